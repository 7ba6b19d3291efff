"""The chains of rows: the words of `numba_kernels.sampler_chain`, with DRY's penalties and mirostat's mu so far."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from numba_kernels.sampler_chain import MIROSTAT, MU, NUM_WORDS, ORDER, packed
from runtime.engine.dry import Dry
from runtime.engine.steps.step_input import RowLoad
from runtime.sampling_table import CHAIN_COLUMNS

NO_WORDS: NDArray[np.int32] = np.empty(0, np.int32)


class Chains:
    """The chains of a batch's rows. ``waits [max_num_seqs]``: whether a row's sample depends on the one before it."""

    def __init__(self, max_num_seqs: int) -> None:
        self.waits = np.zeros(max_num_seqs, np.bool_)
        self._words: dict[int, NDArray[np.int32]] = {}
        self._dry: dict[int, Dry] = {}

    def load(self, load: RowLoad) -> bool:
        """Write a row's chain; False if it has none."""
        row = load.row
        self.forget(row)
        if not load.stages:
            return False
        words = np.zeros(NUM_WORDS, np.int32)
        numbers = words.view(np.float32)
        for place, (name, column) in enumerate(CHAIN_COLUMNS.items()):
            (words if column.dtype == "int32" else numbers)[place] = load.numbers[name]
        numbers[MU] = load.mirostat_mu
        words[ORDER] = np.uint32(packed(load.stages)).view(np.int32)
        self._words[row] = words
        if load.dry_prompt_ids is not None:
            self._dry[row] = Dry(load.numbers, load.dry_breakers, load.dry_prompt_ids)
        self.waits[row] = bool(words[MIROSTAT]) or row in self._dry
        return True

    def forget(self, row: int) -> None:
        """The row has no chain."""
        self._words.pop(row, None)
        self._dry.pop(row, None)
        self.waits[row] = False

    def has_mirostat(self, row: int) -> bool:
        """Whether the row has mirostat: each sample depends on the distributions before it."""
        words = self._words.get(row)
        return words is not None and bool(words[MIROSTAT])

    def words(self, row: int, output_ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """The words for the sample after these outputs; empty without a chain."""
        words, dry = self._words.get(row, NO_WORDS), self._dry.get(row)
        if dry is None:
            return words
        ids, values = dry.penalties(output_ids)
        return np.concatenate((words, ids, values.view(np.int32)))

    def most_words(self, row: int, num_outputs: int) -> int:
        """An upper bound of the number of `words` after so many outputs."""
        dry = self._dry.get(row)
        return len(self._words.get(row, NO_WORDS)) + (0 if dry is None else 2 * dry.most_ids(num_outputs))

    def note(self, rows: NDArray[np.int64], mus: NDArray[np.float32]) -> None:
        """Record mirostat's mu after sampled tokens, in their order."""
        for row, mu in zip(rows.tolist(), mus.tolist()):
            if self.has_mirostat(row):
                words = self._words[row].copy()  # a step's list may be the array itself
                words.view(np.float32)[MU] = mu
                self._words[row] = words
