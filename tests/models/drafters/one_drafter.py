"""One sequence of a drafter that reads hidden states, without an engine."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.drafters.hidden_state_drafter import BlockDrafter, PairDrafter
from runtime import ops
from runtime.batch import Batch
from runtime.engine.steps.layout import BlockTables, lay_out
from runtime.kv.cache import KVCache
from runtime.tensor.tensor import Tensor

BLOCK = 8


class _Pages:
    """Of one sequence."""

    def __init__(self, drafter: PairDrafter | BlockDrafter, num_blocks: int = 4) -> None:
        self.pages = KVCache(drafter.kv_cache_spec(BLOCK), num_blocks)
        self.tables = BlockTables(1, 1, num_blocks, BLOCK)
        self.tables.add(0, 0, 0, [2, 0, 3, 1, *range(4, num_blocks)])
        self.device = drafter.device

    def batch(self, token_ids: NDArray[np.int32], start: int) -> Batch:
        places = np.array([0]), np.array([start]), np.array([len(token_ids)])
        layout = lay_out(token_ids, *places, self.tables, np.empty(0, np.int32))
        return layout.batch(self.device, exact=True)

    def placed(self, states: list[NDArray[np.float32]], first: int, end: int) -> list[Tensor]:
        return [Tensor.from_numpy(np.ascontiguousarray(each[first:end])).to(self.device) for each in states]


class Alone(_Pages):
    """One that goes on token by token."""

    def __init__(self, drafter: PairDrafter) -> None:
        super().__init__(drafter)
        self.drafter = drafter

    def chain(
        self, ids: NDArray[np.int32], states: list[NDArray[np.float32]], column: int, num_steps: int
    ) -> list[NDArray[Any]]:
        """The logits of each step ahead, drafting from a column on, with the right tokens. ``states``: of each layer
        that it reads."""
        parts = self.placed(states, 0, column + 1)
        normed, hidden = self.drafter.forward(self.batch(ids[: column + 1], 0), self.drafter.fuse(parts), self.pages)
        found = [self.drafter.logits(normed).to("cpu").array[-1]]
        hidden = hidden[column : column + 1]
        for step in range(1, num_steps):
            if column + step >= len(ids):
                break
            one = ids[column + step : column + step + 1]
            normed, hidden = self.drafter.forward(self.batch(one, column + step), hidden, self.pages)
            found.append(self.drafter.logits(normed).to("cpu").array[0])
        return found


class BlocksAlone(_Pages):
    """One that says a block at once."""

    def __init__(self, drafter: BlockDrafter, num_blocks: int = 4) -> None:
        super().__init__(drafter, num_blocks)
        self.drafter = drafter
        self.length = 0  # hidden states that are known

    def absorb(self, states: list[NDArray[np.float32]], count: int) -> None:
        """The next ``count`` of all ``states``, of each layer that it reads."""
        drafter, end = self.drafter, self.length + count
        hidden = drafter.fuse(self.placed(states, self.length, end))
        drafter.absorb(self.batch(np.zeros(count, np.int32), self.length), hidden, self.pages)
        self.length = end

    def block(self, token_id: int, before: NDArray[np.int32] | None = None) -> NDArray[np.float32]:
        """The logits of all proposals behind a token; ``before``: what stands before each, if that is asked."""
        drafter, size = self.drafter, self.drafter.block_size
        ids = np.full(size, drafter.mask_token_id, np.int32)
        ids[0] = token_id
        batch = self.batch(ids, self.length)
        (batch.bidirectional_until,) = ops.place([np.full(size, self.length + size, np.int32)], self.device)
        normed = drafter.forward(batch, self.pages)
        rows = np.arange(drafter.first_proposal, size, dtype=np.int32)
        placed = ops.place([rows, np.zeros(len(rows), np.int32) if before is None else before], self.device)
        logits: NDArray[np.float32] = drafter.logits(ops.gather_rows(normed, placed[0]), placed[1]).to("cpu").array
        return logits
