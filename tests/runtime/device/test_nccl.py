"""NCCL by ctypes: what is called, with a library of our own, and the real one where its wheel is installed."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from runtime.device import nccl
from runtime.device.nccl import DTYPES, PROTOTYPES, RESULTS, Nccl, NcclError, NcclLibrary, NoNcclError, UniqueId
from runtime.dtype import bool_
from runtime.errors import InvalidArgumentError


def _wheel() -> Path | None:
    """The folder of the wheel, if it is installed."""
    nvidia = find_spec("nvidia")
    places = [Path(place) / "nccl" for place in nvidia.submodule_search_locations or () if nvidia] if nvidia else []
    return next((place for place in places if (place / "lib" / "libnccl.so.2").is_file()), None)


WHEEL = _wheel()
real = pytest.mark.skipif(WHEEL is None, reason="the wheel nvidia-nccl-cu13 is not installed (pip install '.[nccl]')")


class _Function:
    def __init__(self, library: FakeLibrary, name: str) -> None:
        self._library, self._name = library, name
        self.argtypes: list[Any] = []
        self.restype: Any = None

    def __call__(self, *arguments: Any) -> Any:
        return self._library.answer(self._name, arguments)


class FakeLibrary:
    """Has NCCL's functions; notes calls, and fills in results as its header says."""

    def __init__(self, missing: str = "") -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.status = 0
        for name in (*PROTOTYPES, "ncclGetErrorString", "ncclGetLastError"):
            if name != missing:
                setattr(self, name, _Function(self, name))

    def answer(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if name == "ncclGetErrorString":
            return b"invalid usage"
        if name == "ncclGetLastError":
            return b"rank 3 is missing\n"
        self.calls.append((name, arguments))
        for argument in arguments:
            target = getattr(argument, "_obj", None)
            if isinstance(target, UniqueId):
                target.internal[0] = 7
            elif target is not None:
                target.value = 42
        return self.status


def test_functions_give_what_c_gives_through_pointers() -> None:
    library = FakeLibrary()
    found = Nccl(NcclLibrary(library))
    assert found.version() == 42
    unique_id = found.unique_id()
    assert unique_id == b"\x07" + bytes(127)
    assert found.call("ncclCommInitRank", 4, unique_id, 3) == 42
    name, (pointer, count, by_value, rank) = library.calls[-1]
    assert (name, count, rank) == ("ncclCommInitRank", 4, 3)
    assert isinstance(by_value, UniqueId)
    assert bytes(by_value) == unique_id
    assert pointer._obj.value == 42
    assert found.call("ncclCommWindowRegister", 42, 4096, 8192, 1) == 42
    assert library.calls[-1][1][3]._obj.value == 42  # the fourth of five arguments
    with found.group():
        pass
    assert [name for name, _ in library.calls[-2:]] == ["ncclGroupStart", "ncclGroupEnd"]


def test_an_error_has_ncclss_text() -> None:
    library = FakeLibrary()
    library.status = 5
    text = r"ncclGroupStart failed: ncclInvalidUsage \(5\): invalid usage: rank 3 is missing"
    with pytest.raises(NcclError, match=text) as caught:
        Nccl(NcclLibrary(library)).call("ncclGroupStart")
    assert (caught.value.code, caught.value.name) == (5, "ncclInvalidUsage")
    library.status = 7  # in progress
    Nccl(NcclLibrary(library)).call("ncclGroupStart")


def test_what_is_too_old_or_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoNcclError, match=r"has no ncclCommWindowRegister: 2\.27 or newer"):
        NcclLibrary(FakeLibrary(missing="ncclCommWindowRegister"))
    nccl.load.cache_clear()
    monkeypatch.setattr(nccl, "candidates", lambda: iter(["/nowhere/libnccl.so.2"]))
    with pytest.raises(NoNcclError, match=r"tried /nowhere/libnccl\.so\.2.*pip install"):
        nccl.load()
    nccl.load.cache_clear()


def test_types_that_nccl_lacks_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="NCCL has no bool: dtype must be one of int8"):
        nccl._number(bool_)


@real
def test_the_real_library_has_every_function() -> None:
    """In a process of its own, since it starts threads."""
    assert WHEEL is not None
    script = f"""
import ctypes
from runtime.device.nccl import Nccl, NcclError, NcclLibrary
found = Nccl(NcclLibrary(ctypes.CDLL({str(WHEEL / "lib" / "libnccl.so.2")!r})))
ids = found.unique_id(), found.unique_id()
assert len(ids[0]) == 128 and ids[0] != ids[1]
with found.group():
    pass
try:
    found.call("ncclCommGetAsyncError", None)
except NcclError as error:
    assert error.name == "ncclInvalidArgument" and "comm argument is NULL" in str(error), error
else:
    raise AssertionError("no communicator has no error")
print(found.version())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= nccl.OLDEST_VERSION


@real
def test_numbers_and_sizes_are_the_headers() -> None:
    assert WHEEL is not None
    text = (WHEEL / "include" / "nccl.h").read_text()
    words = text.replace(",", " ").replace(";", " ").split()

    def number(name: str) -> int:
        return int(words[words.index(name) + 2])

    assert all(number(name) == code for code, name in RESULTS.items())
    names = {"float8_e4m3": "ncclFloat8e4m3", "float8_e5m2": "ncclFloat8e5m2"}
    assert all(number(names.get(name, f"nccl{name.capitalize()}")) == code for name, code in DTYPES.items())
    assert all(number(f"nccl{name.capitalize()}") == code for name, code in nccl.OPERATIONS.items())
    for name, value in (("NCCL_UNIQUE_ID_BYTES", 128), ("NCCL_WIN_REQUIRED_ALIGNMENT", nccl.WINDOW_ALIGNMENT)):
        assert int(words[words.index(name) + 1]) == value
    assert int(words[words.index("NCCL_WIN_COLL_SYMMETRIC") + 1], 16) == nccl.COLL_SYMMETRIC
    assert ctypes.sizeof(UniqueId) == 128
    for name, prototype in PROTOTYPES.items():
        start = text.index(f" {name}(") + len(name) + 2
        arguments = [each for each in text[start : text.index(")", start)].split(",") if each.strip()]
        assert len(arguments) == len(prototype), name
        for argument, kind in zip(arguments, prototype):
            is_pointer = "*" in argument
            is_handle = any(each in argument for each in ("ncclComm_t", "cudaStream_t", "ncclWindow_t"))
            if isinstance(kind, nccl._Out):
                assert is_pointer, (name, argument)
            elif kind is ctypes.c_void_p:
                assert is_pointer or is_handle, (name, argument)
            elif kind is ctypes.c_size_t:
                assert "size_t" in argument, (name, argument)
            elif kind is UniqueId:
                assert "ncclUniqueId" in argument, (name, argument)
            else:
                assert not is_pointer, (name, argument)
