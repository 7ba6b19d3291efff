"""The interfaces of drafters, which propose a sequence's next tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from runtime.dtype import DType
from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.steps.executor import AuxiliaryHiddenStates

Ids = NDArray[np.int32]

NOTHING: Ids = np.empty(0, np.int32)


class Drafter(Protocol):
    """Proposes draft tokens for one sequence after another. It belongs to the engine's loop.

    name  for logs
    """

    name: str

    def propose(self, sequence: Sequence, most: int) -> tuple[Ids, int]:
        """Up to ``most`` draft tokens, and the drafter's confidence: 0 to ``SUREST``, a class of drafts whose
        acceptance is counted together."""
        ...

    def end(self, sequence: Sequence) -> None:
        """The sequence has ended: its tokens are final."""
        ...


@runtime_checkable
class BatchDrafter(Drafter, Protocol):
    """A drafter that drafts for several sequences at once."""

    def prepare(self, asked: list[tuple[Sequence, int]]) -> None:
        """Draft for these sequences, which are proposed next, up to so many tokens each."""
        ...


@runtime_checkable
class DistributionDrafter(Drafter, Protocol):
    """A drafter that keeps the distributions of its draft tokens."""

    def distributions(self, sequence: Sequence, count: int) -> NDArray[np.float32] | None:
        """The probabilities ``[count, vocab_size]`` from which the first ``count`` of its latest draft tokens were
        sampled, with noise of their own. None if they were sampled with the target's noise."""
        ...


class WantedStates(NamedTuple):
    """Hidden states ``[num_tokens, width]`` after these layers of the model, counted from 1; 0: the embeddings."""

    layers: tuple[int, ...]
    width: int
    dtype: DType


class LeftChunk(NamedTuple):
    """Hidden states that a step left of a sequence: those of ``num_tokens`` tokens from position ``start`` on, from row
    ``first_row`` on. The token after each of them is known."""

    sequence: Sequence
    first_row: int
    start: int
    num_tokens: int


@runtime_checkable
class StateDrafter(BatchDrafter, Protocol):
    """A drafter that reads the model's hidden states, which the executor keeps for it."""

    wanted: WantedStates

    def follow(self, kept: AuxiliaryHiddenStates, chunks: Callable[[], list[LeftChunk]], *, pays: bool) -> None:
        """Take up the hidden states of a step that is over, before the next one starts. ``pays`` means that drafts may
        be worth their preparation."""
        ...


SUREST = 15
