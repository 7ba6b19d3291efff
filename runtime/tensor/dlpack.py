"""DLPack for numpy arrays whose element types numpy itself does not exchange.

numpy speaks the protocol (https://dmlc.github.io/dlpack, https://data-apis.org/array-api) for its own
types, lifetimes and all, but not for bfloat16 and fp8. Those travel as unsigned integers of the same size,
and we write the type into the exchanged structure: before it is exported, and after it is imported. numpy still frees
the structure.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from runtime.dtype import bfloat16, dtype_of_array, float8_e4m3, float8_e5m2
from runtime.errors import InvalidArgumentError
from runtime.tensor.storage import NDArray

CPU_DEVICE = (1, 0)
"""DLPack's (device type, device id) of host memory."""

_CODES = {bfloat16: 4, float8_e4m3: 10, float8_e5m2: 12}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_UNSIGNED_INTEGER = 1


class _DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", _DLTensor),
    )


_capsule_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_capsule_is_valid.argtypes = (ctypes.py_object, ctypes.c_char_p)
_capsule_is_valid.restype = ctypes.c_int
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_capsule_pointer.restype = ctypes.c_void_p


def export_array(
    array: NDArray,
    *,
    stream: Any,
    max_version: tuple[int, int] | None,
    dl_device: tuple[int, int] | None,
    copy: bool | None,
) -> object:
    """A capsule with the array's memory, which it keeps alive; arguments as in the protocol's `__dlpack__`.

    Raises:
        BufferError: for another device than the cpu, a stream, a read-only array for a consumer from before DLPack 1,
            or a negative stride, which makes torch end the process.
    """
    if stream is not None:
        raise BufferError(f"DLPack: stream is {stream!r}, must be None: the array is on the cpu")
    if any(stride < 0 for stride in array.strides):
        raise BufferError(f"DLPack: strides {array.strides} bytes run backwards; export a contiguous() copy")
    dtype = dtype_of_array(array)
    code = _CODES.get(dtype)
    if code is not None:
        array = array.view(f"u{dtype.itemsize}")
    capsule: object = array.__dlpack__(max_version=max_version, dl_device=dl_device, copy=copy)
    if code is not None:
        _element_type(capsule).code = code
    return capsule


def import_array(source: Any) -> NDArray:
    """A numpy array over the memory of any object with `__dlpack__`, without a copy.

    It is read-only where the object says so, or is from before DLPack 1.

    Raises:
        InvalidArgumentError: where the object does not speak DLPack, or has no memory or type for us.
    """
    try:
        device = tuple(source.__dlpack_device__())
        if device != CPU_DEVICE:
            raise BufferError(f"its memory is on DLPack device {device}, not on the cpu {CPU_DEVICE}")
        try:
            capsule = source.__dlpack__(max_version=(1, 0))
        except TypeError:  # a producer from before DLPack 1
            capsule = source.__dlpack__()
        return _take(capsule)
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"from_dlpack: cannot take a {type(source).__name__}: {error}", param="source"
        ) from error


def _take(capsule: object) -> NDArray:
    """A numpy array that owns what a capsule holds."""
    element_type = _element_type(capsule)
    dtype = _DTYPES.get(element_type.code)
    if dtype is None:
        return np.from_dlpack(_Producer(capsule))
    if element_type.bits != 8 * dtype.itemsize:
        raise BufferError(f"its elements are {dtype} of {element_type.bits} bits")
    element_type.code = _UNSIGNED_INTEGER
    return np.from_dlpack(_Producer(capsule)).view(dtype.numpy)


class _Producer:
    """Hands a capsule to numpy."""

    def __init__(self, capsule: object) -> None:
        self._capsule = capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU_DEVICE

    def __dlpack__(self, **_request: Any) -> Any:
        return self._capsule


def _element_type(capsule: object) -> _DLDataType:
    """The element type inside a capsule, in place."""
    if _capsule_is_valid(capsule, b"dltensor_versioned"):
        address = _capsule_pointer(capsule, b"dltensor_versioned")
        managed = _DLManagedTensorVersioned.from_address(address)
        if managed.major != 1:
            raise BufferError(f"DLPack version {managed.major}.{managed.minor}, of which 1 is understood")
        return managed.dl_tensor.dtype  # type: ignore[no-any-return]
    address = _capsule_pointer(capsule, b"dltensor")  # ValueError where it is neither
    return _DLTensor.from_address(address).dtype  # type: ignore[no-any-return]
