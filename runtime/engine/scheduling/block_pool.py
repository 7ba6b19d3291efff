"""Which KV blocks are free, how many sequences hold each of the others, and which content can be found again.

A block is a number; its bytes live in ``runtime.kv.cache``. A block is held by sequences (its reference count), or
nobody holds it: then it is either empty or cached, that is, its content can be found and shared until the block is
needed for something else. Who the holders are is the scheduler's knowledge: its ``check_invariants`` compares the
counts with the sequences.

Whoever holds a block holds all blocks before it, too, or a copy of them. The pool keeps it so that a content that
somebody holds is found in a block that somebody holds; what nobody holds is therefore never in the middle of a prefix
that somebody does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.engine.scheduling.eviction import EvictionPolicy, eviction_policy
from runtime.engine.scheduling.host_pool import HostPool
from runtime.engine.scheduling.prefix_cache import CachedBlock, Digest, PrefixCache, block_digest


class TokenSource(Protocol):
    """A sequence, as far as the pool reads it."""

    def copy_tokens(self, start: int, out: NDArray[np.int32]) -> None:
        """Write the tokens ``start : start + len(out)`` into ``out``."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest findable prefix of some tokens.

    block_ids   full blocks on the device
    host_slots  the full blocks after those, in the host pool only
    partial     a block on the device that continues ``block_ids``, and how many of its first tokens match; None when
                nothing does or ``host_slots`` continue them
    num_tokens  tokens of all three
    """

    block_ids: list[int] = field(default_factory=list)
    host_slots: list[int] = field(default_factory=list)
    partial: tuple[int, int] | None = None
    num_tokens: int = 0


@dataclass(slots=True)
class CacheCounters:
    """What the prefix cache has done so far.

    queried_tokens, hit_tokens  counted by whoever admits a sequence (``count_query``)
    evictions                   cached blocks that were given up for others
    offloads                    of those, the ones copied to the host pool
    """

    queried_tokens: int = 0
    hit_tokens: int = 0
    evictions: int = 0
    offloads: int = 0


class Chain:
    """How far a sequence's blocks are recorded; lives on the sequence and is ``reset`` when its blocks are
    released."""

    __slots__ = ("is_broken", "node", "num_blocks", "salt")

    def __init__(self, salt: str | None = None) -> None:
        self.salt = salt
        self.reset()

    def reset(self) -> None:
        self.node: CachedBlock | None = None  # of the last recorded block
        self.num_blocks = 0
        self.is_broken = False  # a digest collided: nothing after it can be recorded


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` tokens, all empty at first. Not thread-safe: it belongs to the engine's
    loop.

    host_pool  where evicted content goes; None: it is lost
    eviction   one of ``runtime.engine.scheduling.eviction.POLICIES``; RequestError for any other
    digest     of a block's tokens after its parent's (for tests of collisions)
    offloads   (block, host slot) pairs whose bytes are to be copied before anything is written to the block; whoever
               plans the step drains the list
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        host_pool: HostPool | None = None,
        eviction: str = "reuse-gap",
        digest: Digest = block_digest,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.host_pool = host_pool
        self.counters = CacheCounters()
        self.offloads: list[tuple[int, int]] = []
        self._cache = PrefixCache(block_size, digest)
        self._idle: EvictionPolicy = eviction_policy(eviction, num_blocks)  # cached, held by nobody
        self._empty = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is warm in the cache
        self._ref_counts = [0] * num_blocks
        self._nodes: list[CachedBlock | None] = [None] * num_blocks  # the content of each block, once recorded
        if host_pool is not None:
            host_pool.on_drop = self._cache.prune

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, empty or cached."""
        return len(self._empty) + len(self._idle)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and whose content can be found."""
        return len(self._idle)

    def run_lengths(self) -> str:
        """What every block is, in order, as in ``StepView.block_map``. O(num_blocks)."""
        kinds = np.minimum(self._ref_counts, 2)
        kinds[self._empty] = 3
        bounds = np.flatnonzero(np.diff(kinds, prepend=-1, append=-1))
        return "".join(
            f"{count}{'cusf'[kind]}" for count, kind in zip(np.diff(bounds).tolist(), kinds[bounds[:-1]].tolist())
        )

    def num_holders(self, block_id: int) -> int:
        """The block's reference count."""
        return self._ref_counts[block_id]

    def count_query(self, num_tokens: int, hit_tokens: int) -> None:
        """Count an admitted sequence that looked for ``num_tokens`` and took over ``hit_tokens``."""
        self.counters.queried_tokens += num_tokens
        self.counters.hit_tokens += hit_tokens

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks, each with reference count 1: empty ones first, then cached ones, whose content
        goes to the host pool if there is room. The caller has looked at ``num_free``."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} are free"
        block_ids = [self._empty.pop() if self._empty else self._evict() for _ in range(count)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Count one more holder of each block; each must be held already, or cached."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                node = self._nodes[block_id]
                assert node is not None, f"block {block_id} is empty and cannot be shared"
                self._idle.reuse(node)
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Count one holder less of each block, given in the order of the sequence. Those without a holder are free;
        the last is evicted first, so that a prefix outlives what continues it."""
        for block_id in reversed(list(block_ids)):
            count = self._ref_counts[block_id] - 1
            assert count >= 0, f"block {block_id} was released twice"
            self._ref_counts[block_id] = count
            if count == 0:
                node = self._nodes[block_id]
                if node is not None and node.block_id == block_id and not node.copies:
                    self._idle.add(node)
                else:
                    self._clear(block_id)

    def find(self, tokens: NDArray[np.int32], salt: str | None = None) -> Hit:
        """The longest findable prefix of ``tokens [num_tokens]`` int32; holders do not change.

        To use it: ``share`` the block ids at once; ``hold`` the host slots until the step that reads them was run, and
        copy them into fresh blocks; ``share`` the partial block until the step that copies it was run. Pass all
        known tokens but the last, whose logits must be computed.
        """
        if not self.enable_prefix_caching:
            return Hit()
        nodes = self._cache.walk(tokens, salt)
        block_ids: list[int] = []
        for node in nodes:
            if node.block_id is None:
                break
            block_ids.append(node.block_id)
        host_slots: list[int] = []
        for node in nodes[len(block_ids) :]:
            if node.host_slot is None or node.block_id is not None:
                break
            host_slots.append(node.host_slot)
        num_tokens = (len(block_ids) + len(host_slots)) * self.block_size
        partial = None
        if not host_slots:
            last = nodes[len(block_ids) - 1] if block_ids else None
            found = self._cache.longest_partial(last, tokens[num_tokens:], salt)
            if found is not None:
                node, count = found
                assert node.block_id is not None
                partial = (node.block_id, count)
                num_tokens += count
        return Hit(block_ids, host_slots, partial, num_tokens)

    def record(
        self, chain: Chain, block_ids: list[int], num_computed: int, tokens: TokenSource, *, is_final: bool = False
    ) -> None:
        """Make the blocks that became full since the last call findable.

        ``block_ids`` are a sequence's, all held by it, ``num_computed`` of its ``tokens`` lie in them, ``chain`` is
        the sequence's own. ``is_final`` says that it is about to release them: then the partial last block is
        recorded, too. Constant time but for new full blocks.
        """
        last = num_computed // self.block_size
        rest = num_computed % self.block_size if is_final else 0
        if (last == chain.num_blocks and not rest) or chain.is_broken or not self.enable_prefix_caching:
            return
        first = chain.num_blocks
        assert chain.node is None or self._is_held(chain.node), "the chain of released blocks was not reset"
        buffer = np.empty((last - first) * self.block_size + rest, np.int32)
        tokens.copy_tokens(first * self.block_size, buffer)
        data, width = buffer.tobytes(), self.block_size * buffer.itemsize
        node = chain.node or self._cache.root(chain.salt)
        for place in range(first, last):
            start = (place - first) * width
            child = self._record_block(node, data[start : start + width], block_ids[place])
            if child is None:
                chain.is_broken = True
                break
            chain.node = node = child
            chain.num_blocks = place + 1
        if rest and not chain.is_broken:
            partial = data[(last - first) * width :]
            if self._cache.continued_by(node, partial) is None:
                self._record_block(node, partial, block_ids[last])
        if node.parent is None:
            self._cache.prune(node)  # a root under which nothing could be recorded

    def check_invariants(self, holders: Iterable[Iterable[int]]) -> None:
        """Assert that every block is held exactly as often as ``holders`` (one list of blocks a sequence) say, that
        the others are either empty or cached, and that index and blocks agree. For tests: O(num_blocks)."""
        expected = [0] * self.num_blocks
        for block_ids in holders:
            block_ids = list(block_ids)
            assert len(set(block_ids)) == len(block_ids), f"a sequence holds a block twice: {block_ids}"
            for block_id in block_ids:
                expected[block_id] += 1
        assert expected == self._ref_counts, "reference counts differ from the sequences' blocks"
        empty = set(self._empty)
        assert len(empty) == len(self._empty), "a block is free twice"
        num_idle = 0
        for block_id, (count, node) in enumerate(zip(expected, self._nodes)):
            if block_id in empty:
                assert (count, node) == (0, None), f"block {block_id} is among the empty ones but is not"
            elif count == 0:
                assert node is not None, f"block {block_id} is lost"
                assert node.block_id == block_id, f"block {block_id} is a copy that nobody holds"
                assert node in self._idle, f"block {block_id} is held by nobody but is not to be evicted"
                num_idle += 1
            if node is not None:
                self._check_node(block_id, node)
        assert num_idle == len(self._idle), "a block that somebody holds is to be evicted"
        self._cache.check_invariants()

    def _check_node(self, block_id: int, node: CachedBlock) -> None:
        assert node.block_id is not None, f"block {block_id} has a content that lies nowhere"
        if node.block_id != block_id:
            assert block_id in node.copies, f"block {block_id} has the content of another"
            assert self._ref_counts[block_id] > 0, f"block {block_id}, a copy, is held by nobody"
        else:
            assert all(self._nodes[copy] is node for copy in node.copies), f"a copy of block {block_id} is none"
        if node.copies:
            assert self._is_held(node), f"block {node.block_id} is held by nobody, yet a copy of it is"
        parent = node.parent
        assert parent is not None
        if parent.parent is not None:
            assert parent.block_id is not None, f"block {block_id} cannot be found: its parent is gone"
            assert self._is_held(parent) or not self._is_held(node), f"block {block_id}'s parent is not held"

    def _record_block(self, parent: CachedBlock, tokens: bytes, block_id: int) -> CachedBlock | None:
        node = self._cache.add(parent, tokens)
        if node is None or node.block_id == block_id or self._nodes[block_id] is node:
            return node
        assert self._nodes[block_id] is None, f"block {block_id} was recorded with another content"
        self._nodes[block_id] = node
        if node.block_id is None:
            node.block_id = block_id
        elif self._is_held(node):
            node.copies.append(block_id)
            return node
        else:  # the block that somebody holds takes over from the one that nobody does
            self._idle.reuse(node)
            old, node.block_id = node.block_id, block_id
            self._nodes[old] = None
            self._empty.append(old)
        for beginning in self._cache.beginnings_of(node):
            if beginning.block_id is not None and not self._is_held(beginning):
                self._idle.discard(beginning)
                self._clear(beginning.block_id)
        return node

    def _evict(self) -> int:
        node = self._idle.pop()
        block_id = node.block_id
        assert block_id is not None
        self.counters.evictions += 1
        if self.host_pool is not None and node.num_tokens == self.block_size:
            slot = self.host_pool.store(node)
            if slot is not None:
                self.counters.offloads += 1
                self.offloads.append((block_id, slot))
        node.block_id = None
        self._nodes[block_id] = None
        self._cache.prune(node)
        return block_id

    def _clear(self, block_id: int) -> None:
        """Make an unheld block empty; a copy of its content takes its place."""
        node = self._nodes[block_id]
        if node is not None:
            self._nodes[block_id] = None
            if node.block_id != block_id:
                node.copies.remove(block_id)
            else:
                node.block_id = node.copies.pop() if node.copies else None
                self._cache.prune(node)
        self._empty.append(block_id)

    def _is_held(self, node: CachedBlock) -> bool:
        return node.block_id is not None and self._ref_counts[node.block_id] > 0
