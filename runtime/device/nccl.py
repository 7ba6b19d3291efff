"""NCCL, through ctypes: collectives of several GPUs, each driven by a process, or by a group of calls.

    nccl = open_nccl(gpu.driver)
    comm = NcclComm(gpu, nccl, unique_id, rank=0, num_ranks=2)    # every rank at the same time
    comm.all_reduce(address, address, count, float32)             # queued in the GPU's current stream

`Nccl` is the seam: real ones call libnccl.so.2 of the wheel nvidia-nccl-cu13 (the extra `nccl`); an
emulated driver has an emulated one (`runtime.emulator.nccl`). Both have functions of NCCL's names that return a
tuple: an `ncclResult_t`, then C's results through pointers. Names, arguments and numbers are those of nccl.h 2.27 and
later: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html

A communicator's calls belong to one thread; `abort` alone may come from another.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from runtime.device.driver import Driver
from runtime.device.gpu import Gpu
from runtime.dtype import DType
from runtime.errors import DeviceError, InvalidArgumentError
from runtime.later import later

_emulated_nccl = later("runtime.emulator.nccl.emulated_nccl")

UNIQUE_ID_BYTES = 128
OLDEST_VERSION = 22_700
"""The first that registers windows: 2.27.0, as `ncclGetVersion` counts."""
WINDOW_ALIGNMENT = 4096
COLL_SYMMETRIC = 1
"""A window whose collectives all ranks call with the same offset in it."""

SUCCESS, IN_PROGRESS = 0, 7
RESULTS = {
    0: "ncclSuccess", 1: "ncclUnhandledCudaError", 2: "ncclSystemError", 3: "ncclInternalError",
    4: "ncclInvalidArgument", 5: "ncclInvalidUsage", 6: "ncclRemoteError", 7: "ncclInProgress", 8: "ncclTimeout",
}  # fmt: skip
DTYPES = {
    "int8": 0, "uint8": 1, "int32": 2, "int64": 4, "float16": 6, "float32": 7, "bfloat16": 9, "float8_e4m3": 10,
    "float8_e5m2": 11,
}  # fmt: skip
_SUM = 0

_WHERE = "pip install '.[nccl]' in xserv's checkout, or nvidia-nccl-cu13, or name its folder in LD_LIBRARY_PATH"


class NoNcclError(DeviceError):
    """NCCL is not installed, or too old; the message names the paths tried."""


class NcclError(DeviceError):
    """A function of NCCL failed.

    Attributes:
        call: the function, `ncclAllReduce`.
        code: its ncclResult_t as a number.
        name: its ncclResult_t's name, `ncclRemoteError`.
    """

    def __init__(self, message: str, *, call: str, code: int) -> None:
        super().__init__(message)
        self.call, self.code, self.name = call, code, RESULTS.get(code, str(code))


class UniqueId(ctypes.Structure):
    """`ncclUniqueId`, which goes by value."""

    _fields_ = [("internal", ctypes.c_byte * UNIQUE_ID_BYTES)]


class _Out(NamedTuple):
    """An argument that points to a result."""

    type: Any


_INT, _SIZE, _POINTER = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (_Out(_INT),),
    "ncclGetUniqueId": (_Out(UniqueId),),
    "ncclCommInitRank": (_Out(_POINTER), _INT, UniqueId, _INT),
    "ncclCommFinalize": (_POINTER,),
    "ncclCommDestroy": (_POINTER,),
    "ncclCommAbort": (_POINTER,),
    "ncclCommGetAsyncError": (_POINTER, _Out(_INT)),
    "ncclAllReduce": (_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "ncclAllGather": (_POINTER, _POINTER, _SIZE, _INT, _POINTER, _POINTER),
    "ncclSend": (_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "ncclRecv": (_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclMemAlloc": (_Out(_POINTER), _SIZE),
    "ncclMemFree": (_POINTER,),
    "ncclCommWindowRegister": (_POINTER, _POINTER, _SIZE, _Out(_POINTER), _INT),
    "ncclCommWindowDeregister": (_POINTER, _POINTER),
}
"""The functions that we call, with their arguments in C's order."""


class NcclLibrary:
    """The functions of a libnccl."""

    def __init__(self, library: Any) -> None:
        """`library` is a `ctypes.CDLL`. Raises NoNcclError where a function is missing."""
        self._library = library
        for name, prototype in PROTOTYPES.items():
            try:
                function = getattr(library, name)
            except AttributeError:
                raise NoNcclError(f"this NCCL has no {name}: 2.27 or newer is needed. {_WHERE}") from None
            given = [ctypes.POINTER(each.type) if isinstance(each, _Out) else each for each in prototype]
            function.argtypes, function.restype = given, _INT
            setattr(self, name, functools.partial(self._call, function, prototype))
        for name, arguments in (("ncclGetErrorString", [_INT]), ("ncclGetLastError", [_POINTER])):
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, ctypes.c_char_p

    def words(self, code: int, comm: Any = None) -> str:
        """NCCL's text of a result, and of the last error."""
        text = (self._library.ncclGetErrorString(code) or b"").decode(errors="replace")
        last = (self._library.ncclGetLastError(comm) or b"").decode(errors="replace")
        return f"{text}: {last.strip()}" if last.strip() else text

    @staticmethod
    def _call(function: Any, prototype: tuple[Any, ...], *values: Any) -> tuple[Any, ...]:
        given: list[Any] = []
        outputs: list[Any] = []
        left = iter(values)
        for each in prototype:
            if isinstance(each, _Out):
                outputs.append(each.type())
                given.append(ctypes.byref(outputs[-1]))
            else:
                value = next(left)
                given.append(UniqueId.from_buffer_copy(value) if each is UniqueId else value)
        status = int(function(*given))
        return status, *(bytes(each) if isinstance(each, UniqueId) else each.value for each in outputs)


class Nccl:
    """An NCCL library.

    Attributes:
        api: its functions.
        is_emulated: whether it serves an emulated driver's devices, and checks the ranks' calls.
        is_dry: whether its calls have no effect, for a rank alone.
    """

    def __init__(self, api: Any, *, is_emulated: bool = False, is_dry: bool = False) -> None:
        self.api = api
        self.is_emulated = is_emulated
        self.is_dry = is_dry

    def call(self, function: str, *arguments: Any, comm: Any = None) -> Any:
        """Calls a function. Returns its values without the `ncclResult_t`. Raises NcclError, with NCCL's text."""
        status, *values = getattr(self.api, function)(*arguments)
        if status not in (SUCCESS, IN_PROGRESS):
            raise self.error(function, status, comm)
        return values[0] if values else None

    def error(self, function: str, code: int, comm: Any = None) -> NcclError:
        """The error for a result other than success."""
        name = RESULTS.get(code, str(code))
        return NcclError(f"{function} failed: {name} ({code}): {self.api.words(code, comm)}", call=function, code=code)

    def version(self) -> int:
        """23203 of NCCL 2.32.3."""
        return int(self.call("ncclGetVersion"))

    def unique_id(self) -> bytes:
        """A new communicator's unique id; one rank makes it and sends it to the others."""
        return bytes(self.call("ncclGetUniqueId"))

    def forget(self, unique_ids: list[bytes]) -> None:
        """Forgets unique ids made here. A real NCCL keeps none."""
        if self.is_emulated and not self.is_dry:
            self.api.forget(unique_ids)

    @contextmanager
    def group(self) -> Iterator[None]:
        """Groups this thread's calls until the block ends: for a send and receive of each other, or several
        communicators in one thread."""
        self.call("ncclGroupStart")
        try:
            yield
        finally:
            self.call("ncclGroupEnd")


def candidates() -> Iterator[str]:
    """Names and paths under which the library may lie."""
    nvidia = find_spec("nvidia")
    for place in nvidia.submodule_search_locations or () if nvidia else ():
        path = Path(place) / "nccl" / "lib" / "libnccl.so.2"
        if path.is_file():
            yield str(path)
    yield "libnccl.so.2"


@functools.cache
def load() -> Nccl:
    """The installed NCCL. Raises NoNcclError naming every place that was tried, or the version and the one needed."""
    tried = list(dict.fromkeys(candidates()))
    for name in tried:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        nccl = Nccl(NcclLibrary(library))
        if (version := nccl.version()) < OLDEST_VERSION:
            raise NoNcclError(f"NCCL is {_dotted(version)}, must be {_dotted(OLDEST_VERSION)} or newer. {_WHERE}")
        return nccl
    raise NoNcclError(f"NCCL was not found: tried {', '.join(tried)}. {_WHERE}")


def open_nccl(driver: Driver) -> Nccl:
    """The NCCL that serves a driver's devices. Raises NoNcclError."""
    if not driver.is_emulated:
        return load()
    api = _emulated_nccl.nccl_of(driver.api)
    return Nccl(api, is_emulated=True, is_dry=api.is_dry)


def _dotted(version: int) -> str:
    return f"{version // 10_000}.{version // 100 % 100}.{version % 100}"


class Window:
    """Memory of this rank registered with NCCL, at the same offsets on all ranks; freed with the communicator.

    Attributes:
        address, size_bytes: this rank's.
    """

    def __init__(self, handle: Any, address: int, size_bytes: int) -> None:
        self.handle, self.address, self.size_bytes = handle, address, size_bytes


class NcclComm:
    """One rank of a communicator. Buffers are addresses on its GPU; work goes to the current stream.

    Attributes:
        gpu, rank, num_ranks.
    """

    def __init__(self, gpu: Gpu, nccl: Nccl, unique_id: bytes, rank: int, num_ranks: int) -> None:
        """Waits for the other ranks, unless it is called in a group.

        Raises:
            InvalidArgumentError: for a unique id of another length, or a rank out of range.
            NcclError: with NCCL's text.
        """
        if len(unique_id) != UNIQUE_ID_BYTES:
            raise InvalidArgumentError(f"unique_id has {len(unique_id)} bytes, must be 128", param="unique_id")
        if not 0 <= rank < num_ranks:
            raise InvalidArgumentError(f"rank is {rank}, must be 0 to {num_ranks - 1}", param="rank")
        self.gpu, self.nccl, self.rank, self.num_ranks = gpu, nccl, rank, num_ranks
        self._windows: list[Window] = []
        gpu.context.make_current()
        self._comm: Any = nccl.call("ncclCommInitRank", num_ranks, unique_id, rank)

    @property
    def handle(self) -> Any:
        """NCCL's own; None once it was destroyed or aborted."""
        return self._comm

    def all_reduce(self, source: int, target: int, count: int, dtype: DType) -> None:
        """The sums of all ranks' `count` numbers in each rank's target, perhaps the source."""
        self._queue("ncclAllReduce", source, target, count, _number(dtype), _SUM)

    def all_gather(self, source: int, target: int, count: int, dtype: DType) -> None:
        """All ranks' `count` numbers, in the order of ranks, in each rank's target."""
        self._queue("ncclAllGather", source, target, count, _number(dtype))

    def send(self, source: int, count: int, dtype: DType, peer: int) -> None:
        """`count` numbers to a rank that receives as many."""
        self._queue("ncclSend", source, count, _number(dtype), peer)

    def receive(self, target: int, count: int, dtype: DType, peer: int) -> None:
        """`count` numbers of a rank that sends as many."""
        self._queue("ncclRecv", target, count, _number(dtype), peer)

    def new_window(self, size_bytes: int) -> Window:
        """New memory, registered as symmetric. Every rank calls it in the same order, of the same size. Raises
        NcclError."""
        size = -(-size_bytes // WINDOW_ALIGNMENT) * WINDOW_ALIGNMENT
        self.gpu.context.make_current()
        address = int(self._call("ncclMemAlloc", size))
        try:
            handle = self._call("ncclCommWindowRegister", self._comm, address, size, COLL_SYMMETRIC)
        except NcclError:
            self._call("ncclMemFree", address)
            raise
        window = Window(handle, address, size)
        self._windows.append(window)
        return window

    def check(self) -> None:
        """Raises NcclError after a failure, here or at another rank."""
        if self._comm is None:
            return
        code = int(self._call("ncclCommGetAsyncError", self._comm))
        if code not in (SUCCESS, IN_PROGRESS):
            raise self.nccl.error("ncclCommGetAsyncError", code, self._comm)

    def end_step(self, number: int) -> None:
        """Reports a queued step to an emulated NCCL, which compares it among ranks, as a collective. `check` for a real
        one."""
        if self.nccl.is_emulated:
            self._queue("emuEndStep", number)
        else:
            self.check()

    def destroy(self) -> None:
        """Waits for queued work and frees everything; may be called twice."""
        comm = self._comm
        if comm is None:
            return
        self.gpu.synchronize()
        for window in self._windows:
            self._call("ncclCommWindowDeregister", comm, window.handle)
        self._comm = None
        self._call("ncclCommFinalize", comm)
        self._call("ncclCommDestroy", comm)
        for window in self._windows:
            self._call("ncclMemFree", window.address)
        self._windows.clear()

    def abort(self) -> None:
        """Ends the communicator at once, with this rank's collectives that wait for others. In any thread, also twice.
        Windows' memory is freed with the process."""
        comm, self._comm = self._comm, None
        if comm is not None:
            self.gpu.context.make_current()
            self._call("ncclCommAbort", comm)

    def _queue(self, function: str, *arguments: Any) -> None:
        if self._comm is None:
            raise NcclError(f"{function}: rank {self.rank} has left its communicator", call=function, code=5)
        gpu = self.gpu
        gpu.context.make_current()
        gpu.break_chain()
        self._call(function, *arguments, self._comm, int(gpu.stream.handle))

    def _call(self, function: str, *arguments: Any) -> Any:
        return self.nccl.call(function, *arguments, comm=self._comm)


def _number(dtype: DType) -> int:
    found = DTYPES.get(dtype.name)
    if found is None:
        raise InvalidArgumentError(f"NCCL has no {dtype.name}: dtype must be one of {', '.join(DTYPES)}", param="dtype")
    return found
