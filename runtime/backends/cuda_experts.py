"""Mixtures of experts on a GPU; see `runtime.ops`. The number and shapes of launches do not depend on the routing.

Few tokens take two launches that go straight over their experts, of 16 bits or quantised. More tokens are grouped by
expert in one launch, then come two products and the sum. Exact mode always groups, since those sums do not depend on
the number of tokens; its tiles give the same bits at any height.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from numba_kernels.cuda import adapter_ids as adapter_ids_kernel
from numba_kernels.cuda import gemm
from numba_kernels.cuda.activation import plan_elementwise
from numba_kernels.cuda.experts import combine, order, router, routing
from numba_kernels.cuda.experts import low_rank as low_rank_kernel
from numba_kernels.cuda.experts.gather import SQUARE_COLUMNS
from numba_kernels.cuda.experts.routing import MAX_EXPERTS
from numba_kernels.cuda.specialisation import Launch
from runtime.backends.checks import fail
from runtime.backends.cuda_linear import glu, rms_norm
from runtime.backends.cuda_plans import Planned, RowList, list_rows, plan, plan_gathered
from runtime.backends.cuda_tensor import alignment, remembered
from runtime.device.gpu import Gpu
from runtime.dtype import float32, int32
from runtime.linear.experts import ExpertsWeight
from runtime.linear.gpu_slots import GpuSlots
from runtime.linear.norm import RmsNorm
from runtime.linear.weight import LinearWeight, RowWeight
from runtime.routing import Routing, RoutingRule
from runtime.tensor.tensor import Tensor

_plan_elementwise = remembered(plan_elementwise)
_plan_adapter_ids = remembered(adapter_ids_kernel.plan)
_plan_combine = remembered(combine.plan)
_plan_low_rank = remembered(low_rank_kernel.plan)
_plan_order = remembered(order.plan)
_plan_router = remembered(router.plan)
_plan_routing = remembered(routing.plan)

_MOST_ROWS = 65536  # of experts at a time, each token with all of its experts
_ROWS_AT_ONCE = 64  # for which reading adapters again costs less than three launches


def route(logits: Tensor, rule: RoutingRule, bias: Tensor | None, factors: Tensor | None) -> Routing:
    """See `ops.route`."""
    rows, num_experts = logits.shape
    if why_not := routing.why_not(num_experts, rule.num_groups):
        raise fail("route", "rule", f"has {why_not}")
    ids = Tensor.new((rows, rule.top_k), int32, logits.device)
    weights = Tensor.new((rows, rule.top_k), float32, logits.device)
    if rows:
        Gpu.of(logits.device).launch(
            _plan_routing(rows, num_experts, rule.scores, rule.num_groups), logits.address,
            0 if bias is None else bias.address, 0 if factors is None else factors.address, ids.address,
            weights.address, rows, num_experts, rule.top_k, rule.num_groups, rule.top_groups,
            int(rule.group_score == "two"), int(rule.normalises), rule.scale, rule.epsilon,
        )  # fmt: skip
    return Routing(ids, weights, rule)


def normed_route(
    x: Tensor, norm: RmsNorm, weight: LinearWeight, rule: RoutingRule, bias: Tensor | None = None
) -> tuple[Tensor, Routing] | None:
    """See `ops.normed_route`; None where there is no such launch."""
    (rows, hidden), dtype = x.shape, x.dtype.ptx
    if not isinstance(weight, RowWeight) or weight.exact or weight.is_normed or weight.activations is not x.dtype:
        return None
    is_aligned = alignment(x.address, weight.address, norm.weight.address) % 16 == 0
    if not is_aligned or not router.can_plan(rows, hidden, rule.num_experts, dtype, rule.num_groups):
        return None
    normalised = Tensor.new(x.shape, x.dtype, x.device)
    logits = Tensor.new((rows, rule.num_experts), float32, x.device)
    ids = Tensor.new((rows, rule.top_k), int32, x.device)
    weights = Tensor.new((rows, rule.top_k), float32, x.device)
    gpu = Gpu.of(x.device)
    launch = _plan_router(rows, hidden, rule.num_experts, dtype, rule.scores, gpu.properties.num_sms, gpu.max_clusters)
    gpu.launch(
        launch, x.address, norm.weight.address, normalised.address, weight.address, weight.bias_address,
        logits.address, 0 if bias is None else bias.address, ids.address, weights.address, hidden, rule.num_experts,
        rule.top_k, int(rule.normalises), norm.eps, rule.scale, rule.epsilon,
    )  # fmt: skip
    return normalised, Routing(ids, weights, rule)


def experts(
    x: Tensor, chosen: Routing, gate_up: ExpertsWeight, down: ExpertsWeight, activation: str, shared: Tensor | None,
    shared_gate: Tensor | None, residual: Tensor | None, gather: Callable[[Tensor, int], Tensor] | None,
) -> Tensor:  # fmt: skip
    """See `ops.experts`. Very many tokens are several passes, so that their rows stay small."""
    tokens, hidden = x.shape[0], down.shape[1] if gather is None else gate_up.shape[2]
    result = Tensor.new((tokens, hidden), x.dtype, x.device)
    added = [0 if each is None else each.address for each in (shared, shared_gate, residual)]
    if not (tokens and hidden):
        return result
    launches = plan_gathered(Gpu.of(x.device), x, chosen, gate_up, down, activation) if gather is None else None
    if launches is not None:
        _gathered(x, chosen, gate_up, down, launches, added, result)
        return result
    squares = Tensor.new((tokens, combine.SQUARE_PARTS), float32, x.device)
    for some, part in chosen.passes(_MOST_ROWS):
        places = [
            0 if each is None else each[some].address for each in (shared, shared_gate, residual, result, squares)
        ]
        _grouped(x[some], part, gate_up, down, activation, places, gather)
    result.deferred_norm = squares
    return result


def _gathered(
    x: Tensor, chosen: Routing, gate_up: ExpertsWeight, down: ExpertsWeight, launches: tuple[Launch, Launch],
    added: list[int], result: Tensor,
) -> None:  # fmt: skip
    assert chosen.weights is not None, "experts have weights"
    gpu, (first, second) = Gpu.of(x.device), launches
    (tokens, top_k), (num_experts, hidden, inner) = chosen.ids.shape, down.shape
    between = Tensor.new((tokens * top_k, inner), x.dtype, x.device)
    gpu.launch(
        first, x.address, gate_up.table_address, chosen.ids.address, between.address, inner, gate_up.shape[2],
        num_experts, top_k,
    )  # fmt: skip
    squares = 0
    if hidden % (4 * SQUARE_COLUMNS) == 0:
        result.deferred_norm = Tensor.new((tokens, hidden // SQUARE_COLUMNS), float32, x.device)
        squares = result.deferred_norm.address
    gpu.launch(
        second, between.address, down.table_address, chosen.ids.address,
        chosen.weights.address, *added, result.address, squares, hidden, inner, num_experts, top_k,
    )  # fmt: skip


def _grouped(
    x: Tensor, chosen: Routing, gate_up: ExpertsWeight, down: ExpertsWeight, activation: str, places: list[int],
    gather: Callable[[Tensor, int], Tensor] | None,
) -> None:  # fmt: skip
    """`places` are addresses of the shared expert's results, its gate, the residual, the result and its squares."""
    rows = _RowsByExpert(x, chosen, list_rows(x, chosen, (gate_up, down)))
    if activation == "squared_relu":
        between = _between(activation, rows.product(x, gate_up, gate_up.shape[1], "", gathers=True))
    else:
        between = rows.product(x, gate_up, gate_up.shape[1] // 2, activation, gathers=True)
    if gather is not None:
        between = gather(between, down.shape[2])
    y = rows.product(between, down, down.shape[1], "", gathers=False)
    rows.add(y if gather is None else gather(y, x.shape[1]), places)


def adapter_ids(adapters: Tensor, ids: Tensor, each: int, num_adapters: int, none: int, first: int = 0) -> Tensor:
    """See `ops.adapter_ids`; numbers begin at the adapter `first`."""
    out = Tensor.new(ids.shape, int32, ids.device)
    if ids.size:
        Gpu.of(ids.device).launch(
            _plan_adapter_ids(ids.size), adapters.address, ids.address, out.address, ids.size, ids.size // ids.shape[0],
            first, num_adapters, each, none & 0xFFFFFFFF,
        )  # fmt: skip
    return out


def adapted_experts(
    x: Tensor, chosen: Routing, gate_up: ExpertsWeight, down: ExpertsWeight, activation: str, adapters: Tensor | None,
    pairs: Sequence[tuple[ExpertsWeight, ExpertsWeight] | None], shared: Tensor | None, shared_gate: Tensor | None,
    residual: Tensor | None, gather: Callable[[Tensor, int], Tensor] | None,
) -> Tensor:  # fmt: skip
    """See `ops.adapted_experts`. The rows between the maps stand in the order of tokens and their choices."""
    tokens, hidden = x.shape[0], down.shape[1] if gather is None else gate_up.shape[2]
    result = Tensor.new((tokens, hidden), x.dtype, x.device)
    for some, part in chosen.passes(_MOST_ROWS):
        added = [None if each is None else each[some] for each in (shared, shared_gate, residual)]
        own = None if adapters is None else adapters[some]
        _some_adapted(x[some], part, gate_up, down, activation, own, pairs, added, result[some], gather)
    return result


def _some_adapted(
    x: Tensor, chosen: Routing, gate_up: ExpertsWeight, down: ExpertsWeight, activation: str, adapters: Tensor | None,
    pairs: Sequence[tuple[ExpertsWeight, ExpertsWeight] | None], added: list[Tensor | None], out: Tensor,
    gather: Callable[[Tensor, int], Tensor] | None,
) -> None:  # fmt: skip
    (tokens, top_k), num_experts = chosen.ids.shape, chosen.rule.num_experts
    count, (first, second) = tokens * top_k, pairs

    def grouped(x: Tensor, pair: tuple[ExpertsWeight, ExpertsWeight]) -> Iterator[tuple[_RowsByExpert, Tensor]]:
        """The products of adapters' pairs with ``x``, a row for each token or each draw, in the pairs' type; as many
        adapters at a time as rows can be grouped by."""
        assert adapters is not None, "without adapters there are no pairs"
        x = x.to(pair[0].experts[0].activations)
        most, num_adapters = max(1, MAX_EXPERTS // num_experts), pair[0].shape[0] // num_experts
        for start in range(0, num_adapters, most):
            at_once = min(most, num_adapters - start)
            ids = adapter_ids(adapters, chosen.ids, num_experts, at_once, -1, start).view(x.shape[0], -1)
            inner, outer = (each.some(start * num_experts, (start + at_once) * num_experts) for each in pair)
            own = Routing(ids, None, RoutingRule(num_experts=inner.shape[0], top_k=ids.shape[1]))
            rows = _RowsByExpert(x, own, list_rows(x, own, (inner, outer)))
            between = rows.product(x, inner, inner.shape[1], "", gathers=True)
            yield rows, rows.product(between, outer, outer.shape[1], "", gathers=False)

    change: Tensor | None = None
    if first is not None:
        for own, made in grouped(x, first):
            change = own.each_draw(made, change)
        assert change is not None, "there is an adapter"
        change = change.to(x.dtype)
    rows = _RowsByExpert(x, chosen, list_rows(x, chosen, (gate_up,)))
    inner = rows.each_draw(rows.product(x, gate_up, gate_up.shape[1], "", gathers=True), change)
    between = _between(activation, inner)
    if gather is not None:
        between = gather(between, down.shape[2])

    def sum_up(rows: _RowsByExpert, made: Tensor, added: list[Tensor | None], result: Tensor) -> Tensor:
        made = made if gather is None else gather(made, out.shape[1])
        squares = Tensor.new((tokens, combine.SQUARE_PARTS), float32, x.device)
        places = [0 if each is None else each.address for each in (*added, result, squares)]
        assert chosen.weights is not None, "experts have weights"
        _combine(rows.gpu, made, chosen.weights.address, rows.rows_of.address, places, tokens, top_k)
        return result

    *shared, residual = added
    if second is not None:
        for own, made in grouped(between, second):
            residual = None if residual is None else residual.to(made.dtype)
            residual = sum_up(own, made, [None, None, residual], Tensor.new(out.shape, made.dtype, x.device))
        assert residual is not None, "there is an adapter"
        residual = residual.to(x.dtype)
    each = Routing(chosen.ids.view(count, 1), None, RoutingRule(num_experts=num_experts, top_k=1))
    flat = _RowsByExpert(between, each, list_rows(between, each, (down,)))
    sum_up(flat, flat.product(between, down, down.shape[1], "", gathers=True), [*shared, residual], out)


def _between(activation: str, x: Tensor) -> Tensor:
    """The activation between experts' maps, of ``x [R, 2 I]``, or ``[R, I]`` without a gate."""
    rows, width = x.shape
    if activation == "squared_relu":
        launch, accesses = _plan_elementwise(activation, rows, width, x.dtype.ptx, alignment=alignment(x.address))
        Gpu.of(x.device).launch(launch, x.address, 0, x.address, accesses, 0.0, 0.0, 0.0, 0.0)
        return x
    return glu(x, activation)


def low_rank(
    x: Tensor, adapters: Tensor, slots: GpuSlots, residual: Tensor | None, computed: dict[Any, Any],
    norm: RmsNorm | None = None,
) -> Tensor:  # fmt: skip
    """See `ops.low_rank`."""
    down, up = slots.down, slots.up
    is_at_once = down.exact or x.shape[0] <= _ROWS_AT_ONCE or slots.shape.num_slots > MAX_EXPERTS
    if is_at_once and up.shape[2] <= low_rank_kernel.MAX_RANKS:
        return _low_rank_at_once(x, adapters, slots, residual, norm)
    if norm is not None:
        x = rms_norm(x, norm.weight, norm.eps, None)
    routing = Routing(adapters.view(-1, 1), None, RoutingRule(num_experts=slots.shape.num_slots, top_k=1))
    result = Tensor.new((x.shape[0], up.shape[1]), x.dtype, x.device)
    tiles = list_rows(x, routing, (down, up))
    key = "low_rank", routing.rule.num_experts, tiles
    rows = computed.get(key)
    if rows is None:
        rows = computed[key] = _RowsByExpert(x, routing, tiles)
    y = rows.product(rows.product(x, down, down.shape[1], "", gathers=True), up, up.shape[1], "", gathers=False)
    squares = Tensor.new((x.shape[0], combine.SQUARE_PARTS), float32, x.device)
    rows.add(y, [0, 0, 0 if residual is None else residual.address, result.address, squares.address])
    return result


def _low_rank_at_once(
    x: Tensor, adapters: Tensor, slots: GpuSlots, residual: Tensor | None, norm: RmsNorm | None
) -> Tensor:
    """In one launch, whose blocks read adapters again for each row."""
    (rows, depth), (num_slots, columns, ranks) = x.shape, slots.up.shape
    result = Tensor.new((rows, columns), x.dtype, x.device)
    weights, eps = (0, 0.0) if norm is None else (norm.weight.address, norm.eps)
    launch = _plan_low_rank(rows, columns, depth, x.dtype.ptx, alignment=alignment(x.address, weights))
    Gpu.of(x.device).launch(
        launch, x.address, adapters.address, slots.down.table_address, slots.up.table_address, slots.ranges.address,
        0 if residual is None else residual.address, result.address, weights, depth, columns, ranks,
        num_slots, slots.ranges.shape[1], eps,
    )  # fmt: skip
    return result


class _RowsByExpert:
    """Rows grouped by expert, for products with the tiles of a list."""

    def __init__(self, x: Tensor, chosen: Routing, tiles: RowList) -> None:
        self.chosen, self.gpu, self.dtype, self.list = chosen, Gpu.of(x.device), x.dtype, tiles
        (self.tokens, self.top_k), self.num_experts = chosen.ids.shape, chosen.rule.num_experts
        self.count = self.tokens * self.top_k

        def integers(*shape: int) -> Tensor:
            return Tensor.new(shape, int32, x.device)

        self.starts, self.num_used = integers(self.num_experts + 1), integers(1)
        self.tiles = integers(self.list.num_tiles, 4)
        self.tokens_of, self.rows_of = integers(self.count), integers(self.tokens, self.top_k)
        self.gpu.launch(
            _plan_order(self.num_experts), chosen.ids.address, self.starts.address, self.tiles.address,
            self.num_used.address, self.tokens_of.address, self.rows_of.address, self.count, self.top_k,
            self.num_experts, self.list.height,
        )  # fmt: skip

    def product(self, source: Tensor, weight: ExpertsWeight, columns: int, activation: str, *, gathers: bool) -> Tensor:
        """Each row times its expert's matrix; with `gathers` the source's rows are tokens'."""
        out = Tensor.new((self.count, columns), self.dtype, source.device)
        (num_experts, width, depth), planned = weight.shape, self._plan(source, weight, columns, activation)
        assert planned.launch is not None
        last = (weight.maps_address,) if planned.takes_maps else ()
        if planned.dequantization is not None:  # the rows of all experts, of x's type
            rows = Tensor.empty((num_experts * width, depth), self.dtype, weight.experts[0].device)
            self.gpu.launch(
                planned.dequantization, weight.table_address, 0, rows.address, 0, width, width, depth, 1.0
            )  # fmt: skip
            last = (rows.address,)
        self.gpu.launch(
            planned.launch, source.address, weight.table_address, self.tiles.address, self.num_used.address,
            self.tokens_of.address if gathers else 0, out.address, columns, depth, self.num_experts, *last,
        )  # fmt: skip
        return out

    def _plan(self, source: Tensor, weight: ExpertsWeight, columns: int, activation: str) -> Planned:
        """The product's kernels, remembered for all layers with such experts."""
        key = self.list, self.num_experts, columns, activation, source.address & 15
        planned = weight.plans.get(key)
        if planned is None:
            product = gemm.Product(
                self.count, columns, weight.shape[2], self.dtype.ptx, weight.packing.name if weight.packing else "",
                epilogue=gemm.Epilogue(has_residual=False, is_aligned=True, activation=activation),
                is_aligned=key[-1] == 0, exact=weight.exact,
            )  # fmt: skip
            planned = plan(self.gpu, weight, product, self.list)
            weight.plans.keep(key, planned)
        return planned

    def add(self, y: Tensor, places: list[int]) -> None:
        """Each token's weighted sum of ``y [T k, N]``; `places` as `_grouped` has them."""
        weights = self.chosen.weights
        address = 0 if weights is None else weights.address
        _combine(self.gpu, y, address, self.rows_of.address, places, self.tokens, self.top_k)

    def each_draw(self, y: Tensor, residual: Tensor | None) -> Tensor:
        """The rows of ``y [T k, N]`` in the order of tokens and their draws, plus the residual's; a draw of -1 has
        zeros."""
        result = Tensor.new(y.shape, y.dtype, y.device)
        squares = Tensor.new((self.count, combine.SQUARE_PARTS), float32, y.device)
        places = [0, 0, 0 if residual is None else residual.address, result.address, squares.address]
        _combine(self.gpu, y, 0, self.rows_of.address, places, self.count, 1)
        return result


def _combine(gpu: Gpu, y: Tensor, weights: int, rows_of: int, places: list[int], tokens: int, top_k: int) -> None:
    """See `numba_kernels.cuda.experts.combine`; all but `y` are addresses."""
    width = y.shape[1]
    launch = _plan_combine(tokens, width, y.dtype.ptx, alignment=alignment(y.address, *places[:4]))
    gpu.launch(launch, y.address, weights, rows_of, *places, top_k, width)
