"""Paged attention against float64: ragged batches, every type, GQA, windows, splits; nothing unowned is ever used."""

from __future__ import annotations

import numpy as np
import pytest

from numba_kernels.cpu.attention import kernel as kernels
from runtime import ops
from runtime.backends import cpu_threads
from runtime.dtype import PAGES, DType
from runtime.errors import InvalidArgumentError
from tests.numba_kernels.cpu.cases import WEIGHT_TYPES, PagedCase, normal, paged_case, tensor
from tests.oracles import attention as oracle
from tests.oracles.dense import relative_error

CASES = [  # (context, queries) of each sequence, q heads, kv heads, head_dim, block size, window
    ([(0, 1)], 1, 1, 1, 8, None),
    ([(0, 1), (0, 1)], 2, 2, 2, 16, None),
    ([(0, 5)], 2, 1, 16, 16, None),
    ([(17, 1)], 12, 12, 64, 16, None),
    ([(0, 64)], 4, 4, 32, 16, None),
    ([(0, 65), (63, 1), (64, 1)], 4, 2, 24, 8, None),
    ([(100, 7), (0, 33), (5, 1), (31, 2)], 8, 2, 40, 24, None),
    ([(3, 50), (200, 1)], 8, 1, 16, 32, None),
    ([(1, 3), (2, 2), (3, 1), (0, 4)], 6, 2, 5, 8, None),
    ([(90, 70)], 8, 8, 17, 48, None),
    ([(0, 9), (70, 1), (127, 1), (128, 1), (129, 1)], 4, 1, 128, 64, None),
    ([(0, 40), (60, 1)], 40, 1, 16, 16, None),
    ([(0, 100)], 3, 3, 80, 16, 1),
    ([(0, 100), (150, 1)], 4, 2, 16, 16, 7),
    ([(300, 1), (0, 200)], 2, 1, 8, 8, 64),
    ([(130, 65)], 4, 4, 48, 16, 100),
    ([(10, 3)], 2, 2, 16, 128, 1000),
    ([(0, 0), (5, 2), (9, 0)], 2, 2, 16, 16, None),
    ([(700, 1), (0, 3)], 4, 2, 256, 16, None),
    ([(700, 1), (0, 40)], 8, 1, 512, 16, None),
    ([(0, 300)], 2, 2, 64, 16, None),
]  # fmt: skip


def _attend(case: PagedCase, scale: float, window: int | None = None) -> np.ndarray:
    k_cache, v_cache = case.cache.layer(0)
    out = ops.attention(tensor(case.queries), k_cache, v_cache, case.batch, 0, scale=scale, window=window)
    return out.numpy().reshape(case.queries.shape)


def _takes_pairs(dtype: np.dtype, block_size: int, head_dim: int) -> bool:
    """Whether queries and weights are rounded to bfloat16: with AMX beside pages of that type."""
    return kernels.takes_pairs(PAGES[DType.parse(dtype)], kernels.span_of(block_size), head_dim, False)


def _expected(case: PagedCase, scale: float, window: int | None = None) -> np.ndarray:
    rows = [
        oracle.attention(case.queries[case.query_rows(seq)], keys, values, scale, window)
        for seq, (keys, values) in enumerate(zip(case.keys, case.values))
    ]
    return np.concatenate(rows)


@pytest.mark.parametrize("dtype", WEIGHT_TYPES, ids=str)
@pytest.mark.parametrize(("chunks", "heads", "kv_heads", "head_dim", "block_size", "window"), CASES)
def test_equals_float64(chunks, heads, kv_heads, head_dim, block_size, window, dtype):
    rng = np.random.default_rng(head_dim)
    case = paged_case(
        rng, chunks, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype
    )
    scale = head_dim**-0.5
    error = relative_error(_attend(case, scale, window), _expected(case, scale, window))
    assert error < (1e-2 if _takes_pairs(dtype, block_size, head_dim) else 1e-5)


@pytest.mark.parametrize("window", [None, 9, 40])
def test_tokens_that_see_each_other(window, monkeypatch):
    rng = np.random.default_rng(3)
    for chunks, heads, kv_heads in (([(0, 150), (1, 40), (70, 1), (1100, 33)], 6, 2), ([(2600, 30), (0, 5)], 5, 1)):
        case = paged_case(rng, chunks, heads=heads, kv_heads=kv_heads, head_dim=24)
        until = oracle.random_spans(rng, chunks)
        case.batch.bidirectional_until = tensor(until)
        rows = [
            oracle.attention(case.queries[case.query_rows(seq)], keys, values, 0.2, window, None, None, until[own])
            for seq, (keys, values) in enumerate(zip(case.keys, case.values))
            for own in [case.query_rows(seq)]
        ]
        out = _attend(case, 0.2, window)
        assert relative_error(out, np.concatenate(rows)) < 1e-5
        with monkeypatch.context() as patch:
            patch.setattr(cpu_threads, "_num_workers", 1)
            np.testing.assert_array_equal(_attend(case, 0.2, window), out)


@pytest.mark.parametrize(
    ("chunks", "heads", "kv_heads", "head_dim", "window"),
    [
        ([(0, 64), (0, 1), (0, 131), (0, 20)], 3, 3, 32, None), ([(0, 70), (0, 9)], 4, 2, 24, 16),
        ([(0, 33)], 2, 2, 80, None), ([(0, 1100), (0, 3)], 2, 1, 16, 200), ([(0, 15), (0, 7)], 5, 5, 2, None),
    ],
)  # fmt: skip
def test_encoders_rounded_to_bfloat16(chunks, heads, kv_heads, head_dim, window):
    """Pairs of bfloat16 where the kind of tile has them; a text's bits are those that it has alone."""
    rng = np.random.default_rng(5)
    case = paged_case(rng, chunks, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=16)
    counts = np.array([count for _, count in chunks])
    last = np.repeat(counts, counts).astype(np.int32)
    own = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
    case.batch.bidirectional_until = tensor(last if window is None else np.minimum(last, own + window))
    exact = _attend(case, 0.3, window)
    case.batch.may_round = True
    rounded = _attend(case, 0.3, window)
    if not kernels.takes_pairs(np.float32, kernels.span_of(16), head_dim, True):
        np.testing.assert_array_equal(rounded, exact)
        return
    assert 1e-5 < relative_error(rounded, exact) < 1e-2
    for seq, count in enumerate(counts):
        rows = case.query_rows(seq)
        alone = paged_case(rng, [(0, int(count))], heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=16)
        alone.cache, alone.queries = case.cache, case.queries[rows].copy()
        alone.batch.block_tables = (tensor(case.batch.block_tables[0].array[seq : seq + 1].copy()),)
        alone.batch.bidirectional_until = tensor(case.batch.bidirectional_until.array[rows].copy())
        alone.batch.may_round = True
        np.testing.assert_array_equal(_attend(alone, 0.3, window), rounded[rows])


@pytest.mark.parametrize(
    ("counts", "heads", "head_dim"),
    [([64, 1, 131, 20], 3, 32), ([5, 70], 2, 64), ([33], 2, 48), ([1100, 3, 16], 1, 16), ([15, 32, 31], 5, 24)],
)
@pytest.mark.parametrize("may_round", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_whole_texts(counts, heads, head_dim, may_round, has_bias, monkeypatch):
    """From rows of qkv, without pages where values are whole vectors; a text's bits are those that it has alone."""
    rng = np.random.default_rng(head_dim)
    chunks = [(0, count) for count in counts]
    rows = normal(rng, (sum(counts), 3 * heads * head_dim))
    reach = max(counts) + ops.BIAS_MARGIN
    bias = normal(rng, (2 * reach, heads)) if has_bias else None

    def attend(chunks, rows):
        case = paged_case(rng, chunks, heads=heads, kv_heads=heads, head_dim=head_dim)
        lengths = np.array([count for _, count in chunks])
        case.batch.bidirectional_until = tensor(np.repeat(lengths, lengths).astype(np.int32))
        case.batch.may_round = may_round
        blocks, size = -(-lengths // 16), 16
        first = np.cumsum(blocks) - blocks
        slots = np.concatenate([start * size + np.arange(length) for start, length in zip(first, lengths)])
        case.batch.slot_mappings = (tensor(slots.astype(np.int64)),)
        table = case.batch.block_tables[0].array
        for row, (start, count) in enumerate(zip(first, blocks)):
            table[row, :count] = start + np.arange(count)
        out = ops.text_attention(
            tensor(rows), *case.cache.layer(0), case.batch, 0, num_heads=heads, head_dim=head_dim, scale=0.3,
            position_bias=None if bias is None else tensor(bias),
        )  # fmt: skip
        return out.numpy()

    out = attend(chunks, rows)
    expected, at = [], 0
    for count in counts:
        q, k, v = rows[at : at + count].reshape(count, 3, heads, head_dim).astype(np.float64).transpose(1, 2, 0, 3)
        scores = 0.3 * q @ k.transpose(0, 2, 1)
        if bias is not None:
            distance = np.arange(count)[None] - np.arange(count)[:, None]
            scores += bias[reach + distance].transpose(2, 0, 1)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        expected.append((weights @ v).transpose(1, 0, 2).reshape(count, -1))
        np.testing.assert_array_equal(attend([(0, count)], rows[at : at + count].copy()), out[at : at + count])
        at += count
    error = relative_error(out, np.concatenate(expected))
    rounds = kernels.takes_pairs(np.float32, kernels.span_of(16), head_dim, may_round)
    assert (1e-5 < error < 2e-2) if rounds else error < 1e-5
    monkeypatch.setattr(cpu_threads, "_num_workers", 1)
    np.testing.assert_array_equal(attend(chunks, rows), out)


def test_texts_are_whole():
    case = paged_case(np.random.default_rng(3), [(3, 4)], heads=2, kv_heads=2, head_dim=16)
    with pytest.raises(InvalidArgumentError, match=r"text_attention: batch\.seq_lens must be the lengths of the texts"):
        ops.text_attention(
            tensor(np.zeros((4, 96), np.float32)), *case.cache.layer(0), case.batch, 0, num_heads=2, head_dim=16,
            scale=1.0,
        )  # fmt: skip


def test_what_tokens_cannot_see():
    case = paged_case(np.random.default_rng(3), [(3, 4)], heads=2, kv_heads=1, head_dim=8)
    for until in ([4, 5, 6, 8], [4, 5, 5, 7], [7, 6, 7, 7]):
        case.batch.bidirectional_until = tensor(np.array(until, np.int32))
        case.batch.plans.clear()
        with pytest.raises(InvalidArgumentError, match=r"batch\.bidirectional_until must rise in each chunk"):
            _attend(case, 0.2)


@pytest.mark.parametrize("window", [None, 9])
def test_sinks_join_the_denominator_and_have_no_value(window, monkeypatch):
    sinks = np.array([-3.0, 0.7, 60.0, -np.inf], np.float32)
    for chunks in ([(0, 33), (70, 1), (5, 2)], [(2600, 1)]):
        case = paged_case(np.random.default_rng(7), chunks, heads=4, kv_heads=2, head_dim=16)
        k_cache, v_cache = case.cache.layer(0)
        arguments = tensor(case.queries), k_cache, v_cache, case.batch, 0
        out = ops.attention(*arguments, scale=0.25, window=window, sinks=tensor(sinks)).numpy()
        rows = [
            oracle.attention(case.queries[case.query_rows(seq)], keys, values, 0.25, window, sinks)
            for seq, (keys, values) in enumerate(zip(case.keys, case.values))
        ]
        assert relative_error(out.reshape(case.queries.shape), np.concatenate(rows)) < 1e-5
        with monkeypatch.context() as patch:
            patch.setattr(cpu_threads, "_num_workers", 1)
            alone = ops.attention(*arguments, scale=0.25, window=window, sinks=tensor(sinks)).numpy()
        np.testing.assert_array_equal(alone, out)


@pytest.mark.parametrize(("softcap", "scale", "window"), [(5.0, 1.5, None), (50.0, 0.25, 21)])
def test_soft_caps(softcap, scale, window):
    for chunks in ([(70, 9), (251, 1), (0, 33)], [(2600, 1)]):
        case = paged_case(np.random.default_rng(7), chunks, heads=4, kv_heads=2, head_dim=16)
        k_cache, v_cache = case.cache.layer(0)
        arguments = tensor(case.queries), k_cache, v_cache, case.batch, 0
        out = ops.attention(*arguments, scale=scale, window=window, softcap=softcap).numpy()
        rows = [
            oracle.attention(case.queries[case.query_rows(seq)], keys, values, scale, window, softcap=softcap)
            for seq, (keys, values) in enumerate(zip(case.keys, case.values))
        ]
        assert relative_error(out.reshape(case.queries.shape), np.concatenate(rows)) < 1e-5


@pytest.mark.parametrize("dtype", WEIGHT_TYPES[::2], ids=str)
@pytest.mark.parametrize("block_size", [8, 16])
def test_pages_behind_a_window_may_be_given_up(block_size, dtype):
    """Whatever their block table's entries name then, here a page of NaN, reaches no result."""
    chunks = [(150, 40), (200, 1), (1500, 1)]
    case = paged_case(
        np.random.default_rng(8), chunks, heads=4, kv_heads=2, head_dim=24, block_size=block_size, dtype=dtype
    )
    most = 1e-2 if _takes_pairs(dtype, block_size, 24) else 1e-5
    table = case.batch.block_tables[0].array
    k_pages = case.cache.layer(0)[0].array
    nobody = next(block for block in range(len(k_pages)) if np.isnan(k_pages[block]).all())
    for window in (100, 37, 1):
        for seq, (context, _) in enumerate(chunks):
            table[seq, : max(0, context + 1 - window) // block_size] = nobody
        assert relative_error(_attend(case, 0.2, window), _expected(case, 0.2, window)) < most


@pytest.mark.parametrize("dtype", WEIGHT_TYPES[::2], ids=str)
@pytest.mark.parametrize(("head_dim", "window", "size"), [(24, None, 1.0), (80, 37, 1.0), (32, None, 2.0**-64)])
def test_a_row_is_the_same_alone_chunked_and_in_any_batch(head_dim, window, size, dtype):
    """Products of the smallest numbers are subnormal, and so are half of the values."""
    rng = np.random.default_rng(0)
    chunks = [(0, 150), (80, 1), (10, 30)]
    case = paged_case(rng, chunks, heads=6, kv_heads=2, head_dim=head_dim, dtype=dtype)
    case.queries *= size
    for pages, power in zip(case.cache.layer(0), (1, 2)):
        pages.array[...] = pages.array * np.float32(size) ** power
    whole = _attend(case, 0.2, window)
    tables, queries = case.batch.block_tables[0].array, case.queries
    for seq, first, last in ((0, 0, 1), (0, 3, 90), (0, 90, 150), (0, 149, 150), (1, 0, 1), (2, 5, 30)):
        chunk = chunks[seq][0] + first, last - first
        alone = paged_case(rng, [chunk], heads=6, kv_heads=2, head_dim=head_dim, dtype=dtype)
        start = case.query_rows(seq).start
        alone.cache, alone.queries = case.cache, queries[start + first : start + last].copy()
        alone.batch.block_tables = (tensor(tables[seq : seq + 1].copy()),)
        np.testing.assert_array_equal(_attend(alone, 0.2, window), whole[start + first : start + last])


@pytest.mark.parametrize("dtype", WEIGHT_TYPES[::2], ids=str)
@pytest.mark.parametrize("window", [None, 1300])
def test_long_decodes_are_split_and_merged_to_the_same_bits(window, dtype, monkeypatch):
    case = paged_case(np.random.default_rng(1), [(2600, 1)], heads=2, kv_heads=1, head_dim=16, dtype=dtype)
    split = _attend(case, 0.25, window)
    error = relative_error(split, _expected(case, 0.25, window))
    assert error < (1e-2 if _takes_pairs(dtype, 16, 16) else 1e-5)
    monkeypatch.setattr(cpu_threads, "_num_workers", 1)
    np.testing.assert_array_equal(_attend(case, 0.25, window), split)


def test_long_prefill_crosses_segments():
    case = paged_case(np.random.default_rng(2), [(kernels.SEGMENT_TOKENS - 3, 9)], heads=2, kv_heads=2, head_dim=8)
    assert relative_error(_attend(case, 0.3), _expected(case, 0.3)) < 1e-5


def test_large_scores_neither_overflow_nor_underflow():
    case = paged_case(np.random.default_rng(3), [(90, 3)], heads=2, kv_heads=2, head_dim=16)
    for scale in (300.0, 1e-30):
        # scores of 3000 carry errors of 2e-4
        assert relative_error(_attend(case, scale), _expected(case, scale)) < 3e-4


def test_closed_forms():
    case = paged_case(np.random.default_rng(4), [(40, 2)], heads=4, kv_heads=2, head_dim=16)
    k_pages, v_pages = (pages.array for pages in case.cache.layer(0))
    k_pages[~np.isnan(k_pages)] = 1.0  # equal keys: the mean of the values
    means = np.stack([case.values[0][: 41 + j].mean(0, dtype=np.float64) for j in range(2)])
    np.testing.assert_allclose(_attend(case, 1.0), np.repeat(means, 2, axis=1), atol=1e-6)
    v_pages[~np.isnan(v_pages)] = 3.0  # equal values: that value
    np.testing.assert_allclose(_attend(case, 1.0), 3.0, rtol=1e-6)


def test_nan_in_a_query_stays_in_its_head():
    case = paged_case(np.random.default_rng(5), [(40, 20)], heads=4, kv_heads=2, head_dim=16)
    case.queries[3, 1, 2] = np.nan
    bad = np.isnan(_attend(case, 1.0)).any(-1)
    assert bad[3, 1]
    assert bad.sum() == 1


@pytest.mark.parametrize("entry", [-1, 10_000])
def test_refuses_a_block_outside_the_pages(entry):
    case = paged_case(np.random.default_rng(6), [(30, 1)], heads=2, kv_heads=2, head_dim=16)
    case.batch.block_tables[0].array[0, 1] = entry
    with pytest.raises(InvalidArgumentError, match=r"attention: batch\.block_tables names a block outside"):
        _attend(case, 1.0)


def test_blocks_below_the_window_need_not_exist():
    case = paged_case(np.random.default_rng(7), [(100, 1)], heads=2, kv_heads=2, head_dim=16)
    expected = _attend(case, 1.0, 16)
    case.batch.block_tables[0].array[0, :5] = -1
    np.testing.assert_array_equal(_attend(case, 1.0, 16), expected)


def test_refuses_inconsistent_batches():
    def broken(change):
        case = paged_case(np.random.default_rng(8), [(30, 2), (0, 1)], heads=2, kv_heads=2, head_dim=16)
        change(case)
        with pytest.raises(InvalidArgumentError, match="attention: ") as caught:
            _attend(case, 1.0)
        return caught.value.param

    def longer(case):
        case.batch.seq_lens.array[0] = 49

    def shorter(case):
        case.batch.seq_lens.array[0] = 1

    def starts(case):
        case.batch.query_start.array[1] = 4

    def more_queries(case):
        case.queries = normal(np.random.default_rng(0), (4, 2, 16))

    def other_heads(case):
        case.queries = normal(np.random.default_rng(0), (3, 3, 16))

    assert broken(longer) == broken(shorter) == "batch.seq_lens"
    assert broken(starts) == broken(more_queries) == "batch.query_start"
    assert broken(other_heads) == "q"
