"""The functions of NCCL that `runtime.device.nccl` calls, for the devices of an emulated driver.

Names, arguments and results are those of `runtime.device.nccl.PROTOTYPES`. Ranks may be processes, or devices of one
driver, whose calls must then be grouped where they wait for each other, as with a real NCCL. There is one more
function, `emuEndStep`: a mark that ranks compare as they do collectives.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec
from weakref import WeakKeyDictionary

from runtime.call_sites import calling_line, line_name
from runtime.emulator.driver.emulated_driver import DryDriver, EmulatedDriver
from runtime.emulator.driver.state import Refused, Stream
from runtime.emulator.nccl.board import ABORTED, LEFT, NOT_JOINED, RING, STATE, Board, Call, new_unique_id, open_by_id
from runtime.emulator.nccl.communicator import ELEMENTS, LOOK_S, Communicator, Messages, Template
from runtime.emulator.races.stream_order import DriverFault

VERSION = 22_700
_SUCCESS, _CUDA_ERROR, _INVALID_ARGUMENT, _INVALID_USAGE, _REMOTE_ERROR = 0, 1, 4, 5, 6
_TEXTS = {
    1: "unhandled cuda error", 4: "invalid argument", 5: "invalid usage",
    6: "remote process exited or there was a network error",
}  # fmt: skip
_ALIGNMENT = 4096
_FLAGS = 1  # NCCL_WIN_COLL_SYMMETRIC
_MOST_MESSAGES = RING // 16

_P = ParamSpec("_P")


class _Failed(Exception):
    """A function ends with a result that is no success."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.code, self.reason = code, reason


def _function(
    body: Callable[Concatenate[EmulatedNccl, _P], Any],
) -> Callable[Concatenate[EmulatedNccl, _P], tuple[Any, ...]]:
    """A method as a function of NCCL: under the driver's lock, with its result's number first."""

    @functools.wraps(body)
    def call(self: EmulatedNccl, /, *arguments: _P.args, **keywords: _P.kwargs) -> tuple[Any, ...]:
        try:
            with self.driver.calling():
                value = body(self, *arguments, **keywords)
        except _Failed as failure:
            self.last_error = failure.reason
            return failure.code, None
        except Refused as refusal:
            self.last_error = refusal.reason or str(refusal.status)
            return _CUDA_ERROR, None
        except DriverFault as failed:
            self.last_error = str(failed)
            return _REMOTE_ERROR, None
        return (_SUCCESS,) if value is None else (_SUCCESS, value)

    return call


class _Group(threading.local):
    """Calls of a thread that wait for its group's end: its depth, works to queue, ranks to wait for."""

    def __init__(self) -> None:
        self.depth = 0
        self.messages: dict[tuple[Communicator, Stream], list[tuple[Call, int, int]]] = {}
        self.joining: list[tuple[Communicator, bytes]] = []
        self.registering: list[tuple[Communicator, Call, int]] = []


class EmulatedNccl:
    """The NCCL of one driver.

    Attributes:
        driver: the driver.
        last_error: the text of the last failed call.
    """

    is_dry = False

    def __init__(self, driver: EmulatedDriver) -> None:
        self.driver = driver
        self.last_error = ""
        self._comms: dict[int, Communicator] = {}
        self._group = _Group()
        self._memory: dict[bytes, int] = {}  # of unique ids made here: open until all ranks have joined
        self._allocated: dict[int, int] = {}  # addresses of `ncclMemAlloc`, and the driver's

    def words(self, code: int, comm: Any = None) -> str:
        """NCCL's text of a result, and of the last error."""
        text = _TEXTS.get(code, "internal error")
        return f"{text}: {self.last_error}" if self.last_error else text

    # -- communicators ------------------------------------------------------------------------------------------------

    def ncclGetVersion(self) -> tuple[int, int]:
        return _SUCCESS, VERSION

    def ncclGetUniqueId(self) -> tuple[Any, ...]:
        unique_id, descriptor = new_unique_id()
        self._memory[unique_id] = descriptor  # joining ranks open it by this number
        return _SUCCESS, unique_id

    def forget(self, unique_ids: list[bytes]) -> None:
        """Closes what is still open of communicators that others have joined, and this process does not."""
        for unique_id in unique_ids:
            if (descriptor := self._memory.pop(unique_id, None)) is not None:
                os.close(descriptor)

    @_function
    def ncclCommInitRank(self, nranks: int, comm_id: bytes, rank: int) -> int:
        try:
            descriptor = open_by_id(comm_id)
        except (OSError, ValueError) as error:
            raise _Failed(_INVALID_ARGUMENT, f"no communicator has this unique id: {error}") from None
        try:
            board = Board(descriptor, rank, nranks)
            board.join()
        except ValueError as error:
            raise _Failed(_INVALID_USAGE, str(error)) from None
        finally:
            os.close(descriptor)
        comm = Communicator(self.driver, self.driver.context(), board)
        handle = self.driver.new_handle()
        self._comms[handle] = comm
        self._group.joining.append((comm, comm_id))
        self._end_if_alone()
        return handle

    @_function
    def ncclCommFinalize(self, comm: int) -> None:
        found = self._comm(comm)
        self.driver.scheduler.finish_all(found.context)

    @_function
    def ncclCommDestroy(self, comm: int) -> None:
        self._leave(comm, LEFT)

    @_function
    def ncclCommAbort(self, comm: int) -> None:
        self._leave(comm, ABORTED)

    def _leave(self, handle: int, state: int) -> None:
        comm = self._comm(handle)
        del self._comms[handle]
        comm.board.records[comm.rank][STATE] = state

    @_function
    def ncclCommGetAsyncError(self, comm: int) -> int:
        found = self._comm(comm)
        if not found.board.has_failed:
            return _SUCCESS
        self.last_error = found.board.failure
        return _INVALID_USAGE

    def _comm(self, handle: int) -> Communicator:
        found = self._comms.get(handle)
        if found is None:
            raise _Failed(_INVALID_ARGUMENT, f"communicator {handle or 0:#x} does not exist")
        return found

    # -- groups -------------------------------------------------------------------------------------------------------

    def ncclGroupStart(self) -> tuple[int]:
        self._group.depth += 1
        return (_SUCCESS,)

    @_function
    def ncclGroupEnd(self) -> None:
        group = self._group
        if not group.depth:
            raise _Failed(_INVALID_USAGE, "ncclGroupEnd without ncclGroupStart")
        group.depth -= 1
        self._end_if_alone()

    def _end_if_alone(self) -> None:
        """The end of a group, or of a call outside of one."""
        group = self._group
        if group.depth:
            return
        joining, group.joining = group.joining, []
        registering, group.registering = group.registering, []
        queued, group.messages = group.messages, {}
        for comm, unique_id in joining:
            self._wait(comm, functools.partial(_have_joined, comm))
            if (descriptor := self._memory.pop(unique_id, None)) is not None:
                os.close(descriptor)
        for comm, call, number in registering:
            self.driver.scheduler.finish_all(comm.context)
            self._wait(comm, functools.partial(comm.compare, comm.board.everyone, number, call))
            comm.board.everyone.done = number
        for batches in itertools.zip_longest(*map(_batches, queued.values())):
            for (comm, stream), batch in zip(queued, batches):
                if batch:
                    self.driver.submit(stream, Messages(comm, tuple(batch)))

    def _wait(self, comm: Communicator, is_so: Callable[[], bool]) -> None:
        """Waits for a condition, without the driver's lock. Raises DriverFault where a rank cannot come any more."""
        looked_s = 0.0
        while not is_so():
            comm.raise_if_failed()
            now = time.monotonic()
            if now - looked_s > LOOK_S:
                looked_s = now
                for rank in range(comm.num_ranks):
                    if rank != comm.rank and (why := comm.board.why_it_cannot_come(rank)):
                        comm.fail([f"rank {comm.rank} waits for all to join; rank {rank} {why}"])
            self.driver.wait_a_moment()

    # -- collectives --------------------------------------------------------------------------------------------------

    @_function
    def ncclAllReduce(self, source: int, target: int, count: int, dtype: int, op: int, comm: int, stream: Any) -> None:
        if op != 0:
            raise _Failed(_INVALID_ARGUMENT, f"operation {op}: sums alone are emulated")
        self._collective(comm, stream, "AllReduce", source, target, count, dtype, writes=1)

    @_function
    def ncclAllGather(self, source: int, target: int, count: int, dtype: int, comm: int, stream: Any) -> None:
        self._collective(comm, stream, "AllGather", source, target, count, dtype, writes=self._comm(comm).num_ranks)

    @_function
    def emuEndStep(self, number: int, comm: int, stream: Any) -> None:
        """A step's collectives have all been called: a rank that had fewer, or more, is found."""
        found = self._comm(comm)
        self._check_alive(found)
        self.driver.submit(self.driver.stream(stream), Template(found, Call("end of step", number), 0, 0))

    def _collective(
        self, handle: int, stream: Any, kind: str, source: int, target: int, count: int, dtype: int, *, writes: int
    ) -> None:
        comm = self._comm(handle)
        self._check_alive(comm)
        size = self._size(count, dtype)
        if not count:
            return
        source_place, target_place = comm.place_of(source, size), comm.place_of(target, size * writes)
        call = Call(kind, count, dtype, -1, source_place, target_place, line_name(*calling_line()))
        self.driver.submit(self.driver.stream(stream), Template(comm, call, source, target))

    @staticmethod
    def _size(count: int, dtype: int) -> int:
        if dtype not in ELEMENTS:
            raise _Failed(_INVALID_ARGUMENT, f"data type {dtype}")
        if count < 0:
            raise _Failed(_INVALID_ARGUMENT, f"a count of {count}")
        return count * int(ELEMENTS[dtype].itemsize)

    @staticmethod
    def _check_alive(comm: Communicator) -> None:
        if comm.board.has_failed:
            raise _Failed(_REMOTE_ERROR, comm.board.failure)

    # -- messages -----------------------------------------------------------------------------------------------------

    @_function
    def ncclSend(self, source: int, count: int, dtype: int, peer: int, comm: int, stream: Any) -> None:
        self._message("Send", source, count, dtype, peer, comm, stream)

    @_function
    def ncclRecv(self, target: int, count: int, dtype: int, peer: int, comm: int, stream: Any) -> None:
        self._message("Recv", target, count, dtype, peer, comm, stream)

    def _message(self, kind: str, address: int, count: int, dtype: int, peer: int, handle: int, stream: Any) -> None:
        comm = self._comm(handle)
        self._check_alive(comm)
        self._size(count, dtype)
        if not 0 <= peer < comm.num_ranks or peer == comm.rank:
            raise _Failed(_INVALID_ARGUMENT, f"peer {peer} of rank {comm.rank} of {comm.num_ranks}")
        if count:
            call = Call(kind, count, dtype, peer, place=line_name(*calling_line()))
            key = comm, self.driver.stream(stream)
            self._group.messages.setdefault(key, []).append((call, address, peer))
        self._end_if_alone()

    # -- windows ------------------------------------------------------------------------------------------------------

    @_function
    def ncclMemAlloc(self, size: int) -> int:
        status, pointer = self.driver.cuMemAlloc(-(-size // _ALIGNMENT) * _ALIGNMENT + _ALIGNMENT)
        if status:
            raise _Failed(_CUDA_ERROR, self.driver.last_reason)
        # The device's own addresses are not aligned so: the bytes before that are unused.
        first = -(-int(pointer) // _ALIGNMENT) * _ALIGNMENT
        self._allocated[first] = int(pointer)
        return first

    @_function
    def ncclMemFree(self, pointer: int) -> None:
        if pointer not in self._allocated:
            raise _Failed(_INVALID_ARGUMENT, f"{pointer or 0:#x} is no memory of ncclMemAlloc")
        (status,) = self.driver.cuMemFree(self._allocated.pop(pointer))
        if status:
            raise _Failed(_CUDA_ERROR, self.driver.last_reason)

    @_function
    def ncclCommWindowRegister(self, comm: int, address: int, size: int, flags: int) -> int:
        found = self._comm(comm)
        self._check_alive(found)
        if address % _ALIGNMENT or size % _ALIGNMENT or size <= 0:
            raise _Failed(_INVALID_ARGUMENT, f"a window of {size} bytes at {address:#x}: not multiples of {_ALIGNMENT}")
        if flags & ~_FLAGS:
            raise _Failed(_INVALID_ARGUMENT, f"window flags {flags:#x}")
        if address not in self._allocated:
            raise _Failed(_INVALID_ARGUMENT, f"{address:#x} is no memory of ncclMemAlloc")
        call = Call("CommWindowRegister", size, place=line_name(*calling_line()))
        found.windows.append((address, size) if flags else None)
        self._group.registering.append((found, call, found.post(found.board.everyone, call)))
        self._end_if_alone()
        return len(found.windows)

    @_function
    def ncclCommWindowDeregister(self, comm: int, window: int) -> None:
        windows = self._comm(comm).windows
        if not 1 <= window <= len(windows):
            raise _Failed(_INVALID_ARGUMENT, f"window {window}")
        windows[window - 1] = None


def _batches(messages: list[tuple[Call, int, int]]) -> list[list[tuple[Call, int, int]]]:
    """Messages that run one after another: of each batch a ring holds those to each peer, and those from it."""
    counts: Counter[tuple[str, int]] = Counter()
    found: list[list[tuple[Call, int, int]]] = []
    for message in messages:
        call, _, peer = message
        number = counts[call.kind, peer] // _MOST_MESSAGES
        counts[call.kind, peer] += 1
        if number == len(found):
            found.append([])
        found[number].append(message)
    return found


def _have_joined(comm: Communicator) -> bool:
    return all(record[STATE] != NOT_JOINED for record in comm.board.records)


class DryNccl:
    """Functions as `EmulatedNccl` has them; all succeed."""

    is_dry = True

    def __init__(self, driver: DryDriver) -> None:
        self._driver = driver

    def words(self, code: int, comm: Any = None) -> str:
        return "nothing fails"

    def _accept(self, *_: Any) -> tuple[int]:
        return (0,)

    def _handle(self, *_: Any) -> tuple[int, int]:
        return 0, 1

    def ncclGetVersion(self) -> tuple[int, int]:
        return 0, VERSION

    def ncclGetUniqueId(self) -> tuple[int, bytes]:
        return 0, bytes(128)

    def ncclCommGetAsyncError(self, comm: int) -> tuple[int, int]:
        return 0, 0

    def ncclMemAlloc(self, size: int) -> tuple[int, int]:
        return 0, int(self._driver.cuMemAlloc(size)[1])

    ncclCommInitRank = ncclCommWindowRegister = _handle
    ncclCommFinalize = ncclCommDestroy = ncclCommAbort = ncclCommWindowDeregister = ncclMemFree = _accept
    ncclAllReduce = ncclAllGather = ncclSend = ncclRecv = emuEndStep = _accept
    ncclGroupStart = ncclGroupEnd = _accept


_of_drivers: WeakKeyDictionary[EmulatedDriver, EmulatedNccl] = WeakKeyDictionary()


def nccl_of(driver: EmulatedDriver) -> EmulatedNccl | DryNccl:
    """The driver's only NCCL."""
    if isinstance(driver, DryDriver):
        return DryNccl(driver)
    if driver not in _of_drivers:
        _of_drivers[driver] = EmulatedNccl(driver)
    return _of_drivers[driver]
