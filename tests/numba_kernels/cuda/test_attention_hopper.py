"""Hopper's prefill attention against float64, and where every bit is known; pages that nothing has written hold NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import cuda, types, uint32, uint64

from numba_kernels.cuda import attention
from numba_kernels.cuda.attention.flash_hopper import has_kernel
from numba_kernels.cuda.attention.hopper_tiles import find_tile
from numba_kernels.cuda.intrinsics.memory import store_4xb32
from numba_kernels.cuda.specialisation import Launch, Specialisation
from runtime.device.gpu import Gpu
from tests.numba_kernels.cuda.harness import DEFAULT_DEVICE, assert_equal, empty, get, put
from tests.numba_kernels.cuda.paged import paged_batch
from tests.numba_kernels.cuda.test_attention import TOLERANCE
from tests.numba_kernels.cuda.test_attention_exact import integers, point_at_keys
from tests.oracles.dense import relative_error

TIER = {"tier": "flash_hopper", "num_sms": 3}  # each block takes several tiles
pytestmark = [
    pytest.mark.emulator,
    pytest.mark.parametrize("gpu", [DEFAULT_DEVICE], indirect=True),
    pytest.mark.exhaustive_cases(r"\bf16\b", r"\b128\b"),
]

CASES = [  # (context, queries) of each sequence, q heads, kv heads, window
    ([(0, 1)], 1, 1, None),
    ([(0, 128)], 1, 1, None),
    ([(0, 129), (127, 1)], 2, 2, None),
    ([(0, 65), (63, 1), (64, 1), (65, 1)], 4, 2, None),
    ([(100, 7), (0, 33), (5, 1), (31, 2)], 8, 2, None),
    ([(300, 140)], 8, 1, None),
    ([(513, 20), (0, 45)], 6, 2, None),
    ([(0, 12), (60, 1)], 24, 1, None),
    ([(0, 0), (5, 2), (9, 0)], 2, 2, None),
    ([(0, 0)] * 3 + [(0, 130)] + [(3, 1), (0, 0)] * 15 + [(0, 140), (0, 0), (7, 2)], 2, 2, None),
    ([(0, 100)], 3, 3, 1),
    ([(0, 100), (450, 9)], 4, 2, 7),
    ([(130, 1), (0, 300)], 2, 1, 64),
    ([(401, 47)], 4, 4, 200),
    ([(10, 3)], 2, 2, 1000),
]


@pytest.mark.parametrize("dtype", [pytest.param("f16", marks=pytest.mark.exhaustive), "bf16"])
@pytest.mark.exhaustive
def test_equals_float64(gpu: Gpu, dtype: str) -> None:
    rng = np.random.default_rng(1)
    for chunks, heads, kv_heads, window in CASES:
        batch = paged_batch(rng, chunks, heads=heads, kv_heads=kv_heads, head_dim=64, dtype=dtype)
        out, _ = batch.run(gpu, 0.125, window, **TIER)
        error = relative_error(out, batch.expected(0.125, window))
        assert error < TOLERANCE[dtype], f"{chunks}, {heads} heads, {kv_heads} KV heads, window {window}: {error}"


HEAD_DIMS = [  # one panel and its parts, two, four, six and eight; every page size
    ("bf16", 128, 16, None),
    pytest.param("f16", 256, 8, 101, marks=pytest.mark.exhaustive),
    pytest.param("bf16", 80, 32, None, marks=pytest.mark.exhaustive),
    pytest.param("f16", 24, 16, None, marks=pytest.mark.exhaustive),
    pytest.param("bf16", 96, 8, 101, marks=pytest.mark.exhaustive),
    pytest.param("f16", 128, 32, 101, marks=pytest.mark.exhaustive),
    pytest.param("bf16", 192, 16, None, marks=pytest.mark.exhaustive),
    pytest.param("bf16", 512, 16, None, marks=pytest.mark.exhaustive),  # both groups have the same rows
    pytest.param("f16", 512, 32, 101, marks=pytest.mark.exhaustive),
    pytest.param("bf16", 320, 16, 101, marks=pytest.mark.exhaustive),
    pytest.param("f16", 264, 32, None, marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("dtype", "head_dim", "block_size", "window"), HEAD_DIMS)
def test_head_dims(gpu: Gpu, dtype: str, head_dim: int, block_size: int, window: int | None) -> None:
    rng = np.random.default_rng(head_dim)
    chunks = [(0, 139), (250, 20), (3, 1)]
    batch = paged_batch(rng, chunks, heads=4, kv_heads=2, head_dim=head_dim, dtype=dtype, block_size=block_size)
    out, _ = batch.run(gpu, head_dim**-0.5, window, **TIER)
    assert relative_error(out, batch.expected(head_dim**-0.5, window)) < TOLERANCE[dtype]


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.exhaustive), 128])
def test_sinks(gpu: Gpu, window: int | None) -> None:
    rng = np.random.default_rng(8)
    batch = paged_batch(rng, [(150, 60), (0, 9)], heads=10, kv_heads=2, head_dim=64, dtype="bf16")
    sinks = (4 * rng.standard_normal(10)).astype(np.float32)
    out, _ = batch.run(gpu, 0.125, window, sinks, **TIER)
    assert relative_error(out, batch.expected(0.125, window, sinks)) < TOLERANCE["bf16"]


@pytest.mark.exhaustive  # Gemma 2's golden has them each time
@pytest.mark.parametrize("window", [None, 48])
def test_soft_caps(gpu: Gpu, window: int | None) -> None:
    rng = np.random.default_rng(9)
    batch = paged_batch(rng, [(300, 140), (0, 9)], heads=4, kv_heads=2, head_dim=64, dtype="bf16")
    sinks = rng.standard_normal(4).astype(np.float32)
    for scale in (0.5, -0.1):
        out, _ = batch.run(gpu, scale, window, sinks, softcap=5.0, **TIER)
        assert relative_error(out, batch.expected(scale, window, sinks, 5.0)) < TOLERANCE["bf16"]


@pytest.mark.exhaustive
def test_pages_behind_a_window_may_be_given_up(gpu: Gpu) -> None:
    batch = paged_batch(
        np.random.default_rng(8), [(150, 40), (200, 70)], heads=4, kv_heads=2, head_dim=64, dtype="bf16", block_size=8
    )
    for window in (100, 37):
        batch.give_up(window)
        out, _ = batch.run(gpu, 0.2, window, **TIER)
        assert relative_error(out, batch.expected(0.2, window)) < TOLERANCE["bf16"], f"window {window}"


def test_equal_scores_give_the_mean_of_integers_exactly(gpu: Gpu) -> None:
    batch = integers(np.random.default_rng(1), "flash", "bf16")
    for window in (1, 8, 32):  # a power of two, which every query can fill
        out, _ = batch.run(gpu, 0.125, window, **TIER)
        assert_equal(out, batch.expected(0.125, window))


def test_a_query_that_points_at_one_key_gets_its_value_exactly(gpu: Gpu) -> None:
    rng = np.random.default_rng(2)
    batch = integers(rng, "flash", "bf16")
    expected = point_at_keys(rng, batch)
    out, _ = batch.run(gpu, 16.0, None, **TIER)
    assert_equal(out, expected)


def test_a_padded_sequence_gives_zeros_and_blocks_below_the_window_need_not_exist(gpu: Gpu) -> None:
    rng = np.random.default_rng(4)
    batch = paged_batch(rng, [(240, 3), (0, 1), (20, 1)], heads=4, kv_heads=2, head_dim=64, dtype="bf16")
    whole, _ = batch.run(gpu, 0.125, 16, **TIER)
    batch.seq_lens[1] = 0
    batch.block_tables[1] = -1
    batch.block_tables[0, : (240 - 16 + 1) // 16] = -1
    padded, _ = batch.run(gpu, 0.125, 16, **TIER)
    assert_equal(padded[3], np.zeros_like(padded[3]))
    assert_equal(padded[[0, 1, 2, 4]], whole[[0, 1, 2, 4]])


def test_nan_in_a_query_or_a_key_stays_in_the_rows_that_see_it(gpu: Gpu) -> None:
    batch = paged_batch(np.random.default_rng(6), [(140, 40)], heads=4, kv_heads=2, head_dim=64, dtype="bf16")
    batch.queries[2, 1, 5] = np.nan
    block, offset = divmod(140 + 30, batch.block_size)
    batch.k_pages[batch.block_tables[0, block], 1, offset, 0] = np.nan
    out, _ = batch.run(gpu, 0.125, **TIER)
    expected = np.zeros((40, 4), bool)
    expected[2, 1] = True
    expected[30:, 2:] = True
    np.testing.assert_array_equal(np.isnan(out.astype(np.float32)).any(-1), expected)


def test_large_and_odd_scales(gpu: Gpu) -> None:
    batch = paged_batch(np.random.default_rng(7), [(130, 2)], heads=2, kv_heads=2, head_dim=64, dtype="bf16")
    for scale in (300.0, 1e-30, 0.0, -0.125):
        out, _ = batch.run(gpu, scale, **TIER)
        expected = batch.expected(scale)
        assert np.abs(out.astype(np.float64) - expected).max() < 3e-2 * np.abs(expected).max()


def test_plan(gpu: Gpu) -> None:
    def tier(max_query_len: int, **choices: Any) -> str:
        sizes: dict[str, Any] = {
            "num_tokens": 800, "num_seqs": 4, "max_seq_len": 900, "num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64,
            "table_width": 60, "dtype": "bf16", "block_size": 16, "num_blocks": 99, "arch": gpu.arch,
        }  # fmt: skip
        return attention.plan(max_query_len=max_query_len, **(sizes | choices)).tier

    assert [tier(length) for length in (1, 4, 16, 17, 400)] == ["decode", "decode", "flash", *["flash_hopper"] * 2]
    for choice in ({"exact": True}, {"arch": "sm_120a"}, {"dtype": "f32"}, {"num_blocks": None}, {"head_dim": 20}):
        assert tier(400, **choice) == "flash"
    # tiles of so many sequences lie in the order of their keys: keys and values that the cache holds
    sizes: dict[str, Any] = {
        "num_tokens": 4096, "num_seqs": 4, "num_q_heads": 16, "num_kv_heads": 16, "head_dim": 128, "table_width": 600,
        "dtype": "bf16", "block_size": 16, "num_blocks": 999, "arch": gpu.arch, **TIER,
    }  # fmt: skip
    plans = [attention.plan(max_query_len=length, max_seq_len=length, **sizes) for length in (16, 1024, 2048, 8192)]
    assert [plan.workspace_columns for plan in plans] == [32, 4, 2, 1]
    assert has_kernel("f16", 264, 264, 64, 16)
    for dim, share, block_size in ((520, 1, 16), (64, 129, 16), (264, 65, 16), (512, 1, 8)):
        assert not has_kernel("f16", dim, dim, share, block_size)
    for choice, got in (
        ({"arch": "sm_80"}, "got sm_80"),
        ({"head_dim": 20}, "20 and 4"),
        ({"num_blocks": None}, "None"),
    ):
        with pytest.raises(ValueError, match=f"tier flash_hopper needs sm_90a, num_blocks, .*{got}"):
            tier(400, **TIER, **choice)


@cuda.jit
def _every_tile(query_start, seq_lens, out, num_seqs, tile_tokens, group, count):
    index = uint32(0)
    while index < count:
        found = find_tile(query_start, seq_lens, num_seqs, tile_tokens, group, index, uint32(cuda.threadIdx.x))
        if cuda.threadIdx.x == 0:
            seq, _, _, seq_len, first = found
            store_4xb32(out + uint64(index) * uint64(16), (seq, first, seq_len, uint32(0)))
        index = uint32(index + uint32(1))


def tiles_in_order(
    gpu: Gpu, chunks: list[tuple[int, int]], tile_tokens: int, group: int
) -> tuple[list[tuple[int, int]], list[int]]:
    """(sequence, first token) of each tile, and how many tiles' tokens its last row sees."""
    query_lens = [count for _, count in chunks]
    starts = np.cumsum([0, *query_lens]).astype(np.int32)
    lengths = np.array([context + count for context, count in chunks], np.int32)
    num_tiles = sum(-(-count // tile_tokens) for count in query_lens)
    pointer = types.CPointer(types.int32)
    kernel = Specialisation("every_tile", _every_tile, (pointer, pointer, types.uint64, *(types.uint32,) * 4), 32)
    blocks, out = [put(gpu, starts), put(gpu, lengths)], empty(gpu, (num_tiles + 1, 4), np.uint32)
    gpu.launch(
        Launch(kernel, (1, 1, 1), (32, 1, 1)), *(block.address for block in blocks), out.address, len(chunks),
        tile_tokens, group, num_tiles + 1,
    )  # fmt: skip
    found = get(gpu, out, (num_tiles + 1, 4), np.uint32)
    assert found[-1, 0] == len(chunks), "there is none after the last"
    levels = [
        -(-chunks[seq][0] // tile_tokens) + int(first) // tile_tokens + 1 for seq, first in found[:-1, :2].astype(int)
    ]
    return [(int(seq), int(first)) for seq, first in found[:-1, :2]], levels


@pytest.mark.exhaustive
def test_tiles_come_in_the_order_of_their_keys(gpu: Gpu) -> None:
    rng = np.random.default_rng(9)
    for group in (1, 5, 32):
        chunks = [(64 * int(rng.integers(0, 9)), int(rng.integers(0, 700))) for _ in range(70)]
        tiles, levels = tiles_in_order(gpu, chunks, 64, group)
        expected = {(seq, first) for seq, (_, count) in enumerate(chunks) for first in range(0, count, 64)}
        assert len(tiles) == len(expected)
        assert set(tiles) == expected
        for first in range(0, len(chunks), group):
            of_group = [level for (seq, _), level in zip(tiles, levels, strict=True) if first <= seq < first + group]
            assert of_group == sorted(of_group, reverse=True)
        assert [seq // group for seq, _ in tiles] == sorted(seq // group for seq, _ in tiles)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("seqs", "length", "heads", "share"), [(4, 1024, 16, 0.95), (8, 512, 12, 0.9)])
def test_blocks_of_short_prompts_have_equal_work(gpu: Gpu, seqs: int, length: int, heads: int, share: float) -> None:
    """132 blocks take every 132nd tile, to and fro; a tile's work is its keys. In the order of sequences it was 0.54
    and 0.81."""
    levels = np.repeat(tiles_in_order(gpu, [(0, length)] * seqs, 128, 32)[1], heads)
    rounds = [levels[at : at + 132][:: 1 if at // 132 % 2 == 0 else -1] for at in range(0, len(levels), 132)]
    rounds[-1] = np.pad(rounds[-1], (132 - len(rounds[-1]), 0) if len(rounds) % 2 == 0 else (0, 132 - len(rounds[-1])))
    assert levels.sum() / 132 >= share * np.sum(rounds, axis=0).max()
