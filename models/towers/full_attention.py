"""Attention among all patches of one picture, in both directions, by the paged causal kernels.

A query that stands last in its sequence sees all keys, so that nothing is masked: a block of `QUERIES` patches becomes
one token of as many query heads, which share a KV head. So the keys of a picture are read once for a whole block, and
no device needs another kernel. A picture's bits depend on no other picture.
"""

from __future__ import annotations

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
    """Attention over one picture of `num_patches`, whose keys and values lie in pages of its own.

    `rope` has a row for each patch; None: nothing is rotated.
    """

    def __init__(
        self, num_patches: int, num_heads: int, head_dim: int, rope: RopeTable | None, dtype: DType, device: Device
    ) -> None:
        self._num_patches, self._num_heads, self._head_dim, self._rope = num_patches, num_heads, head_dim, rope
        spec = KVCacheSpec(
            num_layers=1, num_kv_heads=num_heads, head_dim=head_dim, block_size=_PAGE_TOKENS, dtype=dtype, device=device
        )
        num_pages = -(-num_patches // _PAGE_TOKENS)
        self._pages = KVCache(spec, num_pages)
        num_blocks = -(-num_patches // QUERIES)
        positions = np.arange(num_patches, dtype=np.int32)
        table = np.broadcast_to(np.arange(num_pages, dtype=np.int32), (num_blocks, num_pages))
        arrays = (
            positions,
            positions.astype(np.int64),
            np.arange(num_blocks + 1, dtype=np.int32),
            np.full(num_blocks, num_patches, np.int32),
            np.ascontiguousarray(table),
            np.zeros(0, np.int32),
        )
        positions_on, slots, query_start, seq_lens, tables, nothing = ops.place(arrays, device)
        self._positions, self._slots = positions_on, slots
        self._batch = Batch(
            token_ids=query_start[:num_blocks], positions=query_start[:num_blocks], query_start=query_start,
            seq_lens=seq_lens, slot_mappings=(slots,), block_tables=(tables,), logits_indices=nothing,
            max_query_len=1, max_seq_len=num_patches, exact=True,
        )  # fmt: skip

    def __call__(self, qkv: Tensor) -> Tensor:
        """`[num_patches, 3 * num_heads * head_dim]` -> `[num_patches, num_heads * head_dim]`."""
        heads, head_dim, count = self._num_heads, self._head_dim, self._num_patches
        k_cache, v_cache = self._pages.layer(0)
        q = ops.qkv_prepare(
            qkv, self._positions, num_q_heads=heads, num_kv_heads=heads, head_dim=head_dim, rope=self._rope,
            q_norm=None, k_norm=None, norm_eps=0.0, k_cache=k_cache, v_cache=v_cache, slot_mapping=self._slots,
        )  # fmt: skip
        num_blocks = self._batch.num_seqs
        padded = Tensor.zeros((num_blocks * QUERIES, heads, head_dim), q.dtype, q.device)
        padded[:count] = q
        by_head = padded.view(num_blocks, QUERIES, heads, head_dim).transpose(1, 2).contiguous()
        attended = ops.attention(
            by_head.view(num_blocks, heads * QUERIES, head_dim), k_cache, v_cache, self._batch, 0,
            scale=head_dim**-0.5,
        )  # fmt: skip
        by_patch = attended.view(num_blocks, heads, QUERIES, head_dim).transpose(1, 2).contiguous()
        return by_patch.view(num_blocks * QUERIES, heads * head_dim)[:count].contiguous()
