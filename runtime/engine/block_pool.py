"""Which KV blocks are free, and how many sequences hold each of the others.

A block is a number; its bytes live in ``runtime.kv_cache``. A block with reference count 0 is free. Sequences
of one request share the full blocks of their prompt. The pool does not know who the holders are: the
scheduler's ``check_invariants`` compares the counts with the sequences.
"""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """``num_blocks`` blocks, all free at first. Not thread-safe: it belongs to the engine's loop."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is warm in the cache
        self._ref_counts = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks, each with reference count 1. The caller has looked at ``num_free``."""
        assert count <= len(self._free), f"{count} blocks wanted, {len(self._free)} are free"
        block_ids = [self._free.pop() for _ in range(count)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Count one more holder of each block, which must be held already."""
        for block_id in block_ids:
            assert self._ref_counts[block_id] > 0, f"block {block_id} is free and cannot be shared"
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Count one holder less of each block; those without a holder are free again."""
        for block_id in block_ids:
            assert self._ref_counts[block_id] > 0, f"block {block_id} was released twice"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free.append(block_id)

    def check_invariants(self, holders: Iterable[Iterable[int]]) -> None:
        """Assert that every block is held exactly as often as ``holders`` (one list of blocks a sequence)
        say, and is free exactly when nobody holds it. For tests: O(num_blocks)."""
        expected = [0] * self.num_blocks
        for block_ids in holders:
            block_ids = list(block_ids)
            assert len(set(block_ids)) == len(block_ids), f"a sequence holds a block twice: {block_ids}"
            for block_id in block_ids:
                expected[block_id] += 1
        assert expected == self._ref_counts, "reference counts differ from the sequences' blocks"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert free == {i for i, count in enumerate(expected) if count == 0}, (
            "free blocks are not the unheld ones"
        )
