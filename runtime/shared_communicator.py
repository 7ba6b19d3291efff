"""Ranks that are processes of one machine and compute on its processors: collectives through memory that they share.

Collectives are kernels of the cpu (`numba_kernels.cpu.collectives`), so that a recorded step has them as an eager one
does. Each says what it is, and all are compared: an error names every rank's call where they differ.
"""

from __future__ import annotations

import mmap
from typing import Literal, get_args

import numpy as np

from numba_kernels.cpu.collectives import (
    CHUNK_BYTES,
    HAS_ABORTED,
    LINE_BYTES,
    add_kernel,
    gather_kernel,
    header_bytes,
    meet_kernel,
    publish_kernel,
)
from numba_kernels.cpu.running.launch import address_of, hold, new_array
from numba_kernels.cpu.running.pool import NUM_THREADS
from runtime.call_sites import calling_line, line_name
from runtime.communicator import CommunicatorError
from runtime.dtype import DType, float32
from runtime.rank_notices import TEXT_BYTES, Notices, shared_memory
from runtime.tensor.tensor import Tensor

Kind = Literal["all_reduce", "all_gather", "all_gather_columns", "agree", "end of step"]

_KINDS: tuple[Kind, ...] = get_args(Kind)
_SLOT_BYTES = 1 << 19


def shared_file(num_ranks: int) -> int:
    """The memory that so many ranks map: its descriptor, which they inherit."""
    return shared_memory(_file_bytes(num_ranks))


def _file_bytes(num_ranks: int) -> int:
    return _slots_at(num_ranks) + 2 * num_ranks * _SLOT_BYTES


def _slots_at(num_ranks: int) -> int:
    page = 4096
    return -(-(header_bytes(num_ranks) + num_ranks * TEXT_BYTES) // page) * page


class SharedCommunicator:
    """See `Communicator`. One a process, whose kernels run one after another.

    Attributes:
        rank: this one's number, from 0.
        num_ranks: how many there are.
    """

    def __init__(self, descriptor: int, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._memory = np.frombuffer(mmap.mmap(descriptor, _file_bytes(num_ranks)), np.uint8)
        self._counter = np.zeros(LINE_BYTES // 8, np.int64)
        self._shared, self._counted = address_of(self._memory), address_of(self._counter)
        self._slots = _slots_at(num_ranks)
        texts = self._memory[header_bytes(num_ranks) :][: num_ranks * TEXT_BYTES].reshape(num_ranks, TEXT_BYTES)
        self._notices = Notices(self._memory[:8].view(np.int64), texts, rank)
        self._places: dict[tuple[str, int], int] = {}
        self._place_names: list[str] = []

    def all_reduce(self, tensor: Tensor) -> None:
        if tensor.dtype is not float32:
            raise CommunicatorError(f"all_reduce of {tensor.dtype.name}: on the cpu ranks add float32")
        place = self._place()
        for first in range(0, tensor.size_bytes, _SLOT_BYTES):
            size = min(_SLOT_BYTES, tensor.size_bytes - first)
            self._publish(tensor.address + first, size)
            self._meet("all_reduce", size, place)
            self._add(tensor.address + first, size)

    def all_gather(self, tensor: Tensor) -> Tensor:
        result = Tensor.over(new_array((self.num_ranks, *tensor.shape), tensor.dtype.numpy), tensor.dtype)
        self._gather("all_gather", tensor, result, 1, tensor.size_bytes, self.num_ranks * tensor.size_bytes)
        return result

    def all_gather_columns(self, tensor: Tensor, share: int, columns: int) -> Tensor:
        rows, width = tensor.shape
        expected = min(share, columns - self.rank * share)
        if width != expected or not 0 < columns - (self.num_ranks - 1) * share <= share:
            raise CommunicatorError(
                f"all_gather_columns: rank {self.rank} of {self.num_ranks} has {width} of {columns} columns, and each"
                f" but the last {share}"
            )
        result = Tensor.over(new_array((rows, columns), tensor.dtype.numpy), tensor.dtype)
        size = tensor.dtype.itemsize
        self._gather("all_gather_columns", tensor, result, rows, share * size, columns * size)
        return result

    def _gather(self, kind: Kind, tensor: Tensor, result: Tensor, rows: int, share: int, whole: int) -> None:
        """Rows of ``whole`` bytes, of which each rank but the last has ``share``."""
        if not share:
            return
        mine, place = min(share, whole - self.rank * share), self._place()
        rows_at_once, most = max(1, _SLOT_BYTES // share), min(share, _SLOT_BYTES)
        for row in range(0, rows, rows_at_once):
            count = min(rows_at_once, rows - row)
            for first in range(0, share, most):
                size = max(0, min(most, mine - first))
                self._publish(tensor.address + row * mine + first, count * size)
                self._meet(kind, count * min(most, share - first), place)
                gather_kernel()(
                    count, _workers(count), self._shared, self._counted, result.address + row * whole, self._slots,
                    _SLOT_BYTES, self.num_ranks, first, most, share, whole,
                )  # fmt: skip

    def agree(self, is_so: bool) -> bool:
        """Whether it is so on all ranks. Not to be recorded."""
        votes = Tensor.from_numpy(np.array([is_so], np.float32))
        self._publish(votes.address, 4)
        self._meet("agree", 4, self._place())
        self._add(votes.address, 4)
        return float(votes.array[0]) == self.num_ranks

    def end_step(self, number: int) -> None:
        """Meets the others at the end of a step, so that a rank that had fewer collectives in it is found."""
        self._meet("end of step", number, 0)

    def sum_buffer(self, shape: tuple[int, ...], dtype: DType) -> None:
        """See `Communicator`: any memory serves."""

    def begin_pass(self) -> None:
        """See `Communicator`."""

    def abort(self, reason: str) -> None:
        """Ends all collectives of all ranks, which name the reason. May be called on any thread, and for the others by
        who starts them."""
        self.abort_for(self.rank, reason)

    def abort_for(self, rank: int, reason: str) -> None:
        """The same for a rank that cannot say so itself."""
        self._notices.say(rank, reason)
        self._notices.give_up(rank)

    @property
    def is_aborted(self) -> bool:
        """Whether a rank has given up."""
        return self._notices.has_given_up

    def last_words(self) -> str:
        """What each rank has said of it."""
        return self._notices.last_words()

    def _publish(self, source: int, size: int) -> None:
        tickets = -(-size // CHUNK_BYTES)
        if not tickets:
            return
        hold(self._memory, self._counter)
        publish_kernel()(
            tickets, _workers(tickets), self._shared, self._counted, source, self._slots, _SLOT_BYTES, self.rank,
            self.num_ranks, size,
        )  # fmt: skip

    def _meet(self, kind: Kind, size: int, place: int) -> None:
        hold(self._memory, self._counter)
        description = size * len(_KINDS) + _KINDS.index(kind)
        meet_kernel()(
            1, 1, self._shared, self._counted, self.rank, self.num_ranks, description, place,
            explain=lambda status: self._explain(status, f"{kind} {self._described(kind, size, place)}"),
        )  # fmt: skip

    def _add(self, target: int, size: int) -> None:
        tickets = -(-size // CHUNK_BYTES)
        add_kernel()(
            tickets, _workers(tickets), self._shared, self._counted, target, self._slots, _SLOT_BYTES, self.num_ranks,
            size,
        )  # fmt: skip

    def _place(self) -> int:
        """The number of the line that called, outside of the folders that hand calls on."""
        key = calling_line()
        found = self._places.get(key)
        if found is None:
            found = self._places[key] = len(self._place_names)
            self._place_names.append(line_name(*key))
        return found

    def _described(self, kind: Kind, size: int, place: int) -> str:
        if kind == "end of step":
            return str(size)
        return f"of {size:,} bytes at {self._place_names[place]}"

    def _explain(self, status: int, call: str) -> CommunicatorError:
        """What went wrong, with every rank's words."""
        count = int(self._counter[0])
        self._notices.say(self.rank, f"called {call} as its collective {count}")
        if status != HAS_ABORTED:
            self._notices.give_up(self.rank)
        self._notices.wait_for_all()
        return CommunicatorError(f"ranks do not do the same: {self.last_words()}")


def _workers(tickets: int) -> int:
    return min(NUM_THREADS, tickets)
