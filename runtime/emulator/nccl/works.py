"""Collectives and messages as works of a stream, which park until the other ranks have joined.

A work is done in pieces: this rank's numbers are read from its device's memory with all checks and put into its slot
of the board; when all ranks' are there the result is written with all checks. Ranks' numbers are added in the order of
ranks, in float32 where the type is narrower.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from cuda.bindings import driver as cu
from numpy.typing import NDArray

from runtime.emulator.driver.work_queues import Meeting, MeetingTemplate, Work
from runtime.emulator.nccl.board import POSTED, PUBLISHED, SLOT_BYTES, TAKEN, Call, Channel
from runtime.emulator.nccl.communicator import Communicator

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
        return _Collective(self, self.comm.post(self.call))


class _Collective(Meeting):
    """One run of a collective. `number`: among this communicator's, from 1."""

    def __init__(self, template: Template, number: int) -> None:
        self._template, self._comm, self._number = template, template.comm, number
        call = template.call
        self._kind, self._element = call.kind, ELEMENTS.get(call.dtype, np.dtype(np.uint8))
        self._parts = self._comm.num_ranks if call.kind == "ReduceScatter" else 1
        each = SLOT_BYTES // (self._parts * self._element.itemsize)
        count = call.count if call.dtype >= 0 else 0
        self._pieces = [(first, min(each, count - first)) for first in range(0, count, each)]
        self._next = 0
        self._is_compared = self._is_published = False

    @property
    def label(self) -> str:
        return self._template.label

    def advance(self, work: Work) -> bool:
        """Makes progress; returns whether it is done. Raises DriverFault where the ranks' calls differ."""
        comm = self._comm
        if comm.done != self._number - 1:  # of another stream, and called earlier
            comm.raise_if_failed()
            return False
        if not self._is_compared:
            if not comm.compare(self._number, self._template.call):
                return False
            self._is_compared = True
            self._check(work)
        while self._next < len(self._pieces):
            first, count = self._pieces[self._next]
            mine = comm.board.records[comm.rank]
            turn = comm.turn + 1
            if not self._is_published:
                self._publish(first, count, turn)
                mine[PUBLISHED] = turn
                self._is_published = True
            if any(record[PUBLISHED] < turn for record in comm.board.records):
                comm.look_for_the_missing(self._number, partial(_lacks_piece, comm, turn))
                return False
            self._combine(first, count, turn)
            comm.turn, self._next, self._is_published = turn, self._next + 1, False
        comm.done = self._number
        return True

    def _check(self, work: Work) -> None:
        """All bytes read and written, for the checkers."""
        template, ranks, label = self._template, self._comm.num_ranks, self.label
        count, size = template.call.count if self._pieces else 0, self._element.itemsize
        reads = count * size * (ranks if self._kind == "ReduceScatter" else 1)
        if self._kind == "Broadcast" and template.call.root != self._comm.rank:
            reads = 0
        writes = count * size * (ranks if self._kind == "AllGather" else 1)
        self._comm.memory.check(work, label, template.source, reads, is_write=False)
        self._comm.memory.check(work, label, template.target, writes, is_write=True)

    def _publish(self, first: int, count: int, turn: int) -> None:
        comm, size, source = self._comm, self._element.itemsize, self._template.source
        if self._kind == "Broadcast" and self._template.call.root != comm.rank:
            return
        slot = comm.board.slot(comm.rank, turn)
        for part in range(self._parts):
            at = source + (part * self._template.call.count + first) * size
            ctypes.memmove(slot.ctypes.data + part * count * size, at, count * size)

    def _combine(self, first: int, count: int, turn: int) -> None:
        comm, size, target = self._comm, self._element.itemsize, self._template.target
        slots = [comm.board.slot(rank, turn) for rank in range(comm.num_ranks)]
        at = target + first * size
        if self._kind == "AllGather":
            for rank, slot in enumerate(slots):
                here = at + rank * self._template.call.count * size
                comm.memory.write(here, slot[: count * size])
            return
        if self._kind == "Broadcast":
            comm.memory.write(at, slots[self._template.call.root][: count * size])
            return
        part = comm.rank * count * size if self._kind == "ReduceScatter" else 0
        numbers = [slot[part : part + count * size].view(self._element) for slot in slots]
        comm.memory.write(at, _reduced(numbers, self._template.call.operation).view(np.uint8))


def _lacks_piece(comm: Communicator, turn: int, rank: int) -> bool:
    """Whether a rank's numbers are not there yet."""
    return comm.board.records[rank][PUBLISHED] < turn


def _reduced(numbers: list[NDArray[Any]], operation: int) -> NDArray[Any]:
    """All ranks' numbers reduced by an operation of `ncclRedOp_t`."""
    element = numbers[0].dtype
    is_narrow = element.kind not in "iu" and element.itemsize < 4
    wide = [each.astype(np.float32) if is_narrow else each for each in numbers]
    result = wide[0].copy()
    combine = {0: np.add, 1: np.multiply, 2: np.maximum, 3: np.minimum, 4: np.add}[operation]
    with np.errstate(all="ignore"):
        for each in wide[1:]:
            combine(result, each, out=result)
        if operation == 4:
            result = result / len(wide) if result.dtype.kind == "f" else result // len(wide)
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
        return _Exchange(self, [_Message(self.comm, *each) for each in self.messages])


class _Exchange(Meeting):
    """One run of sends and receives."""

    def __init__(self, messages: Messages, parts: list[_Message]) -> None:
        self._messages, self._parts = messages, parts

    @property
    def label(self) -> str:
        return self._messages.label

    def advance(self, work: Work) -> bool:
        """Makes progress; returns whether it is done. Raises DriverFault where a peer's call differs."""
        self._parts = [part for part in self._parts if not part.advance(work)]
        return not self._parts


class _Message:
    """One end of a message."""

    def __init__(self, comm: Communicator, call: Call, address: int, peer: int) -> None:
        self._comm, self._call, self._address, self._peer = comm, call, address, peer
        self._sends = call.kind == "Send"
        pair = (comm.rank, peer) if self._sends else (peer, comm.rank)
        self._channel: Channel = comm.board.channel(*pair)
        self._mine, self._theirs = self._channel.sender, self._channel.receiver
        my_ring, self._their_ring = self._channel.sends, self._channel.receives
        if not self._sends:
            self._mine, self._theirs = self._theirs, self._mine
            my_ring, self._their_ring = self._their_ring, my_ring
        self._number = self._mine[POSTED] + 1
        my_ring.put(self._number, call)
        self._mine[POSTED] = self._number
        size = call.count * ELEMENTS[call.dtype].itemsize
        self._pieces = [(first, min(SLOT_BYTES, size - first)) for first in range(0, size, SLOT_BYTES)]
        self._size, self._next, self._is_compared = size, 0, False

    def advance(self, work: Work) -> bool:
        comm, channel = self._comm, self._channel
        comm.raise_if_failed()
        if self._mine[TAKEN] != self._number - 1:  # messages of a pair go one after another
            return False
        if not self._is_compared:
            if self._theirs[POSTED] < self._number:
                comm.look_for_the_missing_peer(self._peer, self._call, is_send=self._sends)
                return False
            theirs = self._their_ring.get(self._number)
            if (theirs.count, theirs.dtype) != (self._call.count, self._call.dtype):
                comm.fail_by([(comm.rank, self._call), (self._peer, theirs)])
            self._is_compared = True
            label = f"nccl{self._call.kind} at {self._call.place}"
            comm.memory.check(work, label, self._address, self._size, is_write=not self._sends)
        while self._next < len(self._pieces):
            first, size = self._pieces[self._next]
            published, taken = channel.sender[PUBLISHED], channel.receiver[PUBLISHED]
            if self._sends:
                if published != taken:
                    return comm.is_missing_nobody(self._peer, self._call)
                ctypes.memmove(channel.slot.ctypes.data, self._address + first, size)
                channel.sender[PUBLISHED] = published + 1
            else:
                if published == taken:
                    return comm.is_missing_nobody(self._peer, self._call)
                comm.memory.write(self._address + first, channel.slot[:size])
                channel.receiver[PUBLISHED] = taken + 1
            self._next += 1
        self._mine[TAKEN] = self._number
        return True
