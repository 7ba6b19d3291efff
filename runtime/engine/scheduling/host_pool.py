"""Allocates slots of the host's memory to swapped sequences and to prefixes evicted from the device.

A slot is a number; its bytes (one block of all layers) lie in ``runtime.kv.transfer``'s host pages. A slot is free,
taken by a swapped sequence, or holds an offloaded prefix block. Prefixes are dropped, least recently used first, for
other uses, unless a running step reads them (``hold``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from runtime.engine.scheduling.prefix_cache import CachedBlock


class HostPool:
    """``num_slots`` slots, all free at first. Not thread-safe: it belongs to the engine's loop."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.on_drop: Callable[[CachedBlock], None] = _ignore  # the block pool's, which forgets the node
        self._free = list(range(num_slots - 1, -1, -1))
        self._taken: set[int] = set()
        self._prefixes: OrderedDict[int, CachedBlock] = OrderedDict()  # droppable, least recently used first
        self._held: dict[int, tuple[CachedBlock, int]] = {}  # prefixes that steps read: node, how many

    @property
    def num_free(self) -> int:
        """Slots that ``take`` can give: free ones and those of prefixes that may be dropped."""
        return len(self._free) + len(self._prefixes)

    @property
    def num_prefixes(self) -> int:
        """Slots that hold an offloaded prefix block."""
        return len(self._prefixes) + len(self._held)

    def take(self, count: int) -> list[int] | None:
        """``count`` slots for a sequence that is swapped out, or None if there are not so many."""
        if count > self.num_free:
            return None
        slots = [self._next() for _ in range(count)]
        self._taken.update(slots)
        return slots

    def give(self, slots: Iterable[int]) -> None:
        """Give back slots that ``take`` gave."""
        for slot in slots:
            assert slot in self._taken, f"host slot {slot} was given back but is not taken"
            self._taken.remove(slot)
            self._free.append(slot)

    def hold(self, slots: Iterable[int]) -> None:
        """Keep prefix blocks in place until ``release``: a planned step reads them. In a sequence's order; they count
        as used, the first latest."""
        for slot in reversed(list(slots)):
            node, count = self._held.get(slot) or (self._prefixes.pop(slot), 0)
            self._held[slot] = (node, count + 1)

    def release(self, slots: Iterable[int]) -> None:
        """End a ``hold``, in the same order."""
        for slot in reversed(list(slots)):
            node, count = self._held.pop(slot)
            if count > 1:
                self._held[slot] = (node, count - 1)
            else:
                self._prefixes[slot] = node

    def store(self, node: CachedBlock) -> int | None:
        """A slot for a block that is leaving the device, to be filled by the caller. None if it is here already (and is
        now the latest used), or there is no room."""
        if node.host_slot is not None:
            if node.host_slot in self._prefixes:
                self._prefixes.move_to_end(node.host_slot)
            return None
        if self.num_free == 0:
            return None
        slot = self._next()
        node.host_slot = slot
        self._prefixes[slot] = node
        return slot

    def drop_prefixes(self) -> None:
        """Free every slot of a prefix that no step reads."""
        while self._prefixes:
            slot, node = self._prefixes.popitem(last=False)
            node.host_slot = None
            self._free.append(slot)
            self.on_drop(node)

    def check_invariants(self, holders: Iterable[Iterable[int]]) -> None:
        """Assert that the taken slots are exactly those of ``holders`` (one list a swapped sequence) and that every
        slot is in one state. For tests: O(num_slots)."""
        expected = [slot for slots in holders for slot in slots]
        assert len(expected) == len(set(expected)), "two swapped sequences have the same host slot"
        assert set(expected) == self._taken, "taken host slots differ from the sequences'"
        every = [*self._free, *self._taken, *self._prefixes, *self._held]
        assert sorted(every) == list(range(self.num_slots)), "host slots are lost or doubled"
        for slot, node in self._prefixes.items():
            assert node.host_slot == slot, f"host slot {slot} holds a prefix that lies elsewhere"
        for slot, (node, count) in self._held.items():
            assert node.host_slot == slot, f"host slot {slot} holds a prefix that lies elsewhere"
            assert count > 0

    def _next(self) -> int:
        if self._free:
            return self._free.pop()
        slot, node = self._prefixes.popitem(last=False)
        node.host_slot = None
        self.on_drop(node)
        return slot


def _ignore(node: CachedBlock) -> None:
    """The default callback: does nothing."""
