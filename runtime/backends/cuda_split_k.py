"""Products whose sums over K are cut into segments, as exact mode has them (`numba_kernels.split_k`)."""

from __future__ import annotations

from numba_kernels.cuda import gemm
from numba_kernels.cuda.gemm import split_k
from runtime.backends.cuda_packed import matrix_of
from runtime.backends.cuda_plans import Planned, plan_product
from runtime.device.gpu import Gpu
from runtime.dtype import float32
from runtime.linear.weight import GpuWeight
from runtime.tensor.tensor import Tensor


def product(gpu: Gpu, x: Tensor, weight: GpuWeight, bias: int, residual: int, result: Tensor) -> None:
    """``result [T, N] = x [T, K] . weight [N, K]^T + bias + residual``, the latter by their addresses, or 0. The
    residual may be the result itself."""
    (rows, depth), width, count = x.shape, weight.shape[0], weight.num_segments
    if not result.size:
        return
    most = split_k.most_rows(count, width)
    if count > 1:
        _leave_squares(bias, residual, result)
    sums = None if count == 1 else gpu.allocate(count * min(rows, most) * width * 4)
    for first in range(0, rows, most):
        num_rows = min(most, rows - first)
        start, skipped = x.address + first * depth * x.dtype.itemsize, first * width * result.dtype.itemsize
        multiply = _multiplication(gpu, weight, num_rows, is_aligned=(start | weight.address) & 15 == 0)
        target = result.address + skipped if sums is None else sums.address
        assert multiply.launch is not None
        matrix, memory = matrix_of(gpu, weight, multiply)
        gpu.launch(multiply.launch, start, matrix, 0, 0, target, num_rows, width, depth, 0, *gemm.NO_SQUARES)
        del memory
        if sums is not None:
            _add(gpu, count, sums.address, bias, residual, result, first, num_rows)


def add(gpu: Gpu, partials: Tensor, bias: int, residual: int, result: Tensor) -> None:
    """``result [T, N]`` from ``partials [R, T, N]``, which are added in pairs; bias and residual as in `product`."""
    count, rows, _ = partials.shape
    if result.size:
        _leave_squares(bias, residual, result)
        _add(gpu, count, partials.address, bias, residual, result, 0, rows)


def _leave_squares(bias: int, residual: int, result: Tensor) -> None:
    """Makes room for the result's squares, where there is a residual: a norm may follow."""
    rows, width = result.shape
    is_aligned = (bias | residual | result.address) & 15 == 0 and width % (4 * split_k.SQUARE_COLUMNS) == 0
    result.deferred_norm = None
    if residual and is_aligned:
        result.deferred_norm = Tensor.new((rows, width // split_k.SQUARE_COLUMNS), float32, result.device)


def _add(gpu: Gpu, count: int, sums: int, bias: int, residual: int, result: Tensor, first: int, num_rows: int) -> None:
    """Adds the sums of some rows of the result, from `first` on, and leaves their squares where there is room."""
    width, squares = result.shape[1], result.deferred_norm
    skipped = first * width * result.dtype.itemsize
    launch = split_k.plan_add(count, num_rows, width, result.dtype.ptx)
    gpu.launch(
        launch, sums, bias, residual + skipped if residual else 0, result.address + skipped, num_rows, width,
        0 if squares is None else squares.address + first * squares.shape[1] * 4,
    )  # fmt: skip


def _multiplication(gpu: Gpu, weight: GpuWeight, rows: int, *, is_aligned: bool) -> Planned:
    """The launch of all segments' sums, remembered for all weights of its kind."""
    key = "segments", rows, is_aligned
    planned = weight.plans.get(key)
    if planned is None:
        product = gemm.Product(
            rows, *weight.shape, weight.activations.ptx, weight.elements, "f32",
            gemm.Epilogue(has_residual=False, is_aligned=True), is_aligned=is_aligned, exact=True,
            num_segments=weight.num_segments, whole=weight.whole_shape,
        )  # fmt: skip
        planned = plan_product(gpu, weight, product)
        weight.plans.keep(key, planned)
    return planned
