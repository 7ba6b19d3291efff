"""Latent attention on a GPU; see `runtime.ops`."""

from __future__ import annotations

from collections.abc import Callable

from numba_kernels.cuda import attention as _attention
from numba_kernels.cuda import latent as _latent
from runtime.backends.checks import fail
from runtime.backends.cuda_linear import linear
from runtime.backends.cuda_tensor import alignment, remembered, zeros
from runtime.batch import Batch, LongChunk
from runtime.device.gpu import Gpu
from runtime.dtype import float8_e4m3
from runtime.linear.latent import LatentMaps
from runtime.linear.norm import RmsNorm
from runtime.linear.weight import GpuWeight
from runtime.rope_table import RopeTable
from runtime.tensor.tensor import Tensor

LATENT_ROW_MULTIPLE = _latent.ROW_MULTIPLE

_plan_absorb = remembered(_latent.plan_absorb)
_plan_expanded = remembered(_attention.plan_expanded)
_plan_prepare = remembered(_latent.plan_prepare)
_plan_rows = remembered(_latent.plan_rows)
_plan_values = remembered(_latent.plan_values)


def latent_queries(
    q: Tensor, latent: Tensor, maps: LatentMaps, positions: Tensor, rope: RopeTable, norm: RmsNorm, pages: Tensor,
    slot_mapping: Tensor, out: Tensor | None = None, added: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """See `ops.latent_queries`."""
    tokens, heads, width = q.shape[0], maps.num_heads, maps.row_dim
    _check("latent_queries", q, width, pages)
    result = Tensor.new((tokens, heads, width), q.dtype, q.device) if out is None else out
    if tokens:
        pitches = [each.strides[0] * each.dtype.itemsize for each in (q, latent)]
        is_aligned = alignment(q.address, latent.address, maps.keys.address, result.address, *pitches) % 16 == 0
        launch = _plan_absorb(
            tokens, heads, width, q.dtype.ptx, rotary=maps.rotary_dim, interleaved=rope.interleaved,
            key_dim=maps.key_dim, is_aligned=is_aligned, pages=_kind_of(pages),
        )  # fmt: skip
        Gpu.of(q.device).launch(
            launch, q.address, maps.keys.address, result.address, latent.address, positions.address, rope.cos.address,
            rope.sin.address, 0 if rope.q_scales is None else rope.q_scales.address, norm.weight.address,
            slot_mapping.address, pages.address, q.strides[0], latent.strides[0], heads, tokens, norm.eps,
        )  # fmt: skip
    if added is None or not tokens:
        return result
    if rope.q_scales is None:
        return added(q.contiguous(), result)
    # The result is of scaled queries, so the addend gets them, too; the tokens' rows are written once more.
    return added(latent_prepare(q, latent, maps, positions, rope, norm, pages, slot_mapping), result)


def latent_values(x: Tensor, maps: LatentMaps, out: Tensor | None = None) -> Tensor:
    """See `ops.latent_values`."""
    tokens, heads = x.shape[0], maps.num_heads
    result = Tensor.new((tokens, heads * maps.value_dim), x.dtype, x.device) if out is None else out
    if tokens:
        is_aligned = alignment(x.address, maps.values.address, result.address) % 16 == 0
        launch = _plan_values(tokens, heads, maps.latent_dim, maps.value_dim, x.dtype.ptx, is_aligned=is_aligned)
        Gpu.of(x.device).launch(launch, x.address, maps.values.address, result.address, heads, tokens)
    return result


def latent_prepare(
    q: Tensor, latent: Tensor, maps: LatentMaps, positions: Tensor, rope: RopeTable, norm: RmsNorm, pages: Tensor,
    slot_mapping: Tensor,
) -> Tensor:  # fmt: skip
    """Queries that are not absorbed, rotated, ``[T, H (key_dim + R)]``; writes the tokens' rows."""
    result = Tensor.new(q.shape, q.dtype, q.device)
    launch = _plan_prepare(
        q.shape[0], maps.row_dim, q.dtype.ptx, rotary=maps.rotary_dim, interleaved=rope.interleaved,
        key_dim=maps.key_dim, pages=_kind_of(pages),
    )  # fmt: skip
    Gpu.of(q.device).launch(
        launch, q.address, result.address, latent.address, positions.address, rope.cos.address, rope.sin.address,
        0 if rope.q_scales is None else rope.q_scales.address, norm.weight.address, slot_mapping.address,
        pages.address, q.strides[0], latent.strides[0], maps.num_heads, norm.eps,
    )  # fmt: skip
    return result


def latent_attention(
    q: Tensor, pages: Tensor, batch: Batch, group: int, scale: float, value_dim: int, out: Tensor | None = None
) -> Tensor:
    """See `ops.latent_attention`."""
    op, (tokens, heads, width), table = "latent_attention", q.shape, batch.block_tables[group]
    _check(op, q, width, pages)
    block_size, table_width = pages.shape[2], table.shape[1]
    if batch.max_seq_len > table_width * block_size:
        limit = f"must be at most {table_width * block_size}, the tokens of a block table's row"
        raise fail(op, "batch.max_seq_len", f"is {batch.max_seq_len}, {limit}")
    result = Tensor.new((tokens, heads * value_dim), q.dtype, q.device) if out is None else out
    if tokens == 0 or heads == 0:
        return result
    gpu = Gpu.of(q.device)
    key = "latent_attention", group, tokens, heads, width, value_dim, block_size, q.dtype, pages.dtype
    plan = batch.plans.get(key)
    if plan is None:
        plan = batch.plans[key] = _latent.plan_attention(
            num_tokens=tokens, num_seqs=batch.num_seqs, max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len, num_heads=heads, width=width, value_dim=value_dim, table_width=table_width,
            dtype=q.dtype.ptx, block_size=block_size, num_sms=gpu.properties.num_sms,
            most_shared=gpu.properties.shared_bytes_per_block, arch=gpu.arch, num_blocks=pages.shape[0],
            exact=batch.exact, pages=_kind_of(pages),
        )  # fmt: skip
    workspace = gpu.allocate(plan.workspace_bytes) if plan.workspace_bytes else None
    gpu.launch(
        plan.launch,
        *plan.arguments(
            q.address, pages.address, result.address, 0 if workspace is None else workspace.address,
            zeros(gpu, plan.num_arrivals) if plan.num_arrivals else 0, batch.query_start.address,
            batch.seq_lens.address, table.address, scale,
        ),
    )  # fmt: skip
    return result


def latent_expanded(
    q: Tensor, pages: Tensor, batch: Batch, group: int, chunk: LongChunk, maps: LatentMaps, scale: float, out: Tensor
) -> None:
    """Attention of one chunk's queries, prepared, among ``q [T, H head_dim]`` over the expanded rows of its sequence,
    the only one of `batch`; writes its rows of ``out [T, H value_dim]``. A segment of rows at a time is copied out of
    the pages, expanded by one product, and attended to."""
    gpu, weight, heads = Gpu.of(q.device), maps.expansion, maps.num_heads
    assert isinstance(weight, GpuWeight)
    segment, item, table = (
        maps.segment_rows(chunk.length, q.dtype.itemsize),
        q.dtype.itemsize,
        batch.block_tables[group],
    )
    starts = range(0, chunk.length, segment)
    state, last = None, starts[-1]
    for first in starts:
        num_rows = min(segment, chunk.length - first)
        rows = Tensor.new((num_rows, maps.row_dim), q.dtype, q.device)
        copy = _plan_rows(
            num_rows, maps.row_dim, q.dtype.ptx, pages.shape[2], pages=_kind_of(pages), value_dim=maps.latent_dim
        )
        gpu.launch(copy, pages.address, rows.address, batch.seq_lens.address, table.address, first, num_rows)
        expanded = linear(rows, weight, None, None, q.dtype)
        plan = _plan_expanded(
            q.dtype.ptx, maps.head_dim, maps.value_dim, num_tokens=q.shape[0], query_len=chunk.num_tokens,
            num_heads=heads, num_rows=num_rows, num_sms=gpu.properties.num_sms, arch=gpu.arch,
        )  # fmt: skip
        if state is None and last:
            state = gpu.allocate(plan.state_bytes)
        gpu.launch(
            plan.launch,
            *plan.arguments(
                q.address, expanded.address, expanded.address + maps.head_dim * item, out.address,
                0 if state is None else state.address, batch.query_start.address, batch.seq_lens.address, scale,
                first_key=first, most_keys=num_rows, is_last=first == last,
            ),
        )  # fmt: skip


def _kind_of(pages: Tensor) -> str:
    """The type of pages as plans name it: "" for that of queries."""
    return float8_e4m3.ptx if pages.dtype is float8_e4m3 else ""


def _check(op: str, q: Tensor, width: int, pages: Tensor) -> None:
    if pages.dtype not in (q.dtype, float8_e4m3):
        raise fail(op, "pages", f"are of {pages.dtype}, must be of float8_e4m3 or q's {q.dtype}")
    if why_not := _latent.why_not(width):
        raise fail(op, "q", f"has {why_not}")
