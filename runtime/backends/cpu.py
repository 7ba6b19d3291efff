"""The operations of a model on the cpu, as `runtime.ops` describes them.

Activations are float32; weights are float32, float16 or bfloat16 as stored, widened in the kernel; so is the KV cache,
which may be of int8 or fp8 with scales, too.
Small inputs run on the calling thread, larger ones on the pool's threads; any Python thread may call. Results do not
depend on the other rows of a batch, nor on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numba
import numpy as np

from numba_kernels.cpu import activation as _activation
from numba_kernels.cpu import columns as _columns
from numba_kernels.cpu import embedding as _embedding
from numba_kernels.cpu import experts as _experts
from numba_kernels.cpu import latent as _latent
from numba_kernels.cpu import norm as _norm
from numba_kernels.cpu import qkv as _qkv
from numba_kernels.cpu import scaling as _scaling
from numba_kernels.cpu.attention import kernel as _attention
from numba_kernels.cpu.gemm import experts as _grouped
from numba_kernels.cpu.gemm import linear as _linear
from numba_kernels.cpu.running.launch import Kernel, address_of, hold, new_array
from numba_kernels.cpu.running.recording import current
from runtime.backends.checks import check, fail
from runtime.batch import Batch
from runtime.dtype import PAGES, STORED, DType, float32, int32
from runtime.errors import InvalidArgumentError
from runtime.linear.experts import ExpertsWeight
from runtime.linear.norm import RmsNorm
from runtime.linear.weight import JoinedWeight, PanelWeight
from runtime.rope_table import RopeTable
from runtime.routing import Routing, RoutingRule
from runtime.tensor.storage import NDArray
from runtime.tensor.tensor import Tensor

MAX_WORKERS = numba.get_num_threads()  # threads that this process may use
SERIAL_ELEMENTS = 32 * 1024  # elementwise work below this is not worth waking a thread
_SERIAL_ATTENTION_MACS = 64_000
_MOST_EXPERT_ROWS = 8192  # of experts at a time, each token with all of its experts
ACTIVATIONS = float32
WEIGHT = (PanelWeight, JoinedWeight)
TABLE = PanelWeight
NORM_WEIGHTS = tuple(STORED)
LATENT_ROW_MULTIPLE = 16  # elements, whole vectors
_num_workers = MAX_WORKERS


def num_workers() -> int:
    """Threads that share an operation that is worth it."""
    return _num_workers


def set_num_workers(count: int) -> None:
    """Share operations among so many threads, 1 to `MAX_WORKERS`; results stay the same to the bit."""
    global _num_workers
    if not 1 <= count <= MAX_WORKERS:
        raise InvalidArgumentError(f"num_workers is {count}, must be 1 to {MAX_WORKERS}", param="num_workers")
    _num_workers = count


def _new(shape: tuple[int, ...]) -> Tensor:
    """A float32 tensor, not filled."""
    return Tensor.over(new_array(shape, np.float32), float32)


def _new_int32(shape: tuple[int, ...]) -> Tensor:
    """An int32 tensor, not filled."""
    return Tensor.over(new_array(shape, np.int32), int32)


def _share(rows: int, elements_a_row: int) -> tuple[int, int, int]:
    """(tickets, workers, rows a ticket) for elementwise work."""
    if rows * elements_a_row < SERIAL_ELEMENTS or _num_workers == 1:
        return 1, 1, max(1, rows)
    rows_a_ticket = -(-rows // (4 * _num_workers))
    return -(-rows // rows_a_ticket), _num_workers, rows_a_ticket


# ------------------------------------------------------------------------------------------ linear, embedding


def _parts_of(weight: PanelWeight | JoinedWeight, x: Tensor) -> Iterator[tuple[PanelWeight, Tensor]]:
    """The weight's parts, and what each is multiplied with: ``x [T, K]``, its columns in the part's order."""
    order, ordered = None, x
    for part in (weight,) if isinstance(weight, PanelWeight) else weight.parts:
        if part.order is not order:
            order = part.order
            ordered = x if order is None else _take_columns(x, order)
        yield part, ordered


def _take_columns(x: Tensor, order: NDArray) -> Tensor:
    """``x[:, order]``."""
    rows, depth = x.shape
    result = _new((rows, depth))
    hold(order)
    tickets, workers, rows_a_ticket = _share(rows, depth)
    _columns.take_columns_kernel()(
        tickets, workers, x.address, address_of(order), result.address, rows, depth, rows_a_ticket
    )
    return result


def linear(
    x: Tensor, weight: PanelWeight | JoinedWeight, residual: Tensor | None, out: Tensor | None, dtype: DType
) -> Tensor:
    """See `ops.linear`; `dtype` is that of the result."""
    rows, (width, depth) = x.shape[0], weight.shape
    result = Tensor.over(new_array((rows, width), dtype.numpy), dtype) if out is None else out
    if rows and width:
        first = 0  # of the part's outputs, in bytes
        for part, ordered in _parts_of(weight, x):
            hold(part.panels, part.scales, part.bias)
            _linear.multiply(
                part.stored, ordered.address, part.panels_address, part.scales_address, part.bias_address,
                0 if residual is None else residual.address + first, result.address + first, rows, depth,
                part.shape[0], width, _num_workers, part.num_segments or 1, part.segment_step,
            )  # fmt: skip
            first += part.shape[0] * dtype.itemsize
    return result


def linear_partial(x: Tensor, weight: PanelWeight | JoinedWeight) -> Tensor:
    """See `ops.linear_partial`."""
    rows, (width, depth) = x.shape[0], weight.shape
    result = _new((rows, width))
    if rows and width:
        first = 0  # of the part's outputs
        for part, ordered in _parts_of(weight, x):
            scales, bias = _linear.neutral(part.bias.size)
            hold(part.panels, scales, bias)
            _linear.multiply(
                part.stored, ordered.address, part.panels_address, address_of(scales), address_of(bias), 0,
                result.address + first * 4, rows, depth, part.shape[0], width, _num_workers, part.num_segments,
                part.segment_step,
            )  # fmt: skip
            first += part.shape[0]
    return result


def add_partials(
    partials: Tensor, weight: PanelWeight | JoinedWeight, residual: Tensor | None, out: Tensor | None
) -> Tensor:
    """See `ops.add_partials`."""
    count, rows, width = partials.shape
    result = _new((rows, width)) if out is None else out
    if rows and width:
        first = 0  # of the part's outputs, in bytes
        for part in (weight,) if isinstance(weight, PanelWeight) else weight.parts:
            hold(part.scales, part.bias)
            _linear.add_partials(
                part.stored, partials.address + first, count, part.scales_address, part.bias_address,
                0 if residual is None else residual.address + first, result.address + first, rows, part.shape[0], width,
                _num_workers,
            )  # fmt: skip
            first += part.shape[0] * 4
    return result


def scale_logits(logits: Tensor, scale: float, softcap: float | None) -> None:
    """Multiplies ``logits [T, V]`` in place, and caps them unless ``softcap`` is None."""
    rows, width = logits.shape
    tickets, workers, rows_a_ticket = _share(rows, width * 8)
    _scaling.logits_kernel()(tickets, workers, logits.address, rows, width, rows_a_ticket, scale, softcap or 0.0)


def add_scaled(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """See `ops.add_scaled`."""
    rows, width = x.shape
    result = _new(x.shape)
    tickets, workers, rows_a_ticket = _share(rows, width)
    _scaling.add_scaled_kernel()(
        tickets, workers, x.address, y.address, result.address, rows, width, rows_a_ticket, scale
    )
    return result


def _add_rows(
    op: str, name: str, indices: Tensor, table: Tensor | PanelWeight, out: Tensor | None, multiplier: float = 1.0
) -> Tensor:
    """Rows of the table times the multiplier, added to ``out`` or in a new tensor."""
    rows, (table_rows, width) = indices.shape[0], table.shape
    if isinstance(table, PanelWeight):
        assert table.order is None, "rows of a table are read as they are"
        address, scales, stored = table.panels_address, table.scales_address, table.stored
        hold(table.panels, table.scales)
    else:
        address, scales, stored = table.address, 0, STORED[table.dtype]
    result = _new((rows, width)) if out is None else out

    def explain(status: int) -> Exception:
        low, high = indices.array.min(), indices.array.max()
        return fail(op, name, f"holds {low} to {high}, must lie in 0 to {table_rows - 1}")

    tickets, workers, rows_a_ticket = _share(rows, width * 8)
    _embedding.embedding_kernel(stored)(
        tickets, workers, indices.address, address, scales, result.address, rows, table_rows, width,
        int(isinstance(table, PanelWeight)), int(out is not None), rows_a_ticket, multiplier, explain=explain,
    )  # fmt: skip
    return result


def embedding(token_ids: Tensor, table: Tensor | PanelWeight, scale: float) -> Tensor:
    """See `ops.embedding`."""
    return _add_rows("embedding", "token_ids", token_ids, table, None, scale)


def add_embedding(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """See `ops.add_embedding`."""
    return _add_rows("add_embedding", "positions", positions, table, x)


def gather_rows(x: Tensor, indices: Tensor) -> Tensor:
    """See `ops.gather_rows`."""
    return _add_rows("gather_rows", "indices", indices, x, None)


def join_columns(parts: Sequence[Tensor]) -> Tensor:
    """See `ops.join_columns`."""
    rows, total, first = parts[0].shape[0], sum(each.shape[1] for each in parts), 0
    result = _new((rows, total))
    for each in parts:
        width = each.shape[1]
        tickets, workers, rows_a_ticket = _share(rows, width)
        _columns.put_columns_kernel()(
            tickets, workers, each.address, result.address, rows, width, total, first, rows_a_ticket
        )
        first += width
    return result


# ------------------------------------------------------------------------------------------ norms, activations


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> Tensor:
    """See `ops.rms_norm`."""
    rows, width = x.shape
    result = _new(x.shape)
    tickets, workers, rows_a_ticket = _share(rows, width)
    _norm.rms_norm_kernel(STORED[weight.dtype])(
        tickets, workers, x.address, weight.address, 0 if residual is None else residual.address, result.address, rows,
        width, rows_a_ticket, eps,
    )  # fmt: skip
    return result


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """See `ops.layer_norm`."""
    rows, width = x.shape
    result = _new(x.shape)
    tickets, workers, rows_a_ticket = _share(rows, width)
    _norm.layer_norm_kernel(STORED[weight.dtype])(
        tickets, workers, x.address, weight.address, 0 if bias is None else bias.address, result.address, rows, width,
        rows_a_ticket, eps,
    )  # fmt: skip
    return result


def activate(function: str, x: Tensor, out: Tensor | None) -> Tensor:
    """The kernel `function` of `numba_kernels.cpu.activation`, elementwise; ``out`` may be ``x``."""
    result = _new(x.shape) if out is None else out
    width = x.shape[-1] if x.ndim else 1
    rows = x.size // width if width else 0
    tickets, workers, rows_a_ticket = _share(rows, width * 8)
    _activation.activation_kernel(function)(
        tickets, workers, x.address, 0, result.address, rows, width, width, width, rows_a_ticket
    )
    return result


def activate_shaped(function: str, x: Tensor, factors: tuple[float, ...], out: Tensor | None) -> Tensor:
    """As `activate`, of a kernel with up to four numbers."""
    result = _new(x.shape) if out is None else out
    rows, width = x.shape
    tickets, workers, rows_a_ticket = _share(rows, width * 8)
    numbers = (*factors, 0.0, 0.0, 0.0)[:4]
    _activation.shaped_kernel(function)(
        tickets, workers, x.address, result.address, rows, width, rows_a_ticket, *numbers
    )
    return result


def glu(gate_up: Tensor, activation: str) -> Tensor:
    """See `ops.glu`."""
    rows, both = gate_up.shape
    width = both // 2
    result = _new((rows, width))
    tickets, workers, rows_a_ticket = _share(rows, width * 8)
    gate = gate_up.address
    _activation.activation_kernel(activation)(
        tickets, workers, gate, gate + width * 4, result.address, rows, width, both, both, rows_a_ticket
    )
    return result


def linear_glu(x: Tensor, weight: PanelWeight | JoinedWeight, activation: str) -> Tensor:
    """``glu(linear(x, weight), activation)``."""
    return glu(linear(x, weight, None, None, float32), activation)


# ------------------------------------------------------------------------------------------ experts


def route(logits: Tensor, rule: RoutingRule, bias: Tensor | None) -> Routing:
    """See `ops.route`."""
    rows, num_experts = logits.shape
    ids, weights = _new_int32((rows, rule.top_k)), _new((rows, rule.top_k))
    tickets, workers, rows_a_ticket = _share(rows, num_experts * 8)
    kind = _experts.KINDS.index(rule.scores)
    _experts.route_kernel()(
        tickets, workers, logits.address, 0 if bias is None else bias.address, ids.address, weights.address, rows,
        num_experts, rule.top_k, kind, rule.num_groups, rule.top_groups, int(rule.group_score == "two"),
        int(rule.normalises), rows_a_ticket, rule.scale, rule.epsilon,
    )  # fmt: skip
    return Routing(ids, weights, rule)


def experts(
    x: Tensor, routing: Routing, gate_up: ExpertsWeight, down: ExpertsWeight, activation: str, shared: Tensor | None,
    shared_gate: Tensor | None, residual: Tensor | None, gather: Callable[[Tensor, int], Tensor] | None,
) -> Tensor:  # fmt: skip
    """See `ops.experts`. Many tokens are several passes, so that their rows stay small."""
    tokens, hidden = x.shape[0], down.shape[1] if gather is None else gate_up.shape[2]
    result = _new((tokens, hidden))
    at_once = max(1, _MOST_EXPERT_ROWS // routing.rule.top_k)
    for first in range(0, tokens, at_once):
        some = slice(first, first + at_once)
        added = [0 if each is None else each[some].address for each in (shared, shared_gate, residual)]
        chosen = Routing(routing.ids[some], routing.weights[some], routing.rule)
        _some_experts(x[some], chosen, gate_up, down, activation, added, result[some], gather)
    return result


def _some_experts(
    x: Tensor, routing: Routing, gate_up: ExpertsWeight, down: ExpertsWeight, activation: str, added: list[int],
    out: Tensor, gather: Callable[[Tensor, int], Tensor] | None,
) -> None:  # fmt: skip
    """`added` are addresses of the shared expert's results, its gate and the residual."""
    rows = _RowsByExpert(routing)
    between = glu(rows.product(rows.gather(x), gate_up), activation)
    if gather is not None:
        between = gather(between, down.shape[2])
    y = rows.product(between, down)
    rows.add(y if gather is None else gather(y, out.shape[1]), added, out)


def expert_linear(x: Tensor, routing: Routing, weight: ExpertsWeight) -> Tensor:
    """See `ops.expert_linear`."""
    tokens = x.shape[0]
    result = _new((tokens, weight.shape[1]))
    for first in range(0, tokens, _MOST_EXPERT_ROWS):
        some = slice(first, first + _MOST_EXPERT_ROWS)
        rows = _RowsByExpert(Routing(routing.ids[some], routing.weights[some], routing.rule))
        rows.add(rows.product(rows.gather(x[some]), weight), [0, 0, 0], result[some])
    return result


class _RowsByExpert:
    """Rows grouped by expert."""

    def __init__(self, routing: Routing) -> None:
        self.routing = routing
        (self.tokens, self.top_k), self.num_experts = routing.ids.shape, routing.rule.num_experts
        self.count = count = self.tokens * self.top_k
        self.num_active = min(self.num_experts, count)
        sizes = (self.num_experts + 1,), (self.num_active,), (count,), (count,)
        self.starts, self.active, self.tokens_of, self.places = map(_new_int32, sizes)
        _experts.group_kernel()(
            1, 1, routing.ids.address, self.starts.address, self.active.address, self.tokens_of.address,
            self.places.address, self.tokens, self.top_k, self.num_experts, self.num_active,
        )  # fmt: skip

    def gather(self, x: Tensor) -> Tensor:
        """Each row of x once for each of its experts, ``[T k, K]``."""
        return _add_rows("experts", "routing", self.tokens_of, x, None)

    def product(self, x: Tensor, weight: ExpertsWeight) -> Tensor:
        """Each row of ``x [T k, K]`` times its expert's matrix, ``[T k, N]``."""
        width, first = weight.shape[1], 0
        result = _new((self.count, width))
        for part, table in zip(weight.parts[0], weight.tables, strict=True):
            hold(table)
            _grouped.multiply(
                part.stored, x.address, address_of(table), self.starts.address, self.active.address,
                result.address + first * 4, self.count, self.num_experts, self.num_active, part.shape[1],
                part.shape[0], width, _num_workers,
            )  # fmt: skip
            first += part.shape[0]
        return result

    def add(self, y: Tensor, added: list[int], out: Tensor) -> None:
        """Writes each token's weighted sum of ``y [T k, N]`` to ``out [T, N]``, and what `_some_experts` adds."""
        width = y.shape[1]
        tickets, workers, rows_a_ticket = _share(self.tokens, width * self.top_k)
        _experts.combine_kernel()(
            tickets, workers, y.address, self.routing.weights.address, self.places.address, *added, out.address,
            self.tokens, self.top_k, width, rows_a_ticket,
        )  # fmt: skip


# ------------------------------------------------------------------------------------------ attention


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
    q_norm: Tensor | None, k_norm: Tensor | None, norm: str, norm_eps: float, k_cache: Tensor, v_cache: Tensor,
    slot_mapping: Tensor, scales: tuple[Tensor, ...],
) -> Tensor:  # fmt: skip
    """See `ops.qkv_prepare`."""
    tokens, heads = qkv.shape[0], num_q_heads + 2 * num_kv_heads
    norms = [_as_float32(weight) for weight in (q_norm, k_norm)]
    cos = sin = q_scales = rotary = num_positions = interleaved = 0
    if rope is not None:
        num_positions, rotary = rope.cos.shape[0], 2 * rope.cos.shape[1]
        cos, sin, interleaved = rope.cos.address, rope.sin.address, int(rope.interleaved)
        q_scales = 0 if rope.q_scales is None else rope.q_scales.address
    blocks, _, _, block_size = k_cache.shape
    result = _new((tokens, num_q_heads, head_dim))
    tickets, workers, tokens_a_ticket = _share(tokens, heads * head_dim * 2)

    _qkv.qkv_kernel(PAGES[k_cache.dtype])(
        tickets, workers, qkv.address, positions.address, cos, sin, q_scales,
        *(0 if weight is None else address_of(weight) for weight in norms),
        k_cache.address, v_cache.address, *_scale_addresses(scales), slot_mapping.address, result.address,
        tokens, num_q_heads, num_kv_heads, head_dim, _qkv.NORMS.index(norm), rotary, interleaved, num_positions,
        blocks, block_size, v_cache.shape[3], tokens_a_ticket, norm_eps,
        explain=_explain_places("qkv_prepare", positions, num_positions, slot_mapping, blocks * block_size),
    )  # fmt: skip
    return result


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


def _attention_plan(batch: Batch, group: int, tokens: int, share: int, block_size: int) -> _AttentionPlan | None:
    """The plan of a batch; None without sequences. ``share`` query heads share a KV head."""
    key = ("attention", group, tokens, share, block_size)
    if key in batch.plans:
        plan: _AttentionPlan | None = batch.plans[key]
        return plan
    op = "attention"
    seqs = batch.num_seqs
    starts, seq_lens, table = (
        tensor.array for tensor in (batch.query_start, batch.seq_lens, batch.block_tables[group])
    )
    if current() is not None:
        assert batch.sees_until is None, "a step with pictures is recorded"
        batch.plans[key] = plan = _recorded_plan(batch, group, tokens, share, table.shape[1])
        return plan
    query_lens = np.diff(starts)
    if starts[0] != 0 or starts[-1] != tokens or (query_lens < 0).any():
        raise fail(op, "batch.query_start", f"must rise from 0 to {tokens}, the tokens of q")
    limit = table.shape[1] * block_size
    if (seq_lens < query_lens).any() or (seq_lens > limit).any():
        raise fail(
            op, "batch.seq_lens", f"must lie between the chunk's length and {limit}, the tokens of a block table's row"
        )
    if batch.sees_until is not None:
        until, lens = batch.sees_until.array, seq_lens.astype(np.int64)
        own = np.arange(1, tokens + 1) + np.repeat(lens - query_lens - starts[:-1], query_lens)
        falls = (np.diff(until) < 0) & (np.diff(own) == 1)
        if (until < own).any() or (until > np.repeat(lens, query_lens)).any() or falls.any():
            raise fail(op, "batch.sees_until", "must rise in each chunk, from behind each token to the sequence's end")
    plan = None
    if seqs:
        group_tokens = max(1, _attention.GROUP_ROWS // share)
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


def _recorded_plan(batch: Batch, group: int, tokens: int, share: int, table_width: int) -> _AttentionPlan:
    """The plan for any chunks of at least one token, of sequences up to the batch's longest, since each replay has
    other values in the arrays."""
    seqs = batch.num_seqs
    if not 0 < seqs <= tokens:
        raise fail("attention", "batch", f"cannot be recorded: {seqs} sequences of {tokens} tokens")
    group_tokens = max(1, _attention.GROUP_ROWS // share)
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
) -> Tensor:  # fmt: skip
    """See `ops.attention`."""
    kernel = _attention.attention_kernel(PAGES[k_cache.dtype], _attention.span_of(pages[2]))
    places = k_cache.address, v_cache.address, *_scale_addresses(scales)
    return _attend(
        "attention", kernel, q, places, batch, group, pages, (q.shape[2], v_cache.shape[3], v_cache.shape[3]), scale,
        window, sinks, softcap,
    )  # fmt: skip


def latent_prepare(
    q: Tensor, latent: Tensor, positions: Tensor, rope: RopeTable, norm: RmsNorm, pages: Tensor, slot_mapping: Tensor
) -> Tensor:
    """See `ops.latent_prepare`."""
    tokens, heads, width = q.shape
    blocks, _, block_size, stride = pages.shape
    weight = _as_float32(norm.weight)
    assert weight is not None
    tickets, workers, tokens_a_ticket = _share(tokens, (heads + 2) * width)
    _latent.latent_kernel(STORED[pages.dtype])(
        tickets, workers, q.address, latent.address, positions.address, rope.cos.address, rope.sin.address,
        address_of(weight), pages.address, slot_mapping.address, tokens, heads, width, 2 * rope.cos.shape[1],
        int(rope.interleaved), rope.cos.shape[0], blocks, block_size, stride, tokens_a_ticket, norm.eps,
        explain=_explain_places("latent_prepare", positions, rope.cos.shape[0], slot_mapping, blocks * block_size),
    )  # fmt: skip
    return q


def latent_attention(q: Tensor, pages: Tensor, batch: Batch, group: int, scale: float, value_dim: int) -> Tensor:
    """See `ops.latent_attention`."""
    blocks, _, block_size, stride = pages.shape
    kernel = _attention.attention_kernel(STORED[pages.dtype], _attention.span_of(block_size), is_latent=True)
    first_value = pages.address + (q.shape[2] - value_dim) * pages.dtype.itemsize
    width = -(-value_dim // 16) * 16
    return _attend(
        "latent_attention", kernel, q, (pages.address, first_value, 0, 0), batch, group, (blocks, 1, block_size),
        (value_dim, width, stride), scale, None, None, None,
    )  # fmt: skip


def _attend(
    op: str, kernel: Kernel, q: Tensor, places: tuple[int, ...], batch: Batch, group: int, pages: tuple[int, int, int],
    value_sizes: tuple[int, int, int], scale: float, window: int | None, sinks: Tensor | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    """`places` are addresses of keys, values and their scales; `value_sizes` are a value's length, that of the row
    that it is summed in, and of a row of pages."""
    (tokens, q_heads, head_dim), (blocks, kv_heads, block_size) = q.shape, pages
    value_dim, width, stride = value_sizes
    share = q_heads // kv_heads
    plan = _attention_plan(batch, group, tokens, share, block_size)
    result = _new((tokens, q_heads * value_dim))
    if plan is None:
        return result
    groups = plan.num_groups * kv_heads
    workers = 1 if plan.num_keys * q_heads * head_dim < _SERIAL_ATTENTION_MACS else _num_workers
    segments = -(-plan.longest // _attention.SEGMENT_TOKENS)
    if workers == 1 or groups >= 2 * workers:
        segments = 1
    partial_size = groups * segments * plan.group_tokens * share * (width + 2) if segments > 1 else 0
    partial = new_array((partial_size,), np.float32)
    query_start, seq_lens, table, group_starts = plan.addresses
    arguments = (
        q.address, *places, query_start, seq_lens, table, group_starts, address_of(partial), result.address,
        batch.num_seqs, q_heads, kv_heads, head_dim, value_dim, width, stride, blocks, block_size,
        plan.table_width, window or 0, plan.group_tokens, segments,
        0 if sinks is None else sinks.address, 0 if batch.sees_until is None else batch.sees_until.address, scale,
        softcap or 0.0,
    )  # fmt: skip

    def explain(status: int) -> Exception:
        if status == _attention.BAD_BLOCK:
            return fail(op, "batch.block_tables", f"names a block outside the cache's {blocks}")
        limit = plan.table_width * block_size
        return fail(op, "batch.seq_lens", f"holds {batch.seq_lens.array.max()}, limit {limit} of the block tables")

    kernel(groups * segments, workers, *arguments, explain=explain)
    if segments > 1:
        _attention.merge_kernel()(groups, workers, *arguments)
    return result
