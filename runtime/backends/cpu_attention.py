"""Attention on the cpu, and what prepares its queries and pages; see `runtime.ops`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from numba_kernels.cpu import qkv as _qkv
from numba_kernels.cpu.attention import kernel as _attention
from numba_kernels.cpu.attention import texts as _texts
from numba_kernels.cpu.latent import attention as _latent
from numba_kernels.cpu.latent.prepare import latent_kernel
from numba_kernels.cpu.running.launch import address_of, hold, new_array
from numba_kernels.cpu.running.recording import current
from numba_kernels.cpu.target import LANES
from numba_kernels.latent_rows import LatentBytes
from runtime.backends.checks import check, fail
from runtime.backends.cpu_threads import new, num_workers, share_among
from runtime.batch import Batch
from runtime.dtype import PAGES, DType, NDArray, float32
from runtime.linear.norm import RmsNorm
from runtime.rope_table import RopeTable
from runtime.tensor.tensor import Tensor

_SERIAL_ATTENTION_MACS = 64_000
_FEW_TOKENS = 32  # of texts: drawing a head takes a fifth of its time
_ITEMS_A_WORKER = 4  # of segments, so that a slow thread takes fewer
LATENT_ROW_MULTIPLE = 16  # elements, whole vectors


def page_shape(op: str, k_cache: Tensor, v_cache: Tensor, x: Tensor, head_dim: int) -> tuple[int, int, int]:
    """(blocks, KV heads, block size) of K ``[blocks, KV heads, head_dim, block size]`` and V ``[..., block size,
    head_dim rounded up to 16]``."""
    check(op, "k_cache", k_cache, x.device, tuple(PAGES), (None, None, head_dim, None))
    blocks, heads, _, block_size = k_cache.shape
    if block_size % 8 or blocks == 0:
        raise fail(op, "k_cache", f"has {blocks} blocks of {block_size} tokens, must be some, of a multiple of 8")
    check(op, "v_cache", v_cache, x.device, k_cache.dtype, (blocks, heads, block_size, None))
    if v_cache.shape[3] != -(-head_dim // 16) * 16:
        raise fail(op, "v_cache", f"has rows of {v_cache.shape[3]}, must be head_dim {head_dim} rounded up to 16")
    return blocks, heads, block_size


def _scale_addresses(scales: tuple[Tensor, ...]) -> tuple[int, int]:
    """Addresses of the scales of keys and of values; 0 for pages without."""
    return (scales[0].address, scales[1].address) if scales else (0, 0)


def _as_float32(weight: Tensor | None) -> NDArray | None:
    """A norm's weight, converted where it is stored otherwise."""
    if weight is None:
        return None
    array = np.ascontiguousarray(weight.array, np.float32)
    hold(array)
    return array


def qkv_prepare(
    qkv: Tensor, positions: Tensor, num_q_heads: int, num_kv_heads: int, head_dim: int, rope: RopeTable | None,
    q_norm: Tensor | None, k_norm: Tensor | None, norm: str, norm_eps: float, values: str, k_cache: Tensor,
    v_cache: Tensor, slot_mapping: Tensor, scales: tuple[Tensor, ...],
) -> Tensor:  # fmt: skip
    """See `ops.qkv_prepare`."""
    tokens, heads = qkv.shape[0], num_q_heads + 2 * num_kv_heads
    norms = [_as_float32(weight) for weight in (q_norm, k_norm)]
    cos = sin = q_scales = rotary = num_positions = interleaved = distance = 0
    if rope is not None:
        num_positions, rotary = rope.cos.shape[0], 2 * rope.cos.shape[1]
        cos, sin, interleaved = rope.cos.address, rope.sin.address, int(rope.interleaved)
        q_scales = 0 if rope.q_scales is None else rope.q_scales.address
        distance = (head_dim if rope.is_spread else rotary) // 2
    blocks, _, _, block_size = k_cache.shape
    result = new((tokens, num_q_heads, head_dim))
    work_items, workers, tokens_a_work_item = share_among(tokens, heads * head_dim * 2)

    _qkv.qkv_kernel(PAGES[k_cache.dtype])(
        work_items, workers, qkv.address, positions.address, cos, sin, q_scales,
        *(0 if weight is None else address_of(weight) for weight in norms),
        k_cache.address, v_cache.address, *_scale_addresses(scales), slot_mapping.address, result.address,
        tokens, num_q_heads, num_kv_heads, head_dim, _qkv.NORMS.index(norm), _qkv.VALUES.index(values), rotary,
        distance, interleaved, num_positions, blocks, block_size, v_cache.shape[3], tokens_a_work_item, norm_eps,
        explain=_explain_places("qkv_prepare", positions, num_positions, slot_mapping, blocks * block_size),
    )  # fmt: skip
    return result


def qkv_attention(*_: Any) -> None:
    """Returns None: on a CPU heads are prepared before attention, in a launch of its own (``ops.qkv_attention``)."""


def _explain_places(
    op: str, positions: Tensor, num_positions: int, slot_mapping: Tensor, num_slots: int
) -> Callable[[int], Exception]:
    """Raises the error for a status of a kernel that rotates and writes pages."""

    def explain(status: int) -> Exception:
        if status == _qkv.BAD_POSITION:
            low, high = positions.array.min(), positions.array.max()
            return fail(op, "positions", f"hold {low} to {high}, limit {num_positions - 1}")
        return fail(op, "slot_mapping", f"holds {slot_mapping.array.max()}, limit {num_slots - 1}")

    return explain


@dataclass(frozen=True, slots=True)
class _AttentionPlan:
    """A batch's cut into row groups, worked out and checked once for all layers."""

    group_tokens: int  # most tokens of a row group
    num_groups: int  # row groups, or more
    group_starts: NDArray  # [num_seqs + 1] int32: row groups before each sequence
    num_keys: int  # query tokens times the keys of their sequence, at most what is attended to
    longest: int  # tokens of the longest sequence
    table_width: int
    addresses: tuple[int, ...]  # query_start, seq_lens, block table, group_starts


def _attention_plan(
    batch: Batch, group: int, tokens: int, group_tokens: int, block_size: int, op: str
) -> _AttentionPlan | None:
    """The plan of a batch; None without sequences. A row group has up to ``group_tokens`` tokens."""
    key = ("attention", group, tokens, group_tokens, block_size)
    if key in batch.plans:
        plan: _AttentionPlan | None = batch.plans[key]
        return plan
    seqs = batch.num_seqs
    starts, seq_lens, table = (
        tensor.array for tensor in (batch.query_start, batch.seq_lens, batch.block_tables[group])
    )
    if current() is not None:
        batch.plans[key] = plan = _recorded_plan(batch, group, tokens, group_tokens, table.shape[1], op)
        return plan
    query_lens = np.diff(starts)
    if starts[0] != 0 or starts[-1] != tokens or (query_lens < 0).any():
        raise fail(op, "batch.query_start", f"must rise from 0 to {tokens}, the tokens of q")
    limit = table.shape[1] * block_size
    if (seq_lens < query_lens).any() or (seq_lens > limit).any():
        raise fail(
            op, "batch.seq_lens", f"must lie between the chunk's length and {limit}, the tokens of a block table's row"
        )
    if batch.bidirectional_until is not None:
        until, lens = batch.bidirectional_until.array, seq_lens.astype(np.int64)
        own = np.arange(1, tokens + 1) + np.repeat(lens - query_lens - starts[:-1], query_lens)
        falls = (np.diff(until) < 0) & (np.diff(own) == 1)
        if (until < own).any() or (until > np.repeat(lens, query_lens)).any() or falls.any():
            raise fail(
                op, "batch.bidirectional_until", "must rise in each chunk, from behind each token to the sequence's end"
            )
    plan = None
    if seqs:
        group_starts = np.zeros(seqs + 1, np.int32)
        np.cumsum(-(-query_lens // group_tokens), out=group_starts[1:])
        tensors = batch.query_start, batch.seq_lens, batch.block_tables[group]
        plan = _AttentionPlan(
            group_tokens,
            int(group_starts[-1]),
            group_starts,
            num_keys=int(np.dot(query_lens.astype(np.int64), seq_lens)),
            longest=int(seq_lens.max()),
            table_width=table.shape[1],
            addresses=(*(tensor.address for tensor in tensors), address_of(group_starts)),
        )
    batch.plans[key] = plan
    return plan


def _recorded_plan(
    batch: Batch, group: int, tokens: int, group_tokens: int, table_width: int, op: str
) -> _AttentionPlan:
    """The plan for any chunks of at least one token, of sequences up to the batch's longest, since each replay has
    other values in the arrays."""
    seqs = batch.num_seqs
    if not 0 < seqs <= tokens:
        raise fail(op, "batch", f"cannot be recorded: {seqs} sequences of {tokens} tokens")
    if seqs == tokens:
        group_starts = np.arange(seqs + 1, dtype=np.int32)
        hold(group_starts)
    else:
        group_starts = new_array((seqs + 1,), np.int32)
        _attention.group_starts_kernel()(1, 1, batch.query_start.address, address_of(group_starts), seqs, group_tokens)
    tensors = batch.query_start, batch.seq_lens, batch.block_tables[group]
    return _AttentionPlan(
        group_tokens,
        seqs + (tokens - seqs) // group_tokens,
        group_starts,
        num_keys=tokens * batch.max_seq_len,
        longest=batch.max_seq_len,
        table_width=table_width,
        addresses=(*(tensor.address for tensor in tensors), address_of(group_starts)),
    )


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, group: int, pages: tuple[int, int, int], scale: float,
    window: int | None, sinks: Tensor | None, softcap: float | None, scales: tuple[Tensor, ...],
    position_bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """See `ops.attention`."""
    (tokens, q_heads, head_dim), (blocks, kv_heads, block_size) = q.shape, pages
    share, width = q_heads // kv_heads, v_cache.shape[3]
    group_tokens = max(1, _attention.group_rows(head_dim) // share)
    plan = _attention_plan(batch, group, tokens, group_tokens, block_size, "attention")
    result = new((tokens, q_heads * head_dim))
    if plan is None:
        return result
    groups = plan.num_groups * kv_heads
    workers, segments = _shares(plan, groups, q_heads * head_dim, _attention.SEGMENT_TOKENS)
    partial = _partial_sums(plan, groups, segments, share * (width + 2))
    query_start, seq_lens, table, group_starts = plan.addresses
    stored, span = PAGES[k_cache.dtype], _attention.span_of(block_size)
    rounds = _attention.takes_pairs(stored, span, head_dim, batch.may_round)
    _attention.attention_kernel(stored, span, rounds)(
        groups * segments, workers, q.address, k_cache.address, v_cache.address, *_scale_addresses(scales), query_start,
        seq_lens, table, group_starts, address_of(partial), result.address, batch.num_seqs, q_heads, kv_heads, head_dim,
        width, blocks, block_size, plan.table_width, window or 0, plan.group_tokens, segments,
        0 if sinks is None else sinks.address, 0 if batch.bidirectional_until is None else
        batch.bidirectional_until.address, *_bias_fields(position_bias), scale, softcap or 0.0,
        explain=_explain_pages("attention", batch, plan, blocks, block_size),
    )  # fmt: skip
    if segments > 1:
        _merge_segments(plan, batch, groups, workers, partial, result, sinks, (q_heads, kv_heads, head_dim), segments)
    return result


def takes_texts(page_dtype: DType, head_dim: int) -> bool:
    """Whether `text_attention` takes heads of this size without the pages."""
    return page_dtype == float32 and _texts.takes(head_dim)


def text_attention(
    qkv: Tensor, batch: Batch, group: int, block_size: int, num_heads: int, head_dim: int, scale: float,
    position_bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """See `ops.text_attention`."""
    rows = 256 if num_workers() <= 8 else 64  # of a group, which turns its text's keys; many threads need many groups
    plan = _attention_plan(batch, group, qkv.shape[0], rows, block_size, "text_attention")
    result = new((qkv.shape[0], num_heads * head_dim))
    if plan is None:
        return result
    if current() is None and not np.array_equal(np.diff(batch.query_start.array), batch.seq_lens.array):
        raise fail("text_attention", "batch.seq_lens", "must be the lengths of the texts in the batch")
    groups = plan.num_groups
    workers, _ = _shares(plan, groups * num_heads, num_heads * head_dim, _attention.SEGMENT_TOKENS)
    items = workers if workers == 1 or qkv.shape[0] <= _FEW_TOKENS else _ITEMS_A_WORKER * workers
    heads = max(1, min(num_heads, groups * num_heads // items))
    query_start, _, _, group_starts = plan.addresses
    bias, bias_rows = _bias_fields(position_bias)
    _texts.text_attention_kernel(_texts.rounds_text(batch.may_round))(
        groups * -(-num_heads // heads), workers, qkv.address, query_start, group_starts, bias,
        result.address, batch.num_seqs, num_heads, head_dim, plan.group_tokens, heads, bias_rows, scale,
    )  # fmt: skip
    return result


def _bias_fields(position_bias: Tensor | None) -> tuple[int, int]:
    return (0, 0) if position_bias is None else (position_bias.address, position_bias.shape[0])


def latent_prepare(
    q: Tensor, out: Tensor, latent: Tensor, positions: Tensor, rope: RopeTable, norm: RmsNorm, pages: Tensor,
    slot_mapping: Tensor,
) -> None:  # fmt: skip
    """Rotates the last R numbers of ``q [T, H, key + R]`` into ``out [T, H, R + C]``, which has the C already; scales
    all of them, and writes the tokens' rows; see `ops.latent_queries`."""
    (tokens, heads, width), rotary = out.shape, 2 * rope.cos.shape[1]
    blocks, _, block_size, stride = pages.shape
    weight = _as_float32(norm.weight)
    assert weight is not None
    work_items, workers, tokens_a_work_item = share_among(tokens, (heads + 2) * width)
    q_scales = 0 if rope.q_scales is None else rope.q_scales.address
    rows = LatentBytes(width, width - rotary)
    latent_kernel(PAGES[pages.dtype])(
        work_items, workers, q.address, out.address, latent.address, positions.address, rope.cos.address,
        rope.sin.address, q_scales, address_of(weight), pages.address, slot_mapping.address, tokens, heads,
        q.shape[2] - rotary, width, rotary, int(rope.interleaved), rope.cos.shape[0], blocks, block_size, stride,
        rows.value_bytes, rows.rotated_at, tokens_a_work_item, norm.eps,
        explain=_explain_places("latent_prepare", positions, rope.cos.shape[0], slot_mapping, blocks * block_size),
    )  # fmt: skip


def latent_attention(q: Tensor, pages: Tensor, batch: Batch, group: int, scale: float, value_dim: int) -> Tensor:
    """See `ops.latent_attention`."""
    (tokens, heads, width), (blocks, _, block_size, stride) = q.shape, pages.shape
    group_tokens = max(1, _latent.GROUP_ROWS // heads)
    plan = _attention_plan(batch, group, tokens, group_tokens, block_size, "latent_attention")
    result = new((tokens, heads * value_dim))
    if plan is None:
        return result
    workers, segments = _shares(plan, plan.num_groups, heads * width, _latent.SEGMENT_TOKENS)
    partial = _partial_sums(plan, plan.num_groups, segments, heads * (-(-value_dim // LANES) * LANES + 2))
    item_segments = max(1, segments * plan.num_groups // (_ITEMS_A_WORKER * workers))
    query_start, seq_lens, table, group_starts = plan.addresses
    rows = LatentBytes(width, value_dim)
    _latent.latent_attention_kernel(PAGES[pages.dtype])(
        plan.num_groups * -(-segments // item_segments), workers, q.address, pages.address, query_start, seq_lens,
        table, group_starts, address_of(partial), result.address, batch.num_seqs, heads, width, value_dim, stride,
        blocks, block_size, plan.table_width, plan.group_tokens, segments, item_segments,
        rows.value_bytes, rows.rotated_at, scale,
        explain=_explain_pages("latent_attention", batch, plan, blocks, block_size),
    )  # fmt: skip
    if segments > 1:
        sizes = heads, 1, value_dim
        _merge_segments(plan, batch, plan.num_groups, workers, partial, result, None, sizes, segments)
    return result


def _shares(plan: _AttentionPlan, groups: int, elements: int, segment_tokens: int) -> tuple[int, int]:
    """(workers, segments of each group) for ``groups`` row groups of ``elements`` multiply-adds a token and key."""
    workers = 1 if plan.num_keys * elements < _SERIAL_ATTENTION_MACS else num_workers()
    return workers, 1 if workers == 1 or groups >= 2 * workers else -(-plan.longest // segment_tokens)


def _partial_sums(plan: _AttentionPlan, groups: int, segments: int, token_size: int) -> NDArray:
    """Memory for the sums of all segments, ``token_size`` floats a token."""
    return new_array((groups * segments * plan.group_tokens * token_size if segments > 1 else 0,), np.float32)


def _merge_segments(
    plan: _AttentionPlan, batch: Batch, groups: int, workers: int, partial: NDArray, result: Tensor,
    sinks: Tensor | None, sizes: tuple[int, int, int], segments: int,
) -> None:  # fmt: skip
    """`sizes` are query heads, KV heads and a value's length."""
    query_start, _, _, group_starts = plan.addresses
    _attention.merge_kernel()(
        groups, workers, query_start, group_starts, address_of(partial), result.address,
        0 if sinks is None else sinks.address, batch.num_seqs, *sizes, -(-sizes[2] // LANES) * LANES,
        plan.group_tokens, segments,
    )  # fmt: skip


def _explain_pages(
    op: str, batch: Batch, plan: _AttentionPlan, num_blocks: int, block_size: int
) -> Callable[[int], Exception]:
    """Raises the error for a status of an attention kernel."""

    def explain(status: int) -> Exception:
        if status == _attention.BAD_BLOCK:
            return fail(op, "batch.block_tables", f"names a block outside the cache's {num_blocks}")
        limit = plan.table_width * block_size
        return fail(op, "batch.seq_lens", f"holds {batch.seq_lens.array.max()}, limit {limit} of the block tables")

    return explain
