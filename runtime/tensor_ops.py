"""Generic arithmetic on tensors: what Tensor's operators reach through `runtime.ops`."""

from __future__ import annotations

from runtime.storage import check_writeable
from runtime.tensor import Scalar, Tensor


def fill(tensor: Tensor, value: Scalar) -> None:
    """Sets every element, in place."""
    check_writeable("fill", tensor.storage)
    tensor.array[...] = value


def copy(tensor: Tensor) -> Tensor:
    """A contiguous copy in memory of its own."""
    result = Tensor.empty(tensor.shape, tensor.dtype, tensor.device)
    result.array[...] = tensor.array
    return result
