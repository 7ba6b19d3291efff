"""Gathering rows on the device."""

from __future__ import annotations

import numpy as np
import pytest

from numba_kernels.cuda import embedding
from runtime.device.gpu import Gpu
from tests.numba_kernels.cuda.harness import both_archs, get, numpy_dtype, put

SHAPES = [
    (1, 1, 1), (1, 5, 3), (3, 7, 8), (2, 2, 31), (17, 3, 32), (5, 1, 33), (1, 100, 64), (31, 10, 16), (4, 4, 127),
    (2, 9, 128), (65, 65, 4), (3, 3, 255), (1, 2, 256), (2, 2, 768), (9, 50, 24), (1, 3, 1000), (2, 5, 1021),
    (1, 1, 2048), (130, 11, 2), (2, 3, 4096), (6, 6, 40),
]  # fmt: skip


def run(
    gpu: Gpu, ids: np.ndarray, table: np.ndarray, dtype: str, x: np.ndarray | None = None, multiplier: float = 1.0
) -> tuple[np.ndarray, int]:
    launch, accesses = embedding.plan_embedding(len(ids), table.shape[1], dtype, is_added=x is not None)
    out_shape = (len(ids), table.shape[1])
    out = put(gpu, np.zeros(out_shape, table.dtype) if x is None else x)
    ids_block, table_block, flag = put(gpu, ids), put(gpu, table), put(gpu, np.zeros(1, np.int32))
    gpu.launch(
        launch, ids_block.address, table_block.address, out.address, flag.address, len(ids), len(table), accesses,
        multiplier,
    )  # fmt: skip
    return get(gpu, out, out_shape, dtype), int(get(gpu, flag, 1, np.int32)[0])


@both_archs
@pytest.mark.parametrize("dtype", ["f32", pytest.param("f16", marks=pytest.mark.exhaustive), "bf16"])
@pytest.mark.exhaustive_cases("f32")
def test_rows(gpu: Gpu, dtype: str) -> None:
    rng = np.random.default_rng(1)
    for num_rows, table_rows, size in SHAPES:
        table = rng.standard_normal((table_rows, size)).astype(numpy_dtype(dtype))
        ids = rng.integers(0, table_rows, num_rows).astype(np.int32)
        found, flag = run(gpu, ids, table, dtype)
        assert np.array_equal(found, table[ids])
        scaled, _ = run(gpu, ids, table, dtype, multiplier=1.75)
        assert np.array_equal(scaled, (table[ids].astype(np.float32) * np.float32(1.75)).astype(table.dtype))
        x = rng.standard_normal((num_rows, size)).astype(table.dtype)
        added, _ = run(gpu, ids, table, dtype, x)
        assert np.array_equal(added, (x.astype(np.float32) + table[ids].astype(np.float32)).astype(table.dtype))
        assert flag == 0


@pytest.mark.parametrize("bad", [-1, 5, 2**31 - 1, -(2**31)])
def test_an_id_outside_the_table_is_flagged_and_reads_nothing_else(gpu: Gpu, bad: int) -> None:
    table = np.arange(20, dtype=np.float32).reshape(5, 4)
    found, flag = run(gpu, np.array([4, bad, 1], np.int32), table, "f32")
    assert flag == 1
    assert np.array_equal(found, table[[4, 0, 1]])
