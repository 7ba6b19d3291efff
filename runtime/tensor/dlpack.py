"""DLPack, for numpy arrays whose element types numpy itself does not exchange and for a GPU's memory.

numpy speaks the protocol (https://dmlc.github.io/dlpack, https://data-apis.org/array-api) for its own
types, lifetimes and all, but not for bfloat16 and fp8. Those travel as unsigned integers of the same size,
and we write the type into the exchanged structure: before it is exported, and after it is imported. numpy still frees
the structure.

A GPU's memory is shared with torch, CuPy and others by capsules of our own, and by the CUDA array interface
(https://numba.readthedocs.io, version 3). Emulated memory is no GPU's, and is refused. A capsule keeps the tensor alive
until its consumer calls the deleter.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from runtime.device.device import Device
from runtime.dtype import (
    ALL_DTYPES,
    DType,
    NDArray,
    bfloat16,
    bool_,
    dtype_of_array,
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
from runtime.tensor.views import Shape

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


CUDA = 2
"""DLPack's device type of a CUDA device's memory."""

_TYPES: dict[DType, tuple[int, int]] = {
    int8: (0, 8), int32: (0, 32), int64: (0, 64), uint8: (1, 8), float16: (2, 16), float32: (2, 32), bfloat16: (4, 16),
    bool_: (6, 8), float8_e4m3: (10, 8), float8_e5m2: (12, 8),
}  # fmt: skip
_GPU_DTYPES = {code: dtype for dtype, code in _TYPES.items()}
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
        dtype = _GPU_DTYPES.get((tensor.dtype.code, tensor.dtype.bits))
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
