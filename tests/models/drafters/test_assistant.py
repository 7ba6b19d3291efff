"""Gemma 4's assistants: they propose what transformers' own propose; and drafters that do not fit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from models.drafters.gemma4_assistant import AssistantDrafter, load_assistant
from models.errors import ModelLoadError
from models.families.gemma4 import Gemma4Model
from models.registry import load_model
from runtime.engine.steps.layout import BlockTables, lay_out
from runtime.kv.cache import KVCache
from runtime.tensor.tensor import Tensor
from tests.models.drafters.assistant_cases import (
    FOLDER,
    LENGTHS,
    NUM_STEPS,
    TARGETS,
    assistant_config,
    assistant_tensors,
    write_assistant,
)
from tests.models.folders import arrays_of, change_config, load_golden, write_model
from tests.models.gguf.gemma4_files import write_assistant_gguf

DEVICES = ["cpu", pytest.param("emulated:sm_90a", marks=[pytest.mark.emulator, pytest.mark.exhaustive])]
BLOCK = 8


def both_of(folder: Path, case: str, **settings: Any) -> tuple[Gemma4Model, AssistantDrafter]:
    target: Any = load_model(write_model(folder / "model", load_golden(TARGETS[case])), **settings)
    return target, load_assistant(write_assistant(folder / "drafter", case), target, **settings)


class Alone:
    """One sequence of a model and its assistant, without an engine."""

    def __init__(self, drafter: AssistantDrafter) -> None:
        self.drafter = drafter
        spec = drafter.target.kv_cache_spec(BLOCK)
        groups = len(spec.group_kinds)
        self.pages = KVCache(spec, [5 * groups] * len(spec.block_bytes))
        self.tables = BlockTables(groups, 1, 4, BLOCK)
        for group in range(groups):
            self.tables.add(group, 0, 0, [5 * group + 1 + page for page in (2, 0, 3, 1)])

    def run(self, token_ids: NDArray[np.int32], start: int, *, keeps: bool = False) -> tuple[Any, Any]:
        """The batch of tokens from `start` on; with `keeps`, the model's pass over it."""
        places = np.array([0]), np.array([start]), np.array([len(token_ids)])
        offsets = None if keeps else np.ones(1, np.int64)
        layout = lay_out(token_ids, *places, self.tables, np.empty(0, np.int32), offsets)
        batch = layout.batch(self.drafter.device, exact=True)
        if keeps:
            batch.auxiliary_layers = self.drafter.layers
            self.drafter.target.forward(batch, self.pages)
        return batch, batch.kept

    def propose(self, ids: NDArray[np.int32], steps: int) -> list[NDArray[np.float32]]:
        """The logits of so many steps after known tokens."""
        count, drafter = len(ids) - 1, self.drafter
        _, kept = self.run(ids[:count], 0, keeps=True)
        hidden = drafter.fuse([kept[layer][count - 1 :] for layer in drafter.layers])
        last, found = ids[-1:], list[NDArray[np.float32]]()
        for _ in range(steps):
            batch, _ = self.run(last, count - 1)
            normed, hidden = drafter.forward(batch, hidden, self.pages)
            found.append(drafter.logits(normed).to("cpu").array[0])
            last = np.array([found[-1].argmax()], np.int32)
        return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", TARGETS)
def test_logits_are_those_of_transformers(case: str, device: str, tmp_path: Path) -> None:
    target, drafter = both_of(tmp_path, case, device=device, dtype="float32")
    declared = load_assistant(tmp_path / "drafter", target, device=device, dtype="float32", declares=True)
    assert declared.weight_bytes == drafter.weight_bytes
    expected = arrays_of(FOLDER / f"{case}.npz")
    prompt = np.array(load_golden(TARGETS[case]).prompt_ids, np.int32)
    lengths = range(len(LENGTHS)) if device == "cpu" else (2, len(LENGTHS) - 1)
    for place in lengths:
        found = Alone(drafter).propose(prompt[: LENGTHS[place]], NUM_STEPS)
        assert [int(each.argmax()) for each in found] == expected["token_ids"][place].tolist()
        for logits, wanted in zip(found, expected["logits"][place], strict=True):
            kept = np.isfinite(logits)
            assert int(kept.sum()) == (9 if case == "groups" else len(logits))
            assert np.abs(logits - wanted)[kept].max() <= 1e-4 * np.abs(wanted).max()
            assert (wanted[~kept] < logits[kept].min()).all()


@pytest.mark.parametrize("case", ["keys", "inputs"])
def test_files_of_llama_cpp(case: str, tmp_path: Path) -> None:
    target, stored = both_of(tmp_path, case, device="cpu", dtype="float32")
    file = write_assistant_gguf(tmp_path / "drafter.gguf", assistant_config(case), assistant_tensors(case))
    drafter = load_assistant(file, target, device="cpu", dtype="float32")
    prompt = np.array(load_golden(TARGETS[case]).prompt_ids, np.int32)
    found, wanted = (Alone(each).propose(prompt, NUM_STEPS) for each in (drafter, stored))
    assert all(np.array_equal(*pair) for pair in zip(found, wanted, strict=True))


def test_it_fits_its_model_alone(tmp_path: Path) -> None:
    target, _ = both_of(tmp_path, "keys", device="cpu")
    drafter = tmp_path / "drafter"
    config = assistant_config("keys")
    text = config["text_config"]
    inputs = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 61}
    per_layer = {"3": {"head_dim": 32, "num_key_value_heads": 2}}
    for changes, message in (
        ({"backbone_hidden_size": 40}, r"backbone_hidden_size = 40, but the model has 36"),
        ({"text_config": text | {"vocab_size": 60}}, r"text_config: vocab_size = 60, but the model has 61"),
        ({"text_config": text | {"sliding_window": 5}}, r"sliding_window = 5, but the model's layers have .* of 4"),
        ({"text_config": text | {"head_dim": 8}}, r"head_dim of layer 0: 2 heads of keys of 8, but .* has 2 of 16"),
        (
            {"text_config": {**text, "per_layer_config": per_layer}},
            r"num_key_value_heads of layer 3: 2 heads of keys of 32, but the model's layer 3 has 1 of 32",
        ),
        ({"text_config": {**text, "num_kv_shared_layers": 2}}, r"num_kv_shared_layers = 2 must be all 4 layers"),
        ({"text_config": text | inputs}, r"hidden_size_per_layer_input must be 0"),
        ({"architectures": ["Gemma4ForCausalLM"]}, r"'Gemma4ForCausalLM' is no drafter apart"),
        ({"tie_word_embeddings": False}, r"tie_word_embeddings"),
        ({"use_ordered_embeddings": True, "num_centroids": 60}, r"num_centroids = 60 must divide vocab_size = 61"),
        ({"anything": 1}, r"anything"),
    ):  # fmt: skip
        (drafter / "config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")
        with pytest.raises(ModelLoadError, match=message):
            load_assistant(drafter, target, device="cpu")
    (drafter / "config.json").write_text(json.dumps(config), encoding="utf-8")
    other: Any = load_model(write_model(tmp_path / "llama", load_golden("llama_default")), device="cpu")
    with pytest.raises(ModelLoadError, match=r"an assistant of Gemma 4.*LlamaForCausalLM is another model"):
        load_assistant(drafter, other, device="cpu")


def test_missing_and_wrong_tensors_are_named(tmp_path: Path) -> None:
    target, _ = both_of(tmp_path, "groups", device="cpu")
    folder, order = tmp_path / "wrong", "masked_embedding.token_ordering"
    for changes, message in (
        ({"post_projection.weight": ...}, r"tensor 'post_projection.weight' \[36, 24\] is missing"),
        ({order: ...}, rf"tensor '{re.escape(order)}' \[61\] is missing: use_ordered_embeddings is true"),
        ({order: np.zeros(61, np.int64)}, r"token_ordering' must name each of the 61 tokens once"),
        ({order: np.zeros(61, np.float32)}, r"token_ordering' is F32 \[61\], must be I64 or I32 \[61\]"),
        ({"model.layers.0.self_attn.k_proj.weight": np.zeros((32, 24), np.float32)}, r"k_proj"),
    ):  # fmt: skip
        with pytest.raises(ModelLoadError, match=message):
            load_assistant(write_assistant(folder, "groups", **changes), target, device="cpu")


def test_dummy_weights(tmp_path: Path) -> None:
    target, stored = both_of(tmp_path, "groups", device="cpu")
    drafter = load_assistant(tmp_path / "drafter", target, device="cpu", load_format="dummy", max_model_len=50)
    assert (drafter.max_positions, drafter.weight_bytes) == (50, stored.weight_bytes)
    change_config(tmp_path / "drafter", use_ordered_embeddings=False)
    assert (
        load_assistant(tmp_path / "drafter", target, device="cpu", load_format="dummy").weight_bytes
        < stored.weight_bytes
    )
    found = Alone(drafter).propose(np.arange(9, dtype=np.int32), 2)
    assert all(np.isfinite(each).sum() == 9 for each in found)


def test_kept_states_are_not_written_to(tmp_path: Path) -> None:
    """The model's pages are read alone."""
    _, drafter = both_of(tmp_path, "keys", device="cpu", dtype="float32")
    alone, ids = Alone(drafter), np.array(load_golden(TARGETS["keys"]).prompt_ids, np.int32)
    alone.run(ids[:19], 0, keeps=True)
    before = [plane.array.copy() for planes in alone.pages.storages for plane in planes]
    batch, _ = alone.run(ids[19:], 18)
    drafter.forward(batch, Tensor.zeros((1, 36), drafter.target.activations), alone.pages)
    after = [plane.array for planes in alone.pages.storages for plane in planes]
    assert all(np.array_equal(*pair) for pair in zip(before, after, strict=True))
