"""Verification steps: decodes of which some have draft tokens, with a sample after each token of the step.

Such steps follow one another with the same rows, and often with as many tokens of each. Everything that depends on
these alone is cached: the row, chunk and offset of each token, and the parameters of its draw. The rest of a step is a
few sums over arrays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.engine.steps.ragged import Layout, largest
from runtime.engine.steps.rows import Rows
from runtime.engine.steps.step_input import LAST_TOKEN, StepInput
from runtime.sampling_arrays import SamplingArrays

_MOST_KEPT = 64
"""Numbers of tokens of the same rows that are cached."""


@dataclass(slots=True)
class Draws:
    """The draws of a step.

    rows, tokens, positions  of each draw: its row, the token of the step that it follows, and its index in the
                     row's output
    counts           of each chunk that samples; None means one each
    proposals        tokens that the draws are compared with, or None
    version          the rows', when the step began
    """

    rows: NDArray[np.int64]
    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    counts: list[int] | None
    proposals: NDArray[np.int32] | None
    version: int


@dataclass(slots=True)
class _Places:
    """Cached arrays for the same rows with as many tokens each. ``[T]``: by token.

    counts         tokens of each chunk
    query_start    [n + 1]
    indices        [T] 0, 1, ...
    chunks, rows   [T] of each token
    offsets        [T] index in its chunk
    first_entries  [T] first entry of its row's blocks
    outputs        [T] output index of the sample after it, minus its position
    rotary         [T] rotary position minus position, or None
    sampling       of the draws, except their positions; None if they have to be gathered for each step
    keeps_outputs  one of the rows has parameters that depend on its output
    """

    counts: list[int]
    query_start: NDArray[np.int32]
    indices: NDArray[np.int32]
    tokens: NDArray[np.int64]
    chunks: NDArray[np.int64]
    rows: NDArray[np.int64]
    offsets: NDArray[np.int64]
    first_entries: NDArray[np.int64]
    outputs: NDArray[np.int64]
    rotary: NDArray[np.int64] | None
    max_query_len: int
    sampling: SamplingArrays | None
    keeps_outputs: bool


class Verifications:
    """Lays out decodes with drafts over the executor's rows. ``has_offsets``: rotary positions may differ from
    positions in the sequence."""

    def __init__(self, rows: Rows, *, has_offsets: bool) -> None:
        self._row_data = rows
        self._has_offsets = has_offsets
        self._kept: dict[bytes, _Places] = {}
        self._version = -1  # of the rows, when these were made
        self._rows: NDArray[np.int64] = np.empty(0, np.int64)  # of these rows

    def lay_out(self, step: StepInput) -> tuple[Layout, Draws, SamplingArrays, list[int]]:
        """A step that `draws_everywhere`, whose rows are loaded: its batch, its draws, their parameters, and the draws
        whose own parameters raise an error. Unchanged arrays are the same objects as before."""
        rows = self._row_data
        places = self._places_of(step)
        positions = step.starts.take(places.chunks)
        positions += places.offsets
        token_ids = rows.last_tokens.take(places.rows)
        np.copyto(token_ids, step.token_ids, where=step.token_ids != LAST_TOKEN)
        seq_lens = (step.starts + step.counts).astype(np.int32)
        rotary = positions if places.rotary is None else positions + places.rotary
        outputs = positions + places.outputs
        proposals = np.empty_like(step.token_ids)  # a draw that is its chunk's last is compared with none
        proposals[:-1], proposals[-1] = step.token_ids[1:], 0
        draws = Draws(places.rows, places.tokens, outputs, places.counts, proposals, rows.version)
        if places.keeps_outputs:
            rows.sampling.write_outputs(places.rows, outputs, proposals)
        sampling, broken = places.sampling, list[int]()
        if sampling is None:
            sampling, broken = rows.sampling.gather_sound(places.rows, outputs)
        else:
            sampling.position = outputs.astype(np.int32)
        layout = Layout(
            token_ids,
            rotary.astype(np.int32),
            places.query_start,
            seq_lens,
            rows.tables.slots(places.first_entries, positions),
            rows.tables.of(step.rows),
            places.indices,
            places.max_query_len,
            largest(seq_lens),
        )
        return layout, draws, sampling, broken

    def _places_of(self, step: StepInput) -> _Places:
        rows = self._row_data
        if self._version != rows.version or (step.rows is not self._rows and not np.array_equal(step.rows, self._rows)):
            self._kept.clear()
            self._version = rows.version
        self._rows = step.rows
        key = step.counts.tobytes()
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) == _MOST_KEPT:
                del self._kept[next(iter(self._kept))]
            found = self._kept[key] = self._made(step)
        return found

    def _made(self, step: StepInput) -> _Places:
        counts, sampling = step.counts, self._row_data.sampling
        query_start = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        chunks = np.repeat(np.arange(len(counts)), counts)
        rows, tokens = step.rows[chunks], np.arange(len(chunks))
        parameters = None
        if sampling.are_plain(step.rows) and not sampling.has_broken:
            parameters = sampling.gather(rows, tokens)
        return _Places(
            counts.tolist(),
            query_start,
            tokens.astype(np.int32),
            tokens,
            chunks,
            rows,
            tokens - query_start[chunks],
            self._row_data.tables.first_entries(rows),
            1 - sampling.num_prompt_tokens[rows],
            self._row_data.rotary_offsets[rows] if self._has_offsets else None,
            int(counts.max()),
            parameters,
            bool(sampling.keeps_outputs[step.rows].any()),
        )
