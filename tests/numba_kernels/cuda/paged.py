"""Ragged batches over paged keys and values, as the GPU's attention kernels take them, and how to run them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from numba_kernels.cuda import attention
from numba_kernels.cuda.kv_cache import page_row
from runtime.device.gpu import Gpu
from tests.numba_kernels.cuda.harness import empty, get, numpy_dtype, put
from tests.oracles import attention as oracle

PAGES = {"s8": np.dtype(np.int8), "e4m3": numpy_dtype("f8_e4m3")}


@dataclass
class PagedBatch:
    """Sequences over a shuffled block table, with each one's keys and values also in plain rows.

    What no sequence owns in the pages is NaN, and a block table's entries behind a sequence's end name no block.
    """

    dtype: str
    chunks: list[tuple[int, int]]  # (context, query length)
    num_kv_heads: int
    block_size: int
    keys: list[np.ndarray]  # each [length, Hkv, D] of the dtype
    values: list[np.ndarray]
    queries: np.ndarray  # [T, Hq, D] of the dtype
    k_pages: np.ndarray  # [num_blocks, Hkv, block_size, page_row]
    v_pages: np.ndarray
    block_tables: np.ndarray  # [S, table_width]
    query_start: np.ndarray
    seq_lens: np.ndarray
    pages: str = ""  # "s8", "e4m3"; "": the dtype
    scales: tuple[np.ndarray, ...] = ()  # of keys and values, each [num_blocks, Hkv, block_size]

    def rows(self, seq: int) -> slice:
        """The tokens of a sequence."""
        return slice(int(self.query_start[seq]), int(self.query_start[seq + 1]))

    def give_up(self, window: int) -> None:
        """Pages that no query of their sequence sees are given up: their entries name a page that holds NaN."""
        owned = {int(block) for blocks, keys in zip(self.block_tables, self.keys)
                 for block in blocks[: -(-len(keys) // self.block_size)]}  # fmt: skip
        nobody = next(block for block in range(len(self.k_pages)) if block not in owned)
        for seq, (context, _) in enumerate(self.chunks):
            self.block_tables[seq, : max(0, context + 1 - window) // self.block_size] = nobody

    def expected(
        self, scale: float, window: int | None = None, sinks: np.ndarray | None = None, softcap: float | None = None,
        until: np.ndarray | None = None,
    ) -> np.ndarray:  # fmt: skip
        """[T, Hq, D] in float64."""
        ends = [None if until is None else until[self.rows(seq)] for seq in range(len(self.keys))]
        parts = [
            oracle.attention(self.queries[self.rows(seq)], keys, values, scale, window, sinks, softcap, ends[seq])
            for seq, (keys, values) in enumerate(zip(self.keys, self.values))
        ]
        return np.concatenate(parts)

    def plan(self, window: int | None = None, **choices: Any) -> attention.AttentionPlan:
        sizes = {
            "num_tokens": len(self.queries), "num_seqs": len(self.chunks),
            "max_query_len": max(q for _, q in self.chunks), "max_seq_len": int(self.seq_lens.max()),
            "num_q_heads": self.queries.shape[1], "num_kv_heads": self.num_kv_heads, "head_dim": self.queries.shape[2],
            "table_width": self.block_tables.shape[1], "dtype": self.dtype, "block_size": self.block_size,
            "window": window, "num_blocks": len(self.k_pages), "pages": self.pages,
        }  # fmt: skip
        return attention.plan(**(sizes | choices))

    def run(
        self, gpu: Gpu, scale: float, window: int | None = None, sinks: np.ndarray | None = None,
        until: np.ndarray | None = None, **choices: Any,
    ) -> tuple[np.ndarray, np.ndarray | None]:  # fmt: skip
        """(out [T, Hq, D], the naive tier's weights [T, Hq, columns] or None). `until` is `bidirectional_until`;
        `choices` go to
        `attention.plan`."""
        has_spans = until is not None
        plan = self.plan(window, has_sinks=sinks is not None, has_spans=has_spans, arch=gpu.arch, **choices)
        arrays = (
            self.queries, self.k_pages, self.v_pages, self.query_start, self.seq_lens, self.block_tables,
        )  # fmt: skip
        blocks = [put(gpu, array) for array in arrays]
        q, k_cache, v_cache, query_start, seq_lens, tables = (block.address for block in blocks)
        out = empty(gpu, self.queries.shape, self.dtype)
        workspace = empty(gpu, plan.workspace_bytes // 4, np.float32) if plan.workspace_bytes else None
        at = workspace.address if workspace else 0
        sink_block = None if sinks is None else put(gpu, sinks)
        sinks_at = 0 if sink_block is None else sink_block.address
        arrivals = put(gpu, np.zeros(plan.num_arrivals, np.uint32))
        arguments = (
            q, k_cache, v_cache, out.address, at, arrivals.address, query_start, seq_lens, tables, scale, sinks_at,
        )  # fmt: skip
        scale_blocks = [put(gpu, scales) for scales in self.scales]
        until_block = None if until is None else put(gpu, until)
        bidirectional_until = 0 if until_block is None else until_block.address
        scales_at = [block.address for block in scale_blocks]
        gpu.launch(plan.launch, *plan.arguments(*arguments, *scales_at, bidirectional_until=bidirectional_until))
        assert not get(gpu, arrivals, plan.num_arrivals, np.uint32).any(), "arrivals must be zeros again"
        weights = None
        if plan.tier == "naive" and workspace is not None:
            weights = get(gpu, workspace, (*self.queries.shape[:2], plan.workspace_columns), np.float32)
        return get(gpu, out, self.queries.shape, self.dtype), weights


def paged_batch(
    rng: np.random.Generator,
    chunks: list[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: str,
    block_size: int = 16,
) -> PagedBatch:
    """Normally distributed queries, keys and values for `chunks`: (context, query length) of each sequence."""
    lengths = [context + queries for context, queries in chunks]
    shape = kv_heads, head_dim
    keys = [_normal(rng, (length, *shape), dtype) for length in lengths]
    values = [_normal(rng, (length, *shape), dtype) for length in lengths]
    starts = np.cumsum([0, *(queries for _, queries in chunks)]).astype(np.int32)
    queries = _normal(rng, (int(starts[-1]), heads, head_dim), dtype)
    return paged(rng, chunks, queries, keys, values, dtype=dtype, block_size=block_size)


def paged(
    rng: np.random.Generator,
    chunks: list[tuple[int, int]],
    queries: np.ndarray,
    keys: list[np.ndarray],
    values: list[np.ndarray],
    *,
    dtype: str,
    block_size: int = 16,
) -> PagedBatch:
    """The given queries, keys and values in pages."""
    _, kv_heads, head_dim = keys[0].shape
    blocks_each = [-(-len(rows) // block_size) for rows in keys]
    num_blocks = sum(blocks_each) + 2
    pages = np.full((2, num_blocks, kv_heads, block_size, page_row(head_dim)), np.nan, numpy_dtype(dtype))
    free = rng.permutation(num_blocks)
    tables = np.full((len(chunks), max([1, *blocks_each])), -1, np.int32)
    for seq, count in enumerate(blocks_each):
        blocks, free = free[:count], free[count:]
        tables[seq, :count] = blocks
        for kind, rows in enumerate((keys[seq], values[seq])):
            for token, row in enumerate(rows):
                place = pages[kind, blocks[token // block_size], :, token % block_size]
                place[:, :head_dim], place[:, head_dim:] = row, 0
    starts = np.cumsum([0, *(count for _, count in chunks)]).astype(np.int32)
    lengths = np.array([len(rows) for rows in keys], np.int32)
    return PagedBatch(
        dtype, chunks, kv_heads, block_size, keys, values, queries, pages[0], pages[1], tables, starts, lengths
    )


def quantised(rows: np.ndarray, pages: str) -> tuple[np.ndarray, np.ndarray]:
    """Numbers and scales of rows (float32) along the last axis, by numpy and ml_dtypes."""
    limit = np.float32(127 if pages == "s8" else 448)
    largest = np.abs(rows).max(axis=-1, keepdims=True)
    inverse = np.divide(limit, largest, out=np.zeros_like(largest), where=largest > 0)
    numbers = rows * inverse
    return (np.rint(numbers) if pages == "s8" else numbers).astype(PAGES[pages]), (largest / limit)[..., 0]


def quantised_batch(batch: PagedBatch, pages: str) -> PagedBatch:
    """The batch with pages of bytes, and with the keys and values that these give back, in float64. What no sequence
    owns has the scale NaN."""
    num_blocks, kv_heads, block_size, _ = batch.k_pages.shape
    head_dim = batch.queries.shape[2]
    planes, scales, given_back = [], [], []
    for rows_of in (batch.keys, batch.values):
        plane = np.zeros((num_blocks, kv_heads, block_size, page_row(head_dim, pages)), PAGES[pages])
        plane_scales = np.full((num_blocks, kv_heads, block_size), np.nan, np.float32)
        found = []
        for blocks, rows in zip(batch.block_tables, rows_of):
            numbers, scales_of_rows = quantised(rows.astype(np.float32), pages)
            places = np.arange(len(rows))
            at = blocks[places // block_size], slice(None), places % block_size
            plane[(*at, slice(head_dim))] = numbers
            plane_scales[at] = scales_of_rows
            found.append(numbers.astype(np.float64) * scales_of_rows[..., None])
        planes.append(plane)
        scales.append(plane_scales)
        given_back.append(found)
    return replace(
        batch, pages=pages, scales=tuple(scales), keys=given_back[0], values=given_back[1], k_pages=planes[0],
        v_pages=planes[1],
    )  # fmt: skip


def _normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32).astype(numpy_dtype(dtype))
