"""Runs a drafter that reads the model's own pages (`models.drafters.gemma4_assistant`).

It keeps nothing of a sequence: a draft follows from the last known token, the model's hidden states one token before,
and the pages that the latest step left. So prefixes from the cache, preempted sequences and pictures are drafted for
like any others. Pages that a window has left are still there: no step runs before the next draft.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from models.drafters.hidden_state_drafter import SteppingDrafter
from runtime.engine.limits import EngineLimits
from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.speculation.drafter import Drawing, Ids, LeftChunk, PairChunks, WantedStates, prepared
from runtime.engine.speculation.drafting import Stepping
from runtime.engine.steps.executor import AuxiliaryHiddenStates
from runtime.engine.steps.layout import BlockTables
from runtime.kv.cache import KVCache
from runtime.tensor.tensor import Tensor


class PageProposer:
    """See `StateDrafter`. Belongs to the engine's loop.

    drafter  on the engine's device
    pages, tables  the executor's
    limits   the engine's
    most     highest draft length of a sequence
    """

    def __init__(
        self, drafter: SteppingDrafter, pages: KVCache, tables: BlockTables, limits: EngineLimits, most: int
    ) -> None:
        self.name, config = drafter.kind, drafter.target.config
        assert drafter.layers == (config.num_layers,), "behind other layers steps leave the rows of all tokens"
        self.wanted = WantedStates(drafter.layers, config.hidden_size, drafter.target.dtype, of_last=True)
        self._max_positions = drafter.max_positions
        self._drafting = Stepping(drafter, pages, tables, limits, most, only_reads=True)
        self._states: tuple[Tensor, ...] = ()  # left by the latest step
        self._chunks: Callable[[], list[LeftChunk]] = list  # their sequences
        self._proposed: dict[Sequence, list[int]] = {}

    def follow(self, kept: AuxiliaryHiddenStates, chunks: Callable[[], list[LeftChunk]], *, pays: bool) -> None:
        """See `StateDrafter`. Nothing is computed before drafts are requested."""
        self._states, self._chunks, self._proposed = kept.tensors, chunks, {}

    def prepare(self, asked: list[tuple[Sequence, int]]) -> None:
        self._proposed = {}
        left = {chunk.sequence: chunk for chunk in self._chunks()}
        self._chunks = list
        ready: list[tuple[int, LeftChunk, Drawing]] = []  # by row
        for sequence, most in asked:
            chunk, row, length = left.get(sequence), sequence.row, sequence.num_tokens
            if chunk is None or row is None or chunk.start + chunk.num_tokens != length - 1:
                continue
            if length <= self._max_positions:
                ready.append((row, chunk, Drawing(sequence, most)))
        if not ready:
            return
        ready.sort(key=lambda one: one[0])
        rows, chunks, sampling_sequences = zip(*ready, strict=True)
        pairs = PairChunks(
            self._states,
            np.array([each.first_row + each.num_tokens - 1 for each in chunks], np.int32),
            np.array([each.sequence.last_token_id for each in chunks], np.int32),
            np.array(rows),
            np.array([each.sequence.num_tokens - 2 for each in chunks]),
            np.ones(len(rows), np.int64),
        )
        found = self._drafting.draft(pairs, list(sampling_sequences))
        self._proposed = {each.sequence: ids for each, ids in zip(sampling_sequences, found, strict=True)}

    def propose(self, sequence: Sequence, most: int) -> tuple[Ids, int]:
        return prepared(self._proposed, sequence, most)

    def end(self, sequence: Sequence) -> None:
        self._proposed.pop(sequence, None)
