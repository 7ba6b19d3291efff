"""What a drafter over hidden states makes of what a step left: pairs in its pages, and proposals behind them.

`stepping` and `blocks` are the two ways; `state_proposer` knows whose the pairs are, and which pages are theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime import ops
from runtime.device.device import Device
from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.speculation.drafter import Ids
from runtime.tensor.tensor import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PairChunks:
    """Pairs of some sequences that are computed next, those of each one behind another.

    states       the model's, of each layer that is read
    state_rows   of each pair among them
    token_ids    of each pair
    rows         of the sequences in the block tables; they ascend
    starts, counts  where in their pages the pairs go, and how many
    """

    states: tuple[Tensor, ...]
    state_rows: NDArray[np.int32]
    token_ids: Ids
    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]

    def own_states(self, device: Device) -> list[Tensor]:
        """Of each layer, those of the pairs alone."""
        return [rows_of(each, self.state_rows, device) for each in self.states]

    @property
    def last(self) -> NDArray[np.int32]:
        """The place of each sequence's last pair."""
        return (np.cumsum(self.counts) - 1).astype(np.int32)


class Drawing(NamedTuple):
    """A sequence for which at most so many tokens are proposed, one or more."""

    sequence: Sequence
    most: int


class Drafting(Protocol):
    """One way of drafting.

    pair_ahead  how far the last token that a pair's key and value are made of is behind that of its hidden states
    """

    pair_ahead: int

    def slots_behind(self, most: int) -> int:
        """Slots behind a sequence's pairs that so many proposals take; of pairs alone 0 are asked for."""
        ...

    def absorb(self, chunks: PairChunks) -> None:
        """The pairs go into their pages."""
        ...

    def draft(self, chunks: PairChunks, drawing: list[Drawing]) -> list[list[int]]:
        """The pairs go into their pages, and what is proposed behind each sequence's last one."""
        ...


def rows_of(x: Tensor, rows: NDArray[np.int32], device: Device) -> Tensor:
    """Rows ``[n]`` of ``x``."""
    (indices,) = ops.place([rows], device)
    return ops.gather_rows(x, indices)
