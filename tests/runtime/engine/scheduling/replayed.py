"""Prefix cache hits of prompts that come one after another: in the engine's scheduler, and in a plain LRU."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Sequences

import numpy as np

from runtime.engine.limits import EngineLimits
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.scheduling.block_pool import BlockPool
from runtime.engine.scheduling.scheduler import Scheduler
from runtime.engine.scheduling.sequence import Request, Sequence

BLOCK_SIZE = 2

Prompts = Sequences[Sequences[int]]
"""Each request's block ids, in the order of arrival."""


def scheduler_hits(prompts: Prompts, num_blocks: int, eviction: str) -> int:
    """Blocks that the scheduler finds. At least one token of a prompt is always computed: a last block that is found
    except for that token counts, as its content is copied."""
    most = max(map(len, prompts)) * BLOCK_SIZE + 1
    limits = EngineLimits(
        max_model_len=most, max_num_seqs=1, max_num_batched_tokens=most, block_size=BLOCK_SIZE, num_blocks=num_blocks,
        max_waiting=1,
    )  # fmt: skip
    scheduler = Scheduler(limits, BlockPool(num_blocks, BLOCK_SIZE, eviction=eviction))
    hits = 0
    for number, prompt in enumerate(prompts):
        firsts = np.array(prompt, np.int32) * np.int32(BLOCK_SIZE)
        ids = np.add.outer(firsts, np.arange(BLOCK_SIZE, dtype=np.int32)).ravel().astype(np.int32)
        request = Request(str(number), ids, SamplingParams(max_tokens=1), max_tokens=1, arrival_s=float(number))
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
        hits += next((place for place, block in enumerate(prompt) if block not in kept), len(prompt))
        for block in reversed(prompt):
            kept[block] = None
            kept.move_to_end(block)
        while len(kept) > num_blocks:
            kept.popitem(last=False)
    return hits
