"""The order in which cached free blocks are evicted.

The block pool reports to a policy which blocks have lost their last holder and which are reused; the policy picks the
next victim. A sequence's blocks come last to first, and a sequence that holds a block holds those before it, so
a block's parent is never older than the block and was reused at least as often. Both policies rely on that: they never
evict a block before its continuations. Blocks that leave an attention window come first to last, and go in that
order: a prefix needs only its last ones. Every operation takes constant time.

States, of which a prefix needs the last alone, have an order of their own (``ByReplay``).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import Protocol

from runtime.engine.errors import RequestError
from runtime.engine.scheduling.prefix_cache import CachedBlock

_GHOSTS_PER_BLOCK = 4  # evicted contents that are remembered, for each block of the pool
_RESPITES = (0.0, 1.5, 2.5, 3.5, 4.5)  # in typical gaps, by times reused: how much longer than a new block one is kept
_GAP_RATE = 0.002  # weight of one observation in the running mean of the gaps
_LEAST_NEW_SHARE = 0.02  # of the pool: left by reused blocks to those that were not, or old favourites could fill it


class EvictionPolicy(Protocol):
    """The cached free blocks."""

    def __len__(self) -> int: ...

    def __contains__(self, node: CachedBlock, /) -> bool: ...

    def add(self, node: CachedBlock) -> None:
        """``node`` has lost its last holder."""

    def reuse(self, node: CachedBlock) -> None:
        """Remove a node that another sequence holds from now on."""

    def discard(self, node: CachedBlock) -> None:
        """Remove a node whose content is no longer useful."""

    def drop(self, node: CachedBlock, /) -> None:
        """Remove a node that goes with a victim, as one more."""

    def pop(self) -> CachedBlock:
        """Remove the next victim. There must be one."""
        ...


class LeastRecentlyUsed:
    """Evicts the block whose last holder left first."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[CachedBlock, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node: CachedBlock, /) -> bool:
        return node in self._nodes

    def add(self, node: CachedBlock) -> None:
        self._nodes[node] = None

    def reuse(self, node: CachedBlock) -> None:
        del self._nodes[node]

    def discard(self, node: CachedBlock) -> None:
        del self._nodes[node]

    drop = discard

    def pop(self) -> CachedBlock:
        return self._nodes.popitem(last=False)[0]


class ReuseGap:
    """Least recently used, but reused blocks are given longer to be reused again.

    Most blocks are never reused; one that was is likely to be reused again, the more often the likelier. How long that
    takes is learned: the running mean of the gaps between a block's last use and its next, in blocks evicted meanwhile.
    A reused block counts as younger by a small multiple of it. The digests of the latest victims are remembered, so a
    block that comes back too late is known as reused, and its gap counts, too (the ghosts of 2Q, Johnson and Shasha
    1994, and ARC, Megiddo and Modha 2003). If nothing comes back, or all at once, this is least recently used.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_ghosts = _GHOSTS_PER_BLOCK * num_blocks
        self._least_new = _LEAST_NEW_SHARE * num_blocks
        self._queues = [OrderedDict[CachedBlock, None]() for _ in _RESPITES]  # by times reused
        self._ghosts: OrderedDict[int, tuple[int, int]] = OrderedDict()  # victims' digests: last use, times reused
        self._clock = 0  # evictions so far
        self._gap = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def __contains__(self, node: CachedBlock, /) -> bool:
        return node in self._queues[node.times_reused]

    def add(self, node: CachedBlock) -> None:
        ghost = self._ghosts.pop(node.digest, None)
        if ghost is not None:
            last_used, times_reused = ghost
            node.times_reused = max(node.times_reused, times_reused)
            self._count(node, last_used)
        parent = node.parent  # its own ghost may be gone, or hidden by one with the same digest
        if parent is not None and parent.times_reused < node.times_reused and parent not in self:
            parent.times_reused = node.times_reused  # it is still held, unless it has left a window
        node.last_used = self._clock
        self._queues[node.times_reused][node] = None

    def reuse(self, node: CachedBlock) -> None:
        self.discard(node)
        self._count(node, node.last_used)

    def discard(self, node: CachedBlock) -> None:
        del self._queues[node.times_reused][node]

    def drop(self, node: CachedBlock) -> None:
        self.discard(node)
        self._note(node)

    def pop(self) -> CachedBlock:
        victim = self._next_queue().popitem(last=False)[0]
        self._note(victim)
        return victim

    def _note(self, victim: CachedBlock) -> None:
        self._clock += 1
        self._ghosts[victim.digest] = victim.last_used, victim.times_reused
        if len(self._ghosts) > self._num_ghosts:
            self._ghosts.popitem(last=False)

    def _next_queue(self) -> OrderedDict[CachedBlock, None]:
        """The queue whose head is due first; on a tie, the least reused."""
        gap = 0.0 if len(self._queues[0]) < self._least_new else self._gap
        best, earliest = self._queues[0], float("inf")
        for queue, respite in zip(self._queues, _RESPITES):
            if queue and (due := next(iter(queue)).last_used + respite * gap) < earliest:
                best, earliest = queue, due
        return best

    def _count(self, node: CachedBlock, last_used: int) -> None:
        node.times_reused = min(node.times_reused + 1, len(_RESPITES) - 1)
        self._gap += _GAP_RATE * (self._clock - last_used - self._gap)


class ByReplay:
    """Evicts the state that is cheapest to compute again, for states of one size.

    A state's value is the tokens since the last one before it on its path, times how often it was used, above the value
    of the last victim, so that what is not used grows old (GreedyDual-Size-Frequency, Cherkasova 1998). Spare states
    have none until they are used. A value grows while states before it on the path go: it is read again when its state
    would be the next victim. The pool counts uses, since a sequence that cannot start has used nothing. O(log n), and
    the pages between the two states when one is released or chosen.
    """

    def __init__(self) -> None:
        self._values: dict[CachedBlock, tuple[float, int]] = {}
        self._floors: dict[CachedBlock, float] = {}  # when each was added
        self._heap: list[tuple[float, int, CachedBlock]] = []  # of values that may have changed
        self._floor = 0.0
        self._count = 0

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, node: CachedBlock, /) -> bool:
        return node in self._values

    def add(self, node: CachedBlock) -> None:
        self._count += 1
        self._floors[node] = self._floor
        self._push(node, self._value(node), self._count)
        if len(self._heap) > 2 * len(self._values) + 64:
            self._heap = [(*own, each) for each, own in self._values.items()]
            heapq.heapify(self._heap)

    def reuse(self, node: CachedBlock) -> None:
        self.discard(node)

    def discard(self, node: CachedBlock) -> None:
        del self._values[node], self._floors[node]

    drop = discard

    def pop(self) -> CachedBlock:
        while True:
            value, number, node = heapq.heappop(self._heap)
            if self._values.get(node) != (value, number):
                continue
            if (now := self._value(node)) > value:
                self._push(node, now, number)
                continue
            self.discard(node)
            self._floor = max(self._floor, value)
            return node

    def _value(self, node: CachedBlock) -> float:
        uses = node.times_reused + (not node.is_spare)
        return self._floors[node] + (node.replay_tokens() * uses if uses else 0)

    def _push(self, node: CachedBlock, value: float, number: int) -> None:
        self._values[node] = value, number
        heapq.heappush(self._heap, (value, number, node))


POLICIES = ("lru", "reuse-gap")


def eviction_policy(name: str, num_blocks: int) -> EvictionPolicy:
    """A policy by name, for a pool of ``num_blocks``. Raises RequestError for an unknown name."""
    if name == "lru":
        return LeastRecentlyUsed()
    if name == "reuse-gap":
        return ReuseGap(num_blocks)
    raise RequestError(f"eviction must be one of {', '.join(POLICIES)}, got {name!r}", param="eviction")
