"""What proposes a sequence's next tokens."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from runtime.engine.scheduling.sequence import Sequence

Ids = NDArray[np.int32]

NOTHING: Ids = np.empty(0, np.int32)


class Text:
    """A sequence's tokens as one array, with what may stand before them. It grows as the sequence does."""

    __slots__ = ("_buffer", "_num_before", "length")

    def __init__(self, sequence: Sequence, before: Ids = NOTHING) -> None:
        self._num_before = len(before)
        self.length = self._num_before
        self._buffer: Ids = np.empty(self._num_before + sequence.num_tokens + 256, np.int32)
        self._buffer[: self._num_before] = before
        self.follow(sequence)

    def follow(self, sequence: Sequence) -> Ids:
        """All tokens up to the last that is known: a view."""
        known = self.length - self._num_before
        count = sequence.num_tokens - known
        if count > 0:
            end = self.length + count
            if end > len(self._buffer):
                self._buffer = np.concatenate((self._buffer[: self.length], np.empty(end, np.int32)))
            if count == 1:
                self._buffer[end - 1] = sequence.last_token_id
            else:
                self._buffer[self.length : end] = sequence.token_ids(known, sequence.num_tokens)
            self.length = end
        return self._buffer[: self.length]


class Drafter(Protocol):
    """Proposals for one sequence after another. It belongs to the engine's loop.

    name  for logs
    """

    name: str

    def propose(self, sequence: Sequence, most: int) -> tuple[Ids, int]:
        """Up to ``most`` tokens that may follow, and how sure the drafter is: 0 to ``SUREST``, a class of proposals
        whose acceptance is counted together."""
        ...

    def end(self, sequence: Sequence) -> None:
        """The sequence has ended: its tokens are known for good."""
        ...


@runtime_checkable
class BatchDrafter(Drafter, Protocol):
    """A drafter that works for several sequences at once."""

    def prepare(self, asked: list[tuple[Sequence, int]]) -> None:
        """These sequences' proposals are asked for next, at most so many of each."""
        ...


@runtime_checkable
class DistributionDrafter(Drafter, Protocol):
    """A drafter that knows what it drew its proposals from."""

    def distributions(self, sequence: Sequence, count: int) -> NDArray[np.float32] | None:
        """The probabilities ``[count, vocab_size]`` by which the first ``count`` of its latest proposals were drawn,
        with noise of their own. None: each equals what would be drawn if the drafter were right."""
        ...


SUREST = 15
