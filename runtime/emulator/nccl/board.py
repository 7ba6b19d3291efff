"""The memory shared by the ranks of one emulated communicator, with each rank's calls and numbers.

The memory has no name: the unique id holds its maker's process and descriptor, kept open until all ranks have joined,
so that the memory is freed with the last rank. For R ranks, each part in pages of its own:

| part | contents |
|---|---|
| head | 0, or 1 + the rank that found a fault |
| the group of all | for each rank a record, a ring and two slots |
| R x R groups of two | the same for the messages from one rank to another: first the sender's, then the receiver's |

A record has process, thread, joined or left, counts of posted calls and published pieces, and a rank's last words; a
ring its posted calls, each a `Call`; a slot by turns the numbers of its collective, a piece at a time.

Words that others wait for are stored and loaded in order (`_store`, `_load`).
"""

# mypy: disable-error-code="call-arg"

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
PID, STARTED, THREAD, STATE, POSTED, PUBLISHED = range(6)
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
        dtype: its number in nccl.h; -1 where the call has none.
        peer: of a message; -1 for collectives.
        source, target: where its buffers lie in a window, as 1 + the window's number << 40 | offset; 0 outside windows.
        place: the model's line that called, "families/llama.py:61".
    """

    kind: str
    count: int
    dtype: int = -1
    peer: int = -1
    source: int = 0
    target: int = 0
    place: str = ""

    def agrees_with(self, other: Call) -> bool:
        """Whether two ranks' calls are one collective, or the two ends of a message."""
        if self.kind in ("Send", "Recv"):
            return (self.count, self.dtype) == (other.count, other.dtype)
        return replace(self, place="") == replace(other, place="")

    def packed(self) -> bytes:
        """Numbers, then texts."""
        numbers = (self.count, self.dtype, self.peer, self.source, self.target)
        text = f"{self.kind}\0{self.place}".encode()[: _CALL_BYTES - 8 * len(numbers)]
        return np.array(numbers, np.int64).tobytes() + text.ljust(_CALL_BYTES - 8 * len(numbers), b"\0")

    @staticmethod
    def unpacked(data: bytes) -> Call:
        """The inverse of `packed`."""
        count, dtype, peer, source, target = np.frombuffer(data[:40], np.int64).tolist()
        kind, place, *_ = data[40:].split(b"\0")
        words = place.decode(errors="replace")
        return Call(kind.decode(), count, dtype, peer, source, target, words)


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
    """The words of one rank that others read."""

    __slots__ = ("_address", "_words")

    def __init__(self, memory: NDArray[np.uint8], at: int) -> None:
        self._words = memory[at : at + 8 * 8].view(np.int64)
        self._address = self._words.ctypes.data

    def __getitem__(self, word: int) -> int:
        return int(_load(self._address + 8 * word))

    def __setitem__(self, word: int, value: int) -> None:
        _store(self._address + 8 * word, value)


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


class Group:
    """Ranks that do collectives together: all of a communicator, or the sender and the receiver of messages.

    Attributes:
        ranks: their numbers.
        records: their words.
        mine: this rank's.
        posted, done: this rank's collectives here; turn: pieces of them that are done.
    """

    def __init__(self, memory: NDArray[np.uint8], at: int, ranks: Sequence[int], rank: int) -> None:
        self.ranks = ranks
        self._memory, self._at, self._me = memory, at, ranks.index(rank) if rank in ranks else -1
        self.records = [Record(memory, at + each * self._MEMBER_BYTES) for each in range(len(ranks))]
        self.mine = self.records[self._me]
        self.posted = self.done = self.turn = 0

    _RING_BYTES = _pages(RING * _CALL_BYTES)
    _MEMBER_BYTES = _PAGE + _RING_BYTES + 2 * SLOT_BYTES

    @classmethod
    def size_of(cls, num_ranks: int) -> int:
        """Bytes of a group."""
        return num_ranks * cls._MEMBER_BYTES

    def _call_at(self, member: int, number: int) -> NDArray[np.uint8]:
        first = self._at + member * self._MEMBER_BYTES + _PAGE + number % RING * _CALL_BYTES
        return self._memory[first : first + _CALL_BYTES]

    def post(self, call: Call) -> int:
        """Posts this rank's next collective; returns its number."""
        self.posted += 1
        self._call_at(self._me, self.posted)[:] = np.frombuffer(call.packed(), np.uint8)
        self.mine[POSTED] = self.posted
        return self.posted

    def calls(self, number: int) -> list[tuple[int, Call]]:
        """(rank, its call of this number), of the ranks that have posted it."""
        return [
            (rank, Call.unpacked(self._call_at(member, number).tobytes()))
            for member, rank in enumerate(self.ranks)
            if self.records[member][POSTED] >= number
        ]

    def last_call(self, rank: int) -> Call | None:
        """The call that a rank posted last."""
        member = self.ranks.index(rank)
        posted = self.records[member][POSTED]
        return Call.unpacked(self._call_at(member, posted).tobytes()) if posted else None

    def words_of(self, member: int) -> NDArray[np.uint8]:
        """A member's last words."""
        first = self._at + member * self._MEMBER_BYTES + 64
        return self._memory[first : first + _TEXT_BYTES]

    def slots(self, turn: int) -> list[NDArray[np.uint8]]:
        """Each member's slot for its numbers."""
        first = self._at + _PAGE + self._RING_BYTES + (turn & 1) * SLOT_BYTES
        places = (first + member * self._MEMBER_BYTES for member in range(len(self.ranks)))
        return [self._memory[place : place + SLOT_BYTES] for place in places]

    def my_slot(self, turn: int) -> NDArray[np.uint8]:
        return self.slots(turn)[self._me]

    def lacks(self, turn: int) -> list[int]:
        """The other ranks that have not published their piece of a turn."""
        return [rank for rank, record in zip(self.ranks, self.records)
                if record is not self.mine and record[PUBLISHED] < turn]  # fmt: skip


class Board:
    """The shared memory of one communicator, as one rank sees it.

    Attributes:
        everyone: the group of all ranks; `records` are its.
    """

    def __init__(self, descriptor: int, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._pairs_at = _PAGE + Group.size_of(num_ranks)
        size = self._pairs_at + num_ranks * num_ranks * Group.size_of(2)
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)  # of zeros, which cost no memory until they are written
        self._memory = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
        self._head = Record(self._memory, 0)
        self.everyone = Group(self._memory, _PAGE, range(num_ranks), rank)
        self.records = self.everyone.records
        self._pairs: dict[tuple[int, int], Group] = {}

    def join(self) -> None:
        """Registers this rank. Raises ValueError where another has its number."""
        mine = self.records[self.rank]
        if mine[STATE] != NOT_JOINED:
            raise ValueError(f"rank {self.rank} has joined before")
        mine[PID], mine[THREAD] = os.getpid(), threading.get_ident()
        mine[STARTED] = _started(os.getpid())
        mine[STATE] = JOINED

    def pair(self, sender: int, receiver: int) -> Group:
        """The group for messages from one rank to the other."""
        if (sender, receiver) not in self._pairs:
            at = self._pairs_at + (sender * self.num_ranks + receiver) * Group.size_of(2)
            self._pairs[sender, receiver] = Group(self._memory, at, (sender, receiver), self.rank)
        return self._pairs[sender, receiver]

    # -- the end of it ----------------------------------------------------------------------------------------------

    @property
    def has_failed(self) -> bool:
        """Whether a rank found a fault, or gave up."""
        return self._head[0] != 0

    def fail(self, reason: str) -> None:
        """Ends the communicator for all ranks; all ranks report the first reason."""
        if not self.has_failed:
            data = reason.encode()[: _TEXT_BYTES - 1]
            self.everyone.words_of(self.rank)[: len(data)] = np.frombuffer(data, np.uint8)
            self._head[0] = 1 + self.rank

    @property
    def failure(self) -> str:
        """The reason given to the first `fail`."""
        return bytes(self.everyone.words_of(self._head[0] - 1)).rstrip(b"\0").decode(errors="replace")

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
_WINDOW_SHIFT = 40


def described(call: Call) -> str:
    """`ncclAllReduce of 64 float32 at families/llama.py:61`."""
    if call.kind == "end of step":
        return f"end of step {call.count}"
    if call.dtype < 0:
        return f"nccl{call.kind} of {call.count:,} bytes at {call.place}"
    words = [f"nccl{call.kind} of {call.count:,} {_TYPES[call.dtype]}"]
    if call.peer >= 0:
        words.append(f"{'to' if call.kind == 'Send' else 'of'} rank {call.peer}")
    for name, place in (("source", call.source), ("target", call.target)):
        if place:
            words.append(f"{name} at {place & ((1 << _WINDOW_SHIFT) - 1):,} of window {(place >> _WINDOW_SHIFT) - 1}")
    return f"{' '.join(words)} at {call.place}"


def window_place(number: int, offset: int) -> int:
    """A place in a window, as in `Call`."""
    return (number + 1) << _WINDOW_SHIFT | offset
