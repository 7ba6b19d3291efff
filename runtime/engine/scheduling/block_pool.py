"""Free, held and cached KV blocks.

A block is a number; its bytes live in ``runtime.kv.cache``. A block is either held by sequences (its reference count),
or free: then it is empty or cached, that is, its content can be found and shared until the block is reallocated. The
scheduler knows the holders: its ``check_invariants`` compares the counts with the sequences.

Cache groups (``runtime.kv.groups``) whose blocks have one size draw on one pool. Blocks are numbered through all pools,
so that a number says its pool. Each group has trees of its own in the prefix cache, and a prefix is a hit as far as all
groups have it: each kind determines which pages it needs (``runtime.kv.kinds``).

A sequence that holds a block of a group that keeps all tokens also holds all blocks before it, or copies of them. The
pool keeps a content that is held in a block that is held, so a free block is never in the middle of a held prefix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, takewhile
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from runtime.engine.limits import EngineLimits
from runtime.engine.messages import MISS_REASONS, MissReason, PrefixMiss
from runtime.engine.scheduling.block_events import BlockEvents
from runtime.engine.scheduling.eviction import ByReplay, EvictionPolicy, eviction_policy
from runtime.engine.scheduling.host_pool import HostPool
from runtime.engine.scheduling.prefix_cache import CachedBlock, Digest, PrefixCache, Salt, block_digest
from runtime.kv.groups import NO_BLOCK
from runtime.kv.kinds import FULL, CacheKind, findable_pages

T = TypeVar("T")

_MOST_SHOWN = 24
"""Tokens of another prompt that are told at a difference."""

_REMEMBERED = 4
"""Latest evicted contents that are remembered, for each block."""


class TokenSource(Protocol):
    """A sequence, as the pool reads it."""

    def prefix_keys(self, start: int, end: int) -> NDArray[np.int32]:
        """The keys of the tokens ``start:end`` for comparing prefixes: mostly their ids."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest cached prefix of some tokens.

    blocks       by group: the device block of each full page; None if only the host has it, ``NO_BLOCK``
                 before ``first_pages``. A state's group has the one block of the state after ``num_tokens``
    first_pages  by group: the computation does not need pages before this one
    host_slots   by group: the host slots of the pages that are None in ``blocks``
    partial      by group that has pages of tokens: a block on the device that continues them; empty if there is none
                 or the host has any. If the model has states, the host's is one more page in ``blocks``
    num_partial  how many of its first tokens match
    num_tokens   tokens of all pages
    num_pages    full pages of tokens
    num_known    the first tokens whose pages lie somewhere, whether or not a state after them does
    num_seen     with states: the first tokens whose pages lie somewhere, or are remembered as evicted
    difference   the first tokens that any prompt in the tree has, whether or not their pages lie somewhere
    differing    a content that goes on otherwise there, and how many of its tokens are the same; or None
    reasons      why no state after these was found, and why no further pages were
    """

    blocks: list[list[int | None]]
    first_pages: list[int]
    host_slots: list[list[int]]
    partial: dict[int, int] = field(default_factory=dict)
    num_partial: int = 0
    num_tokens: int = 0
    num_pages: int = 0
    num_known: int = field(default=0, compare=False)
    num_seen: int = field(default=0, compare=False)
    difference: int = field(default=0, compare=False)
    differing: tuple[CachedBlock, int] | None = field(default=None, compare=False)
    reasons: tuple[MissReason, MissReason] = field(default=("no_checkpoint", "unseen"), compare=False)

    @classmethod
    def none(cls, num_groups: int) -> Hit:
        """No hit."""
        return cls([[] for _ in range(num_groups)], [0] * num_groups, [[] for _ in range(num_groups)])

    @property
    def shared(self) -> list[int]:
        """The blocks of all groups on the device, in page order, without ``partial``."""
        return [block_id for block_id in by_page(self.blocks, self.first_pages) if block_id is not None]

    @property
    def num_shared_pages(self) -> int:
        """Pages before the first that some group has to get from the host."""
        return min([self.num_pages, *(ids.index(None) for ids in self.blocks if None in ids)])

    def without_partial(self) -> Hit:
        """The hit's full pages."""
        return replace(self, partial={}, num_partial=0, num_tokens=self.num_tokens - self.num_partial)


@dataclass(slots=True)
class CacheCounters:
    """Counters of the prefix cache.

    queried_tokens, hit_tokens  of admitted sequences (``count_query``)
    missed_tokens               of these, those that were not hit, by reason
    evictions                   cached blocks that were evicted
    offloads                    evicted blocks that were copied to the host pool
    """

    queried_tokens: int = 0
    hit_tokens: int = 0
    evictions: int = 0
    offloads: int = 0
    missed_tokens: dict[MissReason, int] = field(default_factory=lambda: dict.fromkeys(MISS_REASONS, 0))


class Chain:
    """How many of a sequence's blocks are recorded; belongs to the sequence, and the pool resets it when its blocks are
    released."""

    __slots__ = ("is_broken", "nodes", "num_blocks", "salt")

    def __init__(self, salt: Salt = None) -> None:
        self.salt = salt
        self.reset()

    def reset(self) -> None:
        self.nodes: list[CachedBlock] = []  # by group: of the last recorded page
        self.num_blocks = 0  # pages
        self.is_broken = False  # a digest collided: nothing after it can be recorded


class _Part:
    """The free blocks of one pool."""

    def __init__(self, first: int, num_blocks: int, eviction: str, *, has_states: bool) -> None:
        # cached and free
        self.idle: EvictionPolicy = ByReplay() if has_states else eviction_policy(eviction, num_blocks)
        self.empty = list(range(first + num_blocks - 1, first - 1, -1))  # a stack: the latest is warm in the cache
        self.num_fresh = num_blocks  # never taken: the bottom of the stack

    @property
    def num_free(self) -> int:
        return len(self.empty) + len(self.idle)


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` tokens, all empty at first. Not thread-safe: it belongs to the engine's
    loop.

    kinds      of each cache group
    pools      the pool of each cache group; empty: all in one. ``num_blocks`` has the size of each, or of the one
    host_pool  takes evicted content, or None to drop it
    eviction   one of ``runtime.engine.scheduling.eviction.POLICIES``; RequestError for any other
    digest     of a block's tokens after its parent's (for tests of collisions)
    states     the cache groups whose pages are states, which do not follow tokens
    chunked_blocks  returns the held blocks of groups that give pages up; the scheduler's
    ref_counts how often each block is held
    offloads   (block, host slot) pairs whose bytes are to be copied before the block is written; the planner of the
               step drains the list
    """

    def __init__(
        self,
        num_blocks: int | Sequence[int],
        block_size: int,
        *,
        kinds: tuple[CacheKind, ...] = (FULL,),
        pools: Sequence[int] = (),
        enable_prefix_caching: bool = True,
        host_pool: HostPool | None = None,
        eviction: str = "reuse-gap",
        digest: Digest = block_digest,
    ) -> None:
        sizes = (num_blocks,) if isinstance(num_blocks, int) else tuple(num_blocks)
        self._sizes, self.num_blocks = sizes, sum(sizes)
        self.block_size = block_size
        self.kinds = kinds
        self.pools = tuple(pools) or (0,) * len(kinds)
        self.states = [group for group, kind in enumerate(kinds) if not kind.follows_tokens]
        self._are_whole = all(kind.is_whole for kind in kinds)
        self.enable_prefix_caching = enable_prefix_caching
        self.host_pool = host_pool
        self.chunked_blocks: Callable[[], list[int]] = list
        self.counters = CacheCounters()
        self.offloads: list[tuple[int, int]] = []
        self._cache = PrefixCache(block_size, digest)
        self._parts = [
            _Part(first, size, eviction, has_states=bool(kinds) and all(not kind.follows_tokens for kind in of_pool))
            for pool, (first, size) in enumerate(zip(accumulate(sizes, initial=0), sizes))
            for of_pool in ([kind for kind, own in zip(kinds, self.pools) if own == pool],)
        ]
        # Digests of the latest victims; the tokens of a state inside a page stand under its parent's digest, inverted.
        self._evicted: OrderedDict[int, bytes] = OrderedDict()
        self._part_of = [part for part, size in zip(self._parts, sizes) for _ in range(size)]  # by block
        self.page_counts = self.by_pool([1] * len(kinds))
        self.ref_counts = [0] * self.num_blocks
        self._nodes: list[CachedBlock | None] = [None] * self.num_blocks  # the content of each block, once recorded
        if host_pool is not None:
            host_pool.on_drop = self._cache.prune

    def publish(self, digest: Digest) -> BlockEvents:
        """From now on report cached contents by these digests. To be called while there are none."""
        assert not len(self._cache), "there are contents already, under other digests"
        events = BlockEvents()
        self._cache = PrefixCache(self.block_size, digest, events.touch)
        if self.host_pool is not None:
            self.host_pool.on_drop = self._cache.prune
        return events

    @property
    def num_free(self) -> int:
        """Free blocks, empty or cached."""
        return sum(part.num_free for part in self._parts)

    @property
    def free_counts(self) -> list[int]:
        """By pool: free blocks."""
        return [part.num_free for part in self._parts]

    @property
    def empty_counts(self) -> list[int]:
        """By pool: how many more blocks than half of all are empty; negative if fewer are."""
        return [len(part.empty) - size // 2 for part, size in zip(self._parts, self._sizes)]

    @property
    def used_counts(self) -> list[tuple[int, int]]:
        """By pool: how many blocks were ever taken, the first ones, of how many."""
        return [(size - part.num_fresh, size) for part, size in zip(self._parts, self._sizes)]

    def by_pool(self, counts: Iterable[int]) -> list[int]:
        """The sums of each pool's groups, of numbers by cache group."""
        sums = [0] * len(self._parts)
        for pool, count in zip(self.pools, counts, strict=True):
            sums[pool] += count
        return sums

    def has_room(self, needed: Iterable[int], pages_each: int = 0) -> bool:
        """Whether so many blocks of each pool are free, and ``pages_each`` more for each cache group."""
        return all(
            count + pages_each * num_groups <= part.num_free
            for count, num_groups, part in zip(needed, self.page_counts, self._parts)
        )

    @property
    def num_cached(self) -> int:
        """Free blocks that are cached."""
        return sum(len(part.idle) for part in self._parts)

    def run_lengths(self) -> str:
        """The state of every block, in order, as in ``StepView.block_map``. O(num_blocks)."""
        kinds = np.minimum(self.ref_counts, 2)
        kinds[[block_id for part in self._parts for block_id in part.empty]] = 3
        chunked = np.array(self.chunked_blocks(), np.intp)
        kinds[chunked[kinds[chunked] == 1]] = 4
        bounds = np.flatnonzero(np.diff(kinds, prepend=-1, append=-1))
        return "".join(
            f"{count}{'cusfw'[kind]}" for count, kind in zip(np.diff(bounds).tolist(), kinds[bounds[:-1]].tolist())
        )

    def count_query(self, num_tokens: int, hit: Hit) -> PrefixMiss | None:
        """Count an admitted sequence that looked up ``num_tokens``. Returns why it missed some of its pages; None if it
        did not, or could not have found any."""
        self.counters.queried_tokens += num_tokens
        self.counters.hit_tokens += hit.num_tokens
        known = max(hit.num_known, hit.num_tokens)
        missed = known - hit.num_tokens, num_tokens - known
        for reason, count in zip(hit.reasons, missed):
            self.counters.missed_tokens[reason] += count
        if sum(missed) <= 1 or not self.enable_prefix_caching:
            return None
        return PrefixMiss(hit.reasons[missed[1] > missed[0]], max(known, hit.difference), hit.num_tokens)

    def cached_instead(self, hit: Hit) -> list[int]:
        """The tokens that another prompt of the same salt has where the one that was looked up differs."""
        return [] if hit.differing is None else self._cache.following(*hit.differing, _MOST_SHOWN)

    def count_uses(self, hit: Hit) -> None:
        """A sequence starts with the states of a hit. A pool that also has pages of tokens counts them itself."""
        for block_id in (each for group in self.states for each in hit.blocks[group] if each is not None):
            node = self._nodes[block_id]
            if node is not None and isinstance(self._part_of[block_id].idle, ByReplay):
                node.times_reused += 1
                node.is_spare = False

    def allocate(self, count: int, pool: int = 0, *, offloads: bool = True) -> list[int]:
        """Take ``count`` free blocks of a pool, each with reference count 1: empty ones first, then cached ones, whose
        content goes to the host pool if there is room and it ``offloads``. The caller has checked ``has_room``."""
        part = self._parts[pool]
        assert count <= part.num_free, f"{count} blocks wanted, {part.num_free} are free"
        block_ids = [part.empty.pop() if part.empty else self._evict(pool, offloads=offloads) for _ in range(count)]
        part.num_fresh = min(part.num_fresh, len(part.empty))
        for block_id in block_ids:
            self.ref_counts[block_id] = 1
        return block_ids

    def allocate_each(self, needed: Sequence[int]) -> list[Iterator[int]]:
        """By cache group: fresh blocks, ``needed`` of each pool. Groups of one pool share an iterator."""
        fresh = [iter(self.allocate(count, pool)) for pool, count in enumerate(needed)]
        return [fresh[pool] for pool in self.pools]

    def share(self, block_ids: Iterable[int]) -> None:
        """Count one more holder of each block; each must be held already, or cached."""
        for block_id in block_ids:
            if self.ref_counts[block_id] == 0:
                node = self._nodes[block_id]
                assert node is not None, f"block {block_id} is empty and cannot be shared"
                self._part_of[block_id].idle.reuse(node)
            self.ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Count one holder less of each block, given in the order of the sequence. Those without a holder are free; the
        last is evicted first, so that a prefix outlives its continuations."""
        for block_id in reversed(list(block_ids)):
            count = self.ref_counts[block_id] - 1
            assert count >= 0, f"block {block_id} was released twice"
            self.ref_counts[block_id] = count
            if count == 0:
                node = self._nodes[block_id]
                if node is not None and node.block_id == block_id and not node.copies:
                    self._part_of[block_id].idle.add(node)
                else:
                    self._clear(block_id)

    def find(self, tokens: NDArray[np.int32], salt: Salt = None, *, has_partial: bool = True) -> Hit:
        """The longest prefix of ``tokens [num_tokens]`` int32 that all groups have, of full pages unless
        ``has_partial``; holders do not change.

        To use it: ``share`` the blocks at once; ``hold`` the host slots until the step that reads them has run, and
        copy them into fresh blocks; ``share`` the partial blocks until the step that copies them has run. Pass all
        known tokens but the last, whose logits must be computed.
        """
        if not self.enable_prefix_caching:
            return Hit.none(len(self.kinds))
        paths = self.paths(tokens, salt)
        others = [group for group, kind in enumerate(self.kinds) if kind.follows_tokens]
        stored = [[node.lies_somewhere for node in paths[group]] for group in others]
        num_known = len(paths[0])
        if others:
            num_known = findable_pages(stored, [self.kinds[group] for group in others], self.block_size)
        if self.states:
            hit = self._find_states(paths, tokens, salt, has_partial=has_partial)
        else:
            hit = self._hit_of(paths, num_known)
            num_tokens, num_pages = hit.num_tokens, hit.num_pages
            if has_partial and not any(hit.host_slots):
                ends = [path[num_pages - 1] if num_pages else None for path in paths]
                partial, num_partial = self._find_partial(dict(enumerate(ends)), tokens[num_tokens:], salt)
                hit = replace(hit, partial=partial, num_partial=num_partial, num_tokens=num_tokens + num_partial)
        group = max(others or range(len(paths)), key=lambda each: len(paths[each]))
        num_pages, end = len(paths[group]), paths[group][-1] if paths[group] else None
        num_seen = num_known
        if self.states:
            following = self._cache.next_digests(paths[group][:num_known], tokens, salt, group)
            num_seen += sum(1 for _ in takewhile(self._evicted.__contains__, following))
        num_same, node = self._cache.difference(end, tokens[num_pages * self.block_size :], salt, group)
        return replace(
            hit,
            num_known=num_known * self.block_size,
            num_seen=num_seen * self.block_size,
            difference=num_pages * self.block_size + num_same,
            differing=None if node is None else (node, num_same),
            reasons=self._why(hit, paths, num_known, tokens, salt),
        )

    def _why(
        self, hit: Hit, paths: list[list[CachedBlock]], num_known: int, tokens: NDArray[np.int32], salt: Salt
    ) -> tuple[MissReason, MissReason]:
        """See ``Hit.reasons``."""
        had_state = any(
            node.digest in self._evicted for group in self.states for node in paths[group][hit.num_pages : num_known]
        ) or any(self._had_state_inside(paths[group], hit, num_known, tokens, salt, group) for group in self.states)
        following = [
            next(self._cache.next_digests(path[:num_known], tokens, salt, group), None)
            for group, path in enumerate(paths)
            if self.kinds[group].follows_tokens
        ]
        had_page = any(digest in self._evicted for digest in following if digest is not None)
        return "evicted" if had_state else "no_checkpoint", "evicted" if had_page else "unseen"

    def _had_state_inside(
        self, path: list[CachedBlock], hit: Hit, num_known: int, tokens: NDArray[np.int32], salt: Salt, group: int
    ) -> bool:
        """Whether a state inside a page after the hit was evicted."""
        size = self.block_size
        for page in range(hit.num_pages, min(num_known, len(path)) + 1):
            before = path[page - 1].digest if page else self._cache.root_digest(salt, group)
            inside = self._evicted.get(~before)
            following = tokens[page * size : (page + 1) * size].tobytes()
            if inside and following.startswith(inside) and page * size + len(inside) // 4 > hit.num_tokens:
                return True
        return False

    def _hit_of(self, paths: list[list[CachedBlock]], num_pages: int) -> Hit:
        """The hit of these full pages, in groups that have pages of tokens; nothing of states."""
        num_tokens = num_pages * self.block_size
        first_pages = [kind.first_page(num_tokens, self.block_size) for kind in self.kinds]
        blocks: list[list[int | None]] = []
        host_slots: list[list[int]] = []
        for path, first, kind in zip(paths, first_pages, self.kinds):
            needed = path[first:num_pages] if kind.follows_tokens else []
            blocks.append([*[NO_BLOCK] * first, *(node.block_id for node in needed)])
            only_there = (node.host_slot for node in needed if node.block_id is None)
            host_slots.append([slot for slot in only_there if slot is not None])
        return Hit(blocks, first_pages, host_slots, num_tokens=num_tokens, num_pages=num_pages)

    def _find_states(
        self, paths: list[list[CachedBlock]], tokens: NDArray[np.int32], salt: Salt, *, has_partial: bool
    ) -> Hit:
        """The longest prefix whose state all groups of states have, and the others its pages."""
        size = self.block_size
        tokens = np.ascontiguousarray(tokens, np.int32)
        kept = [
            {
                **{page * size: node for page, node in enumerate(paths[group], 1) if node.lies_somewhere},
                **(self._cache.partials(paths[group], tokens, salt, group) if has_partial else {}),
            }
            for group in self.states
        ]
        others = [group for group, kind in enumerate(self.kinds) if kind.follows_tokens]
        for num_tokens in sorted(kept[0], reverse=True):
            if not all(num_tokens in each for each in kept):
                continue
            num_pages, rest = divmod(num_tokens, size)
            stored = [[node.lies_somewhere for node in paths[group][:num_pages]] for group in others]
            if others and findable_pages(stored, [self.kinds[group] for group in others], size) < num_pages:
                continue
            hit = self._hit_of(paths, num_pages)
            partial: dict[int, int] = {}
            if rest and others:
                ends = {group: paths[group][num_pages - 1] if num_pages else None for group in others}
                found = self._find_rest(hit, ends, tokens[num_pages * size : num_tokens], salt)
                if found is None:
                    continue
                partial = found
            for group, each in zip(self.states, kept):
                node = each[num_tokens]
                hit.blocks[group] = [node.block_id]
                if node.block_id is None:
                    assert node.host_slot is not None
                    hit.host_slots[group] = [node.host_slot]
            return replace(hit, partial=partial, num_partial=rest, num_tokens=num_tokens)
        return Hit.none(len(self.kinds))

    def paths(self, tokens: NDArray[np.int32], salt: Salt) -> list[list[CachedBlock]]:
        """By group: the known full pages with which ``tokens`` begin, wherever they lie."""
        return [self._cache.walk(tokens, salt, group) for group in range(len(self.kinds))]

    def pool_number(self, block_id: int) -> int:
        """The pool of a block."""
        return self._parts.index(self._part_of[block_id])

    def on_device(
        self, tokens: NDArray[np.int32], salt: Salt, first_pages: list[int], num_pages: int
    ) -> list[list[int | None]]:
        """By group: the blocks that have the first ``num_pages`` full pages of ``tokens``, or None for a missing one;
        ``NO_BLOCK`` before ``first_pages``. Nothing of states."""
        found: list[list[int | None]] = []
        for group, first in enumerate(first_pages):
            if not self.kinds[group].follows_tokens:
                found.append([])
                continue
            path = self._cache.walk(tokens, salt, group) if self.enable_prefix_caching else []
            ids = [node.block_id for node in path[first:num_pages]]
            found.append([*[NO_BLOCK] * first, *ids, *[None] * (num_pages - first - len(ids))])
        return found

    def record(
        self,
        chain: Chain,
        blocks: Sequence[list[int]],
        first_pages: Sequence[int],
        num_computed: int,
        tokens: TokenSource,
        *,
        is_final: bool = False,
        is_spare: bool = False,
    ) -> None:
        """Cache the pages that became full since the last call.

        ``blocks`` are a sequence's, by group, held by it from ``first_pages`` on, ``num_computed`` of its ``tokens``
        lie in them, ``chain`` is the sequence's own. ``is_final`` means that it is about to release them: then the
        partial last page is recorded, too. A state's group has the block of the state after ``num_computed``, or none;
        ``is_spare`` is of this state, if it is new.
        Constant time except for new full pages.
        """
        last = num_computed // self.block_size
        has_state = bool(self.states) and any(blocks[group] for group in self.states)
        rest = num_computed % self.block_size if is_final or has_state else 0
        is_known = last == chain.num_blocks and not rest and not has_state
        if is_known or chain.is_broken or not self.enable_prefix_caching:
            return
        first = chain.num_blocks
        assert not self._are_whole or not chain.nodes or self._is_held(chain.nodes[0]), "a chain was not forgotten"
        size = self.block_size
        new_tokens = tokens.prefix_keys(first * size, last * size + rest)
        data, width = new_tokens.tobytes(), size * new_tokens.itemsize
        nodes = chain.nodes or [self._cache.root(chain.salt, group) for group in range(len(self.kinds))]
        if self.states and not chain.nodes:
            for root in nodes:
                root.twins = nodes
        useless: list[CachedBlock] = []
        followers = [
            (group, blocks[group], first_pages[group]) for group, kind in enumerate(self.kinds) if kind.follows_tokens
        ]
        add_each, has_states = self._cache.add_each, bool(self.states)
        for place, start in zip(range(first, last), range(0, len(data), width)):
            children = add_each(nodes, data[start : start + width])
            if len(children) < len(nodes):
                chain.is_broken = True
                useless = children
                break
            for group, ids, first_page in followers:
                if place >= first_page and children[group].block_id != ids[place]:
                    self._keep_page(children[group], ids[place])
            if has_states:
                for child in children:
                    child.twins = children
            nodes = children
            chain.num_blocks = place + 1
        if rest and not chain.is_broken:
            partial = data[(last - first) * width :]
            for node, ids, kind in zip(nodes, blocks, self.kinds):
                if kind.follows_tokens or not ids:
                    continue
                if (state := self._cache.add(node, partial)) is not None:
                    state.is_spare = is_spare and not state.lies_somewhere
                    self._keep(state, ids[0])
            if is_final and (not self.states or self._has_state_inside(nodes, partial)):
                for node, ids, kind in zip(nodes, blocks, self.kinds):
                    if kind.follows_tokens and self._cache.continued_by(node, partial) is None:
                        for child in self._cache.add_each([node], partial):
                            self._keep_page(child, ids[last])
        elif has_state and not chain.is_broken:
            for group in self.states:
                if blocks[group]:
                    nodes[group].is_spare = is_spare and not nodes[group].lies_somewhere
                    self._keep(nodes[group], blocks[group][0])
        if chain.num_blocks > first:
            if not self._are_whole:
                self._pin(nodes, 1)
                self._pin(chain.nodes, -1)
            chain.nodes = nodes
        elif not chain.nodes:
            useless += nodes  # roots under which nothing could be recorded
        for node in useless:
            self._cache.prune(node)
        self._drop_lone()

    def is_recorded(self, block_id: int) -> bool:
        """Whether a held block has a content that others may find."""
        return self._nodes[block_id] is not None

    def forget(self, chain: Chain) -> None:
        """The chain's sequence releases its blocks."""
        if not self._are_whole:
            self._pin(chain.nodes, -1)
        chain.reset()
        self._drop_lone()

    def drop_prefixes(self) -> tuple[int, int]:
        """Empty every cached free block, and those on the host. Returns how many were dropped on the device, and how
        many blocks are held."""
        num_dropped = self.num_cached
        for part in self._parts:
            while part.idle:
                node = part.idle.pop()
                block_id = node.block_id
                assert block_id is not None
                node.block_id = None
                self._nodes[block_id] = None
                self._cache.prune(node)
                part.empty.append(block_id)
        self._drop_lone()
        if self.host_pool is not None:
            self.host_pool.drop_prefixes()
        return num_dropped, self.num_blocks - self.num_free

    def check_invariants(self, holders: Iterable[Iterable[int]]) -> None:
        """Assert that every block is held exactly as often as ``holders`` (one list of blocks a sequence) have it, that
        the others are either empty or cached, and that index and blocks agree. For tests: O(num_blocks)."""
        expected = [0] * self.num_blocks
        for block_ids in holders:
            block_ids = list(block_ids)
            assert len(set(block_ids)) == len(block_ids), f"a sequence holds a block twice: {block_ids}"
            for block_id in block_ids:
                expected[block_id] += 1
        assert expected == self.ref_counts, "reference counts differ from the sequences' blocks"
        every = [block_id for part in self._parts for block_id in part.empty]
        empty = set(every)
        assert len(empty) == len(every), "a block is free twice"
        assert all(self._part_of[block_id] is part for part in self._parts for block_id in part.empty), (
            "of another pool"
        )
        num_idle = 0
        for block_id, (count, node) in enumerate(zip(expected, self._nodes)):
            if block_id in empty:
                assert (count, node) == (0, None), f"block {block_id} is among the empty ones but is not"
            elif count == 0:
                assert node is not None, f"block {block_id} is lost"
                assert node.block_id == block_id, f"block {block_id} is a copy that nobody holds"
                assert node in self._part_of[block_id].idle, (
                    f"block {block_id} is held by nobody but is not to be evicted"
                )
                num_idle += 1
            if node is not None:
                self._check_node(block_id, node)
        assert num_idle == self.num_cached, "a block that somebody holds is to be evicted"
        self._cache.check_invariants()

    def _check_node(self, block_id: int, node: CachedBlock) -> None:
        assert node.block_id is not None, f"block {block_id} has a content that lies nowhere"
        if node.block_id != block_id:
            assert block_id in node.copies, f"block {block_id} has the content of another"
            assert self.ref_counts[block_id] > 0, f"block {block_id}, a copy, is held by nobody"
        else:
            assert all(self._nodes[copy] is node for copy in node.copies), f"a copy of block {block_id} is none"
        if node.copies:
            assert self._is_held(node), f"block {node.block_id} is held by nobody, yet a copy of it is"
        parent, group = node.parent, self._cache.group_of(node)
        assert self._part_of[block_id] is self._parts[self.pools[group]], f"block {block_id} is of another pool"
        assert parent is not None
        if parent.parent is not None and self.kinds[group].is_whole:
            assert parent.block_id is not None, f"block {block_id} cannot be found: its parent is gone"
            assert self._is_held(parent) or not self._is_held(node), f"block {block_id}'s parent is not held"

    def _find_partial(
        self, nodes: dict[int, CachedBlock | None], tokens: NDArray[np.int32], salt: Salt
    ) -> tuple[dict[int, int], int]:
        """By group: the block that shares most of ``tokens`` after ``nodes``, and how many all of them share."""
        partial: dict[int, int] = {}
        num_partial = self.block_size
        for group, node in nodes.items():
            found = self._cache.longest_partial(node, tokens, salt, group)
            if found is None:
                return {}, 0
            assert found[0].block_id is not None
            partial[group] = found[0].block_id
            num_partial = min(num_partial, found[1])
        return partial, num_partial

    def _find_rest(
        self, hit: Hit, nodes: dict[int, CachedBlock | None], tokens: NDArray[np.int32], salt: Salt
    ) -> dict[int, int] | None:
        """By group: a block that begins with ``tokens`` after ``nodes``. Those on the host alone become pages of
        ``hit``. None if a group has none."""
        partial: dict[int, int] = {}
        on_host: dict[int, int] = {}
        for group, node in nodes.items():
            found = self._cache.longest_partial(node, tokens, salt, group, on_host=True)
            if found is None or found[1] < len(tokens):
                return None
            if found[0].block_id is not None:
                partial[group] = found[0].block_id
            else:
                assert found[0].host_slot is not None
                on_host[group] = found[0].host_slot
        for group, slot in on_host.items():
            hit.blocks[group].append(None)
            hit.host_slots[group].append(slot)
        return partial

    def _pin(self, nodes: list[CachedBlock], count: int) -> None:
        """Pin nodes of groups that give pages up, which their sequence need not hold, or unpin them."""
        for node, kind in zip(nodes, self.kinds):
            if not kind.is_whole:
                node.num_pins += count
                self._cache.prune(node)

    def _keep_page(self, node: CachedBlock, block_id: int) -> None:
        """Record that a held block has this content; free ones with its beginnings have no use any more."""
        if self._keep(node, block_id):
            for beginning in self._cache.beginnings_of(node):
                if beginning.block_id is not None and not self._is_held(beginning):
                    self._part_of[beginning.block_id].idle.discard(beginning)
                    self._clear(beginning.block_id)

    def _keep(self, node: CachedBlock, block_id: int) -> bool:
        """Record that a held block has this content. False if it is known, or a held block has it already."""
        if node.block_id == block_id or self._nodes[block_id] is node:
            return False
        assert self._nodes[block_id] is None, f"block {block_id} was recorded with another content"
        self._nodes[block_id] = node
        if node.block_id is None:
            node.block_id = block_id
            if self._cache.on_change is not None:
                self._cache.changed(node)
        elif self._is_held(node):
            node.copies.append(block_id)
            return False
        else:  # the held block takes over from the free one
            old, node.block_id = node.block_id, block_id
            part = self._part_of[old]
            part.idle.reuse(node)
            self._nodes[old] = None
            part.empty.append(old)
        return True

    def _drop_lone(self) -> None:
        """With states: drop the free contents that no longer have a use, pages after which no state is left, and states
        whose pages are gone."""
        lone = self._cache.lone
        while lone:
            node = lone.pop()
            if all(each is node or self._cache.has(each) for each in node.twins):
                continue
            gone = [child for of_first in node.children.values() for child in of_first]
            for each in gone if self._has_use(node) else [*gone, node]:
                if each.block_id is not None and not self._is_held(each):
                    self._part_of[each.block_id].idle.drop(each)
                    self._remember(each)
                    self._clear(each.block_id)

    def _has_state_inside(self, nodes: Sequence[CachedBlock], tokens: bytes) -> bool:
        """With states: whether one lies inside the page of ``tokens`` that continues these nodes, one a group."""
        return any(self._cache.ends_inside(nodes[group], tokens) for group in self.states)

    def _has_use(self, node: CachedBlock) -> bool:
        """Whether a page after which no state is left has one inside, and no group lacks the page."""
        before, group = node.parent, node.twins.index(node)
        if before is None or not before.twins or not self.kinds[group].follows_tokens:
            return False
        pages = [each for each, kind in zip(node.twins, self.kinds) if kind.follows_tokens]
        return all(map(self._cache.has, pages)) and self._has_state_inside(before.twins, node.tokens)

    def _drop_partial(self, before: CachedBlock) -> None:
        """A state inside a page is gone, after the node ``before``: drop the free pages there, and beginnings of pages,
        that no other state needs."""
        for group, node in enumerate(before.twins):
            if self.kinds[group].follows_tokens:
                for each in [child for of_first in node.children.values() for child in of_first]:
                    is_idle = each.block_id is not None and not self._is_held(each)
                    is_lone = not each.twins or not all(map(self._cache.has, each.twins))
                    if is_idle and is_lone and not self._has_state_inside(before.twins, each.tokens):
                        assert each.block_id is not None
                        self._part_of[each.block_id].idle.drop(each)
                        self._remember(each)
                        self._clear(each.block_id)

    def _remember(self, node: CachedBlock) -> None:
        """That a content was evicted."""
        key, tokens = node.digest, b""
        if node.num_tokens < self.block_size and node.parent is not None:
            key, tokens = ~node.parent.digest, node.tokens
        self._evicted[key] = tokens
        self._evicted.move_to_end(key)
        if len(self._evicted) > _REMEMBERED * self.num_blocks:
            self._evicted.popitem(last=False)

    def _evict(self, pool: int, *, offloads: bool = True) -> int:
        node = self._parts[pool].idle.pop()
        block_id = node.block_id
        assert block_id is not None
        self.counters.evictions += 1
        if offloads and self.host_pool is not None and (self.states or node.num_tokens == self.block_size):
            slot = self.host_pool.store(node, pool)
            if slot is not None:
                self.counters.offloads += 1
                self.offloads.append((block_id, slot))
        self._remember(node)
        node.block_id = None
        self._nodes[block_id] = None
        before, is_partial = node.parent, node.num_tokens < self.block_size
        self._cache.prune(node)
        if is_partial and before is not None and not node.lies_somewhere:
            self._drop_partial(before)
        self._drop_lone()
        return block_id

    def _clear(self, block_id: int) -> None:
        """Make a free block empty; a copy of its content takes its place."""
        node = self._nodes[block_id]
        if node is not None:
            self._nodes[block_id] = None
            if node.block_id != block_id:
                node.copies.remove(block_id)
            else:
                node.block_id = node.copies.pop() if node.copies else None
                self._cache.prune(node)
        self._part_of[block_id].empty.append(block_id)

    def _is_held(self, node: CachedBlock) -> bool:
        return node.block_id is not None and self.ref_counts[node.block_id] > 0


def pool_of(limits: EngineLimits) -> BlockPool:
    """The blocks, and those on the host, that an engine of these limits has."""
    return BlockPool(
        limits.pool_sizes,
        limits.block_size,
        kinds=limits.cache_kinds,
        pools=limits.cache_pools,
        enable_prefix_caching=limits.enable_prefix_caching,
        host_pool=HostPool(limits.host_pool_sizes) if limits.num_host_blocks else None,
    )


def by_page(blocks: Sequence[Sequence[T]], first_pages: Sequence[int]) -> list[T]:
    """The entries of these lists, one list a group, from each ``first_pages`` on, in page order."""
    filled = [(ids, first) for ids, first in zip(blocks, first_pages) if first < len(ids)]
    if len(filled) == 1:
        return list(filled[0][0][filled[0][1] :])
    pages = range(min((first for _, first in filled), default=0), max((len(ids) for ids, _ in filled), default=0))
    return [ids[page] for page in pages for ids, first in filled if first <= page < len(ids)]
