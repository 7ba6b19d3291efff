"""DFlash and DSpark drafters: as z-lab's and DeepSpec's models compute them; and checkpoints that are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from models.base import Model
from models.drafters.dflash import DFlashDrafter, load_dflash
from models.errors import ModelLoadError
from models.registry import load_model
from tests.models.drafters.dflash_cases import (
    CASES,
    FOLDER,
    HIDDEN,
    LAYERS,
    NUM_TOKENS,
    draft_tensors,
    given,
    write,
    write_drafter,
    write_target,
)
from tests.models.drafters.one_drafter import BlocksAlone
from tests.models.folders import arrays_of, load_golden, write_model

DEVICES = ["cpu", pytest.param("emulated:sm_80", marks=[pytest.mark.emulator, pytest.mark.exhaustive])]


def target_of(folder: Path, device: str = "cpu") -> Model:
    return load_model(write_target(folder), device=device, dtype="float32")


def parts_of(case: str) -> tuple[list[NDArray[np.float32]], NDArray[np.int32]]:
    states, token_ids = given(case)
    return np.split(states, len(LAYERS[case]), 1), token_ids


def check(drafter: DFlashDrafter, case: str, steps: list[int]) -> None:
    """Blocks behind steps of so many hidden states, each written over the one before."""
    states, token_ids = parts_of(case)
    expected, alone = arrays_of(FOLDER / f"{case}.npz"), BlocksAlone(drafter)
    for count in steps:
        alone.absorb(states, count)
        column = alone.length - 1
        drawn = expected["token_ids"][column]
        before = np.array([token_ids[column], *drawn[:-1]], np.int32)
        found, wanted = alone.block(int(token_ids[column]), before), expected["logits"][column]
        assert found.shape == wanted.shape
        assert np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max(), column
        assert found.argmax(1).tolist() == drawn.tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_authors_models(case: str, device: str, tmp_path: Path) -> None:
    """However many hidden states come at once: the reference computes all of them anew for each block."""
    target = target_of(tmp_path / "target", device)
    folder = write_drafter(tmp_path / case, case)
    drafter = load_dflash(folder, target, device=device, dtype="float32")
    assert drafter.layers == LAYERS[case]
    assert drafter.kind == case.split("_")[0]
    declared = load_dflash(folder, target, device=device, dtype="float32", declares=True)
    assert declared.weight_bytes == drafter.weight_bytes
    check(drafter, case, [1] * NUM_TOKENS if device == "cpu" else [1, 3, 6])
    check(drafter, case, [4, 1, 2, 3, 1])


def test_the_models_table_and_head_stand_for_missing_ones(tmp_path: Path) -> None:
    target = target_of(tmp_path / "target")
    tensors = draft_tensors(CASES["dspark"])
    whole = load_dflash(write(tmp_path / "whole", CASES["dspark"], tensors), target, device="cpu", dtype="float32")
    for name in ("embed_tokens.weight", "lm_head.weight"):
        del tensors[name]
    shared = load_dflash(write(tmp_path / "shared", CASES["dspark"], tensors), target, device="cpu", dtype="float32")
    assert whole.weight_bytes - shared.weight_bytes >= 2 * 40 * HIDDEN * 4


def as_speculators(case: str, **changes: Any) -> dict[str, Any]:
    """The config of a case as `speculators` wraps it."""
    fields = dict(CASES[case])
    names: tuple[str, ...] = ("mask_token_id", "target_layer_ids")
    own = fields.pop("dflash_config", None) or {name: fields.pop(name) for name in names}
    kind = case.split("_")[0]
    names = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov", "num_anchors")
    markov = {name: fields.pop(name) for name in names if name in fields}
    size = fields.pop("block_size")
    for name in ("architectures", "num_target_layers", "use_cache"):
        fields.pop(name, None)
    return {
        "architectures": ["DFlashSpeculator" if kind == "dflash" else "DSparkSpeculator"],
        "speculators_model_type": kind, "transformer_layer_config": fields, "draft_vocab_size": 40, "block_size": size,
        "aux_hidden_state_layer_ids": [each + 1 for each in own["target_layer_ids"]],
        "mask_token_id": own["mask_token_id"], "speculators_config": {"algorithm": kind}, "speculators_version": "0.5",
        "tie_word_embeddings": False, **markov, **changes,
    }  # fmt: skip


@pytest.mark.parametrize("case", ["dflash", "dflash_causal", "dspark"])
def test_the_layout_of_speculators(case: str, tmp_path: Path) -> None:
    target, config = target_of(tmp_path / "target"), as_speculators(case)
    folder = write(tmp_path / case, config, draft_tensors(CASES[case]))
    check(load_dflash(folder, target, device="cpu", dtype="float32"), case, [4, 7])


def test_a_head_of_fewer_tokens(tmp_path: Path) -> None:
    """Its logits stand at the model's ids of its tokens, and a bias is theirs, too."""
    target, tensors = target_of(tmp_path / "target"), draft_tensors(CASES["dspark"])
    ids = np.array([3, 8, 9, 20, 39])
    tensors |= {"d2t": ids - np.arange(5), "t2d": np.isin(np.arange(40), ids)}
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        tensors[name] = tensors[name][ids]
    folder = write(tmp_path / "few", as_speculators("dspark", draft_vocab_size=5), tensors)
    alone = BlocksAlone(load_dflash(folder, target, device="cpu", dtype="float32"))
    states, token_ids = parts_of("dspark")
    alone.absorb(states, 4)
    expected = arrays_of(FOLDER / "dspark.npz")
    before = np.array([token_ids[3], *expected["token_ids"][3][:-1]], np.int32)
    found, wanted = alone.block(int(token_ids[3]), before), expected["logits"][3]
    assert np.isneginf(np.delete(found, ids, 1)).all()
    assert np.abs(found[:, ids] - wanted[:, ids]).max() <= 1e-4 * np.abs(wanted).max()


Change = Callable[[dict[str, Any], dict[str, NDArray[Any]]], object]


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("dflash", lambda c, t: c.update(architectures=["Qwen3ForCausalLM"]), "'Qwen3ForCausalLM' is no DFlash"),
        ("dflash", lambda c, t: c.update(model_type="llama"), "model_type 'llama' must be qwen3"),
        ("dflash", lambda c, t: c.update(vocab_size=41), "vocab_size = 41, but the model has 40"),
        ("dflash", lambda c, t: c.update(target_hidden_size=32), "target_hidden_size = 32, but the model has 16"),
        ("dflash", lambda c, t: c.update(num_target_layers=5), "num_target_layers = 5, but the model has 4"),
        ("dflash", lambda c, t: c["dflash_config"].update(target_layer_ids=[0, 3]), r"= \[0, 3\]: must be below 3"),
        ("dflash", lambda c, t: c["dflash_config"].update(target_layer_ids=[]), "target_layer_ids is missing"),
        ("dflash", lambda c, t: c["dflash_config"].update(mask_token_id=40), "mask_token_id must be from 0 to 39"),
        ("dflash", lambda c, t: c["dflash_config"].pop("mask_token_id"), "mask_token_id is missing"),
        ("dflash", lambda c, t: c["dflash_config"].update(attention_sink_bias=True), "attention_sink_bias = True is"),
        ("dflash", lambda c, t: c.update(block_size=1), "block_size must be from 2 to 128, not 1"),
        ("dflash", lambda c, t: c.pop("block_size"), "block_size is missing"),
        ("dflash", lambda c, t: c.update(markov_rank=8), "markov_rank = 8 is not supported"),
        ("dflash", lambda c, t: c.pop("dflash_config"), "dflash_config: target_layer_ids is missing"),
        ("dflash_swa", lambda c, t: c["dflash_config"].pop("swa_window_size"), "swa_window_size is missing, and"),
        ("dflash_causal", lambda c, t: c["dflash_config"].update(swa_window_size=5), "swa_window_size = 5 is not"),
        ("dspark", lambda c, t: c.update(target_layer_ids=[-2]), "must be from -1"),
        ("dspark", lambda c, t: c.update(markov_head_type="gated"), "markov_head_type 'gated' must be vanilla"),
        ("dspark", lambda c, t: c.update(markov_rank=4), r"markov_w1.weight' is \[40, 8\].* asks for \[40, 4\]"),
        ("dspark", lambda c, t: c.update(markov_rank=0), "'markov_head.markov_w1.weight' is left over"),
        ("dflash", lambda c, t: t.pop("hidden_norm.weight"), r"tensor 'hidden_norm.weight' \[16\] is missing"),
        ("dflash", lambda c, t: t.update(mask_embedding=t["norm.weight"]), "tensor 'mask_embedding' is left over"),
    ],
)
def test_bad_checkpoints_are_refused_by_name(case: str, change: Change, message: str, tmp_path: Path) -> None:
    config, tensors = copy.deepcopy(CASES[case]), draft_tensors(CASES[case])
    change(config, tensors)
    folder = write(tmp_path / "drafter", config, tensors)
    with pytest.raises(ModelLoadError, match=message):
        load_dflash(folder, target_of(tmp_path / "target"), device="cpu", dtype="float32")


def test_models_without_hidden_states_and_other_kinds(tmp_path: Path) -> None:
    other = load_model(write_model(tmp_path, load_golden("gpt2_gelu_new")), device="cpu")
    with pytest.raises(ModelLoadError, match="gives no hidden states of its layers, which DFlash reads"):
        load_dflash(write_drafter(tmp_path / "drafter", "dflash"), other, device="cpu")
    target, tensors = target_of(tmp_path / "target"), draft_tensors(CASES["dflash"])
    eagle3 = write(tmp_path / "eagle3", as_speculators("dflash", speculators_model_type="eagle3"), tensors)
    with pytest.raises(ModelLoadError, match="speculators_model_type 'eagle3' must be dflash or dspark"):
        load_dflash(eagle3, target, device="cpu")


def test_dummy_weights(tmp_path: Path) -> None:
    folder = tmp_path / "dummy"
    write_drafter(folder, "dspark")
    (folder / "model.safetensors").unlink()
    drafter = load_dflash(folder, target_of(tmp_path / "target"), device="cpu", load_format="dummy", max_model_len=50)
    assert drafter.max_positions == 54
    alone, (states, _) = BlocksAlone(drafter), parts_of("dspark")
    alone.absorb(states, 5)
    assert np.isfinite(alone.block(3)).all()
