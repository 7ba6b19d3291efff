"""Matrix products by cuBLAS (``gemm="cublas"``): a reference for ours, on a GPU where its library is installed.

Bias and residual lie in the result before the product is added to them, so that they are rounded to its type once more
than by our kernels.
"""

from __future__ import annotations

import functools

from runtime.device.cublas import Cublas
from runtime.device.gpu import Gpu
from runtime.linear.weight import RowWeight
from runtime.tensor.tensor import Tensor


@functools.cache
def _handle(gpu: Gpu) -> Cublas:
    return Cublas(gpu)


def product(gpu: Gpu, x: Tensor, weight: RowWeight, residual: Tensor | None, result: Tensor) -> None:
    """``result [T, N] = x [T, K] . weight [N, K]^T + bias + residual``; the residual may be the result itself.

    Raises: as `Cublas`.
    """
    (rows, depth), width = x.shape, weight.shape[0]
    if not result.size:
        return
    start = residual if weight.bias is None else weight.bias if residual is None else residual + weight.bias
    if start is not None and start.address != result.address:
        result[:] = start
    if depth:
        _handle(gpu).bind_linear(
            rows, width, depth, x.dtype.ptx, x.address, weight.weight.address, result.address,
            out_dtype=result.dtype.ptx, is_added=start is not None,
        )()  # fmt: skip
    elif start is None:
        result[:] = 0.0
