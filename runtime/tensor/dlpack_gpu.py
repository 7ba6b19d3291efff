"""Sharing a GPU's memory with torch, CuPy and others: DLPack capsules of our own, and the CUDA array interface.

https://dmlc.github.io/dlpack, https://data-apis.org/array-api, https://numba.readthedocs.io (CUDA Array Interface 3).
Emulated memory is no GPU's, and is refused. A capsule keeps the tensor alive until its consumer calls the deleter.
"""

from __future__ import annotations

import ctypes
from typing import Any

from runtime.device.device import Device
from runtime.dtype import (
    ALL_DTYPES,
    DType,
    bfloat16,
    bool_,
    float8_e4m3,
    float8_e5m2,
    float16,
    float32,
    int8,
    int32,
    int64,
    uint8,
)
from runtime.errors import InvalidArgumentError
from runtime.tensor.dlpack import _capsule_is_valid, _capsule_pointer, _DLDataType, _DLManagedTensorVersioned, _DLTensor
from runtime.tensor.views import Shape

CUDA = 2
"""DLPack's device type of a CUDA device's memory."""

_TYPES: dict[DType, tuple[int, int]] = {
    int8: (0, 8), int32: (0, 32), int64: (0, 64), uint8: (1, 8), float16: (2, 16), float32: (2, 32), bfloat16: (4, 16),
    bool_: (6, 8), float8_e4m3: (10, 8), float8_e5m2: (12, 8),
}  # fmt: skip
_DTYPES = {code: dtype for dtype, code in _TYPES.items()}
_READ_ONLY = 1
_NAMES = {True: b"dltensor_versioned", False: b"dltensor"}


class _DLManagedTensor(ctypes.Structure):
    """From before DLPack 1."""

    _fields_ = (("dl_tensor", _DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_exported: dict[int, tuple[Any, ...]] = {}  # what consumers hold, by the address of its structure


def _delete(address: int) -> None:
    _exported.pop(address, None)


def _destroy(capsule: int) -> None:
    """Frees a capsule that no consumer renamed."""
    for name in _NAMES.values():
        if _is_valid(capsule, name):
            _delete(_pointer(capsule, name))


_C_DELETE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_delete)
_C_DESTROY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_destroy)
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_new_capsule.restype = ctypes.py_object
_rename = ctypes.pythonapi.PyCapsule_SetName
_rename.argtypes = (ctypes.py_object, ctypes.c_char_p)
# Called by a capsule's destructor, so they take its address.
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def export(
    owner: Any, address: int, device: Device, dtype: DType, shape: Shape, strides: Shape, *,
    is_versioned: bool, is_read_only: bool,
) -> object:  # fmt: skip
    """A capsule over memory of a CUDA device that `owner` keeps alive; strides in elements.

    Raises:
        BufferError: for an emulated device, or read-only memory for a consumer from before DLPack 1.
    """
    if device.kind != "cuda":
        raise BufferError(f"DLPack: memory of {device} is no GPU's; export .to('cpu')")
    if is_read_only and not is_versioned:
        raise BufferError("DLPack: the tensor is read-only, and the consumer is from before DLPack 1; export a clone()")
    sizes = (ctypes.c_int64 * max(1, len(shape)))(*shape)
    steps = (ctypes.c_int64 * max(1, len(shape)))(*strides)
    code, bits = _TYPES[dtype]
    described = _DLTensor(
        address, CUDA, device.index, len(shape), _DLDataType(code, bits, 1), ctypes.addressof(sizes),
        ctypes.addressof(steps), 0,
    )  # fmt: skip
    deleter = ctypes.cast(_C_DELETE, ctypes.c_void_p)
    managed: ctypes.Structure
    if is_versioned:
        managed = _DLManagedTensorVersioned(1, 0, None, deleter, _READ_ONLY if is_read_only else 0, described)
    else:
        managed = _DLManagedTensor(described, None, deleter)
    place = ctypes.addressof(managed)
    _exported[place] = (managed, sizes, steps, owner)
    capsule: object = _new_capsule(place, _NAMES[is_versioned], ctypes.cast(_C_DESTROY, ctypes.c_void_p))
    return capsule


class Imported:
    """Memory that another library's capsule holds; its deleter is called when this object is freed.

    Attributes:
        address: of the first element; device_index: the CUDA device's number; dtype, shape; strides in elements;
        is_read_only.
    """

    def __init__(self, capsule: object) -> None:
        """Raises BufferError for anything but a capsule of a known version and type on a CUDA device."""
        is_versioned = bool(_capsule_is_valid(capsule, _NAMES[True]))
        if not is_versioned and not _capsule_is_valid(capsule, _NAMES[False]):
            raise BufferError("it gives no DLPack capsule, or one that was consumed before")
        self._place = _capsule_pointer(capsule, _NAMES[is_versioned])
        managed: Any = (_DLManagedTensorVersioned if is_versioned else _DLManagedTensor).from_address(self._place)
        if is_versioned and managed.major != 1:
            raise BufferError(f"DLPack version {managed.major}.{managed.minor}, of which 1 is understood")
        tensor = managed.dl_tensor
        dtype = _DTYPES.get((tensor.dtype.code, tensor.dtype.bits))
        if tensor.device_type != CUDA or dtype is None or tensor.dtype.lanes != 1:
            raise BufferError(
                f"device type {tensor.device_type}, element type {tensor.dtype.code} of {tensor.dtype.bits} bits"
            )
        numbers = ctypes.c_int64 * tensor.ndim
        self.shape: Shape = tuple(numbers.from_address(tensor.shape)) if tensor.ndim else ()
        self.strides: Shape | None = tuple(numbers.from_address(tensor.strides)) if tensor.strides else None
        self.address = (tensor.data or 0) + tensor.byte_offset
        self.device_index = int(tensor.device_id)
        self.dtype = dtype
        self.is_read_only = bool(is_versioned and managed.flags & _READ_ONLY)
        self._deleter = managed.deleter
        _rename(capsule, b"used_" + _NAMES[is_versioned])

    def __del__(self) -> None:
        if getattr(self, "_deleter", None):
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._deleter)(self._place)


def array_interface(
    address: int, device: Device, dtype: DType, shape: Shape, strides: Shape, *, is_contiguous: bool, stream: int
) -> dict[str, Any]:
    """The CUDA array interface, version 3; strides in elements.

    Raises AttributeError, as the protocol asks, for memory that is not a real GPU's.
    """
    if device.kind != "cuda":
        raise AttributeError(f"__cuda_array_interface__: memory of {device} is no GPU's")
    return {
        "shape": shape,
        "typestr": dtype.numpy.str,
        "data": (address, False),
        "strides": None if is_contiguous else tuple(stride * dtype.itemsize for stride in strides),
        "stream": stream,
        "version": 3,
    }


def parse_array_interface(source: Any) -> tuple[int, DType, Shape, Shape | None]:
    """(address, dtype, shape, strides in elements or None) of an object with ``__cuda_array_interface__``.

    Raises InvalidArgumentError for masks, types that we lack, strides of broken elements and read-only memory.
    """
    described = source.__cuda_array_interface__
    dtype = next((each for each in ALL_DTYPES if each.numpy.str == described["typestr"]), None)
    if dtype is None or described.get("mask") is not None:
        raise InvalidArgumentError(
            f"from_cuda: elements {described['typestr']!r}, mask {described.get('mask')}", param="source"
        )
    address, is_read_only = described["data"]
    if is_read_only:
        raise InvalidArgumentError("from_cuda: the memory is read-only", param="source")
    strides = described.get("strides")
    if strides is not None and any(stride % dtype.itemsize for stride in strides):
        raise InvalidArgumentError(f"from_cuda: strides {strides} bytes are not whole elements", param="source")
    steps = None if strides is None else tuple(stride // dtype.itemsize for stride in strides)
    return int(address), dtype, tuple(described["shape"]), steps
