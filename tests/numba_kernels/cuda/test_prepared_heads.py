"""Decode attention that prepares its heads: the bits of qkv_prepare and attention, in out and in the pages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from numba_kernels.cuda.attention.prepared_heads import HeadForm
from numba_kernels.cuda.qkv import plan_qkv_prepare
from runtime.device.gpu import Gpu
from tests.numba_kernels.cuda.harness import both_archs, empty, get, numpy_dtype, put
from tests.numba_kernels.cuda.paged import PagedBatch, paged_batch, quantised_batch

EPS = 1e-6
SLOW = pytest.mark.exhaustive


@dataclass(frozen=True)
class Case:
    """Sequences of one new token, and heads. Of the last sequence nothing is there: a captured batch's padding."""

    contexts: tuple[int, ...]
    share: int = 4
    kv_heads: int = 2
    window: int | None = None
    has_sinks: bool = False


CASES = (
    Case((0, 15, 16, 0)),
    Case((127, 128, 129, 0), share=3),
    Case((700, 0)),
    Case((640, 3, 258, 64, 0), share=8, kv_heads=1),
    Case((63, 0), share=1, kv_heads=3),
    Case((140, 4, 7, 9, 0), kv_heads=1),  # a run ends between a short sequence's keys and its turn without any
)
WINDOWS = (
    Case((300, 20, 0), window=17, has_sinks=True),
    Case((511, 128, 0), window=129, has_sinks=True, share=8),
    Case((97, 0), window=1000, has_sinks=True),
)


def attended(
    gpu: Gpu, case: Case, batch: PagedBatch, form: HeadForm, qkv: np.ndarray, num_sms: int, is_one_launch: bool
) -> tuple[np.ndarray, ...]:  # fmt: skip
    """The bytes of out, of both caches, and of their scales."""
    rng = np.random.default_rng(3)
    seqs, kv_heads, heads, head_dim = len(batch.chunks), case.kv_heads, case.kv_heads * case.share, form.head_dim
    longest = int(batch.seq_lens.max()) + 1
    angles = np.outer(np.arange(longest), 10000.0 ** -np.linspace(0, 1, head_dim // 2)).astype(np.float32)
    norms = [rng.uniform(0.5, 2, head_dim).astype(np.float32) for _ in range(2)] if form.norm else []
    positions = np.maximum(batch.seq_lens - 1, 0).astype(np.int32)
    slots = np.array(
        [table[at // batch.block_size] * batch.block_size + at % batch.block_size
         for table, at in zip(batch.block_tables, positions)], np.int64,
    )  # fmt: skip
    slots[batch.seq_lens == 0] = -1
    sinks = rng.standard_normal(heads).astype(np.float32) if case.has_sinks else None
    blocks = [put(gpu, array) for array in (
        qkv, positions, np.cos(angles), np.sin(angles), slots, batch.query_start, batch.seq_lens, batch.block_tables,
    )]  # fmt: skip
    qkv_at, positions_at, cos, sin, slots_at, query_start, seq_lens, tables = (block.address for block in blocks)
    caches = [put(gpu, pages) for pages in (batch.k_pages, batch.v_pages, *batch.scales)]
    caches_at = [block.address for block in caches]
    scales_at = caches_at[2:] or [0, 0]
    norm_blocks = [put(gpu, norm) for norm in norms]
    norms_at = [block.address for block in norm_blocks] or [0, 0]
    sink_block = None if sinks is None else put(gpu, sinks)

    choices = {"num_sms": num_sms, "has_sinks": case.has_sinks, "arch": gpu.arch, "tier": "decode"}
    plan = batch.plan(case.window, **choices, heads=form if is_one_launch else None)
    assert plan.prepares == is_one_launch
    q = empty(gpu, (seqs, heads, head_dim), form.dtype)
    of_heads = positions_at, cos, sin, 0, 0, *norms_at, slots_at
    if not is_one_launch:
        prepare = plan_qkv_prepare(
            seqs, heads, kv_heads, head_dim, batch.block_size, form.dtype, rotary=form.rotary, norm=form.norm,
            pages=batch.pages,
        )  # fmt: skip
        gpu.launch(prepare, qkv_at, *of_heads, *caches_at[:2], *scales_at, q.address, seqs, heads, kv_heads, EPS)
    out = empty(gpu, (seqs, heads, head_dim), form.dtype)
    workspace = empty(gpu, max(4, plan.workspace_bytes // 4), np.float32)
    arrivals = put(gpu, np.zeros(max(1, plan.num_arrivals), np.uint32))
    arguments = plan.arguments(
        qkv_at if is_one_launch else q.address, *caches_at[:2], out.address, workspace.address, arrivals.address,
        query_start, seq_lens, tables, head_dim**-0.5, 0 if sink_block is None else sink_block.address, *scales_at,
    )  # fmt: skip
    gpu.launch(plan.launch, *arguments, *((*of_heads, EPS) if is_one_launch else ()))
    assert not get(gpu, arrivals, max(1, plan.num_arrivals), np.uint32).any(), "arrivals must be zeros again"
    planes = zip(caches, (batch.k_pages, batch.v_pages, *batch.scales), strict=True)
    return (
        get(gpu, out, (seqs, heads, head_dim * 2), np.uint8),
        *(get(gpu, block, array.nbytes, np.uint8) for block, array in planes),
    )


@pytest.mark.parametrize(
    ("form", "pages", "cases"),
    [
        (HeadForm("bf16", 64, 64), "", CASES),
        *(pytest.param(*each, marks=SLOW) for each in (
            (HeadForm("bf16", 128, 128, norm="head"), "", CASES),
            (HeadForm("bf16", 128, 128, norm="head"), "s8", CASES),
            (HeadForm("bf16", 128, 128, norm="head"), "e4m3", CASES),
            (HeadForm("bf16", 64, 64), "", WINDOWS),
            (HeadForm("bf16", 128, 128), "", (Case((640, 3, 0), share=16, kv_heads=1), Case((130, 0), share=12))),
            (HeadForm("f16", 64, 32), "", CASES[:3]),
        )),
    ],
)  # fmt: skip
@both_archs
def test_has_the_bits_of_two_launches(gpu: Gpu, form: HeadForm, pages: str, cases: tuple[Case, ...]) -> None:
    rng = np.random.default_rng(11)
    for case in cases:
        chunks = [(context, 1) for context in case.contexts]
        batch = paged_batch(
            rng, chunks, heads=case.kv_heads * case.share, kv_heads=case.kv_heads, head_dim=form.head_dim,
            dtype=form.dtype,
        )  # fmt: skip
        if pages:
            batch = quantised_batch(batch, pages)
        for table, context in zip(batch.block_tables, case.contexts):  # the new token's row is not there yet
            at = table[context // batch.block_size], slice(None), context % batch.block_size
            for plane in (batch.k_pages, batch.v_pages):
                plane[at] = 0 if pages else np.nan
            for scales in batch.scales:
                scales[at] = np.nan
        batch.seq_lens[-1], batch.block_tables[-1] = 0, -1
        width = case.kv_heads * (case.share + 2) * form.head_dim
        qkv = rng.standard_normal((len(chunks), width)).astype(numpy_dtype(form.dtype))
        for num_sms in (1, 132):
            two, one = (attended(gpu, case, batch, form, qkv, num_sms, is_one) for is_one in (False, True))
            assert np.isfinite(two[0].view(numpy_dtype(form.dtype)).astype(np.float32)).all()
            for expected, found in zip(two, one, strict=True):
                np.testing.assert_array_equal(found, expected, f"{case}, {num_sms} multiprocessors")


def test_other_heads_are_prepared_by_a_launch_of_their_own() -> None:
    """Chunks of several tokens, more query heads than a tile has rows, float32, and norms over all heads."""
    usual = HeadForm("bf16", 128, 128, norm="head")
    rng = np.random.default_rng(1)
    for form, chunks, heads, is_one in (
        (usual, [(40, 1), (3, 1)], 4, True),
        (usual, [(40, 1), (3, 2)], 4, False),
        (usual, [(40, 1)], 48, False),
        (HeadForm("bf16", 128, 128, norm="row"), [(40, 1)], 4, False),
        (HeadForm("bf16", 128, 120), [(40, 1)], 4, False),
        (HeadForm("f32", 128, 128), [(40, 1)], 4, False),
        (HeadForm("bf16", 128, 128, is_vector=False), [(40, 1)], 4, False),
    ):
        batch = paged_batch(rng, chunks, heads=heads, kv_heads=2, head_dim=form.head_dim, dtype=form.dtype)
        assert batch.plan(heads=form, tier="decode").prepares == is_one, form
    exact = paged_batch(rng, [(40, 1)], heads=4, kv_heads=2, head_dim=128, dtype="bf16").plan(heads=usual, exact=True)
    assert (exact.tier, exact.prepares) == ("flash", False)
