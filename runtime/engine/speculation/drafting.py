"""Drafting from the hidden states of a step: pairs in the drafter's pages, and draft tokens after them.

`stepping` and `blocks` are the two ways; `state_proposer` keeps track of the sequences and pages of the pairs.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime import ops
from runtime.device.device import Device
from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.speculation.drafter import Ids
from runtime.sampling_arrays import SamplingArrays
from runtime.sampling_table import COLUMNS
from runtime.tensor.tensor import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PairChunks:
    """The next pairs of some sequences to compute, those of each in order.

    states       the model's, of each layer that is read
    state_rows   of each pair among them
    token_ids    of each pair
    rows         of the sequences in the block tables; they ascend
    starts, counts  indices in their pages where the pairs go, and how many
    """

    states: tuple[Tensor, ...]
    state_rows: NDArray[np.int32]
    token_ids: Ids
    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]

    def own_states(self, device: Device) -> list[Tensor]:
        """The rows of the pairs alone, for each layer."""
        return [rows_of(each, self.state_rows, device) for each in self.states]

    @property
    def last(self) -> NDArray[np.int32]:
        """The index of each sequence's last pair."""
        return (np.cumsum(self.counts) - 1).astype(np.int32)


class Drawing(NamedTuple):
    """A sequence and its draft length, at least one."""

    sequence: Sequence
    most: int


class Drafting(Protocol):
    """One way of drafting.

    pair_ahead  how many positions the last token in a pair's key and value is after that of its hidden states
    """

    pair_ahead: int

    def slots_behind(self, most: int) -> int:
        """Slots after a sequence's pairs that so many draft tokens take; 0 for pairs alone."""
        ...

    def absorb(self, chunks: PairChunks) -> None:
        """Write the pairs to their pages."""
        ...

    def draft(self, chunks: PairChunks, sampling_sequences: list[Drawing]) -> list[list[int]]:
        """Write the pairs to their pages, and draft after each sequence's last one."""
        ...


def rows_of(x: Tensor, rows: NDArray[np.int32], device: Device) -> Tensor:
    """Rows ``[n]`` of ``x``."""
    (indices,) = ops.place([rows], device)
    return ops.gather_rows(x, indices)


SAMPLED_BY = [name for name, column in COLUMNS.items() if not column.is_penalty]
"""The sampling parameters that a draft follows; penalties and biases are ignored."""


def arrays_ahead(sequences: Sequences[Sequence], num_ahead: Sequences[int]) -> SamplingArrays:
    """The parameters of each sequence's sample after so many draft tokens."""
    arrays = SamplingArrays.neutral(len(sequences))
    for name in SAMPLED_BY:
        values: NDArray[Any] = getattr(arrays, name)
        values[:] = [getattr(sequence.request.params, name) for sequence in sequences]
    arrays.seed[:] = [sequence.request.seed for sequence in sequences]
    arrays.choice_index[:] = [sequence.index for sequence in sequences]
    arrays.position[:] = [s.num_output_tokens + ahead for s, ahead in zip(sequences, num_ahead, strict=True)]
    return arrays


def sample_ahead(logits: Tensor, sequences: Sequences[Sequence], num_ahead: Sequences[int]) -> list[int]:
    """The token of each after so many draft tokens, or -1 if there is none. ``logits [n, vocab_size]``."""
    token_ids: list[int] = ops.sample(logits, arrays_ahead(sequences, num_ahead)).token_ids.tolist()
    return token_ids
