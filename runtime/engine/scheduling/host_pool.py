"""Allocates slots of the host's memory to swapped sequences and to prefixes evicted from the device.

A slot is a number; its bytes (one block of all layers) lie in ``runtime.kv.transfer``'s host pages. Slots are numbered
through all pools, as blocks are, and hold blocks of their pool. A slot is free,
taken by a swapped sequence, or holds an offloaded prefix block. Prefixes are dropped, least recently used first, for
other uses, unless a running step reads them (``hold``).

Slots are no `PageStore`, for three reasons. A step moves their bytes, on each rank its own part and on a GPU a layer at
a time beside the work, where a store's pages pass through the engine's loop, which waits and sees one rank's part.
Pages of swapped sequences change, may not be lost, and have no key, and both kinds share the space. And a slot is
filled when its block is evicted, so that host and device hold different pages, where a store gets a page when its
sequence ends. The prefix cache's tree, whose nodes name their slots, finds them by the same chain of hashes and tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain

from runtime.engine.scheduling.prefix_cache import CachedBlock


class HostPool:
    """``num_slots`` slots, or so many of each pool, all free at first. Not thread-safe: it belongs to the engine's
    loop."""

    def __init__(self, num_slots: int | Sequence[int]) -> None:
        sizes = (num_slots,) if isinstance(num_slots, int) else tuple(num_slots)
        self.num_slots = sum(sizes)
        self._pool_of = [pool for pool, size in enumerate(sizes) for _ in range(size)]  # by slot
        self.on_drop: Callable[[CachedBlock], None] = _ignore  # the block pool's, which forgets the node
        firsts = accumulate(sizes, initial=0)
        self._free = [list(range(first + size - 1, first - 1, -1)) for first, size in zip(firsts, sizes)]  # by pool
        self._taken: set[int] = set()
        self._prefixes = [OrderedDict[int, CachedBlock]() for _ in sizes]  # by pool: droppable, least recent first
        self._held: dict[int, tuple[CachedBlock, int]] = {}  # prefixes that steps read: node, how many

    @property
    def num_free(self) -> int:
        """Slots that ``take`` can give: free ones and those of prefixes that may be dropped."""
        return sum(map(len, self._free)) + sum(map(len, self._prefixes))

    @property
    def num_prefixes(self) -> int:
        """Slots that hold an offloaded prefix block."""
        return sum(map(len, self._prefixes)) + len(self._held)

    def take(self, counts: Sequence[int]) -> list[list[int]] | None:
        """So many slots of each pool for a sequence that is swapped out, or None if some pool has not so many."""
        if any(count > self._num_free(pool) for pool, count in enumerate(counts)):
            return None
        slots = [[self._next(pool) for _ in range(count)] for pool, count in enumerate(counts)]
        self._taken.update(*slots)
        return slots

    def give(self, slots: Iterable[int]) -> None:
        """Give back slots that ``take`` gave."""
        for slot in slots:
            assert slot in self._taken, f"host slot {slot} was given back but is not taken"
            self._taken.remove(slot)
            self._free[self._pool_of[slot]].append(slot)

    def hold(self, slots: Iterable[int]) -> None:
        """Keep prefix blocks in place until ``release``: a planned step reads them. In a sequence's order; they count
        as used, the first latest."""
        for slot in reversed(list(slots)):
            node, count = self._held.get(slot) or (self._prefixes[self._pool_of[slot]].pop(slot), 0)
            self._held[slot] = (node, count + 1)

    def release(self, slots: Iterable[int]) -> None:
        """End a ``hold``, in the same order."""
        for slot in reversed(list(slots)):
            node, count = self._held.pop(slot)
            if count > 1:
                self._held[slot] = (node, count - 1)
            else:
                self._prefixes[self._pool_of[slot]][slot] = node

    def store(self, node: CachedBlock, pool: int) -> int | None:
        """A slot for a block that is leaving the device, to be filled by the caller. None if it is here already (and is
        now the latest used), or there is no room."""
        if node.host_slot is not None:
            if node.host_slot in self._prefixes[pool]:
                self._prefixes[pool].move_to_end(node.host_slot)
            return None
        if self._num_free(pool) == 0:
            return None
        slot = self._next(pool)
        node.host_slot = slot
        self._prefixes[pool][slot] = node
        return slot

    def drop_prefixes(self) -> None:
        """Free every slot of a prefix that no step reads."""
        for prefixes, free in zip(self._prefixes, self._free):
            while prefixes:
                slot, node = prefixes.popitem(last=False)
                node.host_slot = None
                free.append(slot)
                self.on_drop(node)

    def check_invariants(self, holders: Iterable[Iterable[int]]) -> None:
        """Assert that the taken slots are exactly those of ``holders`` (one list a swapped sequence) and that every
        slot is in one state. For tests: O(num_slots)."""
        expected = [slot for slots in holders for slot in slots]
        assert len(expected) == len(set(expected)), "two swapped sequences have the same host slot"
        assert set(expected) == self._taken, "taken host slots differ from the sequences'"
        prefixes = {slot: node for each in self._prefixes for slot, node in each.items()}
        every = [*chain.from_iterable(self._free), *self._taken, *prefixes, *self._held]
        assert sorted(every) == list(range(self.num_slots)), "host slots are lost or doubled"
        for slot, node in prefixes.items():
            assert node.host_slot == slot, f"host slot {slot} holds a prefix that lies elsewhere"
        for slot, (node, count) in self._held.items():
            assert node.host_slot == slot, f"host slot {slot} holds a prefix that lies elsewhere"
            assert count > 0

    def _num_free(self, pool: int) -> int:
        return len(self._free[pool]) + len(self._prefixes[pool])

    def _next(self, pool: int) -> int:
        if self._free[pool]:
            return self._free[pool].pop()
        slot, node = self._prefixes[pool].popitem(last=False)
        node.host_slot = None
        self.on_drop(node)
        return slot


def _ignore(node: CachedBlock) -> None:
    """The default callback: does nothing."""
