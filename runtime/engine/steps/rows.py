"""The executor's persistent batch: the block tables, last token and sampling parameters of each running sequence, by
row. Eager steps, recorded steps and decode graphs all read it.
"""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from runtime.engine.steps.block_tables import BlockTables
from runtime.engine.steps.ragged import largest
from runtime.engine.steps.sampler import SamplingRows
from runtime.engine.steps.step_input import LAST_TOKEN, RowLoad, StepInput

logger = logging.getLogger("xserv.engine")


class Rows:
    """``max_num_seqs`` rows. Belongs to the engine's loop.

    tables       block tables
    last_tokens  the last token of each row, by the steps that are over
    rotary_offsets  of each row: rotary position minus KV position
    version      incremented by each load, which invalidates cached facts about rows
    versions     of each row: the version when it was loaded last
    """

    def __init__(self, max_num_seqs: int, max_blocks: int, num_groups: int, block_size: int, vocab_size: int) -> None:
        self.tables = BlockTables(num_groups, max_num_seqs, max_blocks, block_size)
        self.last_tokens = np.zeros(max_num_seqs, np.int32)
        self.rotary_offsets = np.zeros(max_num_seqs, np.int64)
        self.sampling = SamplingRows(max_num_seqs, vocab_size)
        self.version = 0
        self.versions = np.zeros(max_num_seqs, np.int64)

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

    def _load(self, load: RowLoad) -> None:
        row = load.row
        self.version += 1
        self.versions[row] = self.version
        self.tables.clear(row)
        self.last_tokens[row] = load.last_token_id
        self.rotary_offsets[row] = load.rotary_offset
        try:
            self.sampling.load(load)
        except Exception:
            logger.exception("the sampling parameters of row %d cannot be written", row)
            self.sampling.break_row(load)
