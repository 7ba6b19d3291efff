"""The block pool driven by hypothesis, beside a model that keeps nothing but what each block was last filled with."""

from __future__ import annotations

from itertools import islice

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from runtime.engine.scheduling.block_events import SharedDigest
from runtime.engine.scheduling.block_pool import BlockPool, Chain, by_page
from runtime.engine.scheduling.eviction import POLICIES
from runtime.engine.scheduling.host_pool import HostPool
from runtime.engine.scheduling.prefix_cache import block_digest
from runtime.kv.groups import NO_BLOCK
from runtime.kv.kinds import FULL, CacheKind, Window

BLOCK_SIZE = 2

Content = tuple[int, str | None, tuple[int, ...]]
"""Group, salt, and all tokens up to a block's end."""

GROUP_KINDS: list[tuple[CacheKind, ...]] = [
    (FULL,), (FULL,), (Window(3),), (Window(1),), (FULL, Window(4)), (FULL, Window(1), Window(3)),
]  # fmt: skip


class Running:
    """A sequence as a scheduler would keep it."""

    def __init__(self, salt: str | None, tokens: list[int], blocks: list[list[int]], first_pages: list[int]) -> None:
        self.salt = salt
        self.tokens = tokens
        self.blocks = blocks
        self.first_pages = first_pages
        self.chain = Chain(salt)

    def prefix_keys(self, start: int, end: int) -> NDArray[np.int32]:
        return np.array(self.tokens[start:end], np.int32)


class PoolMachine(RuleBasedStateMachine):
    """Sequences start, grow, share, give up what is behind a window, are swapped and end; few tokens and few blocks, so
    that everything collides.

    ``device`` and ``host`` say what bytes would lie in each block and slot: the salt and tokens they were computed
    from. Whatever the pool finds must lie there.
    """

    @initialize(
        num_blocks=st.integers(4, 12),
        kinds=st.sampled_from(GROUP_KINDS),
        num_slots=st.integers(0, 5),
        eviction=st.sampled_from(POLICIES),
        is_colliding=st.booleans(),
    )
    def start(
        self, num_blocks: int, kinds: tuple[CacheKind, ...], num_slots: int, eviction: str, is_colliding: bool
    ) -> None:
        self.kinds = kinds
        self.host_pool = HostPool(num_slots) if num_slots else None
        self.pool = BlockPool(
            num_blocks * len(kinds),
            BLOCK_SIZE,
            kinds=kinds,
            host_pool=self.host_pool,
            eviction=eviction,
        )
        digest = (lambda parent, tokens: block_digest(parent, tokens) % 5) if is_colliding else SharedDigest(b"secret")
        self.events = self.pool.publish(digest)
        self.told: set[int] = set()  # digests of contents that lie somewhere, as the events say
        self.is_colliding = is_colliding
        self.device: dict[int, Content] = {}
        self.host: dict[int, Content] = {}
        self.running: list[Running] = []
        self.swapped: list[list[int]] = []

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=9), salt=st.sampled_from([None, None, "a"]))
    def admit(self, tokens: list[int], salt: str | None) -> None:
        """Look a prompt up, take over what is found, compute the rest."""
        pool = self.pool
        hit = pool.find(np.array(tokens, np.int32), salt)
        num_full, rest = len(hit.blocks[0]), hit.num_partial
        assert hit.num_tokens == num_full * BLOCK_SIZE + rest <= len(tokens)
        for group, (ids, first, slots) in enumerate(zip(hit.blocks, hit.first_pages, hit.host_slots)):
            assert len(ids) == num_full
            assert first == self.kinds[group].first_page(num_full * BLOCK_SIZE, BLOCK_SIZE)
            from_host = iter(slots)
            for page in range(first, num_full):
                block_id = ids[page]
                found = self.host[next(from_host)] if block_id is None else self.device[block_id]
                assert found == self.content(group, salt, tokens, page), "a stranger's block"
            assert next(from_host, None) is None
        for group, block_id in hit.partial.items():
            assert not any(hit.host_slots)
            assert 0 < rest <= BLOCK_SIZE
            of_group, content_salt, content = self.device[block_id]
            assert (of_group, content_salt) == (group, salt)
            assert content[: hit.num_tokens] == tuple(tokens[: hit.num_tokens])
        pool.share(hit.shared)
        num_pages = -(-len(tokens) // BLOCK_SIZE)
        needed = sum(num_pages - len(ids) + ids.count(None) for ids in hit.blocks)
        if needed > pool.num_free:
            pool.release(hit.shared)
            return
        slots = [slot for slots in hit.host_slots for slot in slots]
        if self.host_pool is not None:
            self.host_pool.hold(slots)
        fresh = iter(self.allocate(needed))
        blocks = []
        for group, ids in enumerate(hit.blocks):
            from_host = iter(hit.host_slots[group])
            blocks.append([next(fresh) if block_id is None else block_id for block_id in ids])
            for block_id, found in zip(blocks[-1], ids):
                if found is None:
                    self.device[block_id] = self.host[next(from_host)]
            blocks[-1] += islice(fresh, num_pages - num_full)
        if self.host_pool is not None:
            self.host_pool.release(slots)
        sequence = Running(salt, tokens, blocks, list(hit.first_pages))
        self.running.append(sequence)
        self.compute(sequence, num_full)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0), more=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def grow(self, which: int, more: list[int]) -> None:
        sequence = self.running[which % len(self.running)]
        num_full = len(sequence.tokens) // BLOCK_SIZE
        num_pages = -(-(len(sequence.tokens) + len(more)) // BLOCK_SIZE) - len(sequence.blocks[0])
        if num_pages * len(self.kinds) > self.pool.num_free:
            return
        fresh = iter(self.allocate(num_pages * len(self.kinds)))
        for ids in sequence.blocks:
            ids += islice(fresh, num_pages)
        sequence.tokens = sequence.tokens + more
        self.compute(sequence, num_full)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0))
    def give_up(self, which: int) -> None:
        """What lies behind the windows."""
        sequence = self.running[which % len(self.running)]
        for group, kind in enumerate(self.kinds):
            before = sequence.first_pages[group]
            first = max(before, kind.first_page(len(sequence.tokens), BLOCK_SIZE))
            self.pool.release(reversed(sequence.blocks[group][before:first]))
            sequence.blocks[group][:first] = [NO_BLOCK] * first
            sequence.first_pages[group] = first

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0), is_final=st.booleans())
    def finish(self, which: int, is_final: bool) -> None:
        sequence = self.running.pop(which % len(self.running))
        if is_final:
            self.record(sequence, is_final=True)
        self.pool.release(by_page(sequence.blocks, sequence.first_pages))
        self.pool.forget(sequence.chain)

    @precondition(lambda self: self.host_pool is not None)
    @rule(count=st.integers(1, 3))
    def swap(self, count: int) -> None:
        assert self.host_pool is not None
        num_free = self.host_pool.num_free
        taken = self.host_pool.take([count])
        assert (taken is None) == (count > num_free)
        if taken is not None:
            (slots,) = taken
            self.swapped.append(slots)
            for slot in slots:
                self.host.pop(slot, None)

    @precondition(lambda self: self.swapped)
    @rule(which=st.integers(0))
    def swap_back(self, which: int) -> None:
        assert self.host_pool is not None
        self.host_pool.give(self.swapped.pop(which % len(self.swapped)))

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        holders = [by_page(sequence.blocks, sequence.first_pages) for sequence in self.running]
        self.pool.check_invariants(holders)
        held = {block_id for block_ids in holders for block_id in block_ids}
        assert self.pool.num_free == self.pool.num_blocks - len(held)
        assert 0 <= self.pool.num_cached <= self.pool.num_free
        if self.host_pool is not None:
            self.host_pool.check_invariants(self.swapped)
        self.hear()
        for sequence in self.running:  # nobody has written to its blocks, and what they can give is found
            num_full = len(sequence.tokens) // BLOCK_SIZE
            for group, (ids, first) in enumerate(zip(sequence.blocks, sequence.first_pages)):
                for page in range(first, num_full):
                    expected = self.content(group, sequence.salt, sequence.tokens, page)
                    assert self.device[ids[page]] == expected, "a stranger's block"
            needed = [kind.first_page(num_full * BLOCK_SIZE, BLOCK_SIZE) for kind in self.kinds]
            if not self.is_colliding and all(map(int.__le__, sequence.first_pages, needed)):
                hit = self.pool.find(np.array(sequence.tokens, np.int32), sequence.salt)
                assert len(hit.blocks[0]) == num_full, "blocks that somebody holds were not found"

    def hear(self) -> None:
        """What the events tell is what lies somewhere; nothing is told twice."""
        changes = self.events.take()
        if changes is not None:
            stored, removed = set(changes.stored.tolist()), set(changes.removed.tolist())
            assert len(stored) + len(removed) == len(changes.stored) + len(changes.removed) > 0
            assert not stored & self.told
            assert removed <= self.told
            self.told = self.told - removed | stored
        assert self.events.take() is None
        nodes = self.pool._cache._index.values()
        full = {node.digest for node in nodes if node.lies_somewhere and node.num_tokens == BLOCK_SIZE}
        assert self.told == full

    def allocate(self, count: int) -> list[int]:
        block_ids = self.pool.allocate(count)
        for block_id, slot in self.pool.offloads:
            self.host[slot] = self.device[block_id]
        self.pool.offloads.clear()
        for block_id in block_ids:
            self.device.pop(block_id, None)
        return block_ids

    def compute(self, sequence: Running, first: int) -> None:
        """All pages from ``first`` on."""
        for group, ids in enumerate(sequence.blocks):
            for page in range(first, len(ids)):
                self.device[ids[page]] = self.content(group, sequence.salt, sequence.tokens, page)
        self.record(sequence, is_final=False)

    def record(self, sequence: Running, *, is_final: bool) -> None:
        self.pool.record(
            sequence.chain,
            sequence.blocks,
            sequence.first_pages,
            len(sequence.tokens),
            sequence,
            is_final=is_final,
        )

    def content(self, group: int, salt: str | None, tokens: list[int], page: int) -> Content:
        return group, salt, tuple(tokens[: (page + 1) * BLOCK_SIZE])


PoolMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestBlockPool = PoolMachine.TestCase
