"""The memory shared by the ranks of one emulated communicator, with each rank's calls and numbers.

The memory has no name: the unique id holds its maker's process and descriptor, kept open until all ranks have joined,
so that the memory is freed with the last rank. For R ranks, each part in pages of its own:

| part | contents |
|---|---|
| head | 0, or 1 + the rank that found a fault |
| R records | process, thread, joined or left, counts of posted calls and published pieces, its last words |
| R rings | its posted calls, each a `Call` |
| 2 R slots | by turns, the numbers of its collective, a piece at a time |
| R x R channels | of messages from one rank to another: two records, two rings and a slot |

Words that others wait for are stored and loaded in order (`_store`, `_load`).
"""

# mypy: disable-error-code="call-arg"

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from numba_kernels.cache import njit
from numba_kernels.cpu.intrinsics import atomic

SLOT_BYTES = 1 << 20
RING = 2048
"""Calls that a rank may have posted and not yet run; a stream's queue holds fewer (`work_queues.MAX_QUEUED`)."""

_PAGE = 4096
_CALL_BYTES = 320
_TEXT_BYTES = 2048
_ID = b"emulated NCCL"

# Words of a record, int64 each.
PID, STARTED, THREAD, STATE, POSTED, PUBLISHED, TAKEN = range(7)
NOT_JOINED, JOINED, LEFT, ABORTED = range(4)


@njit
def _load(address):  # type: ignore[no-untyped-def]
    return atomic.load(address)


@njit
def _store(address, value):  # type: ignore[no-untyped-def]
    atomic.store(address, value)


@dataclass(frozen=True, slots=True)
class Call:
    """A rank's call, as the others see it.

    Attributes:
        kind: the function without its prefix, "AllReduce".
        count: elements, as the call counts them; for a mark that is no collective, its number.
        dtype, operation, root: the numbers of nccl.h; -1 where the call has none.
        source, target: where its buffers lie in a window, as 1 + the window's number << 40 | offset; 0 outside windows.
        place: the model's line that called, "families/llama.py:61".
    """

    kind: str
    count: int
    dtype: int = -1
    operation: int = -1
    root: int = -1
    source: int = 0
    target: int = 0
    place: str = ""

    def agrees_with(self, other: Call) -> bool:
        """Whether two ranks' calls are one collective."""
        mine, theirs = (
            (each.kind, each.count, each.dtype, each.operation, each.root, each.source, each.target)
            for each in (self, other)
        )
        return mine == theirs

    def packed(self) -> bytes:
        """Numbers, then texts."""
        numbers = (self.count, self.dtype, self.operation, self.root, self.source, self.target)
        text = f"{self.kind}\0{self.place}".encode()[: _CALL_BYTES - 8 * len(numbers)]
        return np.array(numbers, np.int64).tobytes() + text.ljust(_CALL_BYTES - 8 * len(numbers), b"\0")

    @staticmethod
    def unpacked(data: bytes) -> Call:
        """The inverse of `packed`."""
        count, dtype, operation, root, source, target = np.frombuffer(data[:48], np.int64).tolist()
        kind, place, *_ = data[48:].split(b"\0")
        words = place.decode(errors="replace")
        return Call(kind.decode(), count, dtype, operation, root, source, target, words)


def new_unique_id() -> tuple[bytes, int]:
    """A unique id, and the descriptor of the memory that it names, which this process keeps open."""
    descriptor = os.memfd_create("xserv-emulated-nccl")
    return _ID + f" {os.getpid()} {descriptor}".encode().ljust(128 - len(_ID), b"\0"), descriptor


def open_by_id(unique_id: bytes) -> int:
    """A descriptor of the memory that an id names. Raises ValueError for another id, OSError where it is gone."""
    words = unique_id.rstrip(b"\0").removeprefix(_ID).split()
    if not unique_id.startswith(_ID) or len(words) != 2:
        raise ValueError("the unique id is no emulated NCCL's")
    return os.open(f"/proc/{int(words[0])}/fd/{int(words[1])}", os.O_RDWR | os.O_CLOEXEC)


class Record:
    """The words of one rank, or of one end of a channel, that others read."""

    __slots__ = ("_address", "_words")

    def __init__(self, memory: NDArray[np.uint8], at: int) -> None:
        self._words = memory[at : at + 8 * 8].view(np.int64)
        self._address = self._words.ctypes.data

    def __getitem__(self, word: int) -> int:
        return int(_load(self._address + 8 * word))

    def __setitem__(self, word: int, value: int) -> None:
        _store(self._address + 8 * word, value)


class Ring:
    """Calls in the order in which they were posted."""

    __slots__ = ("_rows",)

    def __init__(self, memory: NDArray[np.uint8], at: int) -> None:
        self._rows = memory[at : at + RING * _CALL_BYTES].reshape(RING, _CALL_BYTES)

    def put(self, number: int, call: Call) -> None:
        self._rows[number % RING] = np.frombuffer(call.packed(), np.uint8)

    def get(self, number: int) -> Call:
        return Call.unpacked(self._rows[number % RING].tobytes())


class Channel:
    """Messages from one rank to another.

    Attributes:
        sender, receiver: their words: calls posted, and pieces published and taken.
        sends, receives: their calls.
        slot: one piece.
    """

    def __init__(self, memory: NDArray[np.uint8], at: int) -> None:
        self.sender, self.receiver = Record(memory, at), Record(memory, at + 64)
        self.sends, self.receives = (Ring(memory, at + _PAGE + end * _pages(RING * _CALL_BYTES)) for end in (0, 1))
        first = at + _PAGE + 2 * _pages(RING * _CALL_BYTES)
        self.slot = memory[first : first + SLOT_BYTES]


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


class Board:
    """The shared memory of one communicator, as one rank sees it."""

    def __init__(self, descriptor: int, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        record, ring = _PAGE, _pages(RING * _CALL_BYTES)
        channel = _PAGE + 2 * ring + SLOT_BYTES
        slots_at = _PAGE + num_ranks * (record + ring)
        channels_at = slots_at + 2 * num_ranks * SLOT_BYTES
        size = channels_at + num_ranks * num_ranks * channel
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)  # of zeros, which cost no memory until they are written
        memory = self._memory = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
        self._head = Record(memory, 0)
        self.records = [Record(memory, _PAGE + each * record) for each in range(num_ranks)]
        self.rings = [Ring(memory, _PAGE + num_ranks * record + each * ring) for each in range(num_ranks)]
        self._slots_at, self._channels_at, self._channel_bytes = slots_at, channels_at, channel
        self._channels: dict[tuple[int, int], Channel] = {}

    def join(self) -> None:
        """Registers this rank. Raises ValueError where another has its number."""
        mine = self.records[self.rank]
        if mine[STATE] != NOT_JOINED:
            raise ValueError(f"rank {self.rank} has joined before")
        mine[PID], mine[THREAD] = os.getpid(), threading.get_ident()
        mine[STARTED] = _started(os.getpid())
        mine[STATE] = JOINED

    def slot(self, rank: int, turn: int) -> NDArray[np.uint8]:
        """A rank's slot for its numbers."""
        first = self._slots_at + (2 * rank + (turn & 1)) * SLOT_BYTES
        return self._memory[first : first + SLOT_BYTES]

    def channel(self, source: int, target: int) -> Channel:
        """The channel from one rank to the other."""
        found = self._channels.get((source, target))
        if found is None:
            at = self._channels_at + (source * self.num_ranks + target) * self._channel_bytes
            found = self._channels[source, target] = Channel(self._memory, at)
        return found

    # -- the end of it ----------------------------------------------------------------------------------------------

    @property
    def has_failed(self) -> bool:
        """Whether a rank found a fault, or gave up."""
        return self._head[0] != 0

    def fail(self, reason: str) -> None:
        """Ends the communicator for all ranks; all ranks report the first reason."""
        at = _PAGE + self.rank * _PAGE + 64
        if not self.has_failed:
            data = reason.encode()[: _TEXT_BYTES - 1]
            self._memory[at : at + len(data)] = np.frombuffer(data, np.uint8)
            self._head[0] = 1 + self.rank

    @property
    def failure(self) -> str:
        """The reason given to the first `fail`."""
        at = _PAGE + (self._head[0] - 1) * _PAGE + 64
        return bytes(self._memory[at : at + _TEXT_BYTES]).rstrip(b"\0").decode(errors="replace")

    def why_it_cannot_come(self, rank: int, *, has_called: bool = False) -> str:
        """The reason why a rank will make no more calls, or, if it `has_called`, not run its call; "" if it may."""
        record = self.records[rank]
        state, pid = record[STATE], record[PID]
        if state == NOT_JOINED:
            return ""
        if state == ABORTED:
            return "has aborted the communicator"
        if state == LEFT:
            return "has left the communicator"
        if pid == os.getpid():
            is_me = not has_called and rank != self.rank and record[THREAD] == threading.get_ident()
            return "belongs to the thread that waits for it" if is_me else ""
        if _started(pid) != record[STARTED]:
            return f"has ended (process {pid})"
        return ""


def _started(pid: int) -> int:
    """The time at which a process began, in the kernel's ticks; 0 where it has ended."""
    with contextlib.suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return 0 if state in "ZX" else int(fields[18])
    return 0


_TYPES = {
    0: "int8", 1: "uint8", 2: "int32", 3: "uint32", 4: "int64", 5: "uint64", 6: "float16", 7: "float32", 8: "float64",
    9: "bfloat16", 10: "float8_e4m3", 11: "float8_e5m2",
}  # fmt: skip
_OPERATIONS = {0: "sum", 1: "prod", 2: "max", 3: "min", 4: "avg"}
_WINDOW_SHIFT = 40


def described(call: Call) -> str:
    """`ncclAllReduce of 64 float32 (sum) at families/llama.py:61`."""
    if call.kind == "end of step":
        return f"end of step {call.count}"
    if call.dtype < 0:
        return f"nccl{call.kind} of {call.count:,} bytes at {call.place}"
    words = [f"nccl{call.kind} of {call.count:,} {_TYPES[call.dtype]}"]
    if call.operation >= 0:
        words.append(f"({_OPERATIONS[call.operation]})")
    if call.root >= 0:
        words.append({"Send": "to", "Recv": "of"}.get(call.kind, "from") + f" rank {call.root}")
    for name, place in (("source", call.source), ("target", call.target)):
        if place:
            words.append(f"{name} at {place & ((1 << _WINDOW_SHIFT) - 1):,} of window {(place >> _WINDOW_SHIFT) - 1}")
    return f"{' '.join(words)} at {call.place}"


def window_place(number: int, offset: int) -> int:
    """A place in a window, as in `Call`."""
    return (number + 1) << _WINDOW_SHIFT | offset
