"""Blocks of prompts that another engine computes, before their requests come: what has arrived of the pages lies in
them, so that an answer goes on with the first step after its request.

    expect(lease, sequence)   the request will come
    note(leases)              pages of these have arrived
    fill(num_running)         between two steps: reads them into free blocks, which are held
    drop(lease)               the request runs, or will not come

The pages come through `StoredPrefixes`. Running sequences go first: if they lack blocks, reserved ones are given up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from runtime.engine.scheduling.block_pool import BlockPool
from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.scheduling.stored_prefixes import StoredPrefixes


@dataclass(slots=True)
class _Reserved:
    """A prompt ``tokens [num_tokens]`` int32, and the blocks that hold its first ``num_tokens``."""

    sequence: Sequence
    tokens: NDArray[np.int32]
    blocks: list[int] = field(default_factory=list)
    num_tokens: int = 0


class ReservedPrefixes:
    """See the module. Belongs to the engine's loop."""

    def __init__(self, pool: BlockPool, stored: StoredPrefixes) -> None:
        self._pool, self._stored = pool, stored
        self._reserved: dict[str, _Reserved] = {}  # by lease
        self._noted: dict[str, None] = {}

    @property
    def has_pages(self) -> bool:
        """Whether pages have arrived that are not read yet."""
        return bool(self._noted)

    @property
    def leases(self) -> list[str]:
        """Those of requests that will come."""
        return list(self._reserved)

    @property
    def held_blocks(self) -> list[int]:
        """All blocks that are held."""
        return [block_id for each in self._reserved.values() for block_id in each.blocks]

    def expect(self, lease: str, sequence: Sequence) -> None:
        """A request will come with this prompt; the sequence's last token stands for the one that is not known yet."""
        self._reserved[lease] = _Reserved(sequence, self._stored.ask(sequence).tokens)

    def note(self, leases: Iterable[str]) -> None:
        """Pages have arrived."""
        self._noted.update(dict.fromkeys(each for each in leases if each in self._reserved))

    def fill(self, num_running: int) -> None:
        """Read noted pages into free blocks, as `StoredPrefixes.restore` does, and hold them. Free blocks may be
        written."""
        while self._noted:
            lease = next(iter(self._noted))
            reserved = self._reserved[lease]
            if not self._stored.restore(reserved.sequence, num_running, may_begin=True):
                return  # the rest after the next step
            del self._noted[lease]
            hit = self._pool.find(reserved.tokens, reserved.sequence.chain.salt)
            blocks = [*hit.shared, *hit.partial.values()]
            self._pool.share(blocks)
            self._pool.release(reserved.blocks)
            reserved.blocks, reserved.num_tokens = blocks, hit.num_tokens

    def covers(self, sequence: Sequence) -> bool:
        """Whether all that a waiting sequence may share lies in its blocks."""
        source = sequence.request.source
        reserved = None if source is None else self._reserved.get(source.lease)
        return (
            reserved is not None
            and reserved.num_tokens == len(reserved.tokens) == sequence.num_tokens - 1
            and np.array_equal(reserved.tokens, sequence.prefix_keys(0, reserved.num_tokens))
        )

    def clear(self) -> None:
        """Let all go."""
        for lease in list(self._reserved):
            self.drop(lease)

    def drop(self, lease: str | None = None) -> bool:
        """Let the blocks of this lease go, or of the latest that has any. False if there are none."""
        if lease is None:
            lease = next((key for key, each in reversed(self._reserved.items()) if each.blocks), "")
        reserved = self._reserved.pop(lease, None)
        self._noted.pop(lease, None)
        if reserved is None:
            return False
        self._stored.drop(reserved.sequence)
        self._pool.release(reserved.blocks)
        return True
