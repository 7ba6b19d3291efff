"""What proposes a sequence's next tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from runtime.dtype import DType
from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.steps.executor import KeptRows

Ids = NDArray[np.int32]

NOTHING: Ids = np.empty(0, np.int32)


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


class WantedStates(NamedTuple):
    """Hidden states ``[num_tokens, width]`` behind these layers of the model, counted from 1; 0: the embeddings."""

    layers: tuple[int, ...]
    width: int
    dtype: DType


class LeftChunk(NamedTuple):
    """Hidden states of a sequence that a step left: those of ``num_tokens`` tokens from position ``start`` on lie from
    row ``first_row`` on. The token behind each of them is known."""

    sequence: Sequence
    first_row: int
    start: int
    num_tokens: int


@runtime_checkable
class StateDrafter(BatchDrafter, Protocol):
    """A drafter that reads the model's hidden states, which the executor keeps for it."""

    wanted: WantedStates

    def follow(self, kept: KeptRows, chunks: Callable[[], list[LeftChunk]], *, pays: bool) -> None:
        """A step is over, and no other was started: what it left, and whose it is, is there until one is. ``pays``:
        proposals may be worth what it takes to prepare them."""
        ...


SUREST = 15
