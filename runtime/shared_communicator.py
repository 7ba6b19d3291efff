"""Ranks that are processes of one machine and compute on its processors: collectives, and pipes between stages, in
shared memory.

Collectives are kernels of the CPU (`numba_kernels.cpu.collectives`), and so are sending and receiving
(`numba_kernels.cpu.pipes`), so that they can be recorded. Each is labelled, and the labels are
compared: an error names every rank's call if they differ.

The memory has a region for all ranks of all stages, then one for the ranks of each stage, if there are several, and a
pipe from each rank to its next stage's.
"""

from __future__ import annotations

import mmap
import os
import time
from typing import Literal, get_args

import numpy as np

from numba_kernels.cpu.collectives import (
    CHUNK_BYTES,
    DIFFERENT,
    HAS_ABORTED,
    LINE_BYTES,
    SPINS,
    YIELDS,
    add_kernel,
    description_at,
    gather_kernel,
    header_bytes,
    meet_kernel,
    publish_kernel,
)
from numba_kernels.cpu.pipes import PIPE_BYTES, SLOT_BYTES, SLOTS, receive_kernel, send_kernel
from numba_kernels.cpu.running.launch import Kernel, OwnLaunch, address_of, hold, new_array
from numba_kernels.cpu.running.pool import NUM_THREADS
from runtime.call_sites import calling_line, line_name
from runtime.communicator import CommunicatorError, check_columns
from runtime.dtype import DType, float32
from runtime.rank_notices import TALLY_BYTES, TEXT_BYTES, Noticed, Notices, Span, shared_memory
from runtime.tensor.tensor import Tensor

Kind = Literal["all_reduce", "all_gather", "all_gather_columns", "agree", "end of step"]

_KINDS: tuple[Kind, ...] = get_args(Kind)
_SLOT_BYTES = 1 << 19
_CROWDED_SPINS = 100


def shared_file(num_ranks: int, num_stages: int = 1) -> int:
    """The memory that so many ranks of each stage map; returns its descriptor, which they inherit."""
    return shared_memory(_file_bytes(num_ranks, num_stages))


def _file_bytes(num_ranks: int, num_stages: int) -> int:
    if num_stages == 1:
        return _region_bytes(num_ranks)
    return _pipes_at(num_ranks, num_stages) + num_ranks * num_stages * PIPE_BYTES


def _region_bytes(num_ranks: int) -> int:
    return _slots_at(num_ranks) + 2 * num_ranks * _SLOT_BYTES


def _slots_at(num_ranks: int) -> int:
    page = 4096
    return -(-(header_bytes(num_ranks) + num_ranks * (TEXT_BYTES + TALLY_BYTES)) // page) * page


def _pipes_at(num_ranks: int, num_stages: int) -> int:
    return _region_bytes(num_ranks * num_stages) + num_stages * _region_bytes(num_ranks)


class _Region:
    """One rank's view of the memory in which some ranks meet.

    Attributes:
        rank, num_ranks: its number, and the number of ranks.
        shared: address of the region.
        counter: memory of this rank's own, in which its collectives count.
        counted: the counter's address.
        slots: bytes before the region's slots.
    """

    def __init__(self, shared: int, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks, self.shared = rank, num_ranks, shared
        self.counter = np.zeros(LINE_BYTES // 8, np.int64)
        self.counted = address_of(self.counter)
        self.slots = _slots_at(num_ranks)


class SharedCommunicator(Noticed):
    """See `RankCommunicator`. One a process, whose kernels run one after another.

    Attributes:
        rank: the number of this rank among those of its stage, from 0.
        num_ranks: the ranks of a stage.
        stage: its number, from 0.
        num_stages: the number of stages.
    """

    def __init__(self, descriptor: int, rank: int, num_ranks: int, stage: int = 0, num_stages: int = 1) -> None:
        self.rank, self.num_ranks, self.stage, self.num_stages = rank, num_ranks, stage, num_stages
        self._number, count = stage * num_ranks + rank, num_stages * num_ranks  # of all
        # If ranks outnumber processors, a spinning rank takes time from those that it waits for.
        is_crowded = count > (os.cpu_count() or 1)
        self._patience = (_CROWDED_SPINS, 0) if is_crowded else (SPINS, YIELDS)
        # Another length is a bug of the creator; reading beyond the end would raise a signal.
        size = _file_bytes(num_ranks, num_stages)
        assert os.fstat(descriptor).st_size >= size, "the memory is of fewer ranks"
        self._memory = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
        self._flag = begin = address_of(self._memory)
        self._all = self._stage = _Region(begin, self._number, count)
        if num_stages > 1:
            self._stage = _Region(begin + _region_bytes(count) + stage * _region_bytes(num_ranks), rank, num_ranks)
        self._step_line, self._begun_ns = np.zeros(LINE_BYTES // 8, np.int64), 0
        self._stepped, self._step = address_of(self._step_line), self._step_line.data
        self._ends: OwnLaunch | None = None  # signals the end of a step
        if num_ranks > 1:
            self._ends = OwnLaunch(
                meet_kernel(), "description", self._stage.shared, self._stage.counted, begin, rank, num_ranks, 0, 0,
                *self._patience, 0,
            )  # fmt: skip
        texts, tallies = self._memory[header_bytes(count) :], self._memory[header_bytes(count) + count * TEXT_BYTES :]
        self._notices = Notices(
            self._memory[:8].view(np.int64), texts[: count * TEXT_BYTES].reshape(count, TEXT_BYTES),
            tallies[: count * TALLY_BYTES].reshape(count, TALLY_BYTES), self._number,
        )  # fmt: skip
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
        check_columns(self.rank, self.num_ranks, width, share, columns)
        result = Tensor.over(new_array((rows, columns), tensor.dtype.numpy), tensor.dtype)
        size = tensor.dtype.itemsize
        self._gather("all_gather_columns", tensor, result, rows, share * size, columns * size)
        return result

    def _gather(self, kind: Kind, tensor: Tensor, result: Tensor, rows: int, share: int, whole: int) -> None:
        """Rows of ``whole`` bytes, of which each rank but the last has ``share``."""
        if not share:
            return
        mine, place, region = min(share, whole - self.rank * share), self._place(), self._stage
        rows_at_once, most = max(1, _SLOT_BYTES // share), min(share, _SLOT_BYTES)
        for row in range(0, rows, rows_at_once):
            count = min(rows_at_once, rows - row)
            for first in range(0, share, most):
                size = max(0, min(most, mine - first))
                self._publish(tensor.address + row * mine + first, count * size)
                self._meet(kind, count * min(most, share - first), place)
                gather_kernel()(
                    count, _workers(count), region.shared, region.counted, result.address + row * whole, region.slots,
                    _SLOT_BYTES, self.num_ranks, first, most, share, whole,
                )  # fmt: skip

    def agree(self, is_so: bool) -> bool:
        """Whether it is so on all ranks. Not to be recorded."""
        votes, everyone = Tensor.from_numpy(np.array([is_so], np.float32)), self._all
        self._publish(votes.address, 4, everyone)
        self._meet("agree", 4, self._place(), everyone)
        self._add(votes.address, 4, everyone)
        return float(votes.array[0]) == everyone.num_ranks

    def send(self, x: Tensor) -> None:
        """See `Pipeline`. It waits only if the next stage lags by many megabytes."""
        self._hand_over("send", send_kernel(), self._number, x)

    def receive(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        result = Tensor.over(new_array(shape, dtype.numpy), dtype)
        count = self.num_stages * self.num_ranks
        self._hand_over("receive", receive_kernel(), (self._number - self.num_ranks) % count, result)
        return result

    def _hand_over(self, kind: str, kernel: Kernel, sender: int, x: Tensor) -> None:
        assert self.num_stages > 1, "there is no other stage"
        hold(self._memory, self._step_line)
        pipe = self._flag + _pipes_at(self.num_ranks, self.num_stages) + sender * PIPE_BYTES
        total, place = x.size_bytes, self._place()
        for first in range(0, total, SLOT_BYTES):
            kernel(
                1, 1, pipe, self._flag, self._stepped, x.address + first, min(SLOT_BYTES, total - first), total,
                explain=lambda status: self._explain(status, self._described_message(kind, total, place, pipe)),
            )  # fmt: skip

    def _described_message(self, kind: str, size: int, place: int, pipe: int) -> str:
        """A rank's call, and for a receiver the message that it got."""
        call = f"{kind} of {size:,} bytes of step {self._step[0]} at {self._place_names[place]}"
        if kind == "send":
            return call
        words = self._memory[pipe - self._flag :].view(np.int64)
        put, taken = words[0], words[LINE_BYTES // 8]
        if put <= taken:
            return f"{call}, but nothing was sent"
        step, sent = words[(2 + taken % SLOTS) * LINE_BYTES // 8 :][:2]
        return f"{call}, but was sent {sent:,} bytes of step {step}"

    def begin_step(self, number: int) -> None:
        self._step[0], self._step[1] = number, 0
        self._begun_ns = time.perf_counter_ns()

    def end_step(self, number: int) -> None:
        """Reports the end of a step to the others, so that a rank with fewer collectives in it is found: here, or when
        this rank or the other meets them next."""
        if self._ends is not None:
            status = self._ends(_description("end of step", number))
            if status:
                raise self._explain(status, self._call_at(self._stage, int(self._stage.counter[DIFFERENT])))
        self._notices.count_span(Span(number, self._begun_ns, time.perf_counter_ns(), self._step[1]))

    def spans(self, rank: int, num_known: int) -> tuple[int, list[Span]]:
        return self._notices.spans(rank, num_known)

    def sum_buffer(self, shape: tuple[int, ...], dtype: DType) -> None:
        """See `Communicator`: any memory serves."""

    def begin_pass(self) -> None:
        """See `Communicator`."""

    def _publish(self, source: int, size: int, region: _Region | None = None) -> None:
        work_items = -(-size // CHUNK_BYTES)
        if not work_items:
            return
        region = region or self._stage
        hold(self._memory, region.counter)
        publish_kernel()(
            work_items, _workers(work_items), region.shared, region.counted, source, region.slots, _SLOT_BYTES,
            region.rank, region.num_ranks, size,
        )  # fmt: skip

    def _meet(self, kind: Kind, size: int, place: int, region: _Region | None = None) -> None:
        region = where = region or self._stage
        hold(self._memory, region.counter)
        description = _description(kind, size)

        def explain(status: int) -> CommunicatorError:
            return self._explain(status, self._call_at(where, int(where.counter[DIFFERENT])))

        meet_kernel()(
            1, 1, region.shared, region.counted, self._flag, region.rank, region.num_ranks, description, place,
            *self._patience, 1, explain=explain,
        )  # fmt: skip

    def _call_at(self, region: _Region, number: int) -> str:
        """This rank's call of a collective."""
        begin = region.shared - self._flag + description_at(region.num_ranks, region.rank, number)
        description, place = self._memory[begin : begin + 16].view(np.int64)
        size, kind = divmod(int(description), len(_KINDS))
        return f"{_KINDS[kind]} {self._described(_KINDS[kind], size, int(place))} as its collective {number}"

    def _add(self, target: int, size: int, region: _Region | None = None) -> None:
        work_items, region = -(-size // CHUNK_BYTES), region or self._stage
        add_kernel()(
            work_items, _workers(work_items), region.shared, region.counted, target, region.slots, _SLOT_BYTES,
            region.num_ranks, size,
        )  # fmt: skip

    def _place(self) -> int:
        """The line number of the caller outside the folders that pass calls on."""
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
        """The error, with every rank's reason."""
        self._notices.say(self._number, f"called {call}")
        if status != HAS_ABORTED:
            self._notices.give_up(self._number)
        self._notices.wait_for_all()
        return CommunicatorError(f"ranks do not do the same: {self.last_words()}")


def _description(kind: Kind, size: int) -> int:
    """The label that `meet` compares."""
    return size * len(_KINDS) + _KINDS.index(kind)


def _workers(work_items: int) -> int:
    return min(NUM_THREADS, work_items)
