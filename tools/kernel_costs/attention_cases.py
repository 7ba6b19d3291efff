"""Attention for the kernel report: prompts and decodes of each tier, and pages of a byte."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from numba_kernels.cuda import (
    attention,
)
from numba_kernels.cuda.attention.parts import MIN_PART_KEYS, record
from numba_kernels.cuda.intrinsics.element_types import ITEM_BYTES
from numba_kernels.cuda.quantised_pages import PAGES
from tools.kernel_costs.case import Case
from tools.kernel_costs.counts import Bench, Work

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 4, 2, 64, 16
_SIZES = (HEADS, KV_HEADS, HEAD_DIM)


def attention_cases() -> Iterator[Case]:
    for tier, dtype in (
        ("naive", "f32"), ("flash", "f32"), ("naive", "bf16"), ("flash", "bf16"), ("flash_hopper", "bf16"),
    ):  # fmt: skip
        yield attention_case(tier, dtype, [(0, 256)])
    for dtype in ("f32", "bf16"):
        yield attention_case("decode", dtype, [(511, 1)] * 4)
    yield attention_case("decode", "bf16", [(511, 1)] * 4, num_sms=1)
    for chunks, tier in (([(1023, 1)] * 2, "decode"), ([(0, 256)], "flash"), ([(0, 512)], "flash_hopper")):
        yield attention_case(tier, "bf16", chunks, sizes=(8, 2, 128))
    for pages in PAGES:
        yield attention_case("decode", "bf16", [(1023, 1)] * 2, sizes=(8, 2, 128), pages=pages)
    yield attention_case("flash", "bf16", [(0, 256)], sizes=(8, 2, 128), pages="e4m3")


_KEY_A_LANE = "the tier's point: a lane has a key of its own, a whole row away from its neighbour's"


def attention_case(
    tier: str | None, dtype: str, chunks: list[tuple[int, int]], *, num_sms: int = 108,
    sizes: tuple[int, int, int] = _SIZES, pages: str = "",
) -> Case:  # fmt: skip
    """`tier`: None: as planned. `chunks`: (context, queries) of each sequence, all alike; `num_sms` 1 keeps decode from
    splitting them; `sizes`: query heads, KV heads, head dim; `pages`: what they hold where that is a byte a number."""
    num_heads, kv_heads, head_dim = sizes
    context, queries = chunks[0]
    length, seqs = context + queries, len(chunks)
    tokens, size = seqs * queries, ITEM_BYTES[dtype]
    blocks_each = -(-length // BLOCK)

    def run(bench: Bench) -> None:
        plan = attention.plan(
            num_tokens=tokens, num_seqs=seqs, max_query_len=queries, max_seq_len=length, num_q_heads=num_heads,
            num_kv_heads=kv_heads, head_dim=head_dim, table_width=blocks_each, dtype=dtype, block_size=BLOCK,
            num_sms=num_sms, arch=bench.gpu.arch, num_blocks=seqs * blocks_each, tier=tier, pages=pages,
        )  # fmt: skip
        q = bench.normal((tokens, num_heads, head_dim), dtype)
        shape = seqs * blocks_each, kv_heads, BLOCK, head_dim
        k, v = (bench.normal(shape, dtype) if not pages else bench.put(_bytes(bench, shape)) for _ in range(2))
        scales = [bench.put(np.full(shape[:3], 0.01, np.float32)) for _ in range(2)] if pages else []
        starts = bench.put(np.arange(seqs + 1, dtype=np.int32) * np.int32(queries))
        lengths = bench.put(np.full(seqs, length, np.int32))
        tables = bench.put(bench.rng.permutation(seqs * blocks_each).astype(np.int32))
        out = bench.empty(tokens * num_heads * head_dim * size)
        workspace = bench.empty(plan.workspace_bytes) if plan.workspace_bytes else 0
        scale = head_dim**-0.5
        arrivals = bench.put(np.zeros(max(1, plan.num_arrivals), np.uint32))
        arguments = q, k, v, out, workspace, arrivals, starts, lengths, tables, scale
        bench.launch(plan.launch, *plan.arguments(*arguments, 0, *scales))

    seen = seqs * sum(context + 1 + query for query in range(queries))  # keys that queries see
    rows = tokens * num_heads * head_dim * size
    key_bytes = head_dim + 4 if pages else head_dim * size  # of a key and head; with its scale
    work = Work(rows + 2 * seqs * length * kv_heads * key_bytes, rows, 4 * seen * num_heads * head_dim, dtype != "f32")
    unsplit = " unsplit" if num_sms == 1 else ""
    shape = f"{seqs} x {queries} queries, {length} keys, {num_heads}/{kv_heads} heads of {head_dim}"
    held = f" {pages} pages" if pages else ""
    name = f"attention {tier} {dtype}{held}{unsplit}{f' d{head_dim}' if sizes != _SIZES else ''}"
    share = num_heads // kv_heads
    if tier == "naive":
        return Case(name, "attention", shape, work, run, _KEY_A_LANE)
    if tier == "decode":  # parts of at least MIN_PART_KEYS leave a record for each row, which is read again
        records = 0 if num_sms == 1 else seqs * num_heads * (length // MIN_PART_KEYS)
        tiled_bytes = work.least_bytes + 2 * records * 4 * record(head_dim)
    else:  # a tile of 128 rows (64 of float32) reads the keys that its last query sees
        queries_each = (128 if dtype != "f32" else 64) // share
        keys = sum(context + min(queries, first + queries_each) for first in range(0, queries, queries_each))
        tiled_bytes = 2 * rows + 2 * seqs * keys * kv_heads * key_bytes
    return Case(name, "attention", shape, work, run, "", tiled_bytes, dtype != "f32" and tier != "decode")


def _bytes(bench: Bench, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Numbers of either type, none a NaN."""
    return bench.rng.integers(0, 127, shape, np.uint8)
