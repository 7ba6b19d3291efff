"""Storage: the bytes that tensors share.

A Tensor is a view of a Storage. Several tensors may share one; it lives as long as any of them, and then its memory
goes back to its owner. A Storage has no element type and no shape.
"""

from __future__ import annotations

import sys

import numpy as np

from numba_kernels.cpu.running.recording import next_number
from runtime.device.device import CPU, Device
from runtime.device.gpu import Gpu
from runtime.dtype import DType, NDArray
from runtime.errors import OutOfMemoryError
from runtime.tensor.views import Shape, contiguous_strides, has_overlap

ALIGNMENT_BYTES = 64
LARGE_BYTES = 64 * 1024
"""From this size on, cpu allocations start on a cache line, the width of the widest vector."""


class Storage:
    """A run of bytes on one device, shared by reference.

    Attributes:
        device: where the bytes lie.
        size_bytes: how many there are.
        owner: the object whose life keeps the bytes valid: our own allocation, a caller's numpy array, a mapped file, a
            block of a GPU's allocator.
        address: on a GPU, where the bytes lie; 0 on the cpu (see `Tensor.address`).
        number: increases from storage to storage (`recording.next_number`).
    """

    __slots__ = (
        "__weakref__", "_buffer", "_is_frozen", "_share", "address", "device", "number", "owner", "size_bytes",
    )  # fmt: skip

    def __init__(
        self, device: Device, size_bytes: int, buffer: NDArray | None, owner: object, address: int = 0
    ) -> None:
        """On the cpu `buffer` is a C-contiguous array of a standard numpy dtype over the bytes; where it is read-only,
        every tensor here is. On a GPU there is no buffer, but the `address` of the bytes."""
        self.device = device
        self.size_bytes = size_bytes
        self.owner = owner
        self.address = address
        self.number = next_number()
        self._buffer = buffer
        self._is_frozen = False
        # Only tensors hold references to `_share`, so that the interpreter's own
        # counter, which threads cannot tear, is the number of tensors.
        self._share = object()

    @staticmethod
    def allocate(device: Device, size_bytes: int) -> Storage:
        """New, uninitialised memory.

        Raises:
            OutOfMemoryError: with the size, where the system has none.
            DeviceError: where the device is not there.
        """
        if device.kind != "cpu":
            block = Gpu.of(device).allocate(size_bytes)
            return Storage(device, size_bytes, None, block, block.address)
        slack = ALIGNMENT_BYTES if size_bytes >= LARGE_BYTES else 0
        try:
            buffer = np.empty(size_bytes + slack, np.uint8)
        except (MemoryError, ValueError):  # ValueError: more than an address can hold
            raise OutOfMemoryError(f"{device}: no memory for {size_bytes} bytes") from None
        if slack:
            start = -buffer.ctypes.data % ALIGNMENT_BYTES
            buffer = buffer[start : start + size_bytes]
        return Storage(device, size_bytes, buffer, buffer)

    @staticmethod
    def of_array(array: NDArray) -> tuple[Storage, int]:
        """(storage, byte offset of the first element in it) over an array's own memory, without a copy.

        The storage covers the bytes from the array's lowest to its highest element, at any alignment.
        """
        if array.flags.c_contiguous:
            buffer = array if array.dtype.isbuiltin == 1 else array.view(f"u{array.itemsize}")
            return Storage(CPU, array.nbytes, buffer, array), 0
        # Turn every axis that runs backwards; the first element is then the one at the lowest address.
        lowest = array[tuple(slice(None, None, -1 if stride < 0 else 1) for stride in array.strides)]
        low, high = np.lib.array_utils.byte_bounds(array)
        corner = lowest[(slice(0, 1),) * array.ndim].reshape(1).view(np.uint8)
        writeable = array.flags.writeable
        buffer = np.lib.stride_tricks.as_strided(corner, (high - low,), (1,), writeable=writeable)
        return Storage(CPU, high - low, buffer, array), array.ctypes.data - low

    @property
    def reference_count(self) -> int:
        """How many live tensors share these bytes."""
        return sys.getrefcount(self._share) - _REFERENCES_AT_REST

    @property
    def is_read_only(self) -> bool:
        """Whether writing is refused: the storage is frozen, or its owner is a read-only array or mapped file."""
        return self._is_frozen or (self._buffer is not None and not self._buffer.flags.writeable)

    def freeze(self) -> None:
        """Freezes these bytes: for a weight, once it is loaded.

        Tensors refuse to write them. An emulated GPU checks every kernel and copy, and lets a kernel that is launched
        dependently read them before it waits for the previous one.
        """
        self._is_frozen = True
        if self.device.kind != "cpu":
            Gpu.of(self.device).declare_immutable(self.owner)

    def thaw(self) -> None:
        """Lets these bytes be written again, by work that follows in the stream; `freeze` must follow."""
        self._is_frozen = False
        if self.device.kind != "cpu":
            Gpu.of(self.device).declare_immutable(self.owner, is_immutable=False)

    def ndarray(self, dtype: DType, shape: Shape, strides: Shape, offset: int) -> NDArray:
        """A numpy view; strides and offset in elements. Read-only where the storage is or where elements
        overlap. The view keeps the bytes alive by itself. Only for storage on the cpu.
        """
        assert self._buffer is not None, "the storage is not on the cpu"
        itemsize = dtype.itemsize
        if strides == contiguous_strides(shape):
            return np.ndarray(shape, dtype.numpy, self._buffer, offset * itemsize)
        strides_bytes = [stride * itemsize for stride in strides]
        array: NDArray = np.ndarray(shape, dtype.numpy, self._buffer, offset * itemsize, strides_bytes)
        if has_overlap(shape, strides):
            array.flags.writeable = False
        return array

    def __repr__(self) -> str:
        return f"Storage({self.size_bytes} bytes on {self.device}, {self.reference_count} tensors)"


_REFERENCES_AT_REST = 0
_REFERENCES_AT_REST = Storage.allocate(CPU, 0).reference_count
