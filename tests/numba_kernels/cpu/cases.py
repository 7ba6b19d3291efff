"""What the kernels' tests share: seeded arrays of every stored type, and paged caches filled through their layout."""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from runtime.batch import Batch
from runtime.dtype import DType
from runtime.kv.cache import KVCache, KVCacheSpec
from runtime.sampling_arrays import SamplingArrays
from runtime.tensor.tensor import Tensor

WEIGHT_TYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


def tensor(array: np.ndarray) -> Tensor:
    return Tensor.from_numpy(array)


def normal(rng: np.random.Generator, shape: tuple[int, ...] | int, dtype: np.dtype = WEIGHT_TYPES[0]) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32).astype(dtype)


@dataclass
class PagedCase:
    """A ragged batch over a shuffled block table, with each sequence's keys and values also in plain rows."""

    cache: KVCache
    batch: Batch
    keys: list[np.ndarray]  # [length, kv heads, head_dim] as stored
    values: list[np.ndarray]
    queries: np.ndarray  # [tokens, heads, head_dim] float32

    def query_rows(self, seq: int) -> slice:
        starts = self.batch.query_start.array
        return slice(int(starts[seq]), int(starts[seq + 1]))


def paged_case(
    rng: np.random.Generator,
    chunks: list[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    dtype: np.dtype = WEIGHT_TYPES[0],
) -> PagedCase:
    """``chunks``: (context, query length) of each sequence. Everything no sequence owns is NaN."""
    lengths = [context + queries for context, queries in chunks]
    blocks_each = [math.ceil(length / block_size) for length in lengths]
    num_blocks = sum(blocks_each) + 2
    cache = KVCache(KVCacheSpec.uniform(1, kv_heads, head_dim, block_size, DType.parse(dtype)), num_blocks)
    k_pages, v_pages = (pages.array for pages in cache.layer(0))
    k_pages[...] = np.nan
    v_pages[...] = np.nan
    free = rng.permutation(num_blocks)
    table = np.full((len(chunks), max([1, *blocks_each])), -1, np.int32)
    keys, values = [], []
    for seq, (length, count) in enumerate(zip(lengths, blocks_each)):
        blocks, free = free[:count], free[count:]
        table[seq, :count] = blocks
        key, value = (normal(rng, (length, kv_heads, head_dim), dtype) for _ in range(2))
        for token in range(length):
            block, inside = blocks[token // block_size], token % block_size
            k_pages[block, :, :, inside] = key[token]
            v_pages[block, :, inside, :head_dim] = value[token]
        keys.append(key)
        values.append(value)
    starts = np.cumsum([0, *(queries for _, queries in chunks)]).astype(np.int32)
    positions = np.concatenate([np.arange(c, c + q) for c, q in chunks] or [np.empty(0)]).astype(np.int32)
    batch = Batch(
        token_ids=tensor(np.zeros(starts[-1], np.int32)),
        positions=tensor(positions),
        query_start=tensor(starts),
        seq_lens=tensor(np.array(lengths, np.int32)),
        slot_mappings=(tensor(np.full(starts[-1], -1, np.int64)),),
        block_tables=(tensor(table),),
        logits_indices=tensor(np.empty(0, np.int32)),
        max_query_len=max([0, *(queries for _, queries in chunks)]),
        max_seq_len=max([0, *lengths]),
    )
    return PagedCase(cache, batch, keys, values, normal(rng, (int(starts[-1]), heads, head_dim)))


def filled(num_rows: int, **values) -> SamplingArrays:
    """Neutral parameters with some fields set, each to one value for all rows or to a sequence."""
    params = SamplingArrays.neutral(num_rows)
    for name, value in values.items():
        getattr(params, name)[:] = value
    return params


def set_lists(params: SamplingArrays, name: str, rows: list[list[int]]) -> None:
    setattr(params, f"{name}_ids", np.array([token for row in rows for token in row], np.int32))
    ends = np.cumsum([*map(len, rows)]).astype(np.int32)
    setattr(params, f"{name}_start", np.append(np.int32(0), ends[:-1]))
    setattr(params, f"{name}_end", ends)
