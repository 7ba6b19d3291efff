"""Adapters of latent attention's `kv_b_proj`, whose parts are absorbed into the neighbouring maps; beside PEFT's logits
(`test_adapters.py`, the cases of that name): many tokens, chunks that would be expanded, slots that are given back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.registry import load_model
from runtime.batch import Batch
from runtime.linear import latent, latent_adapters
from runtime.linear.adapter_pairs import Pair
from runtime.linear.low_rank import LowRankMaps
from runtime.linear.options import LoadOptions
from runtime.tensor.tensor import Tensor
from tests.models.driver import Array, ModelDriver, relative_error
from tests.models.folders import Golden, load_golden, write_model
from tests.models.test_adapters import OWN, WITHOUT, adapted, logits_of
from tests.models.test_expanded_latents import expanding

WIDE = load_golden("deepseek_v3_wide")


def test_many_tokens_are_added_in_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Array] = []
    for most in (65_535, 9):
        monkeypatch.setattr(latent_adapters, "_MOST_ROWS", most)
        model, golden = adapted(tmp_path / str(most), "latent", "cpu")
        ids = golden.golden.prompt_ids
        assert most > len(ids) * model.maps.num_heads or 1 < most // model.maps.num_heads < len(ids) // 2
        found.append(np.stack(logits_of(model, ids, [OWN, WITHOUT, OWN], len(ids) // 2)))
    np.testing.assert_array_equal(*found)


def adapted_wide(tmp_path: Path, golden: Golden, device: str) -> Any:
    """A model with a random pair of each layer's map in slot 0."""
    maps = LowRankMaps(1, 4)
    model = load_model(write_model(tmp_path / device, golden), addends=maps, device=device, dtype="float32")
    maps.allocate(LoadOptions(device=model.device, dtype=model.dtype))
    rng, pairs = np.random.default_rng(3), {}
    for name in maps.heads:
        outputs, inputs = maps.modules[name]
        down = rng.standard_normal((4, inputs)).astype(np.float32) / np.float32(inputs**0.5)
        pairs[name] = Pair(down, rng.standard_normal((outputs, 4)).astype(np.float32))
    assert len(pairs) == model.config.num_layers
    assert maps.size_bytes == sum(each.size_bytes for each in maps.maps.values())
    assert maps.write(0, pairs)
    assert maps.size_bytes > sum(each.size_bytes for each in maps.maps.values())
    return model, maps


def test_a_slot_without_a_pair_is_zeros(tmp_path: Path) -> None:
    model, maps = adapted_wide(tmp_path, WIDE, "cpu")
    own, without = logits_of(model, WIDE.prompt_ids, [0, WITHOUT], 3)
    assert relative_error(own, without) > 0.1
    assert not maps.write(0, {})
    own, _ = logits_of(model, WIDE.prompt_ids, [0, WITHOUT], 3)
    np.testing.assert_array_equal(own, without)


@pytest.mark.emulator
@pytest.mark.exhaustive
@pytest.mark.parametrize("device", ["emulated:sm_80", "emulated:sm_90a"])
def test_a_batch_with_adapters_expands_no_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Rows of a chunk that would be expanded have the logits of the cpu, those without an adapter transformers'."""
    from runtime.backends import cuda_latent

    monkeypatch.setattr(latent, "_LEAST_ROWS", 16)
    monkeypatch.setattr(cuda_latent, "latent_expanded", lambda *_: pytest.fail("a chunk was expanded"))
    ids, found = WIDE.prompt_ids, []
    for each in ("cpu", device):
        model, _ = adapted_wide(tmp_path, WIDE, each)
        name_chunks = expanding(model)

        def complete(batch: Batch, start: int, model: Any = model, name_chunks: Any = name_chunks) -> None:
            adapters = np.repeat(np.array([0, WITHOUT], np.int32), len(ids))
            batch.adapters = Tensor.from_numpy(adapters).to(model.device)
            if model.device.kind != "cpu":
                name_chunks(batch, start)
                assert len(batch.long_chunks.chunks) == 2

        rows = ModelDriver(model, 2, seed=2, block_size=8, complete=complete).step({0: ids, 1: ids})
        found.append(rows[0])
        assert relative_error(rows[1], WIDE.logits["float32"]) <= 1e-4
    assert relative_error(found[1], found[0]) <= 2e-5
