"""Tensors on a GPU, real or emulated: copies between devices, and helpers of all operations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from runtime.device.allocator import DeviceBlock
from runtime.device.context import Stream
from runtime.device.device import Device
from runtime.device.gpu import Gpu
from runtime.dtype import NDArray, dtype_of_array, int32
from runtime.errors import InvalidArgumentError
from runtime.tensor.cast import cast_array
from runtime.tensor.storage import Storage
from runtime.tensor.tensor import Tensor
from runtime.tensor.views import contiguous_strides

_ALIGNMENT = 16
_LEAST_ZEROS = 4096
MOST_PLANS = 1024
MOST_KEPT = 1 << 14
"""Layouts and numbers that a device keeps, of a few hundred bytes each; none is freed, since recordings read them."""

Plan = TypeVar("Plan", bound=Callable[..., Any])


def remembered(plan: Plan) -> Plan:
    """A kernel family's `plan`, which depends on its arguments alone: each layer's same launch gets the same object.
    The answers used last are kept."""
    return functools.lru_cache(MOST_PLANS)(plan)  # type: ignore[return-value]


def upload(array: NDArray, device: Device) -> Tensor:
    """A new tensor on a GPU with an array's elements; the array may be changed when this returns."""
    tensor = Tensor.from_numpy(array)
    result = Tensor.new(tensor.shape, tensor.dtype, device)
    if array.size:
        Gpu.of(device).write(result.address, array)
    return result


def upload_together(arrays: Sequence[NDArray], device: Device) -> list[Tensor]:
    """The arrays on a GPU, C-contiguous, in one piece of memory by one copy: for a step's small arrays."""
    offsets, size = [], 0
    for array in arrays:
        offsets.append(size)
        size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    storage = Storage.allocate(device, size)
    packed = np.zeros(size, np.uint8)
    tensors = []
    for array, offset in zip(arrays, offsets):
        packed[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        dtype = dtype_of_array(array)
        strides = contiguous_strides(array.shape)
        tensors.append(Tensor(storage, dtype, array.shape, strides, offset // dtype.itemsize))
    if size:
        Gpu.of(device).write(storage.address, packed)
    return tensors


def kept(gpu: Gpu, array: NDArray) -> DeviceBlock:
    """A small array on the device, kept there, so that what has run once can be recorded into a graph."""
    key = gpu.stream, array.tobytes()
    found: DeviceBlock | None = gpu.kept.get(key)
    if found is None:
        found = gpu.upload_to_keep(array)
        if len(gpu.kept) < MOST_KEPT:
            gpu.kept[key] = found
    return found


def operand(tensor: Tensor, device: Device) -> Tensor:
    """An operand from the host on a GPU, which is only read. One number is kept there."""
    if tensor.size != 1:
        return upload(tensor.array, device)
    block = kept(Gpu.of(device), tensor.array)
    storage = Storage(device, tensor.dtype.itemsize, None, block, block.address)
    return Tensor(storage, tensor.dtype, tensor.shape, contiguous_strides(tensor.shape), 0)


def download(tensor: Tensor) -> Tensor:
    """A copy on the cpu; waits for earlier work."""
    source = tensor if tensor.is_contiguous else tensor.clone()
    array: NDArray = np.empty(tensor.shape, tensor.dtype.numpy)
    if array.size:
        Gpu.of(tensor.device).read(source.address, array)
    return Tensor.over(array, tensor.dtype)


def id_flag(device: Device) -> Tensor:
    """The flag by which gathering kernels report an id outside its table: ``[1]`` int32, zero until one is."""
    return _id_flag_of(Gpu.of(device))


@functools.cache
def _id_flag_of(gpu: Gpu) -> Tensor:
    """One for each Gpu object that has had the device's name: memory of another one is invalid."""
    block = gpu.upload_to_keep(np.zeros(1, np.int32))
    return Tensor(Storage(gpu.device, 4, None, block, block.address), int32, (1,), (1,), 0)


def zeros(gpu: Gpu, count: int) -> int:
    """The address of at least so many uint32 zeros, for kernels of the current stream that leave them zeros again."""
    return _zeros_of(gpu, gpu.stream, max(_LEAST_ZEROS, 1 << (count - 1).bit_length())).address


@functools.cache
def _zeros_of(gpu: Gpu, stream: Stream, count: int) -> DeviceBlock:
    """Kept for good, as graphs hold the address."""
    block = gpu.allocator.allocate(4 * count, stream, is_redirected=False)
    gpu.fill(block.address, 0, 4 * count, stream)
    return block


@functools.cache
def zero_bias(gpu: Gpu, stream: Stream, width: int) -> DeviceBlock:
    """Immutable float32 zeros for kernels of the current stream. Kept for good, as graphs hold their address."""
    block = gpu.upload_to_keep(np.zeros(width, np.float32))
    gpu.declare_immutable(block)
    return block


def check_id_flag(device: Device) -> None:
    """Waits for the device and raises InvalidArgumentError where an id was outside its table since the last call."""
    flag = id_flag(device)
    if download(flag).array[0]:
        write(flag, np.zeros(1, np.int32))
        raise InvalidArgumentError("embedding: an id is outside the table", param="token_ids")


def to_device(tensor: Tensor, device: Device) -> Tensor:
    """The same values on another device; at least one of the two is a GPU."""
    if tensor.device.kind == "cpu":
        return upload(tensor.array, device)
    if device.kind == "cpu":
        return download(tensor)
    if tensor.device.kind != device.kind or tensor.device.arch != device.arch:  # two drivers: through the host
        return upload(download(tensor).array, device)
    source = tensor if tensor.is_contiguous else tensor.clone()
    result = Tensor.new(tensor.shape, tensor.dtype, device)
    Gpu.of(tensor.device).copy_to_peer(Gpu.of(device), result.address, source.address, tensor.size_bytes)
    return result


def write(target: Tensor, values: NDArray) -> None:
    """Writes an array of the target's shape, cast to its type, over a contiguous tensor on a GPU."""
    if values.size:
        Gpu.of(target.device).write(target.address, cast_array(values, target.dtype))


def fill(target: Tensor, value: NDArray) -> None:
    """Writes an array of one element, cast to its type, over a contiguous tensor on a GPU; where all of its bytes are
    alike, as zero's are, without a copy from the host."""
    element = cast_array(value, target.dtype).tobytes()
    if len(set(element)) == 1:
        Gpu.of(target.device).fill(target.address, element[0], target.size_bytes)
    else:
        write(target, np.broadcast_to(value.reshape(()), target.shape))


def alignment(*addresses: int) -> int:
    """The largest power of two that divides all addresses (0 does not count), at most 256."""
    bits = 256
    for address in addresses:
        bits |= address
    return bits & -bits
