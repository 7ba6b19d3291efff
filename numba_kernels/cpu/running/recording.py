"""Launches that are recorded once and then replayed in one compiled call, as a graph is on a GPU.

    with record(arena) as recording:     # this thread's kernels are noted down and do not run
        step(tensors)
    recording.replay()                   # they run, with the same arguments at the same addresses

Running a step's kernels together keeps the threads at work from the first to the last: Python's work between two of
them, with cold caches, takes longer than many a kernel.

Every address that a recording holds is one of three. It lies in the arena, where `new_array` makes the kernels'
outputs; or in an array that is older than the recording (weights, pages, inputs that are overwritten in place), as
operations declare by `lives_on`; or in a constant that an operation gives away (`hold`). The recording keeps the latter
two alive. Any other address ends it at once with NotRecordableError: a replay would find a temporary array (numpy's
result, say) freed, or with the numbers of the first time.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from numba_kernels.cpu.running import pool
from numba_kernels.cpu.running.arena import Arena

Explain = Callable[[int], Exception]
"""The error that a kernel's nonzero status stands for."""

_LINE_BYTES = 64
_ROW_BYTES = 8 * pool.PROGRAM_COLUMNS

next_number = itertools.count().__next__
"""Numbers that rise from one creation to the next in this process: the older of two objects has the lower one."""


class _Numbered(Protocol):
    """An object numbered by `next_number` when it was made."""

    @property
    def number(self) -> int: ...


class NotRecordableError(Exception):
    """The work did something besides launching kernels on memory that stays."""


class _Thread(threading.local):
    recording: Recording | None = None


_thread = _Thread()


def current() -> Recording | None:
    """This thread's recording; None if its kernels run when they are called."""
    return _thread.recording


def new_array(shape: tuple[int, ...], dtype: type | np.dtype) -> np.ndarray:
    """An uninitialised array for a kernel to write to."""
    recording = _thread.recording
    return np.empty(shape, dtype) if recording is None else recording.arena.new_array(shape, dtype)


def hold(*arrays: np.ndarray) -> None:
    """Keeps read-only arrays of kernels alive as long as this thread's recording, if any."""
    if _thread.recording is not None:
        for array in arrays:
            _thread.recording.hold(array)


def mark(number: int) -> None:
    """See `Recording.mark`. Without a recording nothing happens."""
    if _thread.recording is not None:
        _thread.recording.mark(number)


@contextlib.contextmanager
def record(arena: Arena) -> Iterator[Recording]:
    """Records this thread's kernels instead of running them. Raises NotRecordableError for work that has no replay."""
    assert _thread.recording is None, "the thread records already"
    recording = Recording(arena)
    _thread.recording = recording
    try:
        yield recording
    finally:
        _thread.recording = None
    recording.close()


class Recording:
    """Launches in their order, with arguments of their own.

    arena  where `new_array` cuts from, kept as long as this
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._number = next_number()
        self._held: dict[int, tuple[object, int]] = {}  # by address: the owner that keeps it valid, and bytes
        self._launches: list[tuple[int, bytes, int, int, int, Explain | None]] = []
        self.names: list[str] = []  # of the launches' kernels
        self._blocks = np.empty(0, np.uint8)
        self._program = np.empty((0, pool.PROGRAM_COLUMNS), np.int64)
        self._num_helpers = self._program_address = 0
        self._marks: list[tuple[int, int]] = []  # a number, and the launches before it

    def __len__(self) -> int:
        """Launches."""
        return len(self._launches)

    @property
    def size_bytes(self) -> int:
        """Bytes of launches and arguments; the arena is not counted."""
        return self._blocks.nbytes + self._program.nbytes

    def add(
        self, function: int, arguments: bytes, num_work_items: int, num_workers: int, explain: Explain | None,
        counter: int = 0, name: str = "",
    ) -> None:  # fmt: skip
        """The next launch. ``arguments`` begin with the status, 0. ``counter``: bytes before the word that is set to 0
        after it, if any. ``name``: the kernel's."""
        self._launches.append((function, arguments, num_work_items, num_workers, counter, explain))
        self.names.append(name)

    def mark(self, number: int) -> None:
        """A replay can tell when the launches so far have run."""
        self._marks.append((number, len(self._launches)))

    def keep(self, function: int) -> None:
        """Drops all marks, and all launches so far but those of one kernel, by its address."""
        self._marks.clear()
        kept = [place for place, each in enumerate(self._launches) if each[0] == function]
        self._launches, self.names = [self._launches[place] for place in kept], [self.names[place] for place in kept]

    def lives_on(self, owner: _Numbered, address: int, size_bytes: int, what: str) -> None:
        """A kernel will read or write ``size_bytes`` at ``address``, which are valid as long as ``owner`` lives.

        Raises NotRecordableError, with ``what`` it is, if the owner is not older than this."""
        if address in self._held or self.arena.holds(address):
            return
        if size_bytes and owner.number > self._number:
            raise NotRecordableError(f"{what} is an array that no recorded kernel has made")
        self._held[address] = owner, size_bytes

    def hold(self, array: np.ndarray) -> None:
        """See `hold`."""
        self._held[array.__array_interface__["data"][0]] = array, array.nbytes

    def check(self, address: int, what: str) -> None:
        """Raises NotRecordableError for an address, of ``what``, that may not be valid as long as the recording."""
        if address == 0 or address in self._held or self.arena.holds(address):
            return
        if not any(start <= address < start + size for start, (_, size) in self._held.items()):
            raise NotRecordableError(f"{what} lies in memory that no recorded kernel has made")

    def close(self) -> None:
        """No more launches come."""
        sizes = [-(-len(arguments) // _LINE_BYTES) * _LINE_BYTES for _, arguments, *_ in self._launches]
        memory = np.zeros(sum(sizes) + _LINE_BYTES, np.uint8)
        self._blocks = memory[-memory.ctypes.data % _LINE_BYTES :]
        address, at = self._blocks.ctypes.data, 0
        assert len(self._launches) <= pool.MOST_LAUNCHES
        self._program = np.empty((len(self._launches), pool.PROGRAM_COLUMNS), np.int64)
        for row, size, launch in zip(self._program, sizes, self._launches):
            function, arguments, work_items, workers, counter, _ = launch
            self._blocks[at : at + len(arguments)] = np.frombuffer(arguments, np.uint8)
            helpers, start = pool.num_helpers(work_items, workers), address + at
            row[:] = function, start, work_items, helpers, start + counter if counter else 0
            at += size
        self._num_helpers = int(self._program[:, 3].max(initial=0))
        self._program_address = self._program.ctypes.data
        self._launches = [(0, b"", 0, 0, 0, explain) for *_, explain in self._launches]

    def replay(self, passed: Callable[[int], None] | None = None) -> None:
        """Runs all launches, and calls ``passed`` with the number of each mark. Raises the error of the first launch
        with a nonzero status; later ones do not run."""
        begin = 0
        if passed is not None:
            for number, end in self._marks:
                if end > begin:
                    self._run(begin, end)
                begin = end
                passed(number)
        self._run(begin, len(self._program))

    def _run(self, begin: int, end: int) -> None:
        """Runs some launches (`bench profile` clocks each)."""
        with pool.lock:
            at = self._program_address + begin * _ROW_BYTES
            failed, status = pool.run_program(at, end - begin, self._num_helpers)
        if failed >= 0:
            explain = self._launches[begin + failed][-1]
            assert explain is not None, f"launch {failed} has set status {status}"
            raise explain(status)
