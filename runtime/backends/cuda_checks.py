"""Checks of an operation's arguments on a GPU, whose kernels take addresses.

What arrays on the device hold (ids, positions, slots) is not read back for checking: whoever makes a batch vouches for
it.
"""

from __future__ import annotations

from runtime.backends import checks
from runtime.backends.checks import fail
from runtime.device.device import Device
from runtime.device.gpu import Gpu
from runtime.dtype import DType, bfloat16, float16, float32
from runtime.tensor.tensor import Tensor

FLOATS = (float32, float16, bfloat16)


def first(
    op: str, argument: str, tensor: Tensor, dtype: DType | tuple[DType, ...], shape: tuple[int | None, ...]
) -> Gpu:
    """The GPU of the operation's first tensor, which is checked as by `check`."""
    if not isinstance(tensor, Tensor):
        raise fail(op, argument, f"must be a Tensor, not {type(tensor).__name__}")
    check(op, argument, tensor, tensor.device, dtype, shape)
    return Gpu.of(tensor.device)


def check(
    op: str,
    argument: str,
    tensor: Tensor,
    device: Device,
    dtype: DType | tuple[DType, ...],
    shape: tuple[int | None, ...],
) -> int:
    """The tensor's address, if `checks.check` has nothing against it."""
    checks.check(op, argument, tensor, device, dtype, shape)
    return tensor.address


def output(op: str, out: Tensor | None, shape: tuple[int, ...], dtype: DType, device: Device) -> Tensor:
    """`out`, if it may be written and is what it must be, else a new tensor."""
    if out is None:
        return Tensor.empty(shape, dtype, device)
    check(op, "out", out, device, dtype, shape)
    if out.is_read_only:
        raise fail(op, "out", "is read-only")
    return out


def alignment(*addresses: int) -> int:
    """The largest power of two that divides all addresses (0 does not count), at most 256."""
    bits = 256
    for address in addresses:
        bits |= address
    return bits & -bits
