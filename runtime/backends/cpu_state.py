"""Layers with a recurrent state on the cpu; see `runtime.state_ops`."""

from __future__ import annotations

from collections.abc import Callable

from runtime.backends.checks import fail
from runtime.backends.cpu_threads import SERIAL_ELEMENTS, new, num_workers, share_among
from runtime.batch import Batch
from runtime.dtype import STORED
from runtime.later import later
from runtime.linear.recurrent import DeltaRule, Mamba, ShortConv
from runtime.tensor.tensor import Tensor

_convolution = later("numba_kernels.cpu.recurrent.convolution")
_prepare = later("numba_kernels.cpu.recurrent.prepare")
_scan = later("numba_kernels.cpu.recurrent.scan")
"""Loaded by the models that have such layers, so that the others start without them."""


def _chunks(
    pages: tuple[Tensor, ...], batch: Batch, group: int, tokens: int, channels: int, taps: int, pending: int
) -> tuple[int, ...]:
    """The fields `convolution.CHUNK_FIELDS`."""
    table = batch.block_tables[group]
    return (
        batch.query_start.address, batch.seq_lens.address, table.address, pages[0].address, pages[1].address,
        batch.num_seqs, tokens, channels, taps, pending, pages[0].shape[0], table.shape[1],
    )  # fmt: skip


def _explain(op: str, batch: Batch, group: int, pages: tuple[Tensor, ...], pending: int) -> Callable[[int], Exception]:
    def explain(status: int) -> Exception:
        if status == _convolution.BAD_PAGE:
            limit = f"must name two pages of the cache's {pages[0].shape[0]}"
            return fail(op, "batch.block_tables", f"hold {batch.block_tables[group].array[:, :2].tolist()}, {limit}")
        limit = f"must lie at most {pending} tokens before each chunk's first one"
        return fail(op, "pages.length", f"hold {pages[0].array.ravel().tolist()[:16]}, {limit}")

    return explain


def _workers(tokens: int, width: int) -> int:
    return 1 if tokens * width < SERIAL_ELEMENTS else num_workers()


def short_conv(
    x: Tensor, weights: ShortConv, pages: tuple[Tensor, ...], batch: Batch, group: int, pending: int
) -> Tensor:
    """See `ops.short_conv`."""
    tokens, (channels, taps) = x.shape[0], weights.conv.shape
    result = new((tokens, channels))
    parts, blocks = -(-channels // _convolution.WIDTH), -(-tokens // _convolution.TOKENS)
    _convolution.short_conv_kernel()(
        parts * blocks, _workers(tokens, 8 * channels), *_chunks(pages, batch, group, tokens, channels, taps, pending),
        x.address, weights.conv.address, 0 if weights.bias is None else weights.bias.address, result.address, parts,
        explain=_explain("short_conv", batch, group, pages, pending),
    )  # fmt: skip
    return result


def delta_rule(
    x: Tensor, weights: DeltaRule, pages: tuple[Tensor, ...], batch: Batch, group: int, pending: int
) -> Tensor:
    """See `ops.delta_rule`."""
    w = weights
    out = _recurrence(
        "delta_rule", x, w, pages, batch, group, pending, conv=(w.conv, None), tiled=int(w.tiled), skip=0,
        heads=(w.num_key_heads, w.num_value_heads, w.key_dim, w.value_dim), places=(0, w.keys, 2 * w.keys),
        x_first=0, gates_first=w.channels + w.values, num_gates=w.num_gates, limits=(0.0, 0.0),
    )  # fmt: skip
    _gated_norm(out, x, w.channels, w.norm, w.num_value_heads, 0, w.eps, True, w.gate == "sigmoid")
    return out


def mamba(x: Tensor, weights: Mamba, pages: tuple[Tensor, ...], batch: Batch, group: int, pending: int) -> Tensor:
    """See `ops.mamba`."""
    w = weights
    keys = w.num_groups * w.state_size
    out = _recurrence(
        "mamba", x, w, pages, batch, group, pending, conv=(w.conv, w.conv_bias), tiled=0, skip=w.d.address,
        heads=(w.num_groups, w.num_heads, w.state_size, w.head_dim), places=(w.inner + keys, w.inner, 0),
        x_first=w.inner, gates_first=w.inner + w.channels, num_gates=w.num_gates, limits=w.dt_limit,
    )  # fmt: skip
    _gated_norm(out, x, 0, w.norm, w.norm_groups, w.inner // w.norm_groups, w.eps, False, False)
    return out


def _recurrence(
    op: str, x: Tensor, weights: DeltaRule | Mamba, pages: tuple[Tensor, ...], batch: Batch, group: int, pending: int,
    *, conv: tuple[Tensor, Tensor | None], heads: tuple[int, int, int, int], places: tuple[int, int, int], x_first: int,
    gates_first: int, num_gates: int, limits: tuple[float, float], tiled: int, skip: int,
) -> Tensor:  # fmt: skip
    """The outputs ``[T, value heads * value_dim]`` before the norm. ``places``: first channels of q, k and v."""
    tokens, (channels, taps), is_delta = x.shape[0], conv[0].shape, isinstance(weights, DeltaRule)
    key_heads, value_heads, _, value_dim = heads
    seqs = batch.num_seqs
    result = new((tokens, value_heads * value_dim))
    if not seqs:
        return result
    rows = tokens + seqs * pending
    prepared, factors = new((rows, channels)), new((rows, key_heads + 2 * value_heads))
    chunks = _chunks(pages, batch, group, tokens, channels, taps, pending)
    explain = _explain(op, batch, group, pages, pending)
    workers = _workers(tokens, 8 * channels)
    gates = pages[2].address if pending else 0
    parts, token_blocks = key_heads + value_heads, -(-tokens // _convolution.TOKENS)
    parts_a_work_item = max(1, min(parts, parts * token_blocks // (8 * workers)))
    _prepare.prepare_kernel(is_delta)(
        token_blocks * -(-parts // parts_a_work_item), workers, *chunks, x.address, conv[0].address,
        0 if conv[1] is None else conv[1].address, weights.a.address, weights.dt_bias.address, gates, prepared.address,
        factors.address, x.shape[1], x_first, gates_first, num_gates, *heads, *places, parts_a_work_item, *limits,
        explain=explain,
    )  # fmt: skip
    state, blocks = pages[-1], -(-value_dim // _scan.BLOCK)
    units = value_heads * blocks  # of a sequence
    shared = units if tokens > 2 * seqs else seqs * units  # one long chunk may be most of the work
    units_a_work_item = max(1, min(_scan.MOST_UNITS, units, shared // (8 * workers)))
    _scan.scan_kernel(is_delta, STORED[state.dtype])(
        seqs * -(-units // units_a_work_item), workers, *chunks, prepared.address, factors.address,
        state.address, skip, result.address, *heads, *places, tiled, units_a_work_item, explain=explain,
    )  # fmt: skip
    return result


def _gated_norm(
    out: Tensor, x: Tensor, first: int, weight: Tensor, groups: int, weight_step: int, eps: float, is_delta: bool,
    is_sigmoid: bool,
) -> None:  # fmt: skip
    """Normalises in place, with gates in columns of x from ``first`` on."""
    tokens, width = out.shape
    work_items, workers, tokens_a_work_item = share_among(tokens, 8 * width)
    _scan.gated_norm_kernel(is_delta)(
        work_items, workers, out.address, x.address + first * 4, weight.address, out.address, tokens, width, x.shape[1],
        groups, weight_step, tokens_a_work_item, int(is_sigmoid), eps,
    )  # fmt: skip
