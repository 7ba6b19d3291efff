"""Checks of an operation's arguments on the cpu, each an error that names the operation and the argument."""

from __future__ import annotations

from numba_kernels.cpu.recording import current
from runtime.device.device import CPU
from runtime.dtype import DType, int32
from runtime.errors import InvalidArgumentError
from runtime.tensor.storage import NDArray
from runtime.tensor.tensor import Tensor


def fail(op: str, argument: str, message: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{op}: {argument} {message}", param=argument)


def check(
    op: str, argument: str, tensor: Tensor, dtype: DType | tuple[DType, ...], shape: tuple[int | None, ...]
) -> NDArray:
    """The tensor's array, if it is a C-contiguous cpu tensor of this type and shape (None = any size)."""
    if not isinstance(tensor, Tensor):
        raise fail(op, argument, f"must be a Tensor, not {type(tensor).__name__}")
    if tensor.storage.device is not CPU and tensor.device != CPU:
        raise fail(op, argument, f"is on {tensor.device}, the other arguments are on cpu")
    if tensor.dtype is not dtype:
        dtypes = (dtype,) if isinstance(dtype, DType) else dtype
        if tensor.dtype not in dtypes:
            raise fail(op, argument, f"is {tensor.dtype.name}, must be {' or '.join(d.name for d in dtypes)}")
    actual = tensor.shape
    does_fit = len(actual) == len(shape)
    for want, got in zip(shape, actual):  # a plain loop: this function runs some three hundred times a step
        if want is not None and want != got:
            does_fit = False
    if not does_fit:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise fail(op, argument, f"has shape {actual}, must be [{wanted}]")
    array = tensor.array
    if not array.flags.c_contiguous:
        raise fail(op, argument, f"has strides {tensor.strides}, must be C-contiguous")
    recording = current()
    if recording is not None:
        recording.expect(tensor.storage, tensor.address)
    return array


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
