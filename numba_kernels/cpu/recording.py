"""Launches that are recorded once and then replayed in one compiled call, as a graph is on a GPU.

    with record(arena) as recording:     # this thread's kernels are noted down and do not run
        step(tensors)
    recording.replay()                   # they run, with the same arguments at the same addresses

Running a step's kernels together keeps the threads at work from the first to the last: what Python does between two of
them, in caches that the first has swept, takes longer than many a kernel.

What a kernel writes has to come from `new_array`, and what it reads has to outlive the recording: weights, pages,
inputs that are overwritten in place. `expect` and `hold` are how operations say so. A temporary array that was not made
by a recorded kernel (numpy's result, say) would be read after its end; that is found out when the recording ends.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator

import numpy as np

from numba_kernels.cpu import pool
from numba_kernels.cpu.arena import Arena

Explain = Callable[[int], Exception]
"""The error that a kernel's nonzero status stands for."""

_LINE_BYTES = 64


class NotRecordableError(Exception):
    """The work did something besides launching kernels on memory that stays."""


class _Thread(threading.local):
    recording: Recording | None = None


_thread = _Thread()


def current() -> Recording | None:
    """What this thread records; None: its kernels run when they are called."""
    return _thread.recording


def new_array(shape: tuple[int, ...], dtype: type | np.dtype) -> np.ndarray:
    """An uninitialised array for a kernel to write to."""
    recording = _thread.recording
    return np.empty(shape, dtype) if recording is None else recording.arena.new_array(shape, dtype)


def hold(array: np.ndarray) -> None:
    """Keeps an array that a kernel reads as long as what this thread records, if it records."""
    if _thread.recording is not None:
        _thread.recording.held.append(array)


@contextlib.contextmanager
def record(arena: Arena) -> Iterator[Recording]:
    """Notes down what this thread's kernels would do. Raises NotRecordableError at the end, for what has no replay."""
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
    held   what else has to live as long
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.held: list[object] = []
        self._expected: list[weakref.ref[object]] = []
        self._launches: list[tuple[int, bytes, int, int, Explain | None]] = []
        self._blocks = np.empty(0, np.uint8)
        self._program = np.empty((0, pool.PROGRAM_COLUMNS), np.int64)
        self._num_helpers = 0

    def __len__(self) -> int:
        """Launches."""
        return len(self._launches)

    @property
    def size_bytes(self) -> int:
        """Of launches and arguments; the arena is not counted."""
        return self._blocks.nbytes + self._program.nbytes

    def add(self, function: int, arguments: bytes, num_tickets: int, num_workers: int, explain: Explain | None) -> None:
        """The next launch. ``arguments`` begin with the status, 0."""
        self._launches.append((function, arguments, num_tickets, num_workers, explain))

    def expect(self, owner: object, address: int) -> None:
        """A kernel will read or write at ``address``, which is valid as long as ``owner`` lives."""
        if not self.arena.holds(address):
            self._expected.append(weakref.ref(owner))

    def close(self) -> None:
        """No more launches come. Raises NotRecordableError."""
        if any(owner() is None for owner in self._expected):
            raise NotRecordableError("a kernel reads an array that was not made by a recorded kernel and is gone")
        self._expected.clear()
        sizes = [-(-len(arguments) // _LINE_BYTES) * _LINE_BYTES for _, arguments, *_ in self._launches]
        memory = np.zeros(sum(sizes) + _LINE_BYTES, np.uint8)
        self._blocks = memory[-memory.ctypes.data % _LINE_BYTES :]
        address, at = self._blocks.ctypes.data, 0
        self._program = np.empty((len(self._launches), pool.PROGRAM_COLUMNS), np.int64)
        for row, size, (function, arguments, tickets, workers, _) in zip(self._program, sizes, self._launches):
            self._blocks[at : at + len(arguments)] = np.frombuffer(arguments, np.uint8)
            row[:] = function, address + at, tickets, pool.num_helpers(tickets, workers)
            at += size
        self._num_helpers = int(self._program[:, 3].max(initial=0))
        self._launches = [(0, b"", 0, 0, explain) for *_, explain in self._launches]

    def replay(self) -> None:
        """Runs it all. Raises what the first launch with a nonzero status explains; those behind it do not run."""
        with pool.lock:
            failed, status = pool.run_program(self._program, self._num_helpers)
        if failed >= 0:
            explain = self._launches[failed][-1]
            assert explain is not None, f"launch {failed} has set status {status}"
            raise explain(status)
