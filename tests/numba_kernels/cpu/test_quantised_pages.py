"""KV pages of int8 and fp8: written as ml_dtypes and numpy round, read within float32's rounding."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from numba_kernels.cpu.quantised_rows import store_row
from runtime import ops
from runtime.backends import cpu_threads
from runtime.dtype import DType, float8_e4m3, int8
from runtime.errors import InvalidArgumentError
from runtime.kv.cache import KVCache, KVCacheSpec
from tests.numba_kernels.cpu.cases import PagedCase, normal, paged_case, tensor
from tests.oracles import attention as oracle
from tests.oracles.dense import relative_error

KINDS = {"int8": (int8, np.float32(127), np.int8), "fp8": (float8_e4m3, np.float32(448), ml_dtypes.float8_e4m3fn)}


def quantised(rows: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Numbers and scales of rows along the last axis, by numpy."""
    _, limit, numpy_type = KINDS[kind]
    largest = np.abs(rows).max(axis=-1, keepdims=True)
    inverse = np.divide(limit, largest, out=np.zeros_like(largest), where=largest > 0)
    numbers = rows * inverse
    return (np.rint(numbers) if kind == "int8" else numbers).astype(numpy_type), (largest / limit)[..., 0]


def write(cache: KVCache, keys: np.ndarray, values: np.ndarray, slots: np.ndarray) -> None:
    """Writes K and V ``[T, Hkv, D]`` as a layer does."""
    tokens, heads, head_dim = keys.shape
    k_cache, v_cache, *scales = cache.layer(0)
    qkv = np.concatenate([np.zeros((tokens, heads, head_dim), np.float32), keys, values], axis=1)
    ops.qkv_prepare(
        tensor(qkv.reshape(tokens, -1)), tensor(np.zeros(tokens, np.int32)), num_q_heads=heads, num_kv_heads=heads,
        head_dim=head_dim, rope=None, q_norm=None, k_norm=None, norm_eps=0.0, k_cache=k_cache, v_cache=v_cache,
        slot_mapping=tensor(slots), scales=scales,
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [5, 64])
def test_rows_are_written_as_numpy_rounds(kind: str, head_dim: int) -> None:
    rng = np.random.default_rng(head_dim)
    cache = KVCache(KVCacheSpec.uniform(1, 2, head_dim, 16, KINDS[kind][0]), 5)
    keys, values = (normal(rng, (50, 2, head_dim)) * np.exp(normal(rng, (50, 2, 1)) * 3) for _ in range(2))
    keys[:, :, : head_dim // 2] *= np.float32(2.0**-12)  # subnormal in e4m3
    values[3] = 0
    slots = rng.permutation(80)[:50]
    write(cache, keys, values, slots)
    k_pages, v_pages, k_scales, v_scales = (plane.array for plane in cache.layer(0))
    block, inside = slots // 16, slots % 16
    for rows, scales, stored in (
        (keys, k_scales, k_pages[block, :, :, inside]),
        (values, v_scales, v_pages[block, :, inside, :head_dim]),
    ):
        numbers, expected = quantised(rows, kind)
        np.testing.assert_array_equal(stored.astype(np.float32), numbers.astype(np.float32))
        np.testing.assert_array_equal(scales[block, :, inside], expected)


def test_every_number_of_e4m3_and_every_tie() -> None:
    """Ties go to even, the largest number stays 448, and subnormal numbers have steps of their own."""
    numbers = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ties = (numbers[1:] + numbers[:-1]) / 2
    for values in (numbers, ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(500))):
        row = np.concatenate([values, -values, [448]]).astype(np.float32)
        found, scale = np.zeros(row.size, np.uint8), np.zeros(1, np.float32)
        store_row(found.ctypes.data, 1, row, np.float32(448), scale.ctypes.data)
        assert scale == 1
        rounded = found.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        np.testing.assert_array_equal(rounded, row.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))
        assert found[-1] == 0x7E


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_makes_its_own_scale_nan(kind: str) -> None:
    cache = KVCache(KVCacheSpec.uniform(1, 1, 8, 8, KINDS[kind][0]), 1)
    rows = np.ones((3, 1, 8), np.float32)
    rows[1, 0, 3], rows[2, 0, 5] = np.nan, np.inf
    write(cache, rows, rows, np.arange(3))
    for scales in cache.layer(0)[2:]:
        np.testing.assert_array_equal(np.isnan(scales.array[0, 0, :3]), [False, True, True])


def quantised_case(kind: str, chunks: list[tuple[int, int]], block_size: int, **sizes: int) -> PagedCase:
    """A case whose keys and values are those that its pages give back; what nobody owns has the scale NaN."""
    case = paged_case(np.random.default_rng(sizes["head_dim"]), chunks, block_size=block_size, **sizes)
    dtype = KINDS[kind][0]
    spec = KVCacheSpec.uniform(1, sizes["kv_heads"], sizes["head_dim"], block_size, dtype)
    cache = KVCache(spec, case.cache.num_blocks)
    for scales in cache.layer(0)[2:]:
        scales.array[...] = np.nan
    table = case.batch.block_tables[0].array
    for seq, (keys, values) in enumerate(zip(case.keys, case.values)):
        places = np.arange(len(keys))
        write(cache, keys, values, table[seq, places // block_size].astype(np.int64) * block_size + places % block_size)
        for rows in (keys, values):
            numbers, scales = quantised(rows, kind)
            rows[...] = numbers.astype(np.float32) * scales[..., None]
    case.cache = cache
    return case


CASES = [  # (context, queries) of each sequence, q heads, kv heads, head_dim, block size, window, cap
    ([(0, 1), (17, 1)], 4, 2, 64, 16, None, None),
    ([(100, 7), (0, 33), (5, 1), (31, 2)], 8, 2, 40, 24, None, 5.0),
    ([(0, 100), (150, 1)], 4, 2, 5, 8, 7, None),
    ([(130, 65), (2600, 1)], 4, 4, 48, 16, 100, None),
    ([(2600, 1)], 4, 1, 128, 32, None, None),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("chunks", "heads", "kv_heads", "head_dim", "block_size", "window", "cap"), CASES)
@pytest.mark.exhaustive_cases("chunks0", "chunks3", "chunks4")
def test_equals_float64_of_what_the_pages_hold(
    kind, chunks, heads, kv_heads, head_dim, block_size, window, cap, monkeypatch
):
    case = quantised_case(kind, chunks, block_size, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    k_cache, v_cache, *scales = case.cache.layer(0)

    def attend() -> np.ndarray:
        out = ops.attention(
            tensor(case.queries), k_cache, v_cache, case.batch, 0, scale=0.3, window=window, softcap=cap, scales=scales
        )
        return out.numpy().reshape(case.queries.shape)

    out = attend()
    rows = [
        oracle.attention(case.queries[case.query_rows(seq)], keys, values, 0.3, window, softcap=cap)
        for seq, (keys, values) in enumerate(zip(case.keys, case.values))
    ]
    assert relative_error(out, np.concatenate(rows)) < 1e-5
    monkeypatch.setattr(cpu_threads, "_num_workers", 1)
    np.testing.assert_array_equal(attend(), out)


def test_refuses_pages_without_their_scales() -> None:
    case = quantised_case("int8", [(0, 3)], 8, heads=1, kv_heads=1, head_dim=8)
    k_cache, v_cache, *_ = case.cache.layer(0)
    with pytest.raises(InvalidArgumentError, match="scales are 0 tensors, must be 2 for pages of int8"):
        ops.attention(tensor(case.queries), k_cache, v_cache, case.batch, 0, scale=1.0)
    assert DType.parse("fp8_e4m3") is float8_e4m3
