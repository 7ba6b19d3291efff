"""The executor's persistent batch: the block tables, last token and sampling parameters of each running sequence, by
row. Eager steps, recorded steps and decode graphs all read it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.engine.logits.processing import RowProcessors
from runtime.engine.logits.settings import PLAIN, LogitsSettings
from runtime.engine.steps.layout import NUMBERS, BlockTables, Chunks, StepLayout, largest
from runtime.engine.steps.sampler import SamplingRows
from runtime.engine.steps.step_input import LAST_TOKEN, RowLoad, StepInput
from runtime.sampling_arrays import SamplingArrays

logger = logging.getLogger("xserv.engine")

_MOST_KEPT = 64
"""Numbers of tokens of the same rows that are cached."""


@dataclass(slots=True)
class Samples:
    """The samples of a step.

    rows, tokens, positions  of each sample: its row, the token of the step that it follows, and its index in the
                     row's output
    counts           of each chunk that samples; None means one each
    proposals        tokens that the samples are compared with, or None
    version          the rows', when the step began
    """

    rows: NDArray[np.int64]
    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    counts: list[int] | None
    proposals: NDArray[np.int32] | None
    version: int


class LaidOut(NamedTuple):
    """A step over the rows: its layout, its samples, their parameters, and the samples whose own parameters raise an
    error."""

    layout: StepLayout
    samples: Samples
    sampling: SamplingArrays
    broken: list[int]


@dataclass(slots=True)
class _Places:
    """The part of a layout that follows from a step's rows, counts and numbers of samples. ``[D]``: by sample.

    rotary         by token: rotary position minus position, or None
    tokens, rows   [D] of each sample
    indices        [D] the tokens, as the batch has them
    outputs        [D] output index minus position
    counts         samples of each chunk that has any; None means one each
    sampling       parameters of the samples, except their positions; None if they have to be gathered for each step
    keeps_outputs  one of the rows has parameters that depend on its output
    """

    chunks: Chunks
    rotary: NDArray[np.int64] | None
    tokens: NDArray[np.int64]
    rows: NDArray[np.int64]
    indices: NDArray[np.int32]
    outputs: NDArray[np.int64]
    counts: list[int] | None
    sampling: SamplingArrays | None
    keeps_outputs: bool


class PersistentBatch:
    """``max_num_seqs`` rows. Belongs to the engine's loop.

    Steps of decodes with drafts follow one another with the same rows, and often with as many tokens of each.
    Everything that depends on these alone is cached; the rest of such a step is a few sums over arrays.

    tables       block tables
    last_tokens  the last token of each row, by the steps that are over
    rotary_offsets  of each row: rotary position minus KV position
    has_offsets  some may differ from 0
    numbers      of each row, by the names of the batch's fields that have a number for each sequence
    version      incremented by each load, which invalidates cached facts about rows
    versions     of each row: the version when it was loaded last
    """

    def __init__(
        self, max_num_seqs: int, max_blocks: int, num_groups: int, block_size: int, vocab_size: int,
        *, has_offsets: bool = False, processing: LogitsSettings = PLAIN,
    ) -> None:  # fmt: skip
        self.tables = BlockTables(num_groups, max_num_seqs, max_blocks, block_size)
        self.last_tokens = np.zeros(max_num_seqs, np.int32)
        self.rotary_offsets = np.zeros(max_num_seqs, np.int64)
        self.has_offsets = has_offsets
        self.numbers = {
            name: np.full(max_num_seqs, field.padding, field.dtype) for name, field in NUMBERS.items() if field.row
        }
        processors = RowProcessors(processing.processors)
        self.sampling = SamplingRows(max_num_seqs, vocab_size, processors, tells_processed=processing.tells_processed)
        self.version = 0
        self.versions = np.zeros(max_num_seqs, np.int64)
        self._kept: dict[bytes, _Places] = {}
        self._kept_version = -1  # when these were made
        self._kept_rows: NDArray[np.int64] = np.empty(0, np.int64)

    def apply(self, step: StepInput) -> None:
        """Write the step's changes. A row whose parameters cannot be written samples nothing until its next load."""
        for load in step.loads:
            self._load(load)
        for addition in step.additions:
            self.tables.add(addition.group, addition.row, addition.first, addition.block_ids)

    def tokens_of(self, token_ids: NDArray[np.int32], rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """``token_ids [n]`` with the last tokens of their ``rows [n]`` filled in."""
        filled = self.last_tokens[rows]
        if largest(token_ids) == LAST_TOKEN:  # the lowest value
            return filled
        return np.where(token_ids == LAST_TOKEN, filled, token_ids)

    def note(self, rows: NDArray[np.int64], token_ids: NDArray[np.int32]) -> None:
        """Record sampled tokens, each the last of its row so far."""
        self.last_tokens[rows] = token_ids

    def note_outputs(
        self, rows: NDArray[np.int64], positions: NDArray[np.int64], token_ids: NDArray[np.int32], version: int
    ) -> None:
        """Record tokens sampled by a step that began at ``version``, at these positions of the rows' outputs."""
        is_same = self.versions[rows] <= version
        self.sampling.write_outputs(rows[is_same], positions[is_same], token_ids[is_same])

    def note_mus(self, rows: NDArray[np.int64], mus: NDArray[np.float32], version: int) -> None:
        """Record mirostat's mu after tokens sampled by a step that began at ``version``."""
        is_same = self.versions[rows] <= version
        self.sampling.chains.note(rows[is_same], mus[is_same])

    def lay_out(self, step: StepInput) -> LaidOut:
        """A step whose rows are loaded. Unchanged arrays of decodes with drafts are the same objects as before."""
        places = self._kept_places(step) if step.draws_everywhere else self._places_of(step)
        chunks = places.chunks
        positions = chunks.positions(step.starts)
        outputs = positions.take(places.tokens)
        outputs += places.outputs
        proposals = None
        if places.counts is not None:  # a sample that is not its chunk's last is compared with the next token
            following = np.empty_like(step.token_ids)
            following[:-1], following[-1] = step.token_ids[1:], 0
            proposals = following.take(places.tokens)
            if places.keeps_outputs:
                self.sampling.write_outputs(places.rows, outputs, proposals)
        samples = Samples(places.rows, places.tokens, outputs, places.counts, proposals, self.version)
        sampling, broken = places.sampling, list[int]()
        if sampling is None:
            sampling, broken = self.sampling.gather_sound(places.rows, outputs)
        else:
            sampling.position = outputs.astype(np.int32)
        numbers = {name: values.take(step.rows) for name, values in self.numbers.items()}
        numbers.update(step.numbers)
        token_ids = self.tokens_of(step.token_ids, chunks.token_rows)
        layout = chunks.layout(token_ids, step.starts, positions, places.rotary, places.indices, self.tables, numbers)
        return LaidOut(layout, samples, sampling, broken)

    def _kept_places(self, step: StepInput) -> _Places:
        is_known = step.rows is self._kept_rows or np.array_equal(step.rows, self._kept_rows)
        if self._kept_version != self.version or not is_known:
            self._kept.clear()
            self._kept_version = self.version
        self._kept_rows = step.rows
        key = step.counts.tobytes()
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) == _MOST_KEPT:
                del self._kept[next(iter(self._kept))]
            found = self._kept[key] = self._places_of(step)
            if self.sampling.are_plain(step.rows) and not self.sampling.has_broken:
                found.sampling = self.sampling.gather(found.rows, found.tokens)
        return found

    def _places_of(self, step: StepInput) -> _Places:
        chunks = Chunks.of_rows(step.rows, step.counts, step.num_tokens, self.tables)
        sampled, counts = step.num_samples.nonzero()[0], None  # the chunk of each sample
        ahead: NDArray[Any] | int = 0
        if largest(step.num_samples) > 1:
            num_samples = step.num_samples[sampled]
            counts = num_samples.tolist()
            sampled = np.repeat(sampled, num_samples)
            # samples of the chunk after each of them
            ahead = np.repeat(np.cumsum(num_samples), num_samples) - 1 - np.arange(len(sampled))
        rows = step.rows[sampled]
        tokens = chunks.query_start.astype(np.int64)[1:].take(sampled) - 1 - ahead
        return _Places(
            chunks,
            chunks.by_token(self.rotary_offsets[step.rows]) if self.has_offsets else None,
            tokens,
            rows,
            tokens.astype(np.int32),
            1 - self.sampling.num_prompt_tokens[rows],
            counts,
            None,
            bool(self.sampling.keeps_outputs[step.rows].any()),
        )

    def _load(self, load: RowLoad) -> None:
        row = load.row
        self.version += 1
        self.versions[row] = self.version
        self.tables.clear(row)
        self.last_tokens[row] = load.last_token_id
        self.rotary_offsets[row] = load.rotary_offset
        for name, number in load.row_numbers.items():
            self.numbers[name][row] = number
        try:
            self.sampling.load(load)
        except Exception:
            logger.exception("the sampling parameters of row %d cannot be written", row)
            self.sampling.break_row(load)
