"""The block pool driven by hypothesis, beside a model that keeps nothing but what each block was last filled with."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from runtime.engine.scheduling.block_pool import BlockPool, Chain
from runtime.engine.scheduling.eviction import POLICIES
from runtime.engine.scheduling.host_pool import HostPool
from runtime.engine.scheduling.prefix_cache import block_digest

BLOCK_SIZE = 2

Content = tuple[str | None, tuple[int, ...]]
"""Salt, and all tokens up to a block's end."""


class Running:
    """A sequence as a scheduler would keep it."""

    def __init__(self, salt: str | None, tokens: list[int], block_ids: list[int], num_computed: int) -> None:
        self.salt = salt
        self.tokens = tokens
        self.block_ids = block_ids
        self.num_computed = num_computed
        self.chain = Chain(salt)

    def copy_tokens(self, start: int, out: NDArray[np.int32]) -> None:
        out[:] = self.tokens[start : start + len(out)]


class PoolMachine(RuleBasedStateMachine):
    """Sequences start, grow, share, are swapped and end; few tokens and few blocks, so that everything collides.

    ``device`` and ``host`` say what bytes would lie in each block and slot: the salt and tokens they were computed
    from. Whatever the pool finds must lie there.
    """

    @initialize(
        num_blocks=st.integers(4, 12),
        num_slots=st.integers(0, 5),
        eviction=st.sampled_from(POLICIES),
        is_colliding=st.booleans(),
    )
    def start(self, num_blocks: int, num_slots: int, eviction: str, is_colliding: bool) -> None:
        self.host_pool = HostPool(num_slots) if num_slots else None
        self.pool = BlockPool(
            num_blocks,
            BLOCK_SIZE,
            host_pool=self.host_pool,
            eviction=eviction,
            digest=(lambda parent, tokens: block_digest(parent, tokens) % 5) if is_colliding else block_digest,
        )
        self.is_colliding = is_colliding
        self.device: dict[int, Content] = {}
        self.host: dict[int, Content] = {}
        self.running: list[Running] = []
        self.swapped: list[list[int]] = []
        self.computed: set[Content] = set()

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=9), salt=st.sampled_from([None, None, "a"]))
    def admit(self, tokens: list[int], salt: str | None) -> None:
        """Look a prompt up, take over what is found, compute the rest."""
        pool = self.pool
        hit = pool.find(np.array(tokens, np.int32), salt)
        self.check_hit(hit.block_ids, self.device, salt, tokens, 0)
        self.check_hit(hit.host_slots, self.host, salt, tokens, len(hit.block_ids))
        num_full = len(hit.block_ids) + len(hit.host_slots)
        assert hit.num_tokens == num_full * BLOCK_SIZE + (hit.partial[1] if hit.partial else 0) <= len(tokens)
        if hit.partial is not None:
            block_id, count = hit.partial
            assert not hit.host_slots
            assert 0 < count <= BLOCK_SIZE
            content_salt, content = self.device[block_id]
            assert content_salt == salt
            assert content[: hit.num_tokens] == tuple(tokens[: hit.num_tokens])
        pool.share(hit.block_ids)
        needed = -(-len(tokens) // BLOCK_SIZE) - len(hit.block_ids)
        if needed > pool.num_free:
            pool.release(hit.block_ids)
            return
        if self.host_pool is not None:
            self.host_pool.hold(hit.host_slots)
        fresh = self.allocate(needed)
        for slot, block_id in zip(hit.host_slots, fresh):
            self.device[block_id] = self.host[slot]
        if self.host_pool is not None:
            self.host_pool.release(hit.host_slots)
        sequence = Running(salt, tokens, hit.block_ids + fresh, hit.num_tokens)
        self.running.append(sequence)
        self.compute(sequence, len(tokens))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0), more=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def grow(self, which: int, more: list[int]) -> None:
        sequence = self.running[which % len(self.running)]
        needed = -(-(len(sequence.tokens) + len(more)) // BLOCK_SIZE) - len(sequence.block_ids)
        if needed > self.pool.num_free:
            return
        sequence.block_ids += self.allocate(needed)
        sequence.tokens = sequence.tokens + more
        self.compute(sequence, len(sequence.tokens))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0), is_final=st.booleans())
    def finish(self, which: int, is_final: bool) -> None:
        sequence = self.running.pop(which % len(self.running))
        if is_final:
            self.record(sequence, is_final=True)
        self.pool.release(sequence.block_ids)

    @precondition(lambda self: self.host_pool is not None)
    @rule(count=st.integers(1, 3))
    def swap(self, count: int) -> None:
        assert self.host_pool is not None
        num_free = self.host_pool.num_free
        slots = self.host_pool.take(count)
        assert (slots is None) == (count > num_free)
        if slots is not None:
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
        holders = [sequence.block_ids for sequence in self.running]
        self.pool.check_invariants(holders)
        held = {block_id for block_ids in holders for block_id in block_ids}
        assert self.pool.num_free == self.pool.num_blocks - len(held)
        assert 0 <= self.pool.num_cached <= self.pool.num_free
        if self.host_pool is not None:
            self.host_pool.check_invariants(self.swapped)
        for sequence in self.running:  # nobody has written to its blocks, and all of them are found
            full = len(sequence.tokens) // BLOCK_SIZE
            self.check_hit(sequence.block_ids[:full], self.device, sequence.salt, sequence.tokens, 0)
            if not self.is_colliding:
                hit = self.pool.find(np.array(sequence.tokens, np.int32), sequence.salt)
                assert len(hit.block_ids) == full, "blocks that somebody holds were not found"

    def allocate(self, count: int) -> list[int]:
        block_ids = self.pool.allocate(count)
        for block_id, slot in self.pool.offloads:
            self.host[slot] = self.device[block_id]
        self.pool.offloads.clear()
        for block_id in block_ids:
            self.device.pop(block_id, None)
        return block_ids

    def compute(self, sequence: Running, num_tokens: int) -> None:
        for place in range(sequence.num_computed // BLOCK_SIZE, -(-num_tokens // BLOCK_SIZE)):
            content = tuple(sequence.tokens[: (place + 1) * BLOCK_SIZE])
            self.device[sequence.block_ids[place]] = (sequence.salt, content)
        sequence.num_computed = num_tokens
        self.record(sequence, is_final=False)

    def record(self, sequence: Running, *, is_final: bool) -> None:
        self.pool.record(
            sequence.chain, sequence.block_ids, sequence.num_computed, sequence, is_final=is_final
        )

    def check_hit(
        self, places: list[int], memory: dict[int, Content], salt: str | None, tokens: list[int], first: int
    ) -> None:
        for number, place in enumerate(places, first + 1):
            assert memory[place] == (salt, tuple(tokens[: number * BLOCK_SIZE])), "a stranger's block"


PoolMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestBlockPool = PoolMachine.TestCase
