"""The interfaces of drafters, which propose a sequence's next tokens.

Drafters that read the hidden states of a step write pairs to pages of their own: `drafting` has the two ways
(`Drafting`), and `state_proposer` keeps track of the sequences and pages of the pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from runtime import ops
from runtime.device.device import Device
from runtime.dtype import DType
from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.steps.executor import AuxiliaryHiddenStates
from runtime.sampling_arrays import SamplingArrays
from runtime.sampling_table import KERNEL_COLUMNS
from runtime.tensor.tensor import Tensor

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


def prepared(drafts: Mapping[Sequence, list[int]], sequence: Sequence, most: int) -> tuple[Ids, int]:
    """`Drafter.propose` of one that has drafted before."""
    ids = drafts.get(sequence)
    return (np.array(ids[:most], np.int32), 0) if ids else (NOTHING, 0)


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
    """Hidden states ``[num_tokens, width]`` after these layers of the model, counted from 1; 0: the embeddings.
    ``of_last``: those before a chunk's last tokens are not read, if none of the chunk's is a draft token."""

    layers: tuple[int, ...]
    width: int
    dtype: DType
    of_last: bool = False


class LeftChunk(NamedTuple):
    """Hidden states that a step left of a sequence: those of ``num_tokens`` tokens from position ``start`` on, from row
    ``first_row`` on. The token after each of them is known. (Where last tokens are wanted alone, only their row is
    there.)"""

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

    def slots_after(self, most: int) -> int:
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


SAMPLED_BY = [name for name, column in KERNEL_COLUMNS.items() if not column.is_penalty]
"""The sampling parameters that a draft follows; penalties, biases and chains are ignored."""


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
