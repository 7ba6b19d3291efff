"""The operations of a model on the cpu, as `runtime.ops` describes them.

Activations are float32; weights are float32, float16 or bfloat16 as stored, widened in the kernel; so is the KV cache,
which may be of int8 or fp8 with scales, too.
Small inputs run on the calling thread, larger ones on the pool's threads; any Python thread may call. Results do not
depend on the other rows of a batch, nor on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from numba_kernels.cpu import activation as _activation
from numba_kernels.cpu import adapter_ids as _adapter_ids
from numba_kernels.cpu import decode_inputs as _decode_inputs
from numba_kernels.cpu import embedding as _embedding
from numba_kernels.cpu import experts as _experts
from numba_kernels.cpu import norm as _norm
from numba_kernels.cpu import pooled_texts as _pooled
from numba_kernels.cpu.gemm import experts as _grouped
from numba_kernels.cpu.gemm import linear as _linear
from numba_kernels.cpu.gemm import low_rank as _low_rank
from numba_kernels.cpu.ggml_rows import stored_rows_kernel as _stored_rows
from numba_kernels.cpu.latent import head_maps as _head_maps
from numba_kernels.cpu.layout import GEMM_ROWS
from numba_kernels.cpu.running.launch import address_of, hold, new_array
from runtime.backends.checks import fail
from runtime.backends.cpu_attention import LATENT_ROW_MULTIPLE as LATENT_ROW_MULTIPLE
from runtime.backends.cpu_attention import attention as attention
from runtime.backends.cpu_attention import latent_attention as latent_attention
from runtime.backends.cpu_attention import latent_prepare
from runtime.backends.cpu_attention import page_shape as page_shape
from runtime.backends.cpu_attention import qkv_attention as qkv_attention
from runtime.backends.cpu_attention import qkv_prepare as qkv_prepare
from runtime.backends.cpu_attention import takes_texts as takes_texts
from runtime.backends.cpu_attention import text_attention as text_attention
from runtime.backends.cpu_sampling import log_softmax_topk as log_softmax_topk
from runtime.backends.cpu_sampling import process_logits_row as process_logits_row
from runtime.backends.cpu_sampling import sample as sample
from runtime.backends.cpu_sampling import sample_into as sample_into
from runtime.backends.cpu_state import delta_rule as delta_rule
from runtime.backends.cpu_state import mamba as mamba
from runtime.backends.cpu_state import short_conv as short_conv
from runtime.backends.cpu_threads import MAX_WORKERS as MAX_WORKERS
from runtime.backends.cpu_threads import new, new_int32, num_workers, share_among
from runtime.backends.cpu_threads import set_num_workers as set_num_workers
from runtime.dtype import STORED, DType, NDArray, float32
from runtime.linear.experts import ExpertsWeight
from runtime.linear.latent import LatentMaps
from runtime.linear.low_rank_slots import CpuSlots, LowRank
from runtime.linear.norm import RmsNorm
from runtime.linear.stored_table import StoredTable
from runtime.linear.weight import JoinedWeight, LinearWeight, PanelWeight
from runtime.rope_table import RopeTable
from runtime.routing import Routing, RoutingRule
from runtime.tensor.tensor import Tensor

_MOST_EXPERT_ROWS = 8192  # of experts at a time, each token with all of its experts
GLU_ACTIVATIONS = ("silu", "gelu_tanh", "clamped_silu")
GATES = (*GLU_ACTIVATIONS, "gelu_erf", "gelu_sigmoid")
ACTIVATIONS = float32
WEIGHT = (PanelWeight, JoinedWeight)
TABLE = PanelWeight
NORM_WEIGHTS = tuple(STORED)
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
    result = new((rows, depth))
    hold(order)
    work_items, workers, rows_a_work_item = share_among(rows, depth)
    _embedding.take_columns_kernel()(
        work_items, workers, x.address, address_of(order), result.address, rows, depth, rows_a_work_item
    )
    return result


def linear(
    x: Tensor, weight: PanelWeight | JoinedWeight, residual: Tensor | None, out: Tensor | None, dtype: DType, *,
    low_rank: LowRank | None = None,
) -> Tensor:  # fmt: skip
    """See `ops.linear`; `dtype` is that of the result."""
    rows, (width, depth) = x.shape[0], weight.shape
    result = Tensor.over(new_array((rows, width), dtype.numpy), dtype) if out is None else out
    if rows and width:
        first = 0  # of the part's outputs, in bytes
        added = _riding(low_rank)
        for part, ordered in _parts_of(weight, x):
            hold(part.panels, part.scales, part.bias)
            _linear.multiply(
                part.stored, ordered.address, part.panels_address, part.scales_address, part.bias_address,
                0 if residual is None else residual.address + first, result.address + first, rows, depth,
                part.shape[0], width, num_workers(), part.num_segments or 1, part.segment_step, added,
                first // dtype.itemsize,
            )  # fmt: skip
            first += part.shape[0] * dtype.itemsize
    return result


def takes_low_rank(x: Tensor, weight: Any, norm: RmsNorm | None, activation: str | None, slots: object) -> bool:
    """See `ops.takes_low_rank`."""
    return isinstance(slots, CpuSlots) and norm is None


def linear_partial(x: Tensor, weight: PanelWeight | JoinedWeight) -> Tensor:
    """See `ops.linear_partial`."""
    rows, (width, depth) = x.shape[0], weight.shape
    result = new((rows, width))
    if rows and width:
        first = 0  # of the part's outputs
        for part, ordered in _parts_of(weight, x):
            scales, bias = _linear.neutral(part.bias.size)
            hold(part.panels, scales, bias)
            _linear.multiply(
                part.stored, ordered.address, part.panels_address, address_of(scales), address_of(bias), 0,
                result.address + first * 4, rows, depth, part.shape[0], width, num_workers(), part.num_segments,
                part.segment_step,
            )  # fmt: skip
            first += part.shape[0]
    return result


def add_partials(
    partials: Tensor, weight: PanelWeight | JoinedWeight, residual: Tensor | None, out: Tensor | None,
    low_rank: LowRank | None = None,
) -> Tensor:  # fmt: skip
    """See `ops.add_partials`."""
    count, rows, width = partials.shape
    result = new((rows, width)) if out is None else out
    if rows and width:
        first = 0  # of the part's outputs, in bytes
        added = _riding(low_rank)
        for part in (weight,) if isinstance(weight, PanelWeight) else weight.parts:
            hold(part.scales, part.bias)
            _linear.add_partials(
                part.stored, partials.address + first, count, part.scales_address, part.bias_address,
                0 if residual is None else residual.address + first, result.address + first, rows, part.shape[0], width,
                num_workers(), added, first // 4,
            )  # fmt: skip
            first += part.shape[0] * 4
    return result


def scale_logits(logits: Tensor, scale: float, softcap: float | None) -> None:
    """Multiplies ``logits [T, V]`` in place, and caps them unless ``softcap`` is None."""
    rows, width = logits.shape
    work_items, workers, rows_a_work_item = share_among(rows, width * 8)
    _activation.logits_kernel()(
        work_items, workers, logits.address, rows, width, rows_a_work_item, scale, softcap or 0.0
    )


def forbid(logits: Tensor, token_ids: Tensor) -> None:
    """See `ops.forbid`."""
    rows, width = logits.shape
    work_items, workers, rows_a_work_item = share_among(rows, token_ids.size)
    addresses = logits.address, token_ids.address
    _activation.forbid_kernel()(work_items, workers, *addresses, token_ids.size, rows, width, rows_a_work_item)


def keep_groups(logits: Tensor, scores: Tensor, columns: Tensor, num_best: int) -> None:
    """See `ops.keep_groups`."""
    rows, groups = scores.shape
    work_items, workers, rows_a_work_item = share_among(rows, logits.shape[1] + groups * num_best)
    kept = new_int32(scores.shape)
    addresses = logits.address, scores.address, columns.address, kept.address
    _activation.keep_groups_kernel()(
        work_items, workers, *addresses, groups, columns.shape[1], num_best, rows, rows_a_work_item
    )


def add_scaled(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """See `ops.add_scaled`."""
    rows, width = x.shape
    result = new(x.shape)
    work_items, workers, rows_a_work_item = share_among(rows, width)
    _activation.add_scaled_kernel()(
        work_items, workers, x.address, y.address, result.address, rows, width, rows_a_work_item, scale
    )
    return result


def _add_rows(
    op: str,
    name: str,
    indices: Tensor,
    table: Tensor | PanelWeight | StoredTable,
    out: Tensor | None,
    multiplier: float = 1.0,
) -> Tensor:
    """Rows of the table times the multiplier, added to ``out`` or in a new tensor."""
    rows, (table_rows, width) = indices.shape[0], table.shape
    if isinstance(table, PanelWeight):
        assert table.order is None, "rows of a table are read as they are"
        address, scales, stored = table.panels_address, table.scales_address, table.stored
        hold(table.panels, table.scales)
    elif isinstance(table, StoredTable):
        address, scales, stored = table.rows.address, 0, table.blocks
    else:
        address, scales, stored = table.address, 0, STORED[table.dtype]
    result = new((rows, width)) if out is None else out

    def explain(status: int) -> Exception:
        low, high = indices.array.min(), indices.array.max()
        return fail(op, name, f"holds {low} to {high}, must lie in 0 to {table_rows - 1}")

    work_items, workers, rows_a_work_item = share_among(rows, width * 8)
    kernel = _stored_rows(stored) if isinstance(table, StoredTable) else _embedding.embedding_kernel(stored)
    kernel(
        work_items, workers, indices.address, address, scales, result.address, rows, table_rows, width,
        int(isinstance(table, PanelWeight)), int(out is not None), rows_a_work_item, multiplier, explain=explain,
    )  # fmt: skip
    return result


def embedding(token_ids: Tensor, table: Tensor | PanelWeight | StoredTable, scale: float) -> Tensor:
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
    result = new((rows, total))
    for each in parts:
        width = each.shape[1]
        work_items, workers, rows_a_work_item = share_among(rows, width)
        _embedding.put_columns_kernel()(
            work_items, workers, each.address, result.address, rows, width, total, first, rows_a_work_item
        )
        first += width
    return result


# ------------------------------------------------------------------------------------------ norms, activations


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, factor: float) -> Tensor:
    """See `ops.rms_norm`."""
    rows, width = x.shape
    result = new(x.shape)
    work_items, workers, rows_a_work_item = share_among(rows, width)
    _norm.rms_norm_kernel(STORED[weight.dtype])(
        work_items, workers, x.address, weight.address, 0 if residual is None else residual.address, result.address,
        rows, width, rows_a_work_item, eps, factor,
    )  # fmt: skip
    return result


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """See `ops.layer_norm`."""
    rows, width = x.shape
    result = new(x.shape)
    work_items, workers, rows_a_work_item = share_among(rows, width)
    _norm.layer_norm_kernel(STORED[weight.dtype])(
        work_items, workers, x.address, weight.address, 0 if bias is None else bias.address, result.address, rows,
        width, rows_a_work_item, eps, 1.0,
    )  # fmt: skip
    return result


def pooled_texts(x: Tensor, query_start: Tensor, pooling: str) -> Tensor:
    """See `ops.pooled_texts`."""
    texts, width = query_start.shape[0] - 1, x.shape[1]
    result = new((texts, width))
    _, workers, _ = share_among(x.shape[0], width)
    _pooled.pooled_texts_kernel()(
        texts, workers, x.address, query_start.address, result.address, texts, width, _pooled.POOLINGS.index(pooling)
    )
    return result


def activate(function: str, x: Tensor, out: Tensor | None, factors: tuple[float, ...] = ()) -> Tensor:
    """The kernel `function` of `numba_kernels.cpu.activation`, elementwise, with up to four numbers; ``out`` may be
    ``x``."""
    width = x.shape[-1] if x.ndim else 1
    return _gated(function, x, 0, (width, width), new(x.shape) if out is None else out, factors)


def _gated(
    function: str, gate: Tensor, up: int, steps: tuple[int, int], out: Tensor, factors: tuple[float, ...] = ()
) -> Tensor:
    """f(gate) up in `out`, which is returned. `up` is an address, or 0 without a factor; rows of gate and up are
    `steps` elements apart."""
    width = out.shape[-1] if out.ndim else 1
    rows = out.size // width if width else 0
    work_items, workers, rows_a_work_item = share_among(rows, width * 8)
    _activation.activation_kernel(function)(
        work_items, workers, gate.address, up, out.address, rows, width, *steps, rows_a_work_item,
        *(*factors, 0.0, 0.0, 0.0, 0.0)[:4],
    )  # fmt: skip
    return out


def glu(gate_up: Tensor, activation: str) -> Tensor:
    """See `ops.glu`."""
    rows, both = gate_up.shape
    return _gated(activation, gate_up, gate_up.address + both // 2 * 4, (both, both), new((rows, both // 2)))


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """See `ops.sigmoid_gate`."""
    return _gated("sigmoid", gate, x.address, (x.shape[1], x.shape[1]), new(x.shape))


def gelu_gate(x: Tensor, up: Tensor, first: int) -> Tensor:
    """See `ops.gelu_gate`."""
    return _gated("gelu_tanh", x, up.address + first * 4, (x.shape[1], up.shape[1]), new(x.shape))


def linear_glu(
    x: Tensor, weight: PanelWeight | JoinedWeight, activation: str, *, low_rank: LowRank | None = None
) -> Tensor:
    """``glu(linear(x, weight), activation)``. A panel's products with many rows are gated where they are: all products
    together would leave the caches before they are read."""
    (rows, depth), width = x.shape, weight.shape[0]
    if low_rank is None and isinstance(weight, PanelWeight) and rows > GEMM_ROWS:
        result = new((rows, width // 2))
        ((part, ordered),) = _parts_of(weight, x)
        hold(part.panels, part.scales, part.bias)
        _linear.multiply(
            part.stored, ordered.address, part.panels_address, part.scales_address, part.bias_address, 0,
            result.address, rows, depth, width, width // 2, num_workers(), part.num_segments or 1,
            part.segment_step, gate=_activation.GATED.index(activation) + 1,
        )  # fmt: skip
        return result
    return glu(linear(x, weight, None, None, float32, low_rank=low_rank), activation)


# ------------------------------------------------------------------------------------------ experts


def route(logits: Tensor, rule: RoutingRule, bias: Tensor | None, factors: Tensor | None) -> Routing:
    """See `ops.route`."""
    rows, num_experts = logits.shape
    ids, weights = new_int32((rows, rule.top_k)), new((rows, rule.top_k))
    work_items, workers, rows_a_work_item = share_among(rows, num_experts * 8)
    kind = _experts.KINDS.index(rule.scores)
    _experts.route_kernel()(
        work_items, workers, logits.address, *(0 if each is None else each.address for each in (bias, factors)),
        ids.address, weights.address, rows, num_experts, rule.top_k, kind, rule.num_groups, rule.top_groups,
        int(rule.group_score == "two"), int(rule.normalises), rows_a_work_item, rule.scale, rule.epsilon,
    )  # fmt: skip
    return Routing(ids, weights, rule)


def normed_route(x: Tensor, norm: RmsNorm, weight: LinearWeight, rule: RoutingRule, bias: Tensor | None = None) -> None:
    """Gives None, since no kernel normalises and routes at once: the caller does both."""


def experts(
    x: Tensor, routing: Routing, gate_up: ExpertsWeight, down: ExpertsWeight, activation: str, shared: Tensor | None,
    shared_gate: Tensor | None, residual: Tensor | None, gather: Callable[[Tensor, int], Tensor] | None,
) -> Tensor:  # fmt: skip
    """See `ops.experts`. Many tokens are several passes, so that their rows stay small."""
    tokens, hidden = x.shape[0], down.shape[1] if gather is None else gate_up.shape[2]
    result = new((tokens, hidden))
    for some, chosen in routing.passes(_MOST_EXPERT_ROWS):
        added = [0 if each is None else each[some].address for each in (shared, shared_gate, residual)]
        _some_experts(x[some], chosen, gate_up, down, activation, added, result[some], gather)
    return result


def _some_experts(
    x: Tensor, routing: Routing, gate_up: ExpertsWeight, down: ExpertsWeight, activation: str, added: list[int],
    out: Tensor, gather: Callable[[Tensor, int], Tensor] | None,
) -> None:  # fmt: skip
    """`added` are addresses of the shared expert's results, its gate and the residual."""
    rows = _RowsByExpert(routing)
    between = rows.product(rows.gather(x), gate_up)
    between = activate(activation, between, between) if activation == "squared_relu" else glu(between, activation)
    if gather is not None:
        between = gather(between, down.shape[2])
    y = rows.product(between, down)
    rows.add(y if gather is None else gather(y, out.shape[1]), added, out)


def adapter_ids(adapters: Tensor, ids: Tensor, each: int, num_adapters: int, none: int) -> Tensor:
    """See `ops.adapter_ids`."""
    out, rows = new_int32(ids.shape), ids.shape[0]
    if ids.size:
        _adapter_ids.adapter_ids_kernel()(
            1, 1, adapters.address, ids.address, out.address, rows, ids.size // rows, num_adapters, each, none
        )
    return out


def adapted_experts(
    x: Tensor, routing: Routing, gate_up: ExpertsWeight, down: ExpertsWeight, activation: str, adapters: Tensor | None,
    pairs: Sequence[tuple[ExpertsWeight, ExpertsWeight] | None], shared: Tensor | None, shared_gate: Tensor | None,
    residual: Tensor | None, gather: Callable[[Tensor, int], Tensor] | None,
) -> Tensor:  # fmt: skip
    """See `ops.adapted_experts`. Many tokens are several passes, so that their rows stay small."""
    tokens, hidden = x.shape[0], down.shape[1] if gather is None else gate_up.shape[2]
    result = new((tokens, hidden))
    for some, chosen in routing.passes(_MOST_EXPERT_ROWS):
        added = [None if each is None else each[some] for each in (shared, shared_gate, residual)]
        own = None if adapters is None else adapters[some]
        _some_adapted(x[some], chosen, gate_up, down, activation, own, pairs, added, result[some], gather)
    return result


def _some_adapted(
    x: Tensor, routing: Routing, gate_up: ExpertsWeight, down: ExpertsWeight, activation: str, adapters: Tensor | None,
    pairs: Sequence[tuple[ExpertsWeight, ExpertsWeight] | None], added: list[Tensor | None], out: Tensor,
    gather: Callable[[Tensor, int], Tensor] | None,
) -> None:  # fmt: skip
    """The rows between the maps stand in the order of tokens and their choices."""
    (tokens, top_k), num_experts = routing.ids.shape, routing.rule.num_experts
    count, rule = tokens * top_k, RoutingRule(num_experts=num_experts, top_k=1)

    def grouped(ids: Tensor, num_rows: int, pair: tuple[ExpertsWeight, ExpertsWeight]) -> _RowsByExpert:
        assert adapters is not None, "without adapters there are no pairs"
        own = adapter_ids(adapters, ids, num_experts, pair[0].shape[0] // num_experts, -1)
        rule = RoutingRule(num_experts=pair[0].shape[0], top_k=count // num_rows)
        return _RowsByExpert(Routing(own.view(num_rows, -1), None, rule))

    rows, first, second = _RowsByExpert(routing), *pairs
    change: Tensor | None = None
    if first is not None:
        own = grouped(routing.ids, tokens, first)
        change = own.each_draw(own.product(own.product(own.gather(x), first[0]), first[1]), None)
    between = rows.each_draw(rows.product(rows.gather(x), gate_up), change)
    between = activate(activation, between, between) if activation == "squared_relu" else glu(between, activation)
    if gather is not None:
        between = gather(between, down.shape[2])

    def sum_up(rows: _RowsByExpert, made: Tensor, added: list[Tensor | None], result: Tensor) -> Tensor:
        made = made if gather is None else gather(made, out.shape[1])
        assert routing.weights is not None, "experts have weights"
        addresses = [0 if each is None else each.address for each in added]
        _combine(made, routing.weights.address, rows.places.address, addresses, result, top_k)
        return result

    *shared, residual = added
    if second is not None:
        own = grouped(routing.ids, count, second)
        made = own.product(own.product(own.gather(between), second[0]), second[1])
        residual = sum_up(own, made, [None, None, residual], new(out.shape))
    flat = _RowsByExpert(Routing(routing.ids.view(count, 1), None, rule))
    sum_up(flat, flat.product(flat.gather(between), down), [*shared, residual], out)


def low_rank(
    x: Tensor, adapters: Tensor, slots: CpuSlots, residual: Tensor | None, computed: dict[Any, Any],
    norm: RmsNorm | None = None,
) -> Tensor:  # fmt: skip
    """See `ops.low_rank`."""
    x = x if norm is None else rms_norm(x, norm.weight, norm.eps, None, 1.0)
    rows, width = shape = x.shape[0], sum(slots.shape.heights)
    result = new(shape)
    added = _riding(LowRank(slots, x, adapters, computed))
    assert added is not None
    added.shrink(num_workers())
    block, _ = added.block()
    work_items, workers, columns = share_among(width, rows)
    _low_rank.add_kernel()(
        work_items, workers, block, 0 if residual is None else residual.address, result.address, rows, width, columns
    )
    return result


def _riding(low_rank: LowRank | None) -> _low_rank.Riding | None:
    """The low-rank sums as products' launches take them."""
    if low_rank is None:
        return None
    slots, x, adapters, computed = low_rank
    shape = slots.shape
    rows = computed.get(("low_rank", shape.num_slots))
    if rows is None:
        rule = RoutingRule(num_experts=shape.num_slots, top_k=1)
        rows = computed["low_rank", shape.num_slots] = _RowsByExpert(Routing(adapters.view(-1, 1), None, rule))
    tokens, num_parts = x.shape[0], len(shape.heights)
    between = new((tokens, num_parts * _low_rank.whole_groups(shape.rank)))
    hold(slots.table, slots.parts, *slots.memory)
    riding = _low_rank.Riding(
        slots.stored, x.address, between.address, address_of(slots.table), address_of(slots.parts),
        rows.starts.address, rows.active.address, rows.tokens_of.address, tokens, shape.depth, shape.num_slots,
        rows.num_active, num_parts, shape.rank, num_workers(),
    )  # fmt: skip
    riding.keep(x, between, rows)
    return riding


def latent_queries(
    q: Tensor, latent: Tensor, maps: LatentMaps, positions: Tensor, rope: RopeTable, norm: RmsNorm, pages: Tensor,
    slot_mapping: Tensor, added: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """See `ops.latent_queries`."""
    by_head = q.contiguous().view(-1, maps.num_heads, maps.head_dim)
    out = new((len(by_head), maps.num_heads, maps.row_dim))
    head_linear(by_head, maps.keys, out, maps.rotary_dim)
    if added is not None:
        out = added(by_head.view(len(by_head), -1), out)
    latent_prepare(by_head, out, latent.contiguous(), positions, rope, norm, pages, slot_mapping)
    return out


def latent_values(x: Tensor, maps: LatentMaps) -> Tensor:
    """See `ops.latent_values`."""
    out = new((x.shape[0], maps.num_heads, maps.value_dim))
    head_linear(x.view(-1, maps.num_heads, maps.latent_dim), maps.values, out, 0)
    return out.view(-1, maps.num_heads * maps.value_dim)


def head_linear(x: Tensor, weight: ExpertsWeight, out: Tensor, first: int) -> None:
    """The first K numbers of each head of ``x [T, H, ...]`` times the head's matrix of ``weight [H, N, K]``, written to
    ``out [T, H, ...]`` from number ``first`` on."""
    (tokens, heads, depth), width = x.shape, out.shape[2]
    [part], [table] = weight.parts[0], weight.tables
    num_outputs, num_inputs = part.shape
    hold(table)
    _head_maps.multiply_heads(
        part.stored, x.address, address_of(table), out.address + first * 4, tokens, heads, num_inputs, num_outputs,
        (heads * depth, depth), (heads * width, width), num_workers(),
    )  # fmt: skip


class _RowsByExpert:
    """Rows grouped by expert."""

    def __init__(self, routing: Routing) -> None:
        self.routing = routing
        (self.tokens, self.top_k), self.num_experts = routing.ids.shape, routing.rule.num_experts
        self.count = count = self.tokens * self.top_k
        self.num_active = min(self.num_experts, count)
        sizes = (self.num_experts + 1,), (self.num_active,), (count,), (count,)
        self.starts, self.active, self.tokens_of, self.places = map(new_int32, sizes)
        _experts.group_kernel()(
            1, 1, routing.ids.address, self.starts.address, self.active.address, self.tokens_of.address,
            self.places.address, self.tokens, self.top_k, self.num_experts, self.num_active,
        )  # fmt: skip

    def gather(self, x: Tensor) -> Tensor:
        """Each row of x once for each of its experts, ``[T k, K]``."""
        return _add_rows("experts", "routing", self.tokens_of, x, None)

    def product(self, x: Tensor, weight: ExpertsWeight) -> Tensor:
        """Each row of ``x [T k, K]`` times its expert's matrix, ``[T k, N]``."""
        result = new((self.count, weight.shape[1]))
        self.multiply(x, 0, weight, result, 0)
        return result

    def multiply(self, x: Tensor, column: int, weight: ExpertsWeight, out: Tensor, first: int) -> None:
        """Writes the products of x's rows, from this column on, to the columns of out from ``first`` on."""
        for part, table in zip(weight.parts[0], weight.tables, strict=True):
            hold(table)
            _grouped.multiply(
                part.stored, x.address + column * 4, address_of(table), self.starts.address, self.active.address,
                out.address + first * 4, self.count, self.num_experts, self.num_active, part.shape[1], x.shape[1],
                part.shape[0], out.shape[1], num_workers(),
            )  # fmt: skip
            first += part.shape[0]

    def add(self, y: Tensor, added: list[int], out: Tensor) -> None:
        """Writes each token's weighted sum of ``y [T k, N]`` to ``out [T, N]``, and what `_some_experts` adds."""
        weights = self.routing.weights
        _combine(y, 0 if weights is None else weights.address, self.places.address, added, out, self.top_k)

    def each_draw(self, y: Tensor, residual: Tensor | None) -> Tensor:
        """The rows of ``y [T k, N]`` in the order of tokens and their draws, plus the residual's; a draw of -1 has
        zeros."""
        result = new(y.shape)
        _combine(y, 0, self.places.address, [0, 0, 0 if residual is None else residual.address], result, 1)
        return result


def _combine(y: Tensor, weights: int, places: int, added: list[int], out: Tensor, top_k: int) -> None:
    """See `numba_kernels.cpu.experts.combine_kernel`; `weights` and `places [T, k]` are addresses."""
    tokens, width = out.shape
    work_items, workers, rows_a_work_item = share_among(tokens, width * top_k)
    _experts.combine_kernel()(
        work_items, workers, y.address, weights, places, *added, out.address, tokens, top_k, width, rows_a_work_item
    )


# ------------------------------------------------------------------------------------------ decode steps


def take_decode_inputs(
    changes: Tensor, num_changes: Tensor, tables: Tensor, sources: Tensor, sampled: Tensor, token_ids: Tensor
) -> None:
    """See `ops.take_decode_inputs`."""
    tensors = changes, num_changes, tables, sources, sampled, token_ids
    addresses = (tensor.address for tensor in tensors)
    _decode_inputs.decode_inputs_kernel()(1, 1, *addresses, token_ids.size, tables.size, sampled.size)
