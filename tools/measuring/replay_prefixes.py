"""Prefix cache hits of a pool of a given size over a recorded trace, compared with LRU and the optimum.

    python tools/measuring/replay_prefixes.py mooncake_conversation.jsonl

Each line of a Mooncake trace lists a request's prompt as ids of blocks (512 tokens); equal ids mean equal blocks after
equal blocks. The requests are replayed one after another through the engine's own scheduler and block pool, each id as
a block of two tokens. The other columns come from independent code: least recently used, and Belady's optimum (evict
the block with the farthest next use), which knows the future.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections import OrderedDict
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runtime.engine.limits import EngineLimits
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.scheduling.block_pool import BlockPool
from runtime.engine.scheduling.eviction import POLICIES
from runtime.engine.scheduling.scheduler import Scheduler
from runtime.engine.scheduling.sequence import Request, Sequence

BLOCK_SIZE = 2
POOL_SIZES = (5_000, 10_000, 20_000, 50_000)
NEVER = 1 << 62

Prompts = Sequences[Sequences[int]]
"""Each request's block ids, in the order of arrival."""


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
        """The share of the gap between LRU and the optimum that the engine closes."""
        return (self.ours - self.lru) / (self.belady - self.lru) if self.belady > self.lru else 0.0


def read_prompts(path: Path, most: int | None = None) -> list[list[int]]:
    """The ``hash_ids`` of the first ``most`` requests of a Mooncake trace."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line)["hash_ids"] for line, _ in zip(lines, range(most if most is not None else NEVER))]


def scheduler_hits(prompts: Prompts, num_blocks: int, eviction: str) -> int:
    """Hits of the engine's scheduler and block pool. At least one token of a prompt is always computed: a last block
    that is found except for that token counts, as its content is copied."""
    most = max(map(len, prompts)) * BLOCK_SIZE + 1
    limits = EngineLimits(
        max_model_len=most, max_num_seqs=1, max_num_batched_tokens=most, block_size=BLOCK_SIZE, num_blocks=num_blocks,
        max_waiting=1,
    )  # fmt: skip
    pool = BlockPool(num_blocks, BLOCK_SIZE, eviction=eviction)
    scheduler = Scheduler(limits, pool)
    params = SamplingParams(max_tokens=1)
    hits = 0
    for number, prompt in enumerate(prompts):
        firsts = np.array(prompt, np.int32) * np.int32(BLOCK_SIZE)
        ids = np.add.outer(firsts, np.arange(BLOCK_SIZE, dtype=np.int32)).ravel().astype(np.int32)
        request = Request(str(number), ids, params, max_tokens=1, arrival_s=float(number))
        request.number = number
        sequence = Sequence(request, 0)
        request.sequences = [sequence]
        scheduler.add(sequence)
        step = scheduler.schedule()
        hits += -(-step.chunks[0].start // BLOCK_SIZE)
        scheduler.commit(step)
        scheduler.finish(sequence)
    return hits


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
    """The optimum: evicts the block with the farthest next use, the deepest first."""
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
            if -use != place and kept.get(block) == -use:  # the prompt's own blocks are kept
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
        scheduler_hits(prompts, num_blocks, eviction),
        lru_hits(prompts, num_blocks),
        belady_hits(prompts, num_blocks),
        unlimited_hits(prompts),
    )


def table(rows: Sequences[Row]) -> str:
    lines = ["  blocks     hits  share      LRU  share   Belady  share  unlimited   gap closed"]
    for row in rows:
        shares = [f"{hits:8,d} {hits / row.unlimited:6.3f}" for hits in (row.ours, row.lru, row.belady)]
        lines.append(f"{row.num_blocks:8,d} {' '.join(shares)}   {row.unlimited:8,d} {row.closed:11.1%}")
    return "\n".join(lines)


def _prefix(prompt: Sequences[int], kept: dict[int, int] | dict[int, None]) -> int:
    return next((place for place, block in enumerate(prompt) if block not in kept), len(prompt))


def main(arguments: Sequences[str] | None = None) -> None:
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
