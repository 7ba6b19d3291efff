"""Block drafting: hidden states of a step become keys and values in the pages, and one pass over a block of positions
after them gives all draft tokens. The block's own keys and values are overwritten by the next step's pairs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from models.drafters.hidden_state_drafter import BlockDrafter
from runtime import ops
from runtime.batch import Batch
from runtime.engine.limits import EngineLimits
from runtime.engine.speculation.drafter import Drawing, PairChunks, rows_of, sample_ahead
from runtime.engine.steps.layout import BlockTables, lay_out
from runtime.kv.cache import KVCache
from runtime.tensor.tensor import Tensor

_NO_LOGITS = np.empty(0, np.int32)


class Blocks:
    """See `Drafting`. A block always has its training length, however short the draft, since its positions attend to
    each other."""

    pair_ahead = 0  # keys and values are the hidden states'

    def __init__(self, drafter: BlockDrafter, pages: KVCache, tables: BlockTables, limits: EngineLimits) -> None:
        self._drafter, self._pages, self._tables, self._exact = drafter, pages, tables, limits.exact
        self._most = drafter.block_size - drafter.first_proposal

    def slots_after(self, most: int) -> int:
        return self._drafter.block_size if most > 0 else 0

    def absorb(self, chunks: PairChunks) -> None:
        drafter = self._drafter
        layout = lay_out(chunks.token_ids, chunks.rows, chunks.starts, chunks.counts, self._tables, _NO_LOGITS)
        batch = layout.batch(drafter.device, exact=self._exact)
        drafter.absorb(batch, drafter.fuse(chunks.own_states(drafter.device)), self._pages)

    def draft(self, chunks: PairChunks, sampling_sequences: list[Drawing]) -> list[list[int]]:
        self.absorb(chunks)
        known = chunks.token_ids[chunks.last]
        normed = self._drafter.forward(self._blocks_after(chunks, known), self._pages)
        most = np.array([min(one.most, self._most) for one in sampling_sequences])
        if self._drafter.is_chained:
            return self._draw_in_turn(normed, known, sampling_sequences, most)
        of = np.repeat(np.arange(len(sampling_sequences)), most)
        ahead = np.arange(len(of)) - np.repeat(np.cumsum(most) - most, most)
        sampled = self._draw(normed, np.repeat(known, most), of, ahead, sampling_sequences)
        parts = np.split(np.array(sampled, np.int32), np.cumsum(most)[:-1])
        return [ids[: int(np.argmax(ids < 0)) if (ids < 0).any() else None].tolist() for ids in parts]

    def _blocks_after(self, chunks: PairChunks, known: NDArray[np.int32]) -> Batch:
        size, ends = self._drafter.block_size, chunks.starts + chunks.counts
        ids = np.full((len(known), size), self._drafter.mask_token_id, np.int32)
        ids[:, 0] = known
        layout = lay_out(ids.reshape(-1), chunks.rows, ends, np.full(len(known), size), self._tables, _NO_LOGITS)
        batch = layout.batch(self._drafter.device, exact=self._exact)
        (batch.bidirectional_until,) = ops.place([np.repeat(ends + size, size).astype(np.int32)], self._drafter.device)
        return batch

    def _draw_in_turn(
        self, normed: Tensor, known: NDArray[np.int32], sampling_sequences: list[Drawing], most: NDArray[np.int64]
    ) -> list[list[int]]:
        """Sample each position after the previous one."""
        found: list[list[int]] = [[] for _ in sampling_sequences]
        before, of = known, np.arange(len(sampling_sequences))
        for ahead in range(int(most.max())):
            sampled = np.array(self._draw(normed, before, of, np.full(len(of), ahead), sampling_sequences), np.int32)
            goes_on = sampled >= 0
            for i, token_id in zip(of[goes_on].tolist(), sampled[goes_on].tolist(), strict=True):
                found[i].append(token_id)
            goes_on &= most[of] > ahead + 1
            before, of = sampled[goes_on], of[goes_on]
            if not of.size:
                break
        return found

    def _draw(
        self, normed: Tensor, before: NDArray[np.int32], of: NDArray[np.int64], ahead: NDArray[np.int64],
        sampling_sequences: list[Drawing],
    ) -> list[int]:  # fmt: skip
        """The tokens ``ahead`` in the blocks of these sequences, given by index, each after its predecessor."""
        drafter = self._drafter
        rows = (of * drafter.block_size + drafter.first_proposal + ahead).astype(np.int32)
        (ids,) = ops.place([before], drafter.device)
        logits = drafter.logits(rows_of(normed, rows, drafter.device), ids)
        return sample_ahead(logits, [sampling_sequences[i].sequence for i in of.tolist()], ahead.tolist())
