"""Heads wider than 256 against float64: every tier, architecture and type of pages, and the bits of exact mode."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.device.gpu import Gpu
from tests.numba_kernels.cuda.harness import DEFAULT_DEVICE, assert_equal
from tests.numba_kernels.cuda.paged import paged, paged_batch, quantised_batch
from tests.numba_kernels.cuda.test_attention import TOLERANCE, sinks_of
from tests.numba_kernels.cuda.test_attention_exact import integers
from tests.oracles.attention import random_spans
from tests.oracles.dense import relative_error

pytestmark = pytest.mark.emulator

CHUNKS = {
    "flash": [([(0, 37), (50, 40), (3, 1)], 4, 2), ([(100, 7), (5, 1), (0, 0)], 16, 1), ([(70, 9)], 70, 1)],
    "decode": [([(405, 9), (97, 2)], 8, 1), ([(130, 3), (300, 1), (0, 1)], 16, 1), ([(33, 1), (0, 0)], 8, 4)],
}
CASES = [  # architecture, tier, dtype, pages, head dim, page size, window; each has its kernel
    ("sm_90a", "flash", "bf16", "", 512, 16, None),
    ("sm_90a", "decode", "bf16", "", 512, 16, 120),
    *(
        pytest.param(*case, marks=pytest.mark.exhaustive)
        for case in (
            ("sm_80", "flash", "bf16", "", 512, 8, 33), ("sm_80", "decode", "f16", "", 512, 32, None),
            ("sm_120a", "flash", "bf16", "", 512, 16, None), ("sm_120a", "decode", "bf16", "", 512, 8, 40),
            ("sm_90a", "flash", "bf16", "e4m3", 512, 16, 33), ("sm_90a", "decode", "bf16", "e4m3", 512, 16, None),
            ("sm_90a", "flash", "f16", "s8", 384, 8, None), ("sm_80", "decode", "f16", "s8", 320, 16, 33),
            ("sm_120a", "flash", "f16", "s8", 320, 16, 33), ("sm_120a", "decode", "bf16", "s8", 512, 32, None),
            ("sm_90a", "flash", "bf16", "", 264, 16, 120), ("sm_90a", "decode", "bf16", "", 270, 8, None),
            ("sm_80", "flash", "f16", "", 301, 16, None), ("sm_90a", "flash", "f32", "", 512, 16, 33),
            ("sm_120a", "decode", "f32", "", 512, 16, None), ("sm_90a", "flash", "f32", "e4m3", 320, 16, None),
            ("sm_90a", "naive", "bf16", "", 512, 16, 33), ("sm_90a", "naive", "f32", "s8", 320, 16, None),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("gpu", "tier", "dtype", "pages", "head_dim", "block_size", "window"),
    [
        pytest.param(f"emulated:{case[0]}", *case[1:], marks=marks)
        for case, marks in ((getattr(each, "values", each), getattr(each, "marks", ())) for each in CASES)
    ],
    indirect=["gpu"],
)
def test_equals_float64(
    gpu: Gpu, tier: str, dtype: str, pages: str, head_dim: int, block_size: int, window: int | None
) -> None:
    rng = np.random.default_rng(head_dim)
    scale, softcap = 2 * head_dim**-0.5, 8.0 if block_size == 8 else None
    for chunks, heads, kv_heads in CHUNKS["flash" if tier == "naive" else tier]:
        sinks = sinks_of(24).repeat(3)[:heads] if block_size == 32 else None
        batch = paged_batch(
            rng, chunks, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, block_size=block_size
        )
        batch = quantised_batch(batch, pages) if pages else batch
        if window is not None:
            batch.give_up(window)
        expected = batch.expected(scale, window, sinks, softcap)
        for num_sms in (1, 132) if tier == "decode" else (132,):
            out, _ = batch.run(gpu, scale, window, sinks, tier=tier, num_sms=num_sms, softcap=softcap)
            assert relative_error(out, expected) < TOLERANCE[dtype], f"{chunks}, {num_sms} multiprocessors"


@pytest.mark.parametrize("gpu", [DEFAULT_DEVICE], indirect=True)
def test_in_exact_mode_a_row_has_the_same_bits_alone_and_chunked(gpu: Gpu) -> None:
    rng = np.random.default_rng(3)
    chunks = [(0, 70), (80, 1)]
    whole_batch = paged_batch(rng, chunks, heads=4, kv_heads=2, head_dim=512, dtype="bf16")
    whole, _ = whole_batch.run(gpu, 1.0, exact=True)
    for seq, first, last in ((0, 0, 1), (0, 3, 50), (0, 69, 70), (1, 0, 1)):
        context, start = chunks[seq][0], whole_batch.rows(seq).start
        rows, length = slice(start + first, start + last), context + last
        alone = paged(
            rng, [(context + first, last - first)], whole_batch.queries[rows], [whole_batch.keys[seq][:length]],
            [whole_batch.values[seq][:length]], dtype="bf16",
        )  # fmt: skip
        assert_equal(alone.run(gpu, 1.0, exact=True)[0], whole[rows])


@pytest.mark.parametrize("gpu", [DEFAULT_DEVICE], indirect=True)
@pytest.mark.parametrize("tier", ["flash", "decode"])
@pytest.mark.exhaustive
def test_equal_scores_give_the_mean_of_integers_exactly(gpu: Gpu, tier: str) -> None:
    batch = integers(np.random.default_rng(1), tier, "bf16", head_dim=512)
    for window in (1, 8, 32):
        assert_equal(batch.run(gpu, 0.125, window, tier=tier, num_sms=132)[0], batch.expected(0.125, window))


@pytest.mark.parametrize("gpu", [DEFAULT_DEVICE], indirect=True)
@pytest.mark.parametrize("window", [None, 45])
@pytest.mark.exhaustive
def test_tokens_of_a_picture_see_each_other(gpu: Gpu, window: int | None) -> None:
    rng = np.random.default_rng(5)
    chunks = [(0, 90), (1, 40), (90, 33)]
    batch = paged_batch(rng, chunks, heads=4, kv_heads=2, head_dim=512, dtype="bf16")
    until = random_spans(rng, chunks)
    out, _ = batch.run(gpu, 0.06, window, until=until)
    assert relative_error(out, batch.expected(0.06, window, until=until)) < TOLERANCE["bf16"]


@pytest.mark.parametrize("gpu", [DEFAULT_DEVICE], indirect=True)
@pytest.mark.parametrize("tier", ["flash", "decode"])
@pytest.mark.exhaustive
def test_a_padded_sequence_gives_zeros_and_nan_stays_in_its_row(gpu: Gpu, tier: str) -> None:
    batch = paged_batch(
        np.random.default_rng(4), [(40, 1), (0, 1), (20, 1)], heads=4, kv_heads=2, head_dim=512, dtype="bf16"
    )
    whole, _ = batch.run(gpu, 0.06, tier=tier)
    batch.seq_lens[1] = 0
    batch.block_tables[1] = -1
    batch.queries[2, 1, 5] = np.nan
    out, _ = batch.run(gpu, 0.06, tier=tier)
    assert_equal(out[1], np.zeros_like(out[1]))
    assert_equal(out[0], whole[0])
    np.testing.assert_array_equal(np.isnan(out[2].astype(np.float32)).any(-1), [False, True, False, False])
