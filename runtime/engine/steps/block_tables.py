"""The executor's block tables: the blocks of each row, and the slots of tokens in them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class BlockTables:
    """Each row's blocks, by KV cache group. Entries are numbered through all rows.

    table       [num_groups, num_rows, max_blocks] int32
    num_blocks  by group and row: written entries
    """

    def __init__(self, num_groups: int, num_rows: int, max_blocks: int, block_size: int) -> None:
        self.table = np.zeros((num_groups, num_rows, max_blocks), np.int32)
        self.num_blocks = [[0] * num_rows for _ in range(num_groups)]
        self._max_blocks = max_blocks
        self._block_size = block_size
        self._block_ids = self.table.reshape(num_groups, -1)  # by entry
        self._shifts = np.zeros(self._block_ids.shape, np.int64)  # by entry: slot minus position

    @property
    def num_groups(self) -> int:
        return len(self.table)

    def clear(self, row: int) -> None:
        """Forget the row's blocks."""
        for num_blocks in self.num_blocks:
            num_blocks[row] = 0

    def add(self, group: int, row: int, first: int, block_ids: Sequence[int]) -> None:
        """Write a row's blocks from its entry ``first`` on; later entries are forgotten."""
        start, count, size = row * self._max_blocks + first, len(block_ids), self._block_size
        self._block_ids[group, start : start + count] = block_ids
        shifts = [(block_id - index) * size for index, block_id in enumerate(block_ids, first)]
        self._shifts[group, start : start + count] = shifts
        self.num_blocks[group][row] = first + count

    def of(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """The tables of ascending rows ``[n]``, ``[num_groups, n, width]``: a view if they are dense."""
        count = len(rows)
        if rows[-1] == count - 1:
            return self.table[:, :count]
        width = max(num_blocks[row] for num_blocks in self.num_blocks for row in rows.tolist())
        return self.table[:, :, :width].take(rows, axis=1)

    def first_entries(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first entries of ``rows [n]``."""
        return rows * self._max_blocks

    def slots(self, first_entries: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The slots of tokens at ``positions [n]`` of rows that begin at ``first_entries [n]``, ``[num_groups, n]``."""
        return self._shifts.take(first_entries + positions // self._block_size, axis=1) + positions
