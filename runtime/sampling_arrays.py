"""Sampling parameters of one step as plain arrays, one row a draw: the input of the sampling kernel.

All arrays are C-contiguous numpy arrays on the host; the operation uploads them. A draw's lists are ``ids[start[i] :
end[i]]``; several draws of a sequence read one list, each up to its own end. Semantics and order are vLLM V1's: allowed
mask and bias, then penalties, then the argmax for a greedy row, else temperature, min-p, top-k, top-p and sampling; a
row with a chain has its own order of samplers.
"""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.sampling_table import KERNEL_COLUMNS

Float32Array = NDArray[np.float32]
Int32Array = NDArray[np.int32]


_Numbers: Any = make_dataclass("_Numbers", [(name, NDArray) for name in KERNEL_COLUMNS], slots=True)


@dataclass(slots=True)
class SamplingArrays(_Numbers):  # type: ignore[misc]
    """Parameters of ``n`` rows of logits over a vocabulary of ``V``; first the numbers of
    ``KERNEL_COLUMNS``, each ``[n]``."""

    seed: NDArray[np.uint64]  # [n]
    choice_index: Int32Array  # [n] which of a request's n choices
    position: Int32Array  # [n] output position of the token to sample
    prompt_ids: Int32Array  # [any] only rows that need penalties have entries
    prompt_start: Int32Array  # [n]
    prompt_end: Int32Array  # [n]
    output_ids: Int32Array  # [any] only rows that need penalties have entries
    output_start: Int32Array  # [n]
    output_end: Int32Array  # [n]
    bias_ids: Int32Array  # [any] logit_bias, and -inf for forbidden ids
    bias_values: Float32Array  # as many
    bias_start: Int32Array  # [n]
    bias_end: Int32Array  # [n]
    chain_words: Int32Array  # [any] the words of `numba_kernels.sampler_chain` of the rows that have a chain
    chain_start: Int32Array  # [n]
    chain_end: Int32Array  # [n]
    allowed_mask: NDArray[np.uint32] | None = None  # [n, ceil(V / 32)] bit t % 32 of word t // 32: t is allowed

    @property
    def has_chains(self) -> bool:
        """Whether some row has a chain."""
        return bool(self.chain_end.any())

    @property
    def num_rows(self) -> int:
        """Rows of logits that these parameters belong to."""
        return len(self.seed)

    def at(self, rows: NDArray[np.int64]) -> SamplingArrays:
        """The parameters of some of the rows, which share their lists."""
        numbers: dict[str, Any] = {}
        for name, _, size in SAMPLING_FIELDS:
            value = getattr(self, name)
            numbers[name] = value[rows] if size == "n" else value
        mask = self.allowed_mask
        return SamplingArrays(**numbers, allowed_mask=None if mask is None else mask[rows])

    @classmethod
    def neutral(cls, num_rows: int) -> SamplingArrays:
        """Greedy rows with every other parameter off, for the caller to fill in."""
        others = SAMPLING_FIELDS[len(KERNEL_COLUMNS) :]
        zeros = {name: np.zeros(num_rows if size == "n" else 0, dtype) for name, dtype, size in others}
        numbers = {name: np.full(num_rows, column.neutral, column.dtype) for name, column in KERNEL_COLUMNS.items()}
        return cls(**{**zeros, **numbers})


SAMPLING_FIELDS = (
    *((name, np.dtype(column.dtype), "n") for name, column in KERNEL_COLUMNS.items()),
    ("seed", np.dtype(np.uint64), "n"),
    ("choice_index", np.dtype(np.int32), "n"),
    ("position", np.dtype(np.int32), "n"),
    ("prompt_ids", np.dtype(np.int32), "any"),
    ("prompt_start", np.dtype(np.int32), "n"),
    ("prompt_end", np.dtype(np.int32), "n"),
    ("output_ids", np.dtype(np.int32), "any"),
    ("output_start", np.dtype(np.int32), "n"),
    ("output_end", np.dtype(np.int32), "n"),
    ("bias_ids", np.dtype(np.int32), "any"),
    ("bias_values", np.dtype(np.float32), "any"),
    ("bias_start", np.dtype(np.int32), "n"),
    ("bias_end", np.dtype(np.int32), "n"),
    ("chain_words", np.dtype(np.int32), "any"),
    ("chain_start", np.dtype(np.int32), "n"),
    ("chain_end", np.dtype(np.int32), "n"),
)
"""Name, type and size of all but the mask, in the order of the kernels' arguments: one a draw, or any number."""


class SampledTokens(NamedTuple):
    """The sampled tokens of a step. A row that is not ``ok`` (NaN or +inf in its logits, or no candidate) holds -1."""

    token_ids: Int32Array  # [n]
    ok: NDArray[np.bool_]  # [n]
    mus: Float32Array | None = None  # [n] mirostat's next mu of rows that have one; None without chains


class TopLogprobs(NamedTuple):
    """Log-probabilities of the raw logits; the highest first, ties by the lower id."""

    chosen_logprob: Float32Array  # [n]
    chosen_rank: Int32Array  # [n] 1 + the number of tokens with a higher logit
    top_ids: Int32Array  # [n, top_n]
    top_logprobs: Float32Array  # [n, top_n]
