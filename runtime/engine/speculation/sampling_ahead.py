"""Samples from a small model, with the noise that the target model will use at the same position."""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from typing import Any

from numpy.typing import NDArray

from runtime import ops
from runtime.engine.scheduling.sequence import Sequence
from runtime.sampling_arrays import SamplingArrays
from runtime.sampling_table import COLUMNS
from runtime.tensor.tensor import Tensor

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
