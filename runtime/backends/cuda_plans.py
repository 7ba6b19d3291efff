"""The one place where a GPU's kernels of a product are chosen: by the product, its weight, its rows and the device.

`plan` plans a product with a weight; `gemm.plan` chooses among the tiers that read the weight as it is. A product with
experts has a `RowList`, whose tiles are the same in all products of a layer. Few tokens take no list: two launches go
straight over their experts (`plan_gathered`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType

from numba_kernels.cuda import dequantize, dynamic_quantisation, gemm, rounded_norm
from numba_kernels.cuda.experts import gather, hopper, order, packed, packed_gather, packed_rows, tensor_core, tiled
from numba_kernels.cuda.gemm import Machine
from numba_kernels.cuda.gemm.hopper_ring import Tile
from numba_kernels.cuda.gemm.mixed_input import BLOCK_M
from numba_kernels.cuda.gemm.skinny_shape import MAX_ROWS as FEW_ROWS
from numba_kernels.cuda.intrinsics.element_types import ITEM_BYTES, VECTOR_WIDTH
from numba_kernels.cuda.packing import packing_of
from numba_kernels.cuda.specialisation import Launch
from runtime.backends.cuda_tensor import remembered
from runtime.device.gpu import Gpu
from runtime.linear.experts import ExpertsWeight
from runtime.linear.weight import GpuWeight, PackedWeight
from runtime.routing import Routing
from runtime.tensor.tensor import Tensor

_MOST_WRITTEN_OUT = 5 << 28  # bytes of quantised experts as 16-bit rows
_LEAST_GAIN = 1.2  # by the models, from which on they are dequantised: these do not count writes
_plan_down = remembered(gather.plan_down)
_plan_gate_up = remembered(gather.plan_gate_up)
_plan_packed_down = remembered(packed_gather.plan_down)
_plan_packed_gate_up = remembered(packed_gather.plan_gate_up)
_ADAPTED = {
    "gemv_": gemm.gemv, "gemm_quantised_gemv_": gemm.quantised_gemv, "gemm_hopper_few_": gemm.hopper_few,
    "gemm_skinny_": gemm.skinny,
}  # fmt: skip
"""Tiers that may take adapters, by how their kernels' names start."""
_GATHERED_TOKENS = 4  # beyond, tokens share experts, and an expert's rows are better multiplied together
NEVER_ROUNDED = 16
"""Most rows that are multiplied without rounding: they take no longer than the weight's bytes."""


@dataclass(frozen=True, slots=True)
class Planned:
    """The kernels of a product with a weight.

    Attributes:
        launch: the product's, or None where no launch has its epilogue.
        dequantization: the launch that writes the packed weight out first, or None if the product unpacks it.
        rounding: the launch that normalises x's rows, if need be, and rounds them to bytes first; None if x is not
            rounded.
        input_scale: the static scale of the rounding; 0 for scales of each row, or of each 128 of K.
        takes_weight_again: whether the launch's last two arguments are the weight's address (`gemm/hopper_bytes.py`).
        takes_maps: whether it is the address of the experts' tensor maps.
        num_squares: sums of squares that the launch leaves for each row of its result, or 0.
    """

    launch: Launch | None
    dequantization: Launch | None = None
    rounding: Launch | None = None
    input_scale: float = 0.0
    takes_weight_again: bool = False
    takes_maps: bool = False
    num_squares: int = 0


@dataclass(frozen=True, slots=True)
class RowList:
    """Rows grouped by expert, in tiles of one expert's rows each.

    Attributes:
        num_tiles: the most that there can be.
        height: rows of a tile.
        wgmma: the tile of `wgmma`, or None if other instructions multiply.
    """

    num_tiles: int
    height: int
    wgmma: Tile | None


def plan(
    gpu: Gpu, weight: GpuWeight | ExpertsWeight, product: gemm.Product, rows: RowList | None = None, *,
    has_norm: bool = False, ranks: int = 0,
) -> Planned:  # fmt: skip
    """Chooses the kernels of a product; see `gemm.plan`. With a norm, the launch before it can round, too. Rows of
    experts come in a list. With `ranks` the launch adds low-rank sums of so many if it can: see `Planned`."""
    machine = gemm.machine_of(gpu.arch, gpu.properties.num_sms, gpu.max_clusters)
    if isinstance(weight, ExpertsWeight):
        assert rows is not None
        return _plan_experts(weight, product, rows, machine)
    is_gated = product.epilogue.activation != ""
    if is_gated and (weight.bias is not None or weight.tier == "cublas" or weight.num_segments):
        return Planned(None)
    planned = _choose(weight, product, machine, has_norm=has_norm)
    if ranks:
        planned = _with_adapters(planned, product, machine, weight.tier, ranks)
    if planned.launch is None or not (product.epilogue.has_residual and product.epilogue.is_aligned):
        return planned
    columns = gemm.square_columns(planned.launch, product.n)
    return replace(planned, num_squares=product.n // columns) if columns else planned


def _with_adapters(planned: Planned, product: gemm.Product, machine: Machine, tier: str, ranks: int) -> Planned:
    """The plan with low-rank sums of so many ranks, if a tier can take them: the planned one, else another, since
    launches of the adapters' own take longer than a slower product. It rounds no rows."""
    if planned.launch is None or planned.dequantization is not None:
        return planned
    name = planned.launch.specialisation.name
    able = [own for start, own in _ADAPTED.items() if name.startswith(start)]
    for each in [*able, gemm.hopper_few, gemm.skinny] if tier == "auto" else able:
        if each.can_take_adapters(product, machine):
            return Planned(each.plan(product, machine, ranks))
    return planned


def _choose(weight: GpuWeight, product: gemm.Product, machine: Machine, *, has_norm: bool) -> Planned:
    if not isinstance(weight, PackedWeight):
        return Planned(gemm.plan(product, machine, weight.tier))
    plain = replace(product, weight=product.x)
    if _is_faster_rounded(weight, product, plain, machine, has_norm=has_norm):
        return plan_rounded(weight, product, machine, has_norm=has_norm)
    if gemm.can_read(product, machine, weight.tier) and (
        product.exact or product.m <= FEW_ROWS or _is_faster_packed(weight, product, plain, machine)
    ):
        return Planned(gemm.plan(product, machine, weight.tier))
    launch = gemm.plan(plain, machine, weight.tier)
    if launch is None:
        return Planned(None)
    dequantization = dequantize.plan(weight.packing, *weight.shape, product.x)
    return Planned(replace(launch, starts_late=True), dequantization)  # it may read the weight before it waits


def can_round(weight: PackedWeight, product: gemm.Product, machine: Machine) -> bool:
    """Whether the checkpoint rounds x to bytes, and a kernel multiplies them."""
    is_grouped = weight.rounds_rows == "groups"
    if not weight.rounds_rows or is_grouped != (weight.packing.group > 0):
        return False
    return not (gemm.hopper_bytes.why_not(product, machine) and gemm.w8a8.why_not(product, machine))


def rounded_tier(product: gemm.Product, machine: Machine) -> ModuleType:
    """The launch that multiplies a weight of bytes by rows of bytes, or None."""
    return gemm.w8a8 if gemm.hopper_bytes.why_not(product, machine) else gemm.hopper_bytes


def plan_rounded(weight: PackedWeight, product: gemm.Product, machine: Machine, *, has_norm: bool) -> Planned:
    """The kernels of a product with rounded rows (`can_round`)."""
    packing = packing_of(product.weight)
    assert packing is not None
    element = "s8" if packing.element == "u8" else packing.element
    rounding = (rounded_norm if has_norm else dynamic_quantisation).plan(
        product.m, product.k, product.x, element, is_grouped=packing.group > 0, is_static=weight.input_scale > 0
    )
    is_by_bytes = gemm.hopper_bytes.why_not(product, machine) != ""
    launch = gemm.w8a8.plan(product) if is_by_bytes else gemm.hopper_bytes.plan(product, machine)
    return Planned(launch, rounding=rounding, input_scale=weight.input_scale, takes_weight_again=not is_by_bytes)


def _is_faster_packed(weight: PackedWeight, product: gemm.Product, plain: gemm.Product, machine: Machine) -> bool:
    """Whether the cost models expect unpacking in registers to beat a 16-bit matrix made for this product. False for
    exact products, whose kernel may not depend on the rows."""
    made = dequantize.seconds(weight.packing, *weight.shape, product.x, machine.sustained_bytes)
    return gemm.modelled_s(product, machine) <= made + gemm.modelled_s(plain, machine)


def _is_faster_rounded(
    weight: PackedWeight, product: gemm.Product, plain: gemm.Product, machine: Machine, *, has_norm: bool
) -> bool:
    """Whether x may be rounded to bytes, and the cost models expect that to be faster for so many rows. After a norm's
    launch, rounding is free."""
    if weight.tier != "auto" or product.m <= NEVER_ROUNDED or not can_round(weight, product, machine):
        return False
    rounding = 0.0 if has_norm else dynamic_quantisation.seconds(product.m, product.k, machine.memory_bytes)
    made = dequantize.seconds(weight.packing, *weight.shape, product.x, machine.sustained_bytes)
    others = min(gemm.modelled_s(product, machine), made + gemm.modelled_s(plain, machine))
    multiplying: float = rounded_tier(product, machine).seconds(product, machine)
    return rounding + multiplying < others


# Experts


def plan_gathered(
    gpu: Gpu, x: Tensor, chosen: Routing, gate_up: ExpertsWeight, down: ExpertsWeight, activation: str
) -> tuple[Launch, Launch] | None:
    """The launches of both products of few tokens, or None where there are none."""
    tokens, dtype, top_k, (hidden, inner) = x.shape[0], x.dtype.ptx, chosen.rule.top_k, down.shape[1:]
    if tokens > _GATHERED_TOKENS or gate_up.exact or x.address % 16:
        return None
    if gate_up.packing is not None and down.packing is not None:
        if activation in gather.UNGATED:
            return None
        packings = gate_up.packing, down.packing
        if not all(packed_gather.can_plan(packing, dtype, inner, hidden, top_k) for packing in packings):
            return None
        first = _plan_packed_gate_up(
            tokens * top_k, inner, hidden, gate_up.packing, activation, gpu.properties.num_sms, gpu.arch
        )  # fmt: skip
        return first, _plan_packed_down(tokens, top_k, hidden, inner, down.packing, gpu.properties.num_sms, gpu.arch)
    is_aligned = hidden % VECTOR_WIDTH[dtype] == 0 and inner % VECTOR_WIDTH[dtype] == 0
    if not is_aligned or top_k > gather.MAX_CHOICES or gate_up.packing is not None or down.packing is not None:
        return None
    return _plan_gate_up(tokens * top_k, inner, dtype, activation), _plan_down(tokens, top_k, hidden, dtype)


def list_rows(x: Tensor, chosen: Routing, weights: tuple[ExpertsWeight, ...]) -> RowList:
    """The tiles of all products of a layer with these experts: gate and up, then down, or one matrix alone."""
    count = chosen.ids.size
    tile = hopper_tile(x, count, *weights) if len(weights) == 2 else None
    height = tile_rows_of(x, count, weights) if tile is None else hopper.tile_rows(tile)
    return RowList(order.most_tiles(count, chosen.rule.num_experts, height), height, tile)


def _plan_experts(weight: ExpertsWeight, product: gemm.Product, rows: RowList, machine: Machine) -> Planned:
    dtype, columns, activation, tile = product.x, product.n, product.epilogue.activation, rows.wgmma
    num_experts, width, depth = weight.shape
    if tile is not None:
        packing = weight.packing if tile.num_unpackers else None
        is_dequantised = weight.packing is not None and packing is None
        joined = (num_experts * width, depth) if is_dequantised else None
        launch = hopper.plan(rows.num_tiles, columns, dtype, activation, tile, machine, joined, packing)
        if weight.packing is None or packing is not None:
            return Planned(launch, takes_maps=weight.packing is None)
        return Planned(launch, dequantize.plan_experts(weight.packing, num_experts, width, depth, dtype))
    if weight.packing is not None and rows.height <= packed_rows.MOST_ROWS:
        launch = packed_rows.plan(
            rows.num_tiles, columns, depth, weight.packing, activation, machine.arch, machine.num_multiprocessors
        )
        return Planned(launch)
    if weight.packing is not None:
        return Planned(packed.plan(rows.num_tiles, columns, dtype, weight.packing.name, activation, rows.height))
    if product.is_aligned and tensor_core.can_plan(dtype, depth):
        tile_of_rows = tensor_core.tile_of(rows.height)
        return Planned(tensor_core.plan(rows.num_tiles, columns, dtype, activation, tile_of_rows))
    return Planned(tiled.plan(rows.num_tiles, columns, dtype, activation))


def hopper_tile(x: Tensor, rows: int, gate_up: ExpertsWeight, down: ExpertsWeight) -> Tile | None:
    """The wgmma tile of both products, or None; it unpacks quantised experts, or they are dequantised first."""
    parts = 1 if gate_up.shape[1] == down.shape[2] else 2  # up alone, or gate and up
    if x.address % 16 or gate_up.exact or gate_up.shape[1] % (parts * VECTOR_WIDTH[x.dtype.ptx]):
        return None
    gpu = Gpu.of(x.device)
    machine = gemm.machine_of(gpu.arch, gpu.properties.num_sms, gpu.max_clusters)
    if gate_up.maps is not None and down.maps is not None:
        return hopper.choose_tile(rows, *gate_up.shape, machine)
    if gate_up.packing is None or down.packing is None:
        return None
    tile = hopper.unpacking_tile(rows, down.shape[0])
    if tile is not None and all(
        hopper.can_unpack(
            machine.arch, each.packing, x.dtype.ptx, columns, each.shape[2], is_gated=each is gate_up and parts == 2
        )
        for each, columns in ((gate_up, gate_up.shape[1] // parts), (down, down.shape[1]))
        if each.packing is not None
    ):
        return tile
    return _tile_of_dequantised(x, rows, (gate_up, down), machine)


def _tile_of_dequantised(x: Tensor, rows: int, weights: tuple[ExpertsWeight, ...], machine: Machine) -> Tile | None:
    """The tile of products with quantised experts which are dequantised first; None where they are faster as they
    are, cannot be multiplied so, or are too large."""
    dtype, num_experts = x.dtype.ptx, weights[0].shape[0]
    if packed.choose_tile_rows(rows, num_experts) < BLOCK_M:
        return None
    tile = hopper.best_tile(rows, *weights[0].shape, machine)
    ours, theirs = 0.0, 0.0
    for weight in weights:
        _, width, depth = sizes = weight.shape
        is_small = num_experts * width * depth * ITEM_BYTES[dtype] <= _MOST_WRITTEN_OUT
        if weight.packing is None or not is_small or not hopper.can_plan(machine.arch, dtype, width, depth):
            return None
        ours += dequantize.seconds(weight.packing, num_experts * width, depth, dtype, machine.memory_bytes)
        ours += max(hopper.seconds(tile, rows, *sizes, machine), hopper.weights_seconds(rows, *sizes, machine))
        theirs += packed.seconds(rows, *sizes, machine.num_multiprocessors)
    return tile if ours * _LEAST_GAIN < theirs else None


def tile_rows_of(x: Tensor, rows: int, weights: tuple[ExpertsWeight, ...]) -> int:
    """The tile of all products where `wgmma` does not compute them."""
    is_aligned, dtype = x.address % 16 == 0, x.dtype.ptx
    if any(
        each.packing is None and not (is_aligned and tensor_core.can_plan(dtype, each.shape[2])) for each in weights
    ):
        return tiled.TILE_ROWS  # a packed weight was made for tensor cores
    num_experts, width, _ = weights[-1].shape
    if any(weight.packing is not None for weight in weights):
        return _few_rows_of(x, rows, weights) or packed.choose_tile_rows(rows, num_experts)
    return tensor_core.choose_tile(rows, num_experts, width, Gpu.of(x.device).properties.num_sms).block_m


def _few_rows_of(x: Tensor, rows: int, weights: tuple[ExpertsWeight, ...]) -> int:
    """Rows of the tiles of experts that have very few each; 0 where they have more, or such a kernel does not take
    all of the products."""
    arch, heights = Gpu.of(x.device).arch, []
    for each in weights:
        is_gated = len(weights) == 2 and each is weights[0] and each.shape[1] != weights[1].shape[2]
        columns = each.shape[1] // 2 if is_gated else each.shape[1]
        if each.packing is None or each.exact or x.address % 16:
            return 0
        if not packed_rows.can_plan(each.packing, x.dtype.ptx, columns, each.shape[2], arch, is_gated=is_gated):
            return 0
        heights.append(packed_rows.tile_rows(each.packing, rows, each.shape[0]))
    return min(heights)
