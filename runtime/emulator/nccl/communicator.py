"""One rank of an emulated communicator: its calls, its progress, and whether the others can join.

Each collective is compared among all ranks before data moves: function, count, type, operation, root, and the
places in windows. If ranks differ, or one cannot join any more, the communicator fails for all of them, and each error
has every rank's call and the model's line.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.emulator.driver.state import Context, DriverState
from runtime.emulator.driver.work_queues import Work
from runtime.emulator.execution.fault import FaultKind
from runtime.emulator.memory.device_memory import DeviceMemoryError
from runtime.emulator.nccl.board import ABORTED, LEFT, POSTED, RING, STATE, THREAD, Board, Call, described, window_place
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
        done: collectives that this rank has done; turn: pieces of them.
        windows: (address, bytes) of each that was registered; None once it was deregistered.
    """

    def __init__(self, driver: DriverState, context: Context, board: Board) -> None:
        self.board, self.context, self.driver = board, context, driver
        self.memory = CheckedMemory(driver, context)
        self.rank, self.num_ranks = board.rank, board.num_ranks
        self.posted = self.done = self.turn = 0
        self.windows: list[tuple[int, int] | None] = []
        self._looked_s = self._waits_since = 0.0
        self._waits_for = 0

    # -- calls --------------------------------------------------------------------------------------------------------

    def place_of(self, address: int, size: int) -> int:
        """A buffer's place in a window, as in `Call`; 0 outside windows."""
        for number, window in enumerate(self.windows):
            if window is not None and window[0] <= address and address + size <= window[0] + window[1]:
                return window_place(number, address - window[0])
        return 0

    def post(self, call: Call) -> int:
        """Posts this rank's next collective to the others; returns its number."""
        while self.posted - self.done >= RING - 1:
            self.driver.scheduler.finish_all(self.context)
        self.posted += 1
        self.board.rings[self.rank].put(self.posted, call)
        mine = self.board.records[self.rank]
        mine[THREAD] = threading.get_ident()
        mine[POSTED] = self.posted
        return self.posted

    def compare(self, number: int, mine: Call) -> bool:
        """Whether all ranks have called their collective of this number, and the same one. Raises DriverFault."""
        board = self.board
        calls: list[tuple[int, Call]] = []
        for rank in range(self.num_ranks):
            if board.records[rank][POSTED] >= number:
                calls.append((rank, board.rings[rank].get(number)))
        if any(not call.agrees_with(mine) for _, call in calls):
            self._wait_for_words(number)
            self.fail_by([(r, board.rings[r].get(number)) for r in range(self.num_ranks)
                          if board.records[r][POSTED] >= number])  # fmt: skip
        if len(calls) == self.num_ranks:
            return True
        self.look_for_the_missing(number, lambda rank: board.records[rank][POSTED] < number)
        return False

    def _wait_for_words(self, number: int) -> None:
        """Waits a moment for other ranks' calls."""
        until = time.monotonic() + 0.2
        while time.monotonic() < until:
            if all(record[POSTED] >= number for record in self.board.records):
                return
            time.sleep(0.001)

    # -- the end ------------------------------------------------------------------------------------------------------

    def raise_if_failed(self) -> None:
        """Raises DriverFault where a rank found a fault."""
        if self.board.has_failed:
            raise _fault(self.board.failure)
        if self.board.records[self.rank][STATE] in (LEFT, ABORTED):
            raise _fault(f"rank {self.rank} has left the communicator")

    def fail_by(self, calls: Sequence[tuple[int, Call]]) -> None:
        """For ranks that differ: raises DriverFault with every rank's call."""
        said = dict(calls)
        words = []
        for rank in range(self.num_ranks):
            if rank in said:
                words.append(f"rank {rank} called {described(said[rank])}")
            elif len(calls) < self.num_ranks and rank not in said:
                words.append(self._last_of(rank))
        self.fail("; ".join(word for word in words if word))

    def look_for_the_missing(self, number: int, is_missing: Callable[[int], bool]) -> None:
        """Checks now and then whether a rank missing at this collective cannot join any more. Raises DriverFault."""
        self.raise_if_failed()
        if not self._is_time_to_look():
            return
        for rank in range(self.num_ranks):
            if rank == self.rank or not is_missing(rank):
                continue
            if self._waits_for != number:
                self._waits_for, self._waits_since = number, self._looked_s
            # A rank of the same thread could be called by another thread, but not for long.
            is_fresh = self._looked_s - self._waits_since < PATIENCE_S
            has_called = is_fresh or self.board.records[rank][POSTED] >= number
            if (why := self.board.why_it_cannot_come(rank, has_called=has_called)) and is_missing(rank):
                calls = [
                    f"rank {each} called {described(self.board.rings[each].get(number))}"
                    for each in range(self.num_ranks) if self.board.records[each][POSTED] >= number
                ]  # fmt: skip
                self.fail("; ".join([*calls, f"rank {rank} {why}, {self._last_words(rank)}"]))

    def look_for_the_missing_peer(self, peer: int, call: Call, *, is_send: bool) -> None:
        """The same for a message."""
        self.raise_if_failed()
        if self._is_time_to_look() and (why := self.board.why_it_cannot_come(peer, has_called=True)):
            channel = self.board.channel(*((self.rank, peer) if is_send else (peer, self.rank)))
            mine, theirs = channel.sender[POSTED], channel.receiver[POSTED]
            if (theirs < mine) if is_send else (mine < theirs):
                self.fail(f"rank {self.rank} called {described(call)}; rank {peer} {why}, {self._last_words(peer)}")

    def is_missing_nobody(self, peer: int, call: Call) -> bool:
        """False, where a message has to wait for a peer that lives. Raises DriverFault."""
        self.raise_if_failed()
        if self._is_time_to_look() and (why := self.board.why_it_cannot_come(peer, has_called=True)):
            self.fail(f"rank {self.rank} called {described(call)}; rank {peer} {why}, {self._last_words(peer)}")
        return False

    def _is_time_to_look(self) -> bool:
        now = time.monotonic()
        if now - self._looked_s < LOOK_S:
            return False
        self._looked_s = now
        return True

    def _last_words(self, rank: int) -> str:
        posted = self.board.records[rank][POSTED]
        if not posted:
            return "without a call"
        return f"its last call {described(self.board.rings[rank].get(posted))}"

    def _last_of(self, rank: int) -> str:
        why = self.board.why_it_cannot_come(rank) or "has not come"
        return f"rank {rank} {why}, {self._last_words(rank)}"

    def fail(self, words: str) -> None:
        """Ends the communicator for all ranks. Raises DriverFault."""
        self.board.fail(f"ranks do not do the same: {words}")
        raise _fault(self.board.failure)


def _fault(text: str) -> DriverFault:
    """Ranks whose calls differ."""
    return DriverFault(FaultKind.RANKS_DIFFER, text)
