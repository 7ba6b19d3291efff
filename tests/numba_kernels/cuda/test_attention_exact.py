"""Attention where every bit is known: integers, equal and one-hot weights, rows that must not depend on others."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.device.gpu import Gpu
from tests.numba_kernels.cuda.harness import assert_equal, numpy_dtype
from tests.numba_kernels.cuda.paged import PagedBatch, paged, paged_batch

pytestmark = pytest.mark.exhaustive_cases(r"\bf16\b", r"\bdecode-f32")

DTYPES = ("f32", "f16", "bf16")
TIERS = ("naive", "flash", "decode")
CHUNKS = {"naive": [(70, 40), (31, 1)], "flash": [(70, 90), (128, 33), (31, 1)], "decode": [(300, 1), (31, 1), (95, 1)]}


def integers(rng: np.random.Generator, tier: str, dtype: str, head_dim: int = 64, share: int = 2) -> PagedBatch:
    """Values are small integers; keys are the signs of their position's bits; queries are zero."""
    chunks = CHUNKS[tier]
    kind = numpy_dtype(dtype)
    keys, values = [], []
    for context, queries in chunks:
        positions = np.arange(context + queries)
        signs = 1 - 2 * ((positions[:, None] >> (np.arange(head_dim) % 10)) & 1)
        keys.append(np.repeat(signs[:, None], 2, axis=1).astype(kind))
        values.append(rng.integers(-8, 9, (len(positions), 2, head_dim)).astype(kind))
    tokens = sum(queries for _, queries in chunks)
    queries = np.zeros((tokens, 2 * share, head_dim), kind)
    return paged(rng, chunks, queries, keys, values, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tier", TIERS)
def test_equal_scores_give_the_mean_of_integers_exactly(gpu: Gpu, tier: str, dtype: str) -> None:
    batch = integers(np.random.default_rng(1), tier, dtype)
    for window in (1, 2, 8, 16, 32):  # a power of two, which every query of CHUNKS can fill
        out, _ = batch.run(gpu, 0.125, window, tier=tier, num_sms=132)
        assert_equal(out, batch.expected(0.125, window))


@pytest.mark.exhaustive  # tests/numba_kernels/cuda/test_attention.py has sinks each time
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("tier", TIERS)
def test_a_sink_of_equal_score_counts_as_one_more_key_of_value_zero(gpu: Gpu, tier: str, dtype: str) -> None:
    batch = integers(np.random.default_rng(8), tier, dtype)
    sinks = np.zeros(batch.queries.shape[1], np.float32)
    for window in (1, 3, 7, 31):  # with the sink, a power of two
        out, _ = batch.run(gpu, 0.125, window, sinks, tier=tier, num_sms=132)
        assert_equal(out, batch.expected(0.125, window, sinks))
    for window in (None, 5):  # one that is less than every score by far changes no bit
        without, _ = batch.run(gpu, 0.125, window, tier=tier, num_sms=132)
        out, _ = batch.run(gpu, 0.125, window, sinks - np.float32(np.inf), tier=tier, num_sms=132)
        assert_equal(out, without)


def point_at_keys(rng: np.random.Generator, batch: PagedBatch) -> np.ndarray:
    """Makes each query of `integers` one of the keys that it sees; their values [T, Hq, D], which it then gets.

    Another key differs in at least six of 64 signs: with a scale of 16 its score is 12 * 16 lower, and e^-192 is
    nothing in float32.
    """
    expected = np.zeros(batch.queries.shape)
    for seq, (context, queries) in enumerate(batch.chunks):
        for j in range(queries):
            token = int(batch.query_start[seq]) + j
            for head in range(batch.queries.shape[1]):
                target = int(rng.integers(0, context + j + 1))
                batch.queries[token, head] = batch.keys[seq][target, head // 2]
                expected[token, head] = batch.values[seq][target, head // 2]
    return expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.exhaustive
def test_a_query_that_points_at_one_key_gets_its_value_exactly(gpu: Gpu, tier: str, dtype: str) -> None:
    rng = np.random.default_rng(2)
    batch = integers(rng, tier, dtype)
    expected = point_at_keys(rng, batch)
    out, _ = batch.run(gpu, 16.0, None, tier=tier, num_sms=132)
    assert_equal(out, expected)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_in_exact_mode_a_row_has_the_same_bits_alone_chunked_and_in_any_batch(gpu: Gpu, dtype: str) -> None:
    rng = np.random.default_rng(3)
    chunks = [(0, 150), (80, 1), (10, 30)]
    whole_batch = paged_batch(rng, chunks, heads=6, kv_heads=2, head_dim=64, dtype=dtype)
    for window in (None, 37):
        whole, _ = whole_batch.run(gpu, 0.2, window, exact=True)
        for seq, first, last in ((0, 0, 1), (0, 3, 90), (0, 90, 150), (0, 149, 150), (1, 0, 1), (2, 5, 30)):
            context, start = chunks[seq][0], whole_batch.rows(seq).start
            rows = slice(start + first, start + last)
            length = context + last
            alone = paged(
                rng, [(context + first, last - first)], whole_batch.queries[rows], [whole_batch.keys[seq][:length]],
                [whole_batch.values[seq][:length]], dtype=dtype,
            )  # fmt: skip
            assert_equal(alone.run(gpu, 0.2, window, exact=True)[0], whole[rows])


@pytest.mark.parametrize(
    ("tier", "dtype", "head_dim"),
    [
        *((tier, dtype, 64) for tier in TIERS for dtype in ("f32", "bf16")),
        pytest.param("flash", "bf16", 256, marks=pytest.mark.exhaustive),
    ],
)
def test_a_padded_sequence_gives_zeros(gpu: Gpu, tier: str, dtype: str, head_dim: int) -> None:
    """256: queries are read from shared memory in each turn, of which there is none here."""
    batch = paged_batch(
        np.random.default_rng(4), [(40, 1), (0, 1), (20, 1)], heads=4, kv_heads=2, head_dim=head_dim, dtype=dtype
    )
    whole, _ = batch.run(gpu, 0.125, tier=tier)
    batch.seq_lens[1] = 0
    batch.block_tables[1] = -1
    padded, _ = batch.run(gpu, 0.125, tier=tier)
    assert_equal(padded[1], np.zeros_like(padded[1]))
    assert_equal(padded[[0, 2]], whole[[0, 2]])


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("tier", TIERS)
def test_blocks_below_the_window_need_not_exist(gpu: Gpu, tier: str, dtype: str) -> None:
    batch = paged_batch(np.random.default_rng(5), [(200, 3)], heads=4, kv_heads=2, head_dim=64, dtype=dtype)
    expected, _ = batch.run(gpu, 0.125, 16, tier=tier)
    last_seen = (200 - 16 + 1) // 16
    batch.block_tables[0, : last_seen // 4 * 4] = -1  # a tile of keys begins at a multiple of at most 64
    actual, _ = batch.run(gpu, 0.125, 16, tier=tier)
    assert_equal(actual, expected)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("tier", TIERS)
def test_nan_in_a_query_stays_in_its_row(gpu: Gpu, tier: str, dtype: str) -> None:
    batch = paged_batch(np.random.default_rng(6), [(140, 4)], heads=4, kv_heads=2, head_dim=64, dtype=dtype)
    batch.queries[2, 1, 5] = np.nan
    out, _ = batch.run(gpu, 0.125, tier=tier, num_sms=132)
    is_bad = np.isnan(out.astype(np.float32)).any(-1)
    assert is_bad[2, 1]
    assert is_bad.sum() == 1


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("tier", TIERS)
def test_large_scores_neither_overflow_nor_underflow(gpu: Gpu, tier: str, dtype: str) -> None:
    batch = paged_batch(np.random.default_rng(7), [(130, 2)], heads=2, kv_heads=2, head_dim=64, dtype=dtype)
    for scale in (300.0, 1e-30, 0.0, -0.125):
        out, _ = batch.run(gpu, scale, tier=tier, num_sms=132)
        expected = batch.expected(scale)
        # A score of 6,000 carries an error of 1e-3 before the exponential.
        assert (
            np.abs(out.astype(np.float64) - expected).max()
            < {"f32": 3e-3, "bf16": 3e-2}[dtype] * np.abs(expected).max()
        )
