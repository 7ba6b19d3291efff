"""Drafts token by token: a pass over pairs, then steps with the drafter's own results."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from models.drafters.hidden_state_drafter import SteppingDrafter
from runtime.engine.limits import EngineLimits
from runtime.engine.speculation.drafter import Ids
from runtime.engine.speculation.drafting import Drawing, PairChunks, rows_of
from runtime.engine.speculation.recorded_drafts import RecordedDrafts
from runtime.engine.speculation.sampling_ahead import sample_ahead
from runtime.engine.steps.layout import BlockTables, lay_out
from runtime.kv.cache import KVCache
from runtime.tensor.tensor import Tensor


class Stepping:
    """See `Drafting`. On the CPU all steps are one recording, if they can be recorded."""

    pair_ahead = 1

    def __init__(
        self, drafter: SteppingDrafter, pages: KVCache, tables: BlockTables, limits: EngineLimits, most: int
    ) -> None:
        self._drafter, self._pages, self._tables, self._limits = drafter, pages, tables, limits
        self._recorded: RecordedDrafts | None = None
        if drafter.device.kind == "cpu" and limits.decode_graphs != "off":
            self._recorded = RecordedDrafts(drafter, pages, tables, limits, most)

    def slots_behind(self, most: int) -> int:
        """See `Drafting`. The last proposal is not computed."""
        return max(0, most - 1)

    def absorb(self, chunks: PairChunks) -> None:
        """See `Drafting`."""
        self._compute(chunks)

    def draft(self, chunks: PairChunks, sampling_sequences: list[Drawing]) -> list[list[int]]:
        """See `Drafting`."""
        if self._recorded is not None and (found := self._recorded.run(chunks, sampling_sequences)) is not None:
            return found
        return self._step_by_step(chunks, sampling_sequences)

    def _step_by_step(self, chunks: PairChunks, sampling_sequences: list[Drawing]) -> list[list[int]]:
        normed, hidden = self._compute(chunks)
        found: list[list[int]] = [[] for _ in sampling_sequences]
        ready = np.arange(len(sampling_sequences))  # the sequences of the rows
        ends = chunks.starts + chunks.counts
        for ahead in range(max(one.most for one in sampling_sequences)):
            sequences = [sampling_sequences[i].sequence for i in ready]
            sampled = sample_ahead(self._drafter.logits(normed), sequences, [ahead] * len(ready))
            going_on = []  # rows that are drafted further
            for row, (i, token_id) in enumerate(zip(ready, sampled, strict=True)):
                if token_id >= 0:
                    found[i].append(token_id)
                    if ahead + 1 < sampling_sequences[i].most:
                        going_on.append(row)
            if not going_on:
                break
            newest = np.array([sampled[row] for row in going_on], np.int32)
            ready = ready[going_on]
            if len(going_on) < len(sampled):
                hidden = rows_of(hidden, np.array(going_on, np.int32), self._drafter.device)
            ones = np.ones(len(ready), np.int64)
            normed, hidden = self._forward(newest, chunks.rows[ready], ends[ready] + ahead, ones, hidden)
        return found

    def _compute(self, chunks: PairChunks) -> tuple[Tensor, Tensor]:
        """`_forward`'s result for the last pair of each sequence."""
        states = self._drafter.fuse(chunks.own_states(self._drafter.device))
        normed, hidden = self._forward(chunks.token_ids, chunks.rows, chunks.starts, chunks.counts, states)
        if chunks.counts.max() == 1:
            return normed, hidden
        return tuple(rows_of(each, chunks.last, self._drafter.device) for each in (normed, hidden))  # type: ignore[return-value]

    def _forward(
        self, token_ids: Ids, rows: NDArray[np.int64], starts: NDArray[np.int64], counts: NDArray[np.int64],
        hidden: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """See `SteppingDrafter.forward`."""
        layout = lay_out(token_ids, rows, starts, counts, self._tables, np.empty(0, np.int32))
        batch = layout.batch(self._drafter.device, exact=self._limits.exact)
        return self._drafter.forward(batch, hidden, self._pages)
