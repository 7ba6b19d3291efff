"""Packed weights on a GPU: products that read them as they are, and those that need rows of numbers first.

A product that no tier computes from a packed weight (float32, exact segments, a tier that the user names), or that
others are faster at (many rows), has it dequantised into a matrix of x's type first, every time: memory for one
such matrix is needed then.
"""

from __future__ import annotations

from typing import Any

from numba_kernels.cuda import dequantize, dynamic_quantisation
from runtime.backends.cuda_plans import Planned
from runtime.backends.cuda_tensor import alignment, id_flag
from runtime.device.gpu import Gpu
from runtime.linear.norm import RmsNorm
from runtime.linear.weight import GpuWeight, PackedWeight
from runtime.tensor.tensor import Tensor


def rows_of(gpu: Gpu, x: Tensor, planned: Planned, norm: RmsNorm | None) -> tuple[int, int, Any]:
    """The addresses of the rounded rows of x and of their scales, and the owner of that memory. With `norm` the
    rounding was planned to normalise x, too."""
    assert planned.rounding is not None
    rows, depth = x.shape
    is_grouped = planned.rounding.specialisation.constants.get("group", 0) != 0
    codes, both = dynamic_quantisation.sections(rows, depth, is_grouped=is_grouped)
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
