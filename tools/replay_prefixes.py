"""How many prefix blocks a pool of a given size finds again over a recorded trace, beside LRU and the optimum.

    python tools/replay_prefixes.py mooncake_conversation.jsonl

Each line of a Mooncake trace lists a request's prompt as ids of blocks (512 tokens); equal ids mean equal blocks after
equal blocks. The requests are replayed one after another through the engine's own block pool, each id as one token and
each block as one token: find, share, allocate, record, release. The other columns come from code that shares nothing
with the pool: least recently used, and Belady's optimum (evict what is used again last), which knows the future.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runtime.engine.block_pool import BlockPool, Chain
from runtime.engine.eviction import POLICIES

POOL_SIZES = (5_000, 10_000, 20_000, 50_000)
NEVER = 1 << 62

Prompts = Sequence[Sequence[int]]
"""Each request's block ids, in the order of arrival."""


class Tokens:
    """A prompt of one token a block, as the pool reads it."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.ids: NDArray[np.int32] = np.array(prompt, np.int32)

    def copy_tokens(self, start: int, out: NDArray[np.int32]) -> None:
        out[:] = self.ids[start : start + len(out)]


@dataclass(frozen=True, slots=True)
class Row:
    """Hits (blocks) of one pool size."""

    num_blocks: int
    ours: int
    lru: int
    belady: int
    unlimited: int

    @property
    def closed(self) -> float:
        """The share of the gap between LRU and the optimum that is closed."""
        return (self.ours - self.lru) / (self.belady - self.lru) if self.belady > self.lru else 0.0


def read_prompts(path: Path, most: int | None = None) -> list[list[int]]:
    """The ``hash_ids`` of the first ``most`` requests of a Mooncake trace."""
    with path.open() as lines:
        return [json.loads(line)["hash_ids"] for line, _ in zip(lines, range(most if most is not None else NEVER))]


def pool_hits(prompts: Prompts, num_blocks: int, eviction: str) -> int:
    """Through the engine's block pool."""
    pool = BlockPool(num_blocks, 1, eviction=eviction)
    for prompt in prompts:
        tokens = Tokens(prompt)
        found = pool.find(tokens.ids).block_ids
        pool.share(found)
        block_ids = found + pool.allocate(len(prompt) - len(found))
        pool.count_query(len(prompt), len(found))
        pool.record(Chain(), block_ids, len(prompt), tokens, is_final=True)
        pool.release(block_ids)
    return pool.counters.hit_tokens


def lru_hits(prompts: Prompts, num_blocks: int) -> int:
    """Least recently used, with an ordered dictionary of block ids."""
    kept: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for prompt in prompts:
        count = _prefix(prompt, kept)
        hits += count
        for block in reversed(prompt):
            kept[block] = None
            kept.move_to_end(block)
        while len(kept) > num_blocks:
            kept.popitem(last=False)
    return hits


def belady_hits(prompts: Prompts, num_blocks: int) -> int:
    """The optimum: whenever room is needed, the block whose next use is farthest away goes, the deepest first."""
    next_use: dict[int, int] = {}
    uses: list[list[int]] = []
    for place in range(len(prompts) - 1, -1, -1):
        uses.append([next_use.get(block, NEVER) for block in prompts[place]])
        next_use.update(dict.fromkeys(prompts[place], place))
    uses.reverse()
    kept: dict[int, int] = {}  # block: its next use
    farthest: list[tuple[int, int, int]] = []  # a heap with outdated entries
    hits = 0
    for place, (prompt, following) in enumerate(zip(prompts, uses)):
        count = _prefix(prompt, kept)
        hits += count
        missing = len(prompt) - count
        while len(kept) + missing > num_blocks:
            use, _, block = heapq.heappop(farthest)
            if -use != place and kept.get(block) == -use:  # the prompt's own blocks stay
                del kept[block]
        for depth, (block, use) in enumerate(zip(prompt, following)):
            kept[block] = use
            heapq.heappush(farthest, (-use, -depth, block))
    return hits


def unlimited_hits(prompts: Prompts) -> int:
    """With room for everything."""
    kept: dict[int, None] = {}
    hits = 0
    for prompt in prompts:
        hits += _prefix(prompt, kept)
        kept.update(dict.fromkeys(prompt))
    return hits


def replay(prompts: Prompts, num_blocks: int, eviction: str) -> Row:
    return Row(
        num_blocks,
        pool_hits(prompts, num_blocks, eviction),
        lru_hits(prompts, num_blocks),
        belady_hits(prompts, num_blocks),
        unlimited_hits(prompts),
    )


def table(rows: Sequence[Row]) -> str:
    lines = ["  blocks     hits  share      LRU  share   Belady  share  unlimited   gap closed"]
    for row in rows:
        shares = [f"{hits:8,d} {hits / row.unlimited:6.3f}" for hits in (row.ours, row.lru, row.belady)]
        lines.append(f"{row.num_blocks:8,d} {' '.join(shares)}   {row.unlimited:8,d} {row.closed:11.1%}")
    return "\n".join(lines)


def _prefix(prompt: Sequence[int], kept: dict[int, int] | dict[int, None]) -> int:
    return next((place for place, block in enumerate(prompt) if block not in kept), len(prompt))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("trace", type=Path, help="a Mooncake trace (JSON lines with hash_ids)")
    parser.add_argument("--eviction", choices=POLICIES, default="reuse-gap")
    parser.add_argument("--num-blocks", type=int, nargs="+", default=POOL_SIZES)
    parser.add_argument("--num-requests", type=int, help="only the first so many")
    options = parser.parse_args(arguments)
    prompts = read_prompts(options.trace, options.num_requests)
    print(table([replay(prompts, num_blocks, options.eviction) for num_blocks in options.num_blocks]))


if __name__ == "__main__":
    main()
