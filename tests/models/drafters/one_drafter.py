"""One sequence of a drafter that reads hidden states, without an engine."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.drafters.hidden_state_drafter import HiddenStateDrafter
from runtime.batch import Batch
from runtime.engine.steps.block_tables import BlockTables
from runtime.engine.steps.ragged import lay_out
from runtime.kv.cache import KVCache
from runtime.tensor.tensor import Tensor

BLOCK = 8


class Alone:
    """In pages of its own."""

    def __init__(self, drafter: HiddenStateDrafter) -> None:
        self.drafter = drafter
        self.pages = KVCache(drafter.kv_cache_spec(BLOCK), 4)
        self.tables = BlockTables(1, 1, 4, BLOCK)
        self.tables.add(0, 0, 0, [2, 0, 3, 1])

    def batch(self, token_ids: NDArray[np.int32], start: int) -> Batch:
        places = np.array([0]), np.array([start]), np.array([len(token_ids)])
        layout = lay_out(token_ids, *places, self.tables, np.empty(0, np.int32))
        return layout.batch(self.drafter.device, exact=True)

    def chain(
        self, ids: NDArray[np.int32], states: list[NDArray[np.float32]], column: int, num_steps: int
    ) -> list[NDArray[Any]]:
        """The logits of each step ahead, drafting from a column on, with the right tokens. ``states``: of each layer
        that it reads."""
        device = self.drafter.device
        parts = [Tensor.from_numpy(np.ascontiguousarray(each[: column + 1])).to(device) for each in states]
        normed, hidden = self.drafter.forward(
            self.batch(ids[: column + 1], 0), self.drafter.fuse(parts), self.pages
        )
        found = [self.drafter.logits(normed).to("cpu").array[-1]]
        hidden = hidden[column : column + 1]
        for step in range(1, num_steps):
            if column + step >= len(ids):
                break
            one = ids[column + step : column + step + 1]
            normed, hidden = self.drafter.forward(self.batch(one, column + step), hidden, self.pages)
            found.append(self.drafter.logits(normed).to("cpu").array[0])
        return found
