"""Status messages between rank processes: shared memory with a flag and last words, for failures, and with each rank's
times."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

TEXT_BYTES = 2048
"""Bytes of each rank's last words."""
LAST_WORDS_S = 0.5
"""How long an error waits for the other ranks' reasons."""
_FLAG_BYTES = 64
NUM_SPANS = 64
"""Steps of a rank that are kept."""
_COUNTS, _SPAN = 8, 4  # numbers of a rank's counts, and of each of its steps
TALLY_BYTES = 8 * (_COUNTS + NUM_SPANS * _SPAN)
"""Bytes of each rank's counts and latest steps."""


def shared_memory(size_bytes: int) -> int:
    """An anonymous memory file for ranks to map; returns its descriptor, which they inherit. It is freed with the last
    of them."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("xserv-ranks")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size_bytes)
    return descriptor


def notices_bytes(num_ranks: int) -> int:
    """Bytes of the memory that `Notices.open` maps."""
    return _FLAG_BYTES + num_ranks * (TEXT_BYTES + TALLY_BYTES)


class Tally(NamedTuple):
    """A rank's progress: steps, and the nanoseconds that they took, and those spent waiting for another stage."""

    num_steps: int
    step_ns: int
    waited_ns: int


class Span(NamedTuple):
    """A step of a rank: when it began and ended, by `time.perf_counter_ns`, and how much of it was waiting for another
    stage."""

    number: int
    begun_ns: int
    ended_ns: int
    waited_ns: int


class Notices:
    """One rank's view of the memory.

    Attributes:
        rank: the number of this rank.
        num_ranks: the number of ranks.
    """

    def __init__(
        self, flag: NDArray[np.int64], texts: NDArray[np.uint8], tallies: NDArray[np.uint8], rank: int
    ) -> None:
        """`flag`: one number, 0 or 1 + the rank that aborted. `texts`: `[num_ranks, TEXT_BYTES]`, zeros at first, as
        are `tallies`, `[num_ranks, TALLY_BYTES]`."""
        self.rank, self.num_ranks = rank, len(texts)
        self._flag, self._texts, self._tallies = flag.data, texts, tallies.view(np.int64)
        self._mine = self._tallies[rank].data  # single numbers are read and written faster this way

    @staticmethod
    def open(descriptor: int, rank: int, num_ranks: int) -> Notices:
        """A view over memory with nothing else in it."""
        memory = np.frombuffer(mmap.mmap(descriptor, notices_bytes(num_ranks)), np.uint8)
        texts_end = _FLAG_BYTES + num_ranks * TEXT_BYTES
        texts = memory[_FLAG_BYTES:texts_end].reshape(num_ranks, TEXT_BYTES)
        tallies = memory[texts_end:].reshape(num_ranks, TALLY_BYTES)
        return Notices(memory[:8].view(np.int64), texts, tallies, rank)

    def count(self, step_ns: int, waited_ns: int) -> None:
        """Count a step of this rank, without its times."""
        mine = self._mine
        mine[1] += step_ns
        mine[2] += waited_ns
        mine[0] += 1

    def count_span(self, span: Span) -> None:
        """Record a step of this rank."""
        mine = self._mine
        at = _COUNTS + mine[0] % NUM_SPANS * _SPAN
        for number, value in enumerate(span, at):
            mine[number] = value
        self.count(span.ended_ns - span.begun_ns, span.waited_ns)

    def spans(self, rank: int, num_known: int) -> tuple[int, list[Span]]:
        """The number of steps of a rank, and the latest of them, oldest first, without its `num_known` first."""
        theirs = self._tallies[rank]
        end = int(theirs[0])
        taken = theirs.copy()
        start = max(num_known, int(theirs[0]) + 1 - NUM_SPANS)  # one may be being written
        places = (_COUNTS + number % NUM_SPANS * _SPAN for number in range(start, end))
        return end, [Span(*map(int, taken[at : at + _SPAN])) for at in places]

    def tallies(self) -> list[Tally]:
        """The current tallies of all ranks."""
        return [Tally(*map(int, row[:3])) for row in self._tallies]

    @property
    def has_given_up(self) -> bool:
        """Whether a rank has aborted."""
        return bool(self._flag[0])

    def give_up(self, rank: int) -> None:
        """Set the flag for all ranks."""
        if not self._flag[0]:
            self._flag[0] = 1 + rank

    def say(self, rank: int, text: str) -> None:
        """Store a rank's reason; only its first one counts."""
        if not self.said(rank):
            data = text.encode()[: TEXT_BYTES - 1]
            self._texts[rank, : len(data)] = np.frombuffer(data, np.uint8)

    def said(self, rank: int) -> str:
        """A rank's reason; "" without one."""
        return bytes(self._texts[rank]).rstrip(b"\0").decode(errors="replace")

    def last_words(self) -> str:
        """The reasons of all ranks."""
        return "; ".join(f"rank {rank} {said}" for rank in range(self.num_ranks) if (said := self.said(rank)))

    def wait_for_all(self) -> None:
        """Wait until all have given a reason, or for a moment."""
        until = time.monotonic() + LAST_WORDS_S
        while not all(self.said(rank) for rank in range(self.num_ranks)) and time.monotonic() < until:
            time.sleep(0.01)


class Noticed:
    """The part of a `RankCommunicator` that notices give. `_number`: this rank's, among all."""

    _notices: Notices
    _number: int

    def tallies(self) -> list[Tally]:
        return self._notices.tallies()

    def abort(self, reason: str) -> None:
        self.abort_for(self._number, reason)

    def abort_for(self, rank: int, reason: str) -> None:
        self._notices.say(rank, reason)
        self._notices.give_up(rank)

    @property
    def is_aborted(self) -> bool:
        return self._notices.has_given_up

    def last_words(self) -> str:
        return self._notices.last_words()
