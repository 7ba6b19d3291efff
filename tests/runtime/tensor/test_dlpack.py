"""DLPack both ways. torch, which is no dependency, is checked where it is installed."""

from __future__ import annotations

import ctypes
import gc
import struct
import sys
import weakref
from typing import Any

import numpy as np
import pytest

from runtime.dtype import ALL_DTYPES, DType, bfloat16
from runtime.errors import InvalidArgumentError
from runtime.tensor.tensor import Tensor
from tests.runtime.tensor_cases import assert_same, cases

NUMPY_S_OWN = tuple(dtype for dtype in ALL_DTYPES if dtype.numpy.isbuiltin == 1)


class Exporter:
    """Something that speaks DLPack, as old or as strange as a test wants it."""

    def __init__(self, capsule: Any = None, device: tuple[int, int] = (1, 0), **keywords: Any) -> None:
        self.capsule, self.device, self.keywords = capsule, device, keywords

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **keywords: Any) -> Any:
        if not set(keywords) <= set(self.keywords):
            raise TypeError("unexpected keyword")
        return self.capsule


def is_backwards(array: Any) -> bool:
    return any(stride < 0 for stride in array.strides)


def test_there_and_back() -> None:
    for _, array in cases(1, 300):
        tensor = Tensor.from_numpy(array)
        if is_backwards(array):
            with pytest.raises(InvalidArgumentError, match="backwards"):
                Tensor.from_dlpack(tensor)
            continue
        back = Tensor.from_dlpack(tensor)
        assert back.dtype is tensor.dtype
        assert_same(back.array, array)
        assert back.array.ctypes.data == array.ctypes.data
        assert back.is_read_only == tensor.is_read_only
        assert tensor.__dlpack_device__() == (1, 0)


@pytest.mark.parametrize("dtype", NUMPY_S_OWN, ids=str)
def test_numpy_reads_us_and_we_read_numpy(dtype: DType) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype.numpy)
    tensor = Tensor.from_dlpack(array.T)
    assert_same(tensor.array, array.T)
    tensor[0, 0] = True
    assert array[0, 0] == 1
    theirs = np.from_dlpack(tensor)
    assert_same(theirs, array.T)
    assert np.shares_memory(theirs, array)


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(dtype, marks=[pytest.mark.exhaustive] * (dtype is not bfloat16)) for dtype in ALL_DTYPES],
    ids=str,
)
def test_memory_lives_as_long_as_anybody_looks(dtype: DType) -> None:
    class Bytes(bytearray):
        """Memory that a weak reference can watch."""

    source = Bytes(24 * dtype.itemsize)
    watch = weakref.ref(source)
    tensor = Tensor.from_numpy(np.frombuffer(source, dtype.numpy))
    del source
    capsule = tensor.__dlpack__(max_version=(1, 0))
    back = Tensor.from_dlpack(tensor)
    del tensor
    gc.collect()
    assert watch() is not None
    assert back.to("f32").sum().item() == 0
    del back
    gc.collect()
    assert watch() is not None  # the capsule that nobody took
    taken = Tensor.from_dlpack(Exporter(capsule, max_version=True))
    del capsule
    gc.collect()
    assert watch() is not None
    assert taken.shape == (24,)
    del taken
    gc.collect()
    assert watch() is None


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f8e4m3"])
def test_nothing_leaks(dtype: str) -> None:
    tensor = Tensor.zeros(1000, dtype)
    references = sys.getrefcount(tensor.array), sys.getrefcount(tensor.storage._buffer)
    for _ in range(200):
        Tensor.from_dlpack(tensor)
        tensor.__dlpack__(max_version=(1, 0))
        tensor.__dlpack__()
    gc.collect()
    assert (sys.getrefcount(tensor.array), sys.getrefcount(tensor.storage._buffer)) == references
    assert tensor.storage.reference_count == 1


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_versions_copies_and_read_only_memory(dtype: str) -> None:
    tensor = Tensor.arange(4, dtype=dtype)
    assert '"dltensor"' in repr(tensor.__dlpack__())
    assert '"dltensor"' in repr(tensor.__dlpack__(max_version=(0, 8)))
    for version in ((1, 0), (1, 3), (2, 0)):
        assert '"dltensor_versioned"' in repr(tensor.__dlpack__(max_version=version))
    old = Tensor.from_dlpack(Exporter(tensor.__dlpack__()))
    assert old.tolist() == [0, 1, 2, 3]
    assert old.dtype is tensor.dtype
    copied = Tensor.from_dlpack(Exporter(tensor.__dlpack__(max_version=(1, 0), copy=True), max_version=True))
    assert copied.tolist() == [0, 1, 2, 3]
    assert not np.shares_memory(copied.array, tensor.array)
    wide = tensor[:1].expand(3)
    assert Tensor.from_dlpack(wide).is_read_only
    with pytest.raises(BufferError, match="readonly"):
        wide.__dlpack__()
    for device in ((2, 0), (1, 1)):
        with pytest.raises((BufferError, ValueError)):
            tensor.__dlpack__(dl_device=device)
    with pytest.raises(BufferError, match="stream is 1"):
        tensor.__dlpack__(stream=1)
    assert tensor.__dlpack__(dl_device=(1, 0)) is not None


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (5, "int"),
        (Exporter("no capsule", max_version=True), "Exporter"),
        (Exporter(None, max_version=True), "Exporter"),
        (Exporter(device=(10, 0)), r"\(10, 0\)"),
        (np.zeros(2), "float64"),
        (np.zeros(2, np.uint16), "uint16"),
        (np.zeros(2, np.complex64), "complex64"),
    ],
)
def test_what_cannot_be_taken_is_refused(source: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Tensor.from_dlpack(source)


def test_a_capsule_is_taken_once() -> None:
    capsule = Tensor.arange(3, dtype="bf16").__dlpack__(max_version=(1, 0))
    assert Tensor.from_dlpack(Exporter(capsule, max_version=True)).tolist() == [0, 1, 2]
    with pytest.raises(InvalidArgumentError, match="Exporter"):
        Tensor.from_dlpack(Exporter(capsule, max_version=True))


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_torch(dtype: DType) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    theirs_name = {"float8_e4m3": "float8_e4m3fn"}.get(dtype.name, dtype.name)
    tensor = Tensor.arange(2, dtype=dtype)[None].expand(3, 2).contiguous()
    theirs = torch.from_dlpack(tensor)
    assert theirs.dtype is getattr(torch, theirs_name)
    assert theirs.data_ptr() == tensor.array.ctypes.data
    assert theirs.float().tolist() == [[0, 1]] * 3
    source = torch.arange(6).reshape(2, 3).to(theirs.dtype).t()
    ours = Tensor.from_dlpack(source)
    assert (ours.dtype, ours.strides) == (dtype, (1, 3))
    assert ours.array.ctypes.data == source.data_ptr()
    assert ours.to("f32").tolist() == source.float().tolist()


@pytest.mark.parametrize(
    ("dtype", "code", "bits"),
    [
        ("i8", 0, 8), ("i32", 0, 32), ("i64", 0, 64), ("u8", 1, 8), ("f16", 2, 16), ("f32", 2, 32),
        ("bf16", 4, 16), ("bool", 6, 8), ("f8e4m3", 10, 8), ("f8e5m2", 12, 8),
    ],
)  # fmt: skip
def test_type_codes_are_those_of_the_header(dtype: str, code: int, bits: int) -> None:
    """dlpack.h: the type stands 20 bytes into a DLTensor, and that 32 bytes into a versioned one."""
    pointer_to = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_to.argtypes, pointer_to.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
    tensor = Tensor.zeros((2, 3), dtype)
    for version, name, start in ((None, b"dltensor", 0), ((1, 0), b"dltensor_versioned", 32)):
        capsule = tensor.__dlpack__(max_version=version)
        address = pointer_to(capsule, name) + start
        assert struct.unpack("QiiiBBH", ctypes.string_at(address, 24)) == (
            tensor.array.ctypes.data, 1, 0, 2, code, bits, 1,
        )  # fmt: skip
