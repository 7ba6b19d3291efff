"""Checks of an operation's arguments, each an error that names the operation and the argument.

All arguments are checked before the first launch. `runtime.ops` checks the rules common to all devices; a backend
checks those of its kernels.
"""

from __future__ import annotations

from numba_kernels.cpu.running.recording import current
from runtime.device.device import CPU, Device
from runtime.dtype import DType
from runtime.errors import InvalidArgumentError
from runtime.tensor.tensor import Tensor
from runtime.tensor.views import contiguous_strides


def fail(op: str, argument: str, message: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{op}: {argument} {message}", param=argument)


def check(
    op: str,
    argument: str,
    tensor: Tensor,
    device: Device,
    dtype: DType | tuple[DType, ...],
    shape: tuple[int | None, ...],
) -> None:
    """Raises unless the tensor is C-contiguous, on this device, of this type and shape (None = any size).

    A recording on the cpu notes that the tensor's memory is used.
    """
    if not isinstance(tensor, Tensor):
        raise fail(op, argument, f"must be a Tensor, not {type(tensor).__name__}")
    found = tensor.device
    if found is not device and found != device:
        raise fail(op, argument, f"is on {tensor.device}, the other arguments are on {device}")
    if tensor.dtype is not dtype:
        dtypes = (dtype,) if isinstance(dtype, DType) else dtype
        if tensor.dtype not in dtypes:
            raise fail(op, argument, f"is {tensor.dtype.name}, must be {' or '.join(d.name for d in dtypes)}")
    actual = tensor.shape
    if actual != shape:  # a plain loop: this function runs hundreds of times a step
        does_fit = len(actual) == len(shape)
        for want, got in zip(shape, actual):
            if want is not None and want != got:
                does_fit = False
        if not does_fit:
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise fail(op, argument, f"has shape {actual}, must be [{wanted}]")
    is_on_cpu = found is CPU or found.kind == "cpu"
    if is_on_cpu:
        is_contiguous = tensor.array.flags.c_contiguous
    else:
        is_contiguous = tensor.strides == contiguous_strides(actual) or tensor.is_contiguous
    if not is_contiguous:
        raise fail(op, argument, f"has strides {tensor.strides}, must be C-contiguous")
    if is_on_cpu and (recording := current()) is not None:
        recording.lives_on(tensor.storage, tensor.address, tensor.size_bytes, f"{op}: {argument}")
