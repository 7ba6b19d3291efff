"""Latent attention on a GPU; see `runtime.ops`."""

from __future__ import annotations

from numba_kernels.cuda import attention as _attention
from numba_kernels.cuda import latent as _latent
from runtime.backends.checks import fail
from runtime.backends.cuda_linear import linear
from runtime.backends.cuda_tensor import remembered, zeros
from runtime.batch import Batch, LongChunk
from runtime.device.gpu import Gpu
from runtime.linear.latent import LatentMaps
from runtime.linear.norm import RmsNorm
from runtime.linear.weight import GpuWeight
from runtime.rope_table import RopeTable
from runtime.tensor.tensor import Tensor

LATENT_ROW_MULTIPLE = _latent.ROW_MULTIPLE

_plan_prepare = remembered(_latent.plan_prepare)
_plan_rows = remembered(_latent.plan_rows)
_plan_expanded = remembered(_attention.plan_expanded)


def latent_prepare(
    q: Tensor, latent: Tensor, positions: Tensor, rope: RopeTable, norm: RmsNorm, pages: Tensor, slot_mapping: Tensor,
    rotated_at: int | None = None,
) -> Tensor:  # fmt: skip
    """See `ops.latent_prepare`; with `rotated_at` queries are not absorbed, and have their rotated part there."""
    (tokens, heads, q_width), width = q.shape, latent.shape[1]
    if rotated_at is None:
        _check("latent_prepare", q, pages)
    if tokens:
        launch = _plan_prepare(
            tokens, width, q.dtype.ptx, rotary=2 * rope.cos.shape[1], interleaved=rope.interleaved,
            query=None if rotated_at is None else (q_width, rotated_at),
        )  # fmt: skip
        Gpu.of(q.device).launch(
            launch, q.address, latent.address, positions.address, rope.cos.address, rope.sin.address,
            0 if rope.q_scales is None else rope.q_scales.address, norm.weight.address, slot_mapping.address,
            pages.address, heads, norm.eps,
        )  # fmt: skip
    return q


def latent_attention(
    q: Tensor, pages: Tensor, batch: Batch, group: int, scale: float, value_dim: int, out: Tensor | None = None
) -> Tensor:
    """See `ops.latent_attention`."""
    op, (tokens, heads, width), table = "latent_attention", q.shape, batch.block_tables[group]
    _check(op, q, pages)
    block_size, table_width = pages.shape[2], table.shape[1]
    if batch.max_seq_len > table_width * block_size:
        limit = f"must be at most {table_width * block_size}, the tokens of a block table's row"
        raise fail(op, "batch.max_seq_len", f"is {batch.max_seq_len}, {limit}")
    result = Tensor.new((tokens, heads * value_dim), q.dtype, q.device) if out is None else out
    if tokens == 0 or heads == 0:
        return result
    gpu = Gpu.of(q.device)
    key = "latent_attention", group, tokens, heads, width, value_dim, block_size, q.dtype
    plan = batch.plans.get(key)
    if plan is None:
        plan = batch.plans[key] = _latent.plan_attention(
            num_tokens=tokens, num_seqs=batch.num_seqs, max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len, num_heads=heads, width=width, value_dim=value_dim, table_width=table_width,
            dtype=q.dtype.ptx, block_size=block_size, num_sms=gpu.properties.num_sms,
            most_shared=gpu.properties.shared_bytes_per_block, arch=gpu.arch, num_blocks=pages.shape[0],
            exact=batch.exact,
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
        copy = _plan_rows(num_rows, maps.row_dim, q.dtype.ptx, pages.shape[2])
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


def _check(op: str, q: Tensor, pages: Tensor) -> None:
    if pages.dtype is not q.dtype:
        raise fail(op, "pages", f"are of {pages.dtype}, must be of q's {q.dtype}")
    if why_not := _latent.why_not(q.shape[2]):
        raise fail(op, "q", f"has {why_not}")
