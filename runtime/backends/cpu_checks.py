"""Checks of an operation's arguments on the cpu, whose kernels take arrays and addresses."""

from __future__ import annotations

from runtime.backends import checks
from runtime.backends.checks import fail
from runtime.device.device import CPU
from runtime.dtype import DType, int32
from runtime.tensor.storage import NDArray
from runtime.tensor.tensor import Tensor


def check(
    op: str, argument: str, tensor: Tensor, dtype: DType | tuple[DType, ...], shape: tuple[int | None, ...]
) -> NDArray:
    """The tensor's array, if `checks.check` has nothing against it."""
    checks.check(op, argument, tensor, CPU, dtype, shape)
    return tensor.array


def indices_of(op: str, argument: str, tensor: Tensor, size: int | None, limit: int) -> NDArray:
    """An int32 vector whose entries lie in [0, limit)."""
    array = check(op, argument, tensor, int32, (size,))
    if array.size and (int(array.min()) < 0 or int(array.max()) >= limit):
        raise fail(op, argument, f"holds {array.min()} to {array.max()}, must lie in 0 to {limit - 1}")
    return array


def checked_address(
    op: str, argument: str, tensor: Tensor, dtype: DType | tuple[DType, ...], shape: tuple[int | None, ...]
) -> int:
    """The address of the tensor's first element, after the same checks."""
    check(op, argument, tensor, dtype, shape)
    return tensor.address
