"""Tensor's operators on a GPU; `runtime.tensor.arithmetic` has the rules and settles the types.

Tensors of any strides go to the kernels as they are; axes that can be walked as one are merged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from numba_kernels.cuda import gemm as _gemm
from numba_kernels.cuda.arithmetic import elementwise as _elementwise
from numba_kernels.cuda.arithmetic import integer_matmul as _integer_matmul
from numba_kernels.cuda.arithmetic import reduce as _reduce
from numba_kernels.cuda.intrinsics.storage import CODES
from runtime.backends.cuda_tensor import alignment, kept
from runtime.device.gpu import Gpu
from runtime.dtype import DType, bool_, float32, int32, int64
from runtime.tensor import views
from runtime.tensor.tensor import Tensor
from runtime.tensor.views import Shape

_DTYPES = {"f32": "float32", "s64": "int64", "s32": "int32"}


def kernel_dtype(dtype: DType) -> str:
    """The kernels' name of a dtype."""
    return "bool" if dtype is bool_ else dtype.ptx


def elementwise(op: str, operands: Sequence[Tensor], result: DType, compute: DType) -> Tensor:
    """A new contiguous tensor: `op` of operands on one GPU, broadcast together, computed in float32 or int64."""
    shape = views.broadcast_shapes(op, *(operand.shape for operand in operands))
    target = Tensor.empty(shape, result, operands[0].device)
    write_elementwise(op, operands, target, compute)
    return target


def write_elementwise(op: str, operands: Sequence[Tensor], target: Tensor, compute: DType) -> None:
    """As `elementwise`, over the elements of `target`; no operand may share its memory."""
    if target.size == 0:
        return
    gpu = Gpu.of(target.device)
    condition = [operands[0]] if op == "where" else []
    values = list(operands[len(condition) :])
    addresses = [operand.address for operand in values] + [0] * (2 - len(values)) + [t.address for t in condition or ()]
    addresses += [0] * (3 - len(addresses))
    codes = [CODES[kernel_dtype(operand.dtype)] for operand in values] + [0] * (2 - len(values))
    launch = _elementwise.plan(op, "f32" if compute.is_floating else "s64", target.size)
    common = [target.size, *codes, CODES[kernel_dtype(target.dtype)]]
    is_flat = target.is_contiguous and all(
        operand.size == 1 or (operand.shape == target.shape and operand.is_contiguous) for operand in operands
    )
    if is_flat:
        steps = [0 if operand.size == 1 else operand.dtype.itemsize for operand in values] + [0] * (2 - len(values))
        steps.append(0 if not condition or condition[0].size == 1 else 1)
        gpu.launch(launch, *addresses, target.address, 0, *common, *steps, target.dtype.itemsize)
        return
    tensors = [*values, *condition, target]
    strides = []
    for tensor in tensors:
        _, expanded = views.expanded_strides(op, tensor.shape, tensor.strides, target.shape)
        strides.append(tuple(stride * tensor.dtype.itemsize for stride in expanded))
    shape, merged = merge_axes(target.shape, strides)
    if len(shape) > _elementwise.MAX_AXES:
        expanded_operands = [operand.expand(target.shape) for operand in operands]
        for index in range(target.shape[0]):
            write_elementwise(op, [operand[index] for operand in expanded_operands], target[index], compute)
        return
    columns = [*range(len(values)), *([2] if condition else []), 3]
    table = kept(gpu, _elementwise.pack_layout(shape, dict(zip(columns, merged))))
    gpu.launch(launch, *addresses, target.address, table.address, *common, 0, 0, 0, 0)


def merge_axes(shape: Shape, strides: Sequence[Shape]) -> tuple[Shape, list[Shape]]:
    """The fewest axes that visit the same elements of every operand in the same order; strides in any unit."""
    sizes: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        if sizes and all(own[-1] == stride[axis] * size for own, stride in zip(steps, strides)):
            sizes[-1] *= size
            for own, stride in zip(steps, strides):
                own[-1] = stride[axis]
        else:
            sizes.append(size)
            for own, stride in zip(steps, strides):
                own.append(stride[axis])
    return tuple(sizes), [tuple(own) for own in steps]


def reduce(operation: str, tensor: Tensor, axes: Shape, keepdims: bool) -> Tensor:
    """One of `reduce.OPERATIONS` over axes; an empty reduction only of sum and mean."""
    name = kernel_dtype(tensor.dtype)
    kept_axes = [axis for axis in range(tensor.ndim) if axis not in axes]
    shape = tuple(tensor.shape[axis] for axis in kept_axes)
    named = _reduce.result_dtype(operation, name)
    dtype = tensor.dtype if named == name else DType.parse(_DTYPES[named])
    target = Tensor.empty(shape, dtype, tensor.device)
    num_reduced = math.prod(tensor.shape[axis] for axis in axes)
    if target.size:
        gpu, tables = Gpu.of(tensor.device), []
        for group in (kept_axes, sorted(axes)):
            strides = tuple(tensor.strides[axis] * tensor.dtype.itemsize for axis in group)
            sizes, (steps,) = merge_axes(tuple(tensor.shape[axis] for axis in group), [strides])
            tables.append(kept(gpu, _reduce.pack_axes(sizes, steps)).address)
        launch = _reduce.plan(operation, name, target.size, num_reduced)
        gpu.launch(
            launch, tensor.address, target.address, *tables, target.size, num_reduced, CODES[name], CODES[named],
            dtype.itemsize, float(num_reduced),
        )  # fmt: skip
    if keepdims:
        return target.view(tuple(1 if axis in axes else size for axis, size in enumerate(tensor.shape)))
    return target


def matmul(first: Tensor, second: Tensor, dtype: DType) -> Tensor:
    """``[..., M, K] @ [..., K, N]`` of tensors on one GPU that have been checked; `dtype` is what they meet in."""
    is_row, is_column = first.ndim == 1, second.ndim == 1
    left = first.view((1, *first.shape)) if is_row else first
    right = second.view((*second.shape, 1)) if is_column else second
    batch = views.broadcast_shapes("matmul", left.shape[:-2], right.shape[:-2])
    rows, depth, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    if dtype.is_floating:
        compute = dtype if dtype.itemsize > 1 else float32
        result = compute
    else:
        compute, result = dtype, int32 if dtype.itemsize == 1 else dtype
    # The matrix product reads rows of b transposed or plain; the copies are made where strides are another.
    left = _contiguous_in(left, compute).expand((*batch, rows, depth))
    right = _contiguous_in(right, compute).expand((*batch, depth, columns))
    target = Tensor.empty((*batch, rows, columns), result, first.device)
    if target.size:
        flat = target.view((-1, rows, columns))
        for index, place in enumerate(_places(batch)):
            _product(left[place], right[place], flat[index], compute)
    shape = (*batch, *(() if is_row else (rows,)), *(() if is_column else (columns,)))
    target = target.view(shape)
    wanted = result if not dtype.is_floating else dtype
    return target if target.dtype is wanted else elementwise("copy", [target], wanted, float32)


def _places(batch: Shape) -> list[tuple[int, ...]]:
    places: list[tuple[int, ...]] = [()]
    for size in batch:
        places = [(*place, index) for place in places for index in range(size)]
    return places


def _contiguous_in(tensor: Tensor, dtype: DType) -> Tensor:
    if tensor.dtype is dtype and tensor.is_contiguous:
        return tensor
    return elementwise("copy", [tensor], dtype, float32 if dtype.is_floating else int64)


def _product(left: Tensor, right: Tensor, target: Tensor, dtype: DType) -> None:
    """``target [M, N] = left [M, K] right [K, N]``, all C-contiguous."""
    gpu = Gpu.of(target.device)
    (rows, depth), columns = left.shape, right.shape[1]
    if dtype.is_floating:
        is_aligned = alignment(left.address, right.address) >= 16
        product = _gemm.Product(rows, columns, depth, dtype.ptx, is_weight_layout=False, is_aligned=is_aligned)
        launch = _gemm.plan(product, _gemm.machine_of(gpu.arch, gpu.properties.num_sms, gpu.max_clusters))
        if launch is not None:
            operands = (left.address, right.address, 0, 0, target.address)
            gpu.launch(launch, *operands, rows, columns, depth, 1, *_gemm.NO_SQUARES)
        return
    launch, dtypes = _integer_matmul.plan(rows, columns, kernel_dtype(dtype))
    size = dtype.itemsize
    strides = left.strides[0] * size, left.strides[1] * size, right.strides[0] * size, right.strides[1] * size
    gpu.launch(launch, left.address, right.address, target.address, rows, columns, depth, *dtypes, *strides)
