"""In which order cached blocks that nobody holds are given up.

The block pool tells a policy which blocks have lost their last holder and which are held again; the policy names the
next victim. A sequence's blocks come in the order last to first, and a block is held whenever one that continues it is,
so a policy that keeps this order among equals never evicts a block before those that continue it. Every operation takes
constant time.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from runtime.engine.errors import RequestError
from runtime.engine.prefix_cache import CachedBlock


class EvictionPolicy(Protocol):
    """The cached blocks that nobody holds."""

    def __len__(self) -> int: ...

    def __contains__(self, node: object) -> bool: ...

    def add(self, node: CachedBlock) -> None:
        """``node`` has lost its last holder."""

    def remove(self, node: CachedBlock) -> None:
        """``node`` is held again, or was forgotten."""

    def pop(self) -> CachedBlock:
        """Take out the next victim. There must be one."""
        ...


class LeastRecentlyUsed:
    """The block whose last holder left first."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[CachedBlock, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node: object) -> bool:
        return node in self._nodes

    def add(self, node: CachedBlock) -> None:
        self._nodes[node] = None

    def remove(self, node: CachedBlock) -> None:
        del self._nodes[node]

    def pop(self) -> CachedBlock:
        return self._nodes.popitem(last=False)[0]


POLICIES = ("lru",)


def eviction_policy(name: str, num_blocks: int) -> EvictionPolicy:
    """A policy by name, for a pool of ``num_blocks``. Raises RequestError for an unknown name."""
    if name == "lru":
        return LeastRecentlyUsed()
    raise RequestError(f"eviction must be one of {', '.join(POLICIES)}, got {name!r}", param="eviction")
