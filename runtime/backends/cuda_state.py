"""Layers with a recurrent state on a GPU; see `runtime.state_ops`."""

from __future__ import annotations

import math
from typing import Any

from numba_kernels.cuda.recurrent import chunk_form as _chunk_form
from numba_kernels.cuda.recurrent import gated_norm as _gated_norm
from numba_kernels.cuda.recurrent import short_conv as _short_conv
from numba_kernels.cuda.recurrent import step as _step
from numba_kernels.cuda.recurrent.chunk_layout import ChunkForm
from numba_kernels.cuda.specialisation import Launch
from runtime.backends.cuda_tensor import alignment, remembered
from runtime.batch import Batch
from runtime.device.allocator import DeviceBlock
from runtime.device.gpu import Gpu
from runtime.dtype import float32
from runtime.linear.recurrent import DeltaRule, Mamba, ShortConv
from runtime.tensor.tensor import Tensor

_most_steps = remembered(_chunk_form.most_steps)
_plan_chunk_form = remembered(_chunk_form.plan)
_plan_norm = remembered(_gated_norm.plan)
_plan_short_conv = remembered(_short_conv.plan)
_plan_step = remembered(_step.plan)


Queue = list[tuple[Launch, tuple[int | float, ...]]]
"""Launches with their arguments, in order."""


def run(
    x: Tensor, weights: ShortConv | DeltaRule | Mamba, pages: tuple[Tensor, ...], batch: Batch, group: int, pending: int
) -> Tensor:
    """See `ops.short_conv`, `ops.delta_rule` and `ops.mamba`."""
    queue, result, _owners = queued(x, weights, pages, batch, group, pending)
    gpu = Gpu.of(x.device)
    for launch, arguments in queue:
        gpu.launch(launch, *arguments)
    return result


short_conv = delta_rule = mamba = run


def queued(
    x: Tensor, weights: ShortConv | DeltaRule | Mamba, pages: tuple[Tensor, ...], batch: Batch, group: int, pending: int
) -> tuple[Queue, Tensor, Any]:
    """An operation's launches, their result, and the owners of other memory that they use."""
    if isinstance(weights, ShortConv):
        return _short_conv_queue(x, weights, pages, batch, group, pending)
    w = weights
    if isinstance(w, DeltaRule):
        steps, out, workspace = _recurrence(
            x, w, pages, batch, group, pending, conv=(w.conv, None), heads=(w.num_key_heads, w.num_value_heads),
            key_dim=w.key_dim, value_dim=w.value_dim, places=(0, w.keys, 2 * w.keys), x_first=0,
            gates_first=w.channels + w.values, num_gates=w.num_gates, skip=0, tiled=w.tiled, limits=(0.0, 0.0),
        )  # fmt: skip
        norm, result = _norm(out, x, w.channels, w.norm, w.num_value_heads, 0, w.eps, w.gate)
    else:
        keys = w.num_groups * w.state_size
        steps, out, workspace = _recurrence(
            x, w, pages, batch, group, pending, conv=(w.conv, w.conv_bias), heads=(w.num_groups, w.num_heads),
            key_dim=w.state_size, value_dim=w.head_dim, places=(w.inner + keys, w.inner, 0), x_first=w.inner,
            gates_first=w.inner + w.channels, num_gates=w.num_gates, skip=w.d.address, tiled=False, limits=w.dt_limit,
        )  # fmt: skip
        norm, result = _norm(out, x, 0, w.norm, w.norm_groups, w.inner // w.norm_groups, w.eps, "first")
    return [*steps, *norm], result, (out, workspace)


def _chunks(batch: Batch, group: int) -> tuple[int, int, int]:
    """The addresses of a batch's lengths and tables."""
    return batch.query_start.address, batch.seq_lens.address, batch.block_tables[group].address


def _short_conv_queue(
    x: Tensor, weights: ShortConv, pages: tuple[Tensor, ...], batch: Batch, group: int, pending: int
) -> tuple[Queue, Tensor, None]:
    tokens, (channels, taps) = x.shape[0], weights.conv.shape
    result = Tensor.new((tokens, channels), x.dtype, x.device)
    if not tokens:
        return [], result, None
    lengths, inputs = pages
    bounds = alignment(x.address, result.address, inputs.address)
    launch = _plan_short_conv(batch.max_query_len, batch.num_seqs, channels, taps, x.dtype.ptx, alignment=bounds)
    arguments = (
        x.address, weights.conv.address, 0 if weights.bias is None else weights.bias.address, result.address,
        *_chunks(batch, group), lengths.address, inputs.address, batch.block_tables[group].shape[1], channels, pending,
    )  # fmt: skip
    return [(launch, arguments)], result, None


def _recurrence(
    x: Tensor, weights: DeltaRule | Mamba, pages: tuple[Tensor, ...], batch: Batch, group: int, pending: int, *,
    conv: tuple[Tensor, Tensor | None], heads: tuple[int, int], key_dim: int, value_dim: int,
    places: tuple[int, int, int], x_first: int, gates_first: int, num_gates: int, skip: int, tiled: bool,
    limits: tuple[float, float],
) -> tuple[Queue, Tensor, DeviceBlock | None]:  # fmt: skip
    """The launches, the outputs, float32 ``[T, value heads * value_dim]``, and the memory between. ``places``: first
    channels of q, k, v."""
    (tokens, stride), (channels, taps) = x.shape, conv[0].shape
    key_heads, value_heads = heads
    out = Tensor.new((tokens, value_heads * value_dim), float32, x.device)
    if not tokens:
        return [], out, None
    lengths, inputs, *gates, state = pages
    of_runs = alignment(x.address, inputs.address) // x.dtype.itemsize, stride, x_first, channels, *places[:2]
    launch, parts = _plan_step(
        batch.num_seqs, value_heads, value_dim, key_dim, taps, x.dtype.ptx, state.dtype.ptx,
        is_delta=isinstance(weights, DeltaRule),
    )  # fmt: skip
    gpu, seqs, width = Gpu.of(x.device), batch.num_seqs, batch.block_tables[group].shape[1]
    given = (
        conv[0].address, 0 if conv[1] is None else conv[1].address, weights.a.address, weights.dt_bias.address, skip
    )  # fmt: skip
    tables, of_gates = _chunks(batch, group), gates[0].address if gates else 0
    form = ChunkForm(x.dtype.ptx, key_dim, value_dim, isinstance(weights, DeltaRule))
    multiple = math.gcd(alignment(conv[0].address) // 4, *of_runs, places[2])
    most_steps = _longest_recurrence(gpu, form, batch, pending, value_heads, taps, multiple)
    step = (
        x.address, *given, out.address, *tables, lengths.address, inputs.address, of_gates, state.address,
        width, stride, x_first, gates_first, channels, pending, most_steps, num_gates, key_heads, value_heads,
        value_dim, *places, int(tiled), parts, *limits,
    )  # fmt: skip
    queue: Queue = [(launch, step)]
    if batch.max_query_len <= most_steps:
        return queue, out, None
    plan = _plan_chunk_form(
        form, state.dtype.ptx, taps, tokens, seqs, batch.max_query_len, pending, key_heads, value_heads,
        gpu.properties.num_sms, has_bias=conv[1] is not None,
    )  # fmt: skip
    workspace, share = gpu.allocate(plan.workspace_bytes), value_heads // key_heads
    factors = (
        x.address, workspace.address, *given, *tables, lengths.address, inputs.address, of_gates,
        width, stride, x_first, gates_first, channels, pending, most_steps, plan.slots, key_heads, value_heads,
        plan.heads_of_block, *places, *((1, key_heads) if tiled else (share, 1)), *limits,
    )  # fmt: skip
    scan = (
        workspace.address, out.address, *tables, lengths.address, state.address, width, pending,
        most_steps, plan.slots, key_heads, value_heads, 1 if tiled else share, key_heads,
    )  # fmt: skip
    return [*queue, (plan.factors, factors), (plan.scan, scan)], out, workspace


def _longest_recurrence(
    gpu: Gpu, form: ChunkForm, batch: Batch, pending: int, value_heads: int, taps: int, multiple: int
) -> int:
    """The most tokens of a sequence that the recurrence serves; the chunk form serves longer ones."""
    if batch.exact or _chunk_form.why_not(form, taps, multiple, gpu.properties.shared_bytes_per_block):
        return _chunk_form.ALWAYS_STEPS
    sizes = batch.num_seqs, batch.num_tokens, value_heads, gpu.properties.num_sms
    return max(pending + 1, _most_steps(form, *sizes))


def _norm(
    out: Tensor, x: Tensor, first: int, weight: Tensor, groups: int, weight_step: int, eps: float, gate: str
) -> tuple[Queue, Tensor]:
    """The launch, and the outputs after the gated norm, of x's type; gates are x's columns from ``first`` on."""
    tokens, width = out.shape
    result = Tensor.new(out.shape, x.dtype, x.device)
    if not tokens:
        return [], result
    size, stride, address = width // groups, x.shape[1], x.address + first * x.dtype.itemsize
    of_runs = alignment(address, result.address) // x.dtype.itemsize, stride
    launch = _plan_norm(tokens, groups, size, x.dtype.ptx, gate, multiples=of_runs)
    arguments = (
        out.address, address, weight.address, result.address, tokens, groups, size, stride, weight_step,
        1.0 / size, eps,
    )  # fmt: skip
    return [(launch, arguments)], result
