"""What ranks that are processes tell each other beside their work: shared memory with a flag and last words, for when
they cannot go on, and how long each has computed."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

TEXT_BYTES = 2048
"""Of each rank's last words."""
LAST_WORDS_S = 0.5
"""How long an error waits for what the other ranks say of it."""
_FLAG_BYTES = 64
NUM_SPANS = 64
"""Steps of a rank that are remembered."""
_COUNTS, _SPAN = 8, 4  # numbers of a rank's counts, and of each of its steps
TALLY_BYTES = 8 * (_COUNTS + NUM_SPANS * _SPAN)
"""Of each rank's counts and latest steps."""


def shared_memory(size_bytes: int) -> int:
    """A file of memory for ranks to map: its descriptor, which they inherit. It goes with the last of them and has no
    name, so that nothing is left of it."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("xserv-ranks")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size_bytes)
    return descriptor


def notices_bytes(num_ranks: int) -> int:
    """Of the memory that `Notices.open` maps."""
    return _FLAG_BYTES + num_ranks * (TEXT_BYTES + TALLY_BYTES)


class Tally(NamedTuple):
    """What a rank has done: steps, and the nanoseconds that they took, of which it waited for another stage."""

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
    """One rank's view of it.

    Attributes:
        rank: this one's number.
        num_ranks: how many there are.
    """

    def __init__(
        self, flag: NDArray[np.int64], texts: NDArray[np.uint8], tallies: NDArray[np.uint8], rank: int
    ) -> None:
        """`flag`: one number, 0 or 1 + the rank that gave up. `texts`: `[num_ranks, TEXT_BYTES]`, zeros at first, as
        are `tallies`, `[num_ranks, TALLY_BYTES]`."""
        self.rank, self.num_ranks = rank, len(texts)
        self._flag, self._texts, self._tallies = flag.data, texts, tallies.view(np.int64)
        self._mine = self._tallies[rank].data  # whose numbers are written and read faster, one by one

    @staticmethod
    def open(descriptor: int, rank: int, num_ranks: int) -> Notices:
        """Over memory that holds nothing else."""
        memory = np.frombuffer(mmap.mmap(descriptor, notices_bytes(num_ranks)), np.uint8)
        texts_end = _FLAG_BYTES + num_ranks * TEXT_BYTES
        texts = memory[_FLAG_BYTES:texts_end].reshape(num_ranks, TEXT_BYTES)
        tallies = memory[texts_end:].reshape(num_ranks, TALLY_BYTES)
        return Notices(memory[:8].view(np.int64), texts, tallies, rank)

    def count(self, step_ns: int, waited_ns: int) -> None:
        """This rank has done a step, of which no more is known."""
        mine = self._mine
        mine[1] += step_ns
        mine[2] += waited_ns
        mine[0] += 1

    def count_span(self, span: Span) -> None:
        """This rank has done a step."""
        mine = self._mine
        at = _COUNTS + mine[0] % NUM_SPANS * _SPAN
        for number, value in enumerate(span, at):
            mine[number] = value
        self.count(span.ended_ns - span.begun_ns, span.waited_ns)

    def spans(self, rank: int, num_known: int) -> tuple[int, list[Span]]:
        """How many steps a rank has done, and the latest of them, the oldest first, without its `num_known` first."""
        theirs = self._tallies[rank]
        end = int(theirs[0])
        taken = theirs.copy()
        start = max(num_known, int(theirs[0]) + 1 - NUM_SPANS)  # one may be written just now
        places = (_COUNTS + number % NUM_SPANS * _SPAN for number in range(start, end))
        return end, [Span(*map(int, taken[at : at + _SPAN])) for at in places]

    def tallies(self) -> list[Tally]:
        """Of all ranks, as far as they are now."""
        return [Tally(*map(int, row[:3])) for row in self._tallies]

    @property
    def has_given_up(self) -> bool:
        """Whether a rank has."""
        return bool(self._flag[0])

    def give_up(self, rank: int) -> None:
        """All are told."""
        if not self._flag[0]:
            self._flag[0] = 1 + rank

    def say(self, rank: int, text: str) -> None:
        """What a rank says of the end; its first words count."""
        if not self.said(rank):
            data = text.encode()[: TEXT_BYTES - 1]
            self._texts[rank, : len(data)] = np.frombuffer(data, np.uint8)

    def said(self, rank: int) -> str:
        """What a rank has said; "": nothing."""
        return bytes(self._texts[rank]).rstrip(b"\0").decode(errors="replace")

    def last_words(self) -> str:
        """What each rank has said."""
        return "; ".join(f"rank {rank} {said}" for rank in range(self.num_ranks) if (said := self.said(rank)))

    def wait_for_all(self) -> None:
        """Until all have said something, or for a moment."""
        until = time.monotonic() + LAST_WORDS_S
        while not all(self.said(rank) for rank in range(self.num_ranks)) and time.monotonic() < until:
            time.sleep(0.01)
