"""In which order cached blocks that nobody holds are given up.

The block pool tells a policy which blocks have lost their last holder and which are used again; the policy names the
next victim. A sequence's blocks come in the order last to first, and whoever holds a block holds those before it, so
a block's parent is never older than the block and was reused at least as often. Both policies rely on that: they never
give up a block before those that continue it. Every operation takes constant time.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from runtime.engine.errors import RequestError
from runtime.engine.prefix_cache import CachedBlock

_GHOSTS_PER_BLOCK = 4  # evicted contents that are remembered, for each block of the pool
_MOST_RESPITES = 2.0  # in typical gaps: how much longer a reused block is kept than one that was not
_GAP_RATE = 0.002  # weight of one observation in the running mean of the gaps
_LEAST_NEW_SHARE = 0.1  # of the pool: what reused blocks leave to those that were not, or old favourites could fill it


class EvictionPolicy(Protocol):
    """The cached blocks that nobody holds."""

    def __len__(self) -> int: ...

    def __contains__(self, node: CachedBlock, /) -> bool: ...

    def add(self, node: CachedBlock) -> None:
        """``node`` has lost its last holder."""

    def reuse(self, node: CachedBlock) -> None:
        """Take out a node that another sequence holds from now on."""

    def discard(self, node: CachedBlock) -> None:
        """Take out a node whose content is of no more use."""

    def pop(self) -> CachedBlock:
        """Take out the next victim. There must be one."""
        ...


class LeastRecentlyUsed:
    """The block whose last holder left first."""

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

    def pop(self) -> CachedBlock:
        return self._nodes.popitem(last=False)[0]


class ReuseGap:
    """Least recently used, but blocks that came back once are given longer to come back again.

    Most blocks are never asked for again; one that was is likely to be. How long that takes is learned: the running
    mean of the gaps between a block's last use and its next, in blocks evicted meanwhile. A reused block counts as
    younger by a small multiple of it. The digests of the latest victims are remembered with their time, so a block that
    comes back too late is known as reused, and its gap counts, too (the ghosts of 2Q, Johnson and Shasha 1994, and ARC,
    Megiddo and Modha 2003). Where nothing comes back, or all at once, this is least recently used.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_ghosts = _GHOSTS_PER_BLOCK * num_blocks
        self._least_new = _LEAST_NEW_SHARE * num_blocks
        self._new: OrderedDict[CachedBlock, None] = OrderedDict()  # never reused
        self._reused: OrderedDict[CachedBlock, None] = OrderedDict()
        self._ghosts: OrderedDict[int, int] = OrderedDict()  # digests of victims: when they were last used
        self._clock = 0  # evictions so far
        self._gap = 0.0

    def __len__(self) -> int:
        return len(self._new) + len(self._reused)

    def __contains__(self, node: CachedBlock, /) -> bool:
        return node in self._new or node in self._reused

    def add(self, node: CachedBlock) -> None:
        last_used = self._ghosts.pop(node.digest, None)
        if last_used is not None:
            self._observe(last_used)
            node.was_reused = True
        if node.was_reused and node.parent is not None:
            node.parent.was_reused = True  # the parent is still held; its own ghost may be gone, or hidden by another
        node.last_used = self._clock
        (self._reused if node.was_reused else self._new)[node] = None

    def reuse(self, node: CachedBlock) -> None:
        self.discard(node)
        self._observe(node.last_used)
        node.was_reused = True

    def discard(self, node: CachedBlock) -> None:
        del (self._reused if node.was_reused else self._new)[node]

    def pop(self) -> CachedBlock:
        victim = (self._new if self._is_new_next() else self._reused).popitem(last=False)[0]
        self._clock += 1
        self._ghosts[victim.digest] = victim.last_used
        if len(self._ghosts) > self._num_ghosts:
            self._ghosts.popitem(last=False)
        return victim

    def _is_new_next(self) -> bool:
        """Whether the next victim is one that was never reused."""
        if not self._new or not self._reused:
            return bool(self._new)
        new, reused = next(iter(self._new)).last_used, next(iter(self._reused)).last_used
        if len(self._new) < self._least_new:
            return new <= reused
        return new <= reused + _MOST_RESPITES * self._gap

    def _observe(self, last_used: int) -> None:
        self._gap += _GAP_RATE * (self._clock - last_used - self._gap)


POLICIES = ("lru", "reuse-gap")


def eviction_policy(name: str, num_blocks: int) -> EvictionPolicy:
    """A policy by name, for a pool of ``num_blocks``. Raises RequestError for an unknown name."""
    if name == "lru":
        return LeastRecentlyUsed()
    if name == "reuse-gap":
        return ReuseGap(num_blocks)
    raise RequestError(f"eviction must be one of {', '.join(POLICIES)}, got {name!r}", param="eviction")
