"""Attention among all patches of a picture, or of each of its windows, in both directions, by the paged causal kernels.

A query that stands last in its sequence sees all keys, so that nothing is masked: a block of `QUERIES` patches becomes
one token of as many query heads, which share a KV head. So the keys of a picture are read once for a whole block, and
no device needs another kernel. A picture's bits depend on no other picture.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime import ops
from runtime.batch import Batch
from runtime.device.device import Device
from runtime.dtype import DType
from runtime.kv.cache import KVCache, KVCacheSpec
from runtime.ops import RopeTable
from runtime.tensor.tensor import Tensor

QUERIES = 32
"""Patches that share a read of the keys: the rows of a group of the cpu's kernel."""

_PAGE_TOKENS = 16


class FullAttention:
    """Attention over one picture, whose keys and values lie in pages of its own.

    `lengths` are those of its windows, which lie one behind the other: a patch sees those of its own. `rope` has a row
    for each patch; None: nothing is rotated.
    """

    def __init__(
        self, lengths: Sequence[int], num_heads: int, head_dim: int, rope: RopeTable | None, dtype: DType,
        device: Device,
    ) -> None:  # fmt: skip
        self._num_patches, self._num_heads, self._head_dim, self._rope = sum(lengths), num_heads, head_dim, rope
        spec = KVCacheSpec(
            num_layers=1, num_kv_heads=num_heads, head_dim=head_dim, block_size=_PAGE_TOKENS, dtype=dtype, device=device
        )
        counts = np.array(lengths, np.int64)
        num_pages, num_blocks = -(-counts // _PAGE_TOKENS), -(-counts // QUERIES)  # of each window
        first_pages, total = np.cumsum(num_pages) - num_pages, int(num_blocks.sum())
        self._pages = KVCache(spec, int(num_pages.sum()))
        inside = np.concatenate([np.arange(count) for count in lengths])
        table = np.minimum(np.arange(num_pages.max()), num_pages[:, None] - 1) + first_pages[:, None]
        arrays = (
            np.arange(self._num_patches, dtype=np.int32),
            np.repeat(first_pages, counts) * _PAGE_TOKENS + inside,
            np.arange(total + 1, dtype=np.int32),
            np.repeat(counts, num_blocks).astype(np.int32),
            np.ascontiguousarray(np.repeat(table, num_blocks, axis=0).astype(np.int32)),
            np.zeros(0, np.int32),
        )
        positions, slots, query_start, seq_lens, tables, nothing = ops.place(arrays, device)
        self._positions, self._slots = positions, slots
        self._batch = Batch(
            token_ids=query_start[:total], positions=query_start[:total], query_start=query_start,
            seq_lens=seq_lens, slot_mappings=(slots,), block_tables=(tables,), logits_indices=nothing,
            max_query_len=1, max_seq_len=max(lengths), exact=True,
        )  # fmt: skip
        self._spread: tuple[Tensor, Tensor] | None = None
        if (counts[:-1] % QUERIES).any():  # blocks that are not full, between others
            places = np.repeat((np.cumsum(num_blocks) - num_blocks) * QUERIES, counts) + inside
            sources = np.zeros(total * QUERIES, np.int32)
            sources[places] = np.arange(self._num_patches, dtype=np.int32)
            spread, back = ops.place((sources, places.astype(np.int32)), device)
            self._spread = spread, back

    def __call__(self, qkv: Tensor) -> Tensor:
        """`[num_patches, 3 * num_heads * head_dim]` -> `[num_patches, num_heads * head_dim]`."""
        heads, head_dim, count = self._num_heads, self._head_dim, self._num_patches
        k_cache, v_cache = self._pages.layer(0)
        q = ops.qkv_prepare(
            qkv, self._positions, num_q_heads=heads, num_kv_heads=heads, head_dim=head_dim, rope=self._rope,
            q_norm=None, k_norm=None, norm_eps=0.0, k_cache=k_cache, v_cache=v_cache, slot_mapping=self._slots,
        )  # fmt: skip
        num_blocks = self._batch.num_seqs
        if self._spread is None:
            padded = Tensor.zeros((num_blocks * QUERIES, heads, head_dim), q.dtype, q.device)
            padded[:count] = q
        else:
            padded = ops.gather_rows(q.view(count, heads * head_dim), self._spread[0])
        by_head = padded.view(num_blocks, QUERIES, heads, head_dim).transpose(1, 2).contiguous()
        attended = ops.attention(
            by_head.view(num_blocks, heads * QUERIES, head_dim), k_cache, v_cache, self._batch, 0,
            scale=head_dim**-0.5,
        )  # fmt: skip
        by_patch = attended.view(num_blocks, heads, QUERIES, head_dim).transpose(1, 2).contiguous()
        rows = by_patch.view(num_blocks * QUERIES, heads * head_dim)
        return rows[:count].contiguous() if self._spread is None else ops.gather_rows(rows, self._spread[1])
