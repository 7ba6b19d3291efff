"""The executor's block tables: which blocks hold each row's tokens, and the slots of tokens in them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class BlockTables:
    """Each row's blocks, by KV cache group.

    table       [num_groups, num_rows, max_blocks] int32
    num_blocks  [num_groups, num_rows] int64: entries that are written
    """

    def __init__(self, num_groups: int, num_rows: int, max_blocks: int, block_size: int) -> None:
        self.table = np.zeros((num_groups, num_rows, max_blocks), np.int32)
        self.num_blocks = np.zeros((num_groups, num_rows), np.int64)
        self._max_blocks = max_blocks
        self._block_size = block_size
        # By group and entry: how far a token's slot lies behind its position.
        self._shifts = np.zeros((num_groups, num_rows * max_blocks), np.int64)

    @property
    def num_groups(self) -> int:
        return len(self.table)

    def clear(self, row: int) -> None:
        """Forget the row's blocks."""
        self.num_blocks[:, row] = 0

    def add(self, group: int, row: int, first: int, block_ids: Sequence[int]) -> None:
        """Write a row's blocks from entry ``first`` on; what was behind them is forgotten."""
        end, entry, size = first + len(block_ids), row * self._max_blocks, self._block_size
        self.table[group, row, first:end] = block_ids
        self._shifts[group, entry + first : entry + end] = [
            (block_id - index) * size for index, block_id in enumerate(block_ids, first)
        ]
        self.num_blocks[group, row] = end

    def of(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """The tables of rows ``[n]`` that ascend, ``[num_groups, n, width]``: a view where they are dense."""
        count = len(rows)
        if rows[-1] == count - 1:
            return self.table[:, :count]
        return self.table[:, :, : self.num_blocks[:, rows].max()].take(rows, axis=1)

    def slots(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The slots of tokens at ``positions [n]`` of ``rows [n]``, ``[num_groups, n]``."""
        entries = rows * self._max_blocks + positions // self._block_size
        return self._shifts.take(entries, axis=1) + positions
