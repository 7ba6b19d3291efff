"""One rank of an emulated communicator: its calls, its progress, and whether the others can join.

Each collective is compared among all ranks before data moves: function, count, type, and the places in
windows. If ranks differ, or one cannot join any more, the communicator fails for all of them, and each error
has every rank's call and the model's line.

Collectives and messages are works of a stream, which park until the other ranks have joined. A work is done in pieces:
this rank's numbers are read from its device's memory with all checks and put into its slot of the board; when all
ranks' are there the result is written with all checks. Ranks' numbers are added in the order of ranks, in float32 where
the type is narrower.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
from cuda.bindings import driver as cu
from numpy.typing import NDArray

from runtime.emulator.driver.state import Context, DriverState
from runtime.emulator.driver.work_queues import Meeting, MeetingTemplate, Work
from runtime.emulator.execution.fault import FaultKind
from runtime.emulator.memory.device_memory import DeviceMemoryError
from runtime.emulator.nccl.board import (
    ABORTED,
    LEFT,
    PUBLISHED,
    RING,
    SLOT_BYTES,
    STATE,
    THREAD,
    Board,
    Call,
    Group,
    described,
    window_place,
)
from runtime.emulator.races.stream_order import DriverFault

LOOK_S = 0.05
"""Interval at which a waiting rank checks that the others still live."""
PATIENCE_S = 0.4
"""Wait for a rank that the waiting thread itself called last."""


class CheckedMemory:
    """A device's memory, as collectives read and write it."""

    def __init__(self, driver: DriverState, context: Context) -> None:
        self._driver, self._machine = driver, context.machine

    def check(self, work: Work, label: str, address: int, size: int, *, is_write: bool) -> None:
        """Makes a copy's checks of these bytes, and checks that bytes read were written. Raises DeviceMemoryError and
        Conflict, as a copy."""
        if not size:
            return
        machine = self._machine
        machine.check(address, size, label, is_write=is_write)
        machine.check_block(address, size, label)
        if not is_write and not machine.is_written(address, size):
            raise DeviceMemoryError(
                f"{label} reads {size:,} bytes at {address:#x} on emulated device {machine.index}, some of which"
                f" nothing has written: {machine.describe(address)}", address,
            )  # fmt: skip
        self._driver.order.touch(work, machine, address, size, is_write=is_write)

    def write(self, address: int, data: NDArray[np.uint8]) -> None:
        """Bytes of a range that was checked."""
        data = np.ascontiguousarray(data)
        ctypes.memmove(address, data.ctypes.data, data.nbytes)
        self._machine.mark_written(address, data.nbytes)


class Communicator:
    """One rank.

    Attributes:
        board: shared by the ranks.
        memory: this rank's device's.
        context: of its works.
        windows: (address, bytes) of each that was registered; None once it was deregistered.
    """

    def __init__(self, driver: DriverState, context: Context, board: Board) -> None:
        self.board, self.context, self.driver = board, context, driver
        self.memory = CheckedMemory(driver, context)
        self.rank, self.num_ranks = board.rank, board.num_ranks
        self.windows: list[tuple[int, int] | None] = []
        self._looked_s = self._waits_since = 0.0
        self._waits_for: tuple[Group, int] | None = None

    # -- calls --------------------------------------------------------------------------------------------------------

    def place_of(self, address: int, size: int) -> int:
        """A buffer's place in a window, as in `Call`; 0 outside windows."""
        for number, window in enumerate(self.windows):
            if window is not None and window[0] <= address and address + size <= window[0] + window[1]:
                return window_place(number, address - window[0])
        return 0

    def post(self, group: Group, call: Call) -> int:
        """Posts this rank's next collective to the others of a group; returns its number."""
        while group.posted - group.done >= RING - 1:
            self.driver.scheduler.finish_all(self.context)
        self.board.records[self.rank][THREAD] = threading.get_ident()
        return group.post(call)

    def compare(self, group: Group, number: int, mine: Call) -> bool:
        """Whether all ranks have called their collective of this number, and the same one. Raises DriverFault."""
        calls = group.calls(number)
        if any(not call.agrees_with(mine) for _, call in calls):
            until = time.monotonic() + 0.2  # for the words of the others
            while len(calls) < len(group.ranks) and time.monotonic() < until:
                time.sleep(0.001)
                calls = group.calls(number)
            said = dict(calls)
            self.fail(f"rank {rank} called {described(said[rank])}" if rank in said else self._last_of(rank)
                      for rank in group.ranks)  # fmt: skip
        if len(calls) == len(group.ranks):
            return True
        self.look_for_the_missing(group, number, lambda: set(group.ranks) - {rank for rank, _ in group.calls(number)})
        return False

    # -- the end ------------------------------------------------------------------------------------------------------

    def raise_if_failed(self) -> None:
        """Raises DriverFault where a rank found a fault."""
        if self.board.has_failed:
            raise _fault(self.board.failure)
        if self.board.records[self.rank][STATE] in (LEFT, ABORTED):
            raise _fault(f"rank {self.rank} has left the communicator")

    def look_for_the_missing(self, group: Group, number: int, missing: Callable[[], Iterable[int]]) -> None:
        """Checks now and then whether a rank missing at this collective cannot join any more. Raises DriverFault."""
        self.raise_if_failed()
        if not self._is_time_to_look():
            return
        for rank in missing():
            if self._waits_for != (group, number):
                self._waits_for, self._waits_since = (group, number), self._looked_s
            # A rank of the same thread could be called by another thread, but not for long; a message's peer at any
            # time.
            is_fresh = group is not self.board.everyone or self._looked_s - self._waits_since < PATIENCE_S
            calls = group.calls(number)
            why = self.board.why_it_cannot_come(rank, has_called=is_fresh or rank in dict(calls))
            if why and rank in missing():
                said = [f"rank {each} called {described(call)}" for each, call in calls if each != rank]
                self.fail([*said, f"rank {rank} {why}, {self._last_words(rank)}"])

    def _is_time_to_look(self) -> bool:
        now = time.monotonic()
        if now - self._looked_s < LOOK_S:
            return False
        self._looked_s = now
        return True

    def _last_words(self, rank: int) -> str:
        call = self.board.everyone.last_call(rank)
        return "without a call" if call is None else f"its last call {described(call)}"

    def _last_of(self, rank: int) -> str:
        return f"rank {rank} {self.board.why_it_cannot_come(rank) or 'has not come'}, {self._last_words(rank)}"

    def fail(self, words: Iterable[str]) -> NoReturn:
        """Ends the communicator for all ranks. Raises DriverFault."""
        self.board.fail(f"ranks do not do the same: {'; '.join(words)}")
        raise _fault(self.board.failure)


def _fault(text: str) -> DriverFault:
    """Ranks whose calls differ."""
    return DriverFault(FaultKind.RANKS_DIFFER, text)


ELEMENTS: dict[int, Any] = {
    0: np.dtype(np.int8), 1: np.dtype(np.uint8), 2: np.dtype(np.int32), 3: np.dtype(np.uint32), 4: np.dtype(np.int64),
    5: np.dtype(np.uint64), 6: np.dtype(np.float16), 7: np.dtype(np.float32), 8: np.dtype(np.float64),
    9: np.dtype(ml_dtypes.bfloat16), 10: np.dtype(ml_dtypes.float8_e4m3fn), 11: np.dtype(ml_dtypes.float8_e5m2),
}  # fmt: skip
"""Types by their numbers in `ncclDataType_t`."""


@dataclass(frozen=True, slots=True)
class Template(MeetingTemplate):
    """A collective as it was called, queued in a stream, or held by a graph for every run.

    Attributes:
        call: its record for the other ranks.
        source, target: addresses; 0 where the rank has no such buffer.
    """

    comm: Communicator
    call: Call
    source: int
    target: int

    node_type = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_HOST

    @property
    def label(self) -> str:
        return f"nccl{self.call.kind} at {self.call.place}"

    def queued(self) -> Meeting:
        """The work of one run, posted to the other ranks."""
        return _Collective(self, self.comm.board.everyone)


class _Collective(Meeting):
    """One run of a collective among the ranks of a group."""

    def __init__(self, template: Template, group: Group) -> None:
        self._template, self._comm, self._group = template, template.comm, group
        call = template.call
        self._number = self._comm.post(group, call)
        self._kind, self._element = call.kind, ELEMENTS.get(call.dtype, np.dtype(np.uint8))
        each = SLOT_BYTES // self._element.itemsize
        self._count = call.count if call.dtype >= 0 else 0
        self._pieces = [(first, min(each, self._count - first)) for first in range(0, self._count, each)]
        self._next = 0
        self._is_compared = self._is_published = False

    @property
    def label(self) -> str:
        return self._template.label

    def advance(self, work: Work) -> bool:
        """Makes progress; returns whether it is done. Raises DriverFault where the ranks' calls differ."""
        comm, group = self._comm, self._group
        if group.done != self._number - 1:  # of another stream, and called earlier
            comm.raise_if_failed()
            return False
        if not self._is_compared:
            if not comm.compare(group, self._number, self._template.call):
                return False
            self._is_compared = True
            self._check(work)
        while self._next < len(self._pieces):
            first, count = self._pieces[self._next]
            turn = group.turn + 1
            # A sender waits only until its piece before was taken; a receiver publishes a turn when it has taken
            # the piece.
            if self._kind == "Send" and self._waits_for(turn - 1):
                return False
            if not self._is_published and self._kind != "Recv":
                self._publish(first, count, turn)
                group.mine[PUBLISHED] = turn
                self._is_published = True
            if self._kind != "Send":
                if self._waits_for(turn):
                    return False
                self._combine(first, count, turn)
            group.mine[PUBLISHED] = turn
            group.turn, self._next, self._is_published = turn, self._next + 1, False
        group.done = self._number
        return True

    def _waits_for(self, turn: int) -> bool:
        """Whether another rank's piece of a turn is not there yet. Raises DriverFault where it cannot come."""
        if not self._group.lacks(turn):
            return False
        self._comm.look_for_the_missing(self._group, self._number, partial(self._group.lacks, turn))
        return True

    def _check(self, work: Work) -> None:
        """All bytes read and written, for the checkers."""
        template, ranks, size = self._template, self._comm.num_ranks, self._count * self._element.itemsize
        reads = 0 if self._kind == "Recv" else size
        writes = 0 if self._kind == "Send" else size * (ranks if self._kind == "AllGather" else 1)
        self._comm.memory.check(work, self.label, template.source, reads, is_write=False)
        self._comm.memory.check(work, self.label, template.target, writes, is_write=True)

    def _publish(self, first: int, count: int, turn: int) -> None:
        size = self._element.itemsize
        ctypes.memmove(self._group.my_slot(turn).ctypes.data, self._template.source + first * size, count * size)

    def _combine(self, first: int, count: int, turn: int) -> None:
        size, slots = self._element.itemsize, self._group.slots(turn)
        at, memory = self._template.target + first * size, self._comm.memory
        if self._kind == "AllGather":
            for rank, slot in enumerate(slots):
                memory.write(at + rank * self._count * size, slot[: count * size])
        elif self._kind == "Recv":
            memory.write(at, slots[0][: count * size])
        else:
            numbers = [slot[: count * size].view(self._element) for slot in slots]
            memory.write(at, _sum(numbers).view(np.uint8))


def _sum(numbers: list[NDArray[Any]]) -> NDArray[Any]:
    """The sums of all ranks' numbers."""
    element = numbers[0].dtype
    is_narrow = element.kind not in "iu" and element.itemsize < 4
    result = numbers[0].astype(np.float32 if is_narrow else element)
    with np.errstate(all="ignore"):
        for each in numbers[1:]:
            result += each.astype(result.dtype)
        return result.astype(element)


@dataclass(frozen=True, slots=True)
class Messages(MeetingTemplate):
    """Sends and receives of one group: they run at the same time.

    Attributes:
        messages: each call, the address of its buffer, and the peer.
    """

    comm: Communicator
    messages: tuple[tuple[Call, int, int], ...]

    node_type = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_HOST

    @property
    def label(self) -> str:
        call = self.messages[0][0]
        return f"nccl{call.kind} at {call.place}"

    def queued(self) -> Meeting:
        """The work of one run, posted to the peers."""
        parts = []
        for call, address, peer in self.messages:
            pair = (self.comm.rank, peer) if call.kind == "Send" else (peer, self.comm.rank)
            template = Template(self.comm, call, address, address)
            parts.append(_Collective(template, self.comm.board.pair(*pair)))
        return _Exchange(self.label, parts)


class _Exchange(Meeting):
    """One run of sends and receives."""

    def __init__(self, label: str, parts: list[_Collective]) -> None:
        self._label, self._parts = label, parts

    @property
    def label(self) -> str:
        return self._label

    def advance(self, work: Work) -> bool:
        """Makes progress; returns whether it is done. Raises DriverFault where a peer's call differs."""
        self._parts = [part for part in self._parts if not part.advance(work)]
        return not self._parts
