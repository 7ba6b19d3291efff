"""Inputs of a decode step completed on the device."""

from __future__ import annotations

import numpy as np
import pytest

from numba_kernels.cuda import decode_inputs
from runtime.device.gpu import Gpu
from tests.numba_kernels.cuda.harness import both_archs, get, put


@both_archs
@pytest.mark.parametrize(("num_tokens", "num_changes"), [(1, 0), (3, 1), (300, 5000), (2500, 2048)])
def test_tables_and_tokens(gpu: Gpu, num_tokens: int, num_changes: int) -> None:
    rng = np.random.default_rng(num_tokens)
    tables = rng.integers(0, 99, 6000).astype(np.int32)
    places = rng.choice(len(tables), num_changes, replace=False)
    changes = np.stack([places, rng.integers(0, 2**31 - 1, num_changes)], axis=1).astype(np.int32)
    more = np.full((3, 2), 7, np.int32)  # behind the last one that counts
    drawn = rng.integers(-1, 1000, 400).astype(np.int32)
    sources = rng.integers(-1, len(drawn), num_tokens).astype(np.int32)
    given = rng.integers(1000, 2000, num_tokens).astype(np.int32)
    blocks = [
        put(gpu, array)
        for array in (
            np.concatenate([changes, more]), np.array([num_changes], np.int32), tables, sources, drawn, given,
        )
    ]  # fmt: skip
    gpu.launch(decode_inputs.plan(), *(block.address for block in blocks), num_tokens)
    tables[places] = changes[:, 1]
    assert np.array_equal(get(gpu, blocks[2], tables.shape, np.int32), tables)
    expected = np.where(sources < 0, given, np.maximum(drawn[sources], 0))
    assert np.array_equal(get(gpu, blocks[5], given.shape, np.int32), expected)
