"""Packed weights on a GPU: products that read them as they are, and those that need rows of numbers first.

A product that no tier computes from a packed weight (float32, exact segments, a tier that the user names), or that
others are faster at (many rows), has it written out as a matrix of x's type first, every time: memory for one
such matrix is needed then.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from numba_kernels.cuda import dequantize, gemm, rounded_norm, rounded_rows
from numba_kernels.cuda.gemm.few_rows_shape import MAX_ROWS as FEW_ROWS
from numba_kernels.cuda.packing import packing_of
from numba_kernels.cuda.specialisation import Launch
from runtime.backends.cuda_tensor import alignment, id_flag
from runtime.device.gpu import Gpu
from runtime.linear.norm import RmsNorm
from runtime.linear.weight import GpuWeight, PackedWeight
from runtime.tensor.tensor import Tensor

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
        takes_weight_twice: whether the launch's last argument is the weight's address, too (`gemm/hopper_bytes.py`).
        num_squares: sums of squares that the launch leaves for each row of its result, or 0.
    """

    launch: Launch | None
    dequantization: Launch | None = None
    rounding: Launch | None = None
    input_scale: float = 0.0
    takes_weight_twice: bool = False
    num_squares: int = 0


def plan_product(gpu: Gpu, weight: GpuWeight, product: gemm.Product, *, has_norm: bool = False) -> Planned:
    """Chooses the kernels of a product; see `gemm.plan`. With a norm, the launch before it can round, too."""
    planned = _choose(gpu, weight, product, has_norm=has_norm)
    if planned.launch is None or not (product.epilogue.has_residual and product.epilogue.is_aligned):
        return planned
    columns = gemm.square_columns(planned.launch, product.n)
    return replace(planned, num_squares=product.n // columns) if columns else planned


def _choose(gpu: Gpu, weight: GpuWeight, product: gemm.Product, *, has_norm: bool) -> Planned:
    machine = gemm.machine_of(gpu.arch, gpu.properties.num_sms, gpu.max_clusters)
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
    dequantization = dequantize.plan(weight.packing, *weight.shape, product.x)
    return Planned(launch, None if launch is None else dequantization)


def can_round(weight: PackedWeight, product: gemm.Product, machine: gemm.Machine) -> bool:
    """Whether the checkpoint rounds x to bytes, and a kernel multiplies them."""
    is_grouped = weight.rounds_rows == "groups"
    if not weight.rounds_rows or is_grouped != (weight.packing.group > 0):
        return False
    return not (gemm.hopper_bytes.why_not(product, machine) and gemm.byte_tiles.why_not(product, machine))


def rounded_tier(product: gemm.Product, machine: gemm.Machine) -> ModuleType:
    """The launch that multiplies a weight of bytes by rows of bytes, or None."""
    return gemm.byte_tiles if gemm.hopper_bytes.why_not(product, machine) else gemm.hopper_bytes


def plan_rounded(weight: PackedWeight, product: gemm.Product, machine: gemm.Machine, *, has_norm: bool) -> Planned:
    """The kernels of a product with rounded rows (`can_round`)."""
    packing = packing_of(product.weight)
    assert packing is not None
    element = "s8" if packing.element == "u8" else packing.element
    rounding = (rounded_norm if has_norm else rounded_rows).plan(
        product.m, product.k, product.x, element, is_grouped=packing.group > 0, is_static=weight.input_scale > 0
    )
    is_by_bytes = gemm.hopper_bytes.why_not(product, machine) != ""
    launch = gemm.byte_tiles.plan(product) if is_by_bytes else gemm.hopper_bytes.plan(product, machine)
    return Planned(launch, rounding=rounding, input_scale=weight.input_scale, takes_weight_twice=not is_by_bytes)


def _is_faster_packed(weight: PackedWeight, product: gemm.Product, plain: gemm.Product, machine: gemm.Machine) -> bool:
    """Whether the cost models expect unpacking in registers to beat a 16-bit matrix made for this product. False for
    exact products, whose kernel may not depend on the rows."""
    made = dequantize.seconds(weight.packing, *weight.shape, product.x, machine.sustained_bytes)
    return gemm.modelled_s(product, machine) <= made + gemm.modelled_s(plain, machine)


def _is_faster_rounded(
    weight: PackedWeight, product: gemm.Product, plain: gemm.Product, machine: gemm.Machine, *, has_norm: bool
) -> bool:
    """Whether x may be rounded to bytes, and the cost models expect that to be faster for so many rows. After a norm's
    launch, rounding is free."""
    if weight.tier != "auto" or product.m <= NEVER_ROUNDED or not can_round(weight, product, machine):
        return False
    rounding = 0.0 if has_norm else rounded_rows.seconds(product.m, product.k, machine.memory_bytes)
    made = dequantize.seconds(weight.packing, *weight.shape, product.x, machine.sustained_bytes)
    others = min(gemm.modelled_s(product, machine), made + gemm.modelled_s(plain, machine))
    multiplying: float = rounded_tier(product, machine).seconds(product, machine)
    return rounding + multiplying < others


def rows_of(gpu: Gpu, x: Tensor, planned: Planned, norm: RmsNorm | None) -> tuple[int, int, Any]:
    """The addresses of the rounded rows of x and of their scales, and the owner of that memory. With `norm` the
    rounding was planned to normalise x, too."""
    assert planned.rounding is not None
    rows, depth = x.shape
    is_grouped = planned.rounding.specialisation.constants.get("group", 0) != 0
    codes, both = rounded_rows.sections(rows, depth, is_grouped=is_grouped)
    memory = gpu.allocate(both)
    scales = memory.address + codes
    given = (planned.input_scale, 1.0 / planned.input_scale) if planned.input_scale else ()
    if norm is None:
        gpu.launch(planned.rounding, x.address, memory.address, scales, rows, depth, *given)
    else:
        gpu.launch(
            planned.rounding, x.address, norm.weight.address, memory.address, scales, rows, depth, 1.0 / depth,
            norm.eps, *(given or (0.0, 0.0)),
        )  # fmt: skip
    return memory.address, memory.address + codes, memory


def matrix_of(gpu: Gpu, weight: GpuWeight, planned: Planned) -> tuple[int, Any]:
    """The weight's address for the product's launch, and the owner of that memory."""
    if planned.dequantization is None:
        return weight.address, weight
    rows = Tensor.new(weight.shape, weight.activations, weight.device)
    gpu.launch(planned.dequantization, weight.address, 0, rows.address, 0, weight.shape[0], *weight.shape, 1.0)
    return rows.address, rows


def embedding(ids: Tensor, table: PackedWeight, multiplier: float) -> Tensor:
    """Rows of a packed table."""
    gpu, (num_rows, depth) = Gpu.of(ids.device), table.shape
    result = Tensor.new((ids.shape[0], depth), table.activations, ids.device)
    if result.size:
        launch = dequantize.plan(
            table.packing, ids.shape[0], depth, table.activations.ptx, is_lookup=True,
            alignment=alignment(result.address),
        )  # fmt: skip
        flag = id_flag(ids.device).address
        gpu.launch(launch, table.address, ids.address, result.address, flag, ids.shape[0], num_rows, depth, multiplier)
    return result
