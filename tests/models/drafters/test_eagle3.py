"""EAGLE-3 drafters: as `speculators` computes them, in both layouts; and checkpoints that are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from models.base import Model
from models.drafters.eagle3 import load_eagle3
from models.errors import ModelLoadError
from models.registry import load_model
from tests.models.drafters.eagle3_cases import CASES, FOLDER, NUM_STEPS, NUM_TOKENS, TARGET_LAYERS
from tests.models.drafters.one_drafter import Alone
from tests.models.folders import arrays_of, load_golden, write_model

TARGET: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 40, "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 100.0,
}  # fmt: skip
DEVICES = ["cpu", pytest.param("emulated:sm_80", marks=[pytest.mark.emulator, pytest.mark.exhaustive])]


def target_of(folder: Path, device: str = "cpu", **changes: Any) -> Model:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TARGET, **changes}))
    return load_model(folder, load_format="dummy", device=device, dtype="float32")


def parts_of(states: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    """Those of each layer, which stand side by side."""
    return np.split(states, len(TARGET_LAYERS), 1)


def plain(source: Path, folder: Path, drop: tuple[str, ...] = (), **changes: Any) -> Path:
    """The same in the layout of EAGLE's own checkpoints."""
    config = json.loads((source / "config.json").read_text())
    inner = config.pop("transformer_layer_config")
    for name in ("speculators_model_type", "speculators_config", "speculators_version"):
        config.pop(name, None)
    folder.mkdir(parents=True, exist_ok=True)
    values = {**inner, **config, "architectures": ["LlamaForCausalLMEagle3"], **changes}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    tensors = {name: value for name, value in load_file(source / "model.safetensors").items() if name not in drop}
    save_file({name.replace("layers.0.", "midlayer."): value for name, value in tensors.items()},
              folder / "model.safetensors")  # fmt: skip
    return folder


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.exhaustive_cases("two_layers")
def test_logits_are_those_of_speculators(case: str, device: str, tmp_path: Path) -> None:
    target = target_of(tmp_path / "target", device)
    folders = [FOLDER / case]
    if device == "cpu" and case == "llama":
        folders.append(plain(FOLDER / case, tmp_path / "plain"))
    expected = arrays_of(FOLDER / case / "expected.npz")
    vocab, known = TARGET["vocab_size"], CASES[case][1]["draft_vocab_size"]
    columns = range(NUM_TOKENS) if device == "cpu" else (0, 7)
    for folder in folders:
        drafter = load_eagle3(folder, target, device=device, dtype="float32")
        assert drafter.config.layers == TARGET_LAYERS
        ids = np.arange(vocab) if drafter.token_ids is None else drafter.token_ids
        assert len(ids) == known
        if known < vocab:
            stored = load_file(FOLDER / case / "model.safetensors")
            assert stored["t2d"].nonzero()[0].tolist() == ids.tolist()
        for column in columns:
            found = Alone(drafter).chain(expected["token_ids"], parts_of(expected["states"]), column, NUM_STEPS)
            for step, logits in enumerate(found):
                wanted = expected["logits"][step, column]
                assert np.all(np.isneginf(np.delete(logits, ids)))
                assert np.allclose(logits[ids], wanted, rtol=1e-4, atol=1e-4), (column, step)


def test_the_models_table_and_head_are_shared(tmp_path: Path) -> None:
    target = target_of(tmp_path / "target")
    case = FOLDER / "llama_two_layers"
    whole = load_eagle3(case, target, device="cpu", dtype="float32")
    folder = plain(case, tmp_path / "plain", ("embed_tokens.weight", "lm_head.weight"))
    shared = load_eagle3(folder, target, device="cpu", dtype="float32")
    assert whole.weight_bytes - shared.weight_bytes >= 2 * 40 * 16 * 4
    expected = arrays_of(case / "expected.npz")
    logits = Alone(shared).chain(expected["token_ids"], parts_of(expected["states"]), 4, NUM_STEPS)
    assert all(np.isfinite(each).all() for each in logits)
    declared = load_eagle3(folder, target, device="cpu", dtype="float32", declares=True)
    assert declared.weight_bytes == shared.weight_bytes


Change = Callable[[dict[str, Any], dict[str, NDArray[Any]]], object]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c, t: c.update(architectures=["MistralForCausalLM"]), "architectures 'MistralForCausalLM' is no EAGLE"),
        (lambda c, t: c.update(speculators_model_type="dflash"), "speculators_model_type 'dflash' must be eagle3"),
        (lambda c, t: c["transformer_layer_config"].update(model_type="gemma"), "model_type 'gemma' must be one of"),
        (lambda c, t: c["transformer_layer_config"].update(vocab_size=41), "vocab_size = 41, but the model has 40"),
        (lambda c, t: c.update(target_hidden_size=32), "target_hidden_size = 32, but the model has 16"),
        (lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[1, 5]), r"layer_ids = \[1, 5\]: the model has 4"),
        (lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[-1]), "must be from 0"),
        (lambda c, t: c.update(draft_vocab_size=41), "draft_vocab_size must be from 1 to 40, not 41"),
        (lambda c, t: c.update(norm_before_fc=True, fc_norm=True), "fc_norm and norm_before_fc exclude"),
        (lambda c, t: c.update(parallel_drafting=True), "parallel_drafting = True is not supported"),
        (lambda c, t: c.update(norm_before_residual=1), "norm_before_residual must be true or false"),
        (lambda c, t: t.pop("d2t"), r"tensor 'd2t' \[23\] is missing"),
        (lambda c, t: t.update(d2t=t["d2t"] + 40), r"tensor 'd2t'\[0\] is .*: there is no token"),
        (lambda c, t: t.update(d2t=t["d2t"] * 0 - np.arange(23)), "names a token twice"),
        (lambda c, t: t.update(d2t=t["d2t"].astype(np.float32)), r"'d2t' is F32 \[23\], must be I64 or I32"),
        (lambda c, t: t.update(d2t=t["d2t"][:5]), r"'d2t' is I64 \[5\]"),
        (lambda c, t: t.pop("lm_head.weight"), "tensor 'lm_head.weight' is missing, and the model's head knows 40"),
        (lambda c, t: t.pop("fc.weight"), r"tensor 'fc.weight' \[16, 48\] is missing"),
        (lambda c, t: t.update(extra=t["norm.weight"]), "tensor 'extra' is left over"),
    ],
)
def test_bad_checkpoints_are_refused_by_name(change: Change, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    shutil.copytree(FOLDER / "llama", folder)
    config = json.loads((folder / "config.json").read_text())
    tensors = dict(load_file(folder / "model.safetensors"))
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=message):
        load_eagle3(folder, target_of(tmp_path / "target"), device="cpu", dtype="float32")


def test_the_usual_layers_and_models_without(tmp_path: Path) -> None:
    folder = plain(FOLDER / "llama", tmp_path / "plain", eagle_aux_hidden_state_layer_ids=None)
    assert load_eagle3(folder, target_of(tmp_path / "target"), device="cpu").config.layers == (2, 2, 1)
    with pytest.raises(ModelLoadError, match="is missing, and a model of 3 layers has no usual ones"):
        load_eagle3(folder, target_of(tmp_path / "target", num_hidden_layers=3), device="cpu")
    other = load_model(write_model(tmp_path, load_golden("gpt2_gelu_new")), device="cpu")
    with pytest.raises(ModelLoadError, match="gives no hidden states of its layers"):
        load_eagle3(folder, other, device="cpu")
