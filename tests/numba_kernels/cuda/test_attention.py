"""Paged attention on the device against float64: every tier and dtype, ragged batches, GQA, windows, odd head dims."""

from __future__ import annotations

import numpy as np
import pytest

from numba_kernels.cuda import attention
from runtime.device.gpu import Gpu
from tests.numba_kernels.cuda.paged import paged_batch
from tests.oracles.attention import attention_weights, random_spans
from tests.oracles.dense import relative_error

pytestmark = pytest.mark.exhaustive_cases(r"\bf16\b")

# Largest error over largest value: the result's rounding, and in 16 bits that of the softmax weights.
TOLERANCE = {"f32": 2e-6, "f16": 1.5e-3, "bf16": 1e-2}

CASES = [  # (context, queries) of each sequence, q heads, kv heads, window
    ([(0, 1)], 1, 1, None),
    ([(0, 1), (0, 1)], 2, 2, None),
    ([(0, 2)], 8, 1, None),
    ([(0, 16)], 4, 4, None),
    ([(0, 17)], 4, 2, None),
    ([(16, 1)], 8, 1, None),
    ([(17, 1)], 2, 2, None),
    ([(0, 64)], 1, 1, None),
    ([(0, 65), (63, 1), (64, 1), (65, 1)], 4, 2, None),
    ([(100, 7), (0, 33), (5, 1), (31, 2)], 8, 2, None),
    ([(3, 50), (200, 1)], 4, 1, None),
    ([(1, 3), (2, 2), (3, 1), (0, 4)], 6, 2, None),
    ([(90, 70)], 2, 2, None),
    ([(0, 9), (70, 1), (127, 1), (128, 1), (129, 1)], 4, 1, None),
    ([(0, 40), (60, 1)], 24, 1, None),
    ([(0, 0), (5, 2), (9, 0)], 2, 2, None),
    ([(0, 100)], 3, 3, 1),
    ([(0, 100), (150, 1)], 4, 2, 7),
    ([(130, 1), (0, 131)], 2, 1, 64),
    ([(101, 47)], 4, 4, 100),
    ([(10, 3)], 2, 2, 1000),
    ([(0, 97), (97, 13), (110, 1)], 8, 8, None),
]
DECODES = [
    ([(0, 1)], 1, 1, None),
    ([(15, 1)], 2, 2, None),
    ([(16, 1)], 4, 2, None),
    ([(17, 1), (0, 1)], 8, 2, None),
    ([(63, 1), (64, 1), (65, 1)], 8, 1, None),
    ([(127, 1), (128, 1), (129, 1), (0, 1)], 4, 4, None),
    ([(500, 1)], 2, 1, None),
    ([(500, 1), (3, 1), (257, 1)], 8, 2, None),
    ([(383, 1)], 24, 1, None),
    ([(40, 0), (200, 1), (7, 0)], 4, 2, None),
    ([(300, 2), (0, 4), (10, 3)], 8, 2, None),
    ([(250, 16)], 1, 1, None),
    ([(100, 17), (30, 1)], 2, 1, None),
    ([(251, 5), (0, 5)], 6, 2, None),
    ([(300, 1)], 4, 4, 1),
    ([(300, 1), (20, 1)], 4, 2, 16),
    ([(300, 1), (20, 1)], 4, 2, 17),
    ([(410, 3), (1, 1)], 8, 4, 129),
    ([(97, 1)], 16, 2, 1000),
    ([(192, 1), (191, 1), (193, 1)], 3, 3, 64),
    ([(701, 1)], 8, 1, None),
    ([(405, 9)], 8, 1, 120),  # parts begin within a tile of 32 keys, and later rows' windows in the next one
]


@pytest.mark.parametrize(
    ("tier", "dtype"),
    [
        ("naive", "f32"), ("flash", "f32"), ("flash", "bf16"),
        *(
            pytest.param(*each, marks=pytest.mark.exhaustive)
            for each in (("naive", "bf16"), ("naive", "f16"), ("flash", "f16"))
        ),
    ],
)  # fmt: skip
@pytest.mark.exhaustive_cases("flash-f32", "naive-f32")
def test_equals_float64(gpu: Gpu, tier: str, dtype: str) -> None:
    rng = np.random.default_rng(1)
    for chunks, heads, kv_heads, window in CASES if dtype != "f16" else CASES[:12]:
        batch = paged_batch(rng, chunks, heads=heads, kv_heads=kv_heads, head_dim=64, dtype=dtype)
        out, _ = batch.run(gpu, 0.125, window, tier=tier)
        error = relative_error(out, batch.expected(0.125, window))
        assert error < TOLERANCE[dtype], f"{chunks}, {heads} heads, {kv_heads} KV heads, window {window}: {error}"


@pytest.mark.parametrize("dtype", [*(pytest.param(d, marks=pytest.mark.exhaustive) for d in ("f32", "f16")), "bf16"])
@pytest.mark.exhaustive
def test_decode_equals_float64(gpu: Gpu, dtype: str) -> None:
    rng = np.random.default_rng(2)
    for chunks, heads, kv_heads, window in DECODES if dtype != "f16" else DECODES[:6]:
        batch = paged_batch(rng, chunks, heads=heads, kv_heads=kv_heads, head_dim=64, dtype=dtype)
        for num_sms in (1, 132):
            choices = {"tier": "decode", "num_sms": num_sms}
            out, _ = batch.run(gpu, 0.125, window, **choices)
            error = relative_error(out, batch.expected(0.125, window))
            assert error < TOLERANCE[dtype], f"{chunks}, {heads} heads, {kv_heads} KV heads, window {window}: {error}"


def sinks_of(heads: int) -> np.ndarray:
    """A sink of each head: below the scores, among them, far above; and none."""
    return np.array([-3.0, 0.7, 4.0, -np.inf, 60.0, -200.0, 1.5, 0.0] * 3, np.float32)[:heads]


SINKS = [
    ([(0, 1)], 1, 1, None), ([(0, 65), (63, 1), (0, 0)], 4, 2, None), ([(100, 7), (0, 33), (5, 1)], 8, 2, 20),
    ([(0, 40), (60, 1)], 24, 1, 1),
]  # fmt: skip
SINK_DECODES = [([(500, 1), (3, 1), (257, 1)], 8, 2, None), ([(300, 1), (20, 1)], 4, 2, 16), ([(251, 1)], 24, 3, 130)]


@pytest.mark.parametrize("dtype", [pytest.param("f32", marks=pytest.mark.exhaustive), "bf16"])
@pytest.mark.parametrize(
    "tier", ["naive", *(pytest.param(tier, marks=pytest.mark.exhaustive) for tier in ("flash", "decode"))]
)  # `test_attention_exact` has sinks in each tier, too
def test_sinks_join_the_denominator_and_have_no_value(gpu: Gpu, tier: str, dtype: str) -> None:
    rng = np.random.default_rng(5)
    for chunks, heads, kv_heads, window in SINK_DECODES if tier == "decode" else SINKS:
        batch = paged_batch(rng, chunks, heads=heads, kv_heads=kv_heads, head_dim=64, dtype=dtype)
        sinks = sinks_of(heads)
        for num_sms in (1, 132) if tier == "decode" else (132,):
            out, weights = batch.run(gpu, 0.125, window, sinks, tier=tier, num_sms=num_sms)
            expected = batch.expected(0.125, window, sinks)
            assert relative_error(out, expected) < TOLERANCE[dtype], f"{chunks}, window {window}"
            if heads > 4:  # a sink of 60 takes all: its head's values are nothing
                assert np.abs(out[:, 4].astype(np.float64)).max() < 1e-20
            if weights is not None:
                assert (weights[:, :3].sum(-1) < 1).all()


CAPPED = {"f32": 1e-5, "f16": 2e-3, "bf16": 1e-2}  # e^x of a score that is exact to 2^-22 of the cap


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.exhaustive), 30])
@pytest.mark.parametrize("dtype", [pytest.param("f32", marks=pytest.mark.exhaustive), "bf16"])
@pytest.mark.exhaustive
def test_tokens_that_see_each_other(gpu: Gpu, dtype: str, window: int | None) -> None:
    rng = np.random.default_rng(5)
    for chunks, heads, kv_heads in (([(0, 150), (1, 40), (70, 1), (90, 33)], 4, 2), ([(260, 30), (0, 5)], 5, 1)):
        batch = paged_batch(rng, chunks, heads=heads, kv_heads=kv_heads, head_dim=64, dtype=dtype)
        until = random_spans(rng, chunks)
        if window is not None:
            batch.give_up(window)
        out, _ = batch.run(gpu, 0.125, window, until=until)
        assert relative_error(out, batch.expected(0.125, window, until=until)) < TOLERANCE[dtype]
    with pytest.raises(ValueError, match="tier decode has no spans, must be flash"):
        batch.run(gpu, 0.125, window, until=until, tier="decode")


@pytest.mark.parametrize("dtype", [pytest.param("f32", marks=pytest.mark.exhaustive), "bf16"])
@pytest.mark.parametrize(
    "tier", [*(pytest.param(tier, marks=pytest.mark.exhaustive) for tier in ("flash", "decode")), "naive"]
)
def test_soft_caps(gpu: Gpu, tier: str, dtype: str) -> None:
    """Scores from far below the cap to beyond it, of both signs; with windows and sinks."""
    rng = np.random.default_rng(6)
    chunks = [(251, 1), (3, 2)] if tier == "decode" else [(70, 9), (0, 33)]
    batch = paged_batch(rng, chunks, heads=4, kv_heads=2, head_dim=16, dtype=dtype)
    for softcap, scale, window, sinks in ((5.0, 1.5, None, None), (50.0, 0.25, 21, sinks_of(4))):
        out, _ = batch.run(gpu, scale, window, sinks, tier=tier, softcap=softcap, num_sms=64)
        assert relative_error(out, batch.expected(scale, window, sinks, softcap)) < CAPPED[dtype], f"cap {softcap}"


@pytest.mark.parametrize(
    ("tier", "dtype", "head_dim", "block_size"),
    [
        ("decode", "bf16", 64, 16),
        *(
            pytest.param(tier, dtype, 24, 8, marks=pytest.mark.exhaustive)
            for tier in ("naive", "flash", "decode") for dtype in ("f32", "bf16")
        ),
    ],
)  # fmt: skip
def test_pages_behind_a_window_may_be_given_up(gpu: Gpu, tier: str, dtype: str, head_dim: int, block_size: int) -> None:
    """Whatever their block table's entries name then, NaN here, reaches no result; windows end within tiles."""
    rng = np.random.default_rng(8)
    chunks = [(150, 1), (405, 9), (20, 1)] if tier == "decode" else [(150, 40), (200, 1), (5, 30)]
    batch = paged_batch(
        rng, chunks, heads=4, kv_heads=2, head_dim=head_dim, dtype=dtype, block_size=block_size
    )  # fmt: skip
    for window in (140, 37, 1):  # the shorter ones give up more; of the first, later rows begin within a part
        batch.give_up(window)
        out, _ = batch.run(gpu, 0.2, window, tier=tier, num_sms=132)
        assert relative_error(out, batch.expected(0.2, window)) < TOLERANCE[dtype], f"window {window}"


@pytest.mark.parametrize(
    ("gpu", "tier", "dtype"),
    [
        pytest.param("emulated:sm_80", "flash", "bf16", marks=pytest.mark.exhaustive),
        pytest.param("emulated:sm_120a", "decode", "bf16", marks=pytest.mark.exhaustive),
        pytest.param("emulated:sm_80", "flash", "f32", marks=pytest.mark.exhaustive),
        pytest.param("emulated:sm_120a", "flash", "f32", marks=pytest.mark.exhaustive),
        pytest.param("emulated:sm_120a", "flash", "bf16", marks=pytest.mark.exhaustive),
        pytest.param("emulated:sm_80", "decode", "bf16", marks=pytest.mark.exhaustive),
    ],
    indirect=["gpu"],
)
def test_each_architecture(gpu: Gpu, tier: str, dtype: str) -> None:
    rng = np.random.default_rng(4)
    for chunks, heads, kv_heads, window in (CASES if tier == "flash" else DECODES)[8::3]:
        batch = paged_batch(rng, chunks, heads=heads, kv_heads=kv_heads, head_dim=64, dtype=dtype)
        out, _ = batch.run(gpu, 0.125, window, tier=tier, num_sms=64)
        assert relative_error(out, batch.expected(0.125, window)) < TOLERANCE[dtype]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("gpu", "rows"), [("emulated:sm_80", 8), ("emulated:sm_90a", 16)], indirect=["gpu"])
def test_rows_of_wide_heads_by_the_registers(gpu: Gpu, rows: int) -> None:
    """16 queries a KV head: one tile, or two of 8 where ptxas would spill 16."""
    batch = paged_batch(np.random.default_rng(9), [(150, 1), (3, 2), (33, 1)], heads=16, kv_heads=1, head_dim=256,
                        dtype="bf16")  # fmt: skip
    plan, (out, _) = batch.plan(tier="decode", arch=gpu.arch), batch.run(gpu, 0.07, tier="decode", num_sms=132)
    assert plan.launch.specialisation.constants["num_rows"] == rows
    assert relative_error(out, batch.expected(0.07)) < TOLERANCE["bf16"]


def test_sequences_are_cut_by_their_own_lengths(gpu: Gpu) -> None:
    """One long among short ones, under the plan of a captured batch: longer sequences, and entries that are padding."""
    chunks = [(20, 1), (2999, 1), (0, 1), (150, 1), (700, 1)] + [(7, 1)] * 200
    batch = paged_batch(np.random.default_rng(7), chunks, heads=4, kv_heads=1, head_dim=64, dtype="bf16")
    expected = batch.expected(0.125)
    batch.seq_lens[3], batch.block_tables[3], expected[3] = 0, -1, 0
    captured = {"tier": "decode", "max_seq_len": 100_000}
    plans = [batch.plan(None, num_sms=132, **(captured | {"max_seq_len": longest})) for longest in (4000, 100_000)]
    assert plans[0].launch == plans[1].launch
    for num_sms in (1, 40, 132):
        out, _ = batch.run(gpu, 0.125, num_sms=num_sms, **captured)
        assert relative_error(out, expected) < TOLERANCE["bf16"]
        assert (out[3] == 0).all()
        again, _ = batch.run(gpu, 0.125, num_sms=num_sms, **captured)
        np.testing.assert_array_equal(again.view(np.uint16), out.view(np.uint16))


@pytest.mark.exhaustive
@pytest.mark.parametrize("heads", [2, 8])
def test_a_plan_for_more_queries_than_there_are_has_room_for_parts(gpu: Gpu, heads: int) -> None:
    """As a recorded step with drafts does: fewer tiles than the plan allows for are cut into parts."""
    batch = paged_batch(np.random.default_rng(8), [(120, 8), (0, 0)], heads=heads, kv_heads=2, head_dim=128,
                        dtype="bf16")  # fmt: skip
    captured = {"tier": "decode", "max_query_len": 8, "max_seq_len": 128, "num_sms": 132}
    assert batch.plan(None, **captured).workspace_bytes > 0
    out, _ = batch.run(gpu, 0.09, **captured)
    assert relative_error(out, batch.expected(0.09)) < TOLERANCE["bf16"]


# Rounded up inside the kernel to whole tiles, not a multiple of 16 bytes, the largest; every page size.
HEAD_DIMS = [
    pytest.param("f32", 5, 8, marks=pytest.mark.exhaustive),
    pytest.param("f32", 128, 16, marks=pytest.mark.exhaustive),
    pytest.param("f16", 20, 8, marks=pytest.mark.exhaustive),
    pytest.param("bf16", 80, 32, marks=pytest.mark.exhaustive),
    ("bf16", 128, 16),
    pytest.param("bf16", 96, 8, marks=pytest.mark.exhaustive),
    pytest.param("f16", 256, 16, marks=pytest.mark.exhaustive),
    pytest.param("f32", 256, 16, marks=pytest.mark.exhaustive),  # goldens of Gemma have it
]


@pytest.mark.parametrize(("dtype", "head_dim", "block_size"), HEAD_DIMS)
@pytest.mark.parametrize("tier", [pytest.param("flash", marks=pytest.mark.exhaustive), "decode"])
@pytest.mark.exhaustive_cases("decode-bf16")
def test_head_dims(gpu: Gpu, tier: str, dtype: str, head_dim: int, block_size: int) -> None:
    rng = np.random.default_rng(head_dim)
    chunks = [(0, 37), (50, 40), (3, 1)] if tier == "flash" else [(150, 1), (3, 1), (33, 1)]
    batch = paged_batch(rng, chunks, heads=4, kv_heads=2, head_dim=head_dim, dtype=dtype, block_size=block_size)
    out, _ = batch.run(gpu, head_dim**-0.5, tier=tier)
    assert relative_error(out, batch.expected(head_dim**-0.5)) < TOLERANCE[dtype]


@pytest.mark.parametrize(("dtype", "head_dim"), [("f32", 64), ("bf16", 5)])
@pytest.mark.exhaustive_cases("bf16")
def test_naive_gives_the_weights(gpu: Gpu, dtype: str, head_dim: int) -> None:
    rng = np.random.default_rng(3)
    batch = paged_batch(rng, [(20, 13), (0, 1), (0, 40)], heads=4, kv_heads=2, head_dim=head_dim, dtype=dtype)
    for window in (None, 9):
        out, weights = batch.run(gpu, 0.3, window, tier="naive")
        assert relative_error(out, batch.expected(0.3, window)) < TOLERANCE[dtype]
        expected = np.zeros_like(weights, np.float64)
        for seq, keys in enumerate(batch.keys):
            expected[batch.rows(seq), :, : len(keys)] = attention_weights(
                batch.queries[batch.rows(seq)], keys, 0.3, window
            )
        assert relative_error(weights, expected) < 2e-6
        assert (weights[expected == 0] == 0).all()


def test_plan_chooses_by_chunk_and_exactness() -> None:
    def tier(max_query_len: int, **choices: object) -> str:
        sizes = {
            "num_tokens": 8, "num_seqs": 4, "max_seq_len": 900, "num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64,
            "table_width": 60, "dtype": "bf16", "block_size": 16,
        }  # fmt: skip
        return attention.plan(max_query_len=max_query_len, **(sizes | choices)).tier

    assert [tier(length) for length in (1, 4, 5, 8, 9, 100)] == ["decode"] * 4 + ["flash"] * 2
    assert [tier(length, num_seqs=14) for length in (4, 5)] == ["decode", "flash"], "28 of 108 multiprocessors"
    assert tier(1, num_q_heads=40, num_kv_heads=1) == "decode"
    assert tier(1, exact=True) == "flash"
    assert tier(1, tier="naive") == "naive"
    for head_dim, window, is_cut in ((64, None, False), (128, None, True), (256, None, False), (256, 127, True)):
        # 97 to 128 keys are three turns of 48, but a run may have two; a window's begin within a unit
        found = attention.plan(
            num_tokens=8, num_seqs=4, max_query_len=1, max_seq_len=256 if window else 128, num_q_heads=8,
            num_kv_heads=2, head_dim=head_dim, table_width=60, dtype="bf16", block_size=16, window=window,
        )  # fmt: skip
        assert (found.workspace_bytes > 0) == is_cut, head_dim
    for field, value in {
        "head_dim": 513, "dtype": "f64", "block_size": 12, "num_seqs": 65536, "num_kv_heads": 3, "window": 0,
        "max_query_len": 0, "tier": "fast", "max_seq_len": 2**31, "num_sms": 0, "num_tokens": 0,
    }.items():  # fmt: skip
        named = "num_q_heads" if field == "num_kv_heads" else field
        with pytest.raises(ValueError, match=rf"{named} is '?{value if named == field else 8}'?, must be"):
            tier(**({"max_query_len": 1} | {field: value}))
