"""What of a waiting sequence's content exists already, so that it need not be computed."""

from __future__ import annotations

import numpy as np

from runtime.engine.scheduling.block_pool import BlockPool, Hit
from runtime.engine.scheduling.sequence import Sequence, State


def reusable(sequence: Sequence, pool: BlockPool) -> Hit:
    """Where the first tokens of a waiting sequence lie: its own swapped blocks (of which the device may still have the
    first), a choice of the same request that runs, or the prefix cache.

    At most all tokens but the last, whose logits are wanted; only its own where the prompt's log probabilities are
    wanted, for they come from computing it.
    """
    if sequence.needs_prompt_logprobs and not sequence.host_slots:
        return Hit()
    tokens = np.empty(sequence.num_tokens - 1, np.int32)
    sequence.copy_tokens(0, tokens)
    hit = pool.find(tokens, sequence.request.cache_salt)
    if sequence.host_slots:
        shared = hit.block_ids[: sequence.num_computed // pool.block_size]
        return Hit(shared, sequence.host_slots[len(shared) :], None, sequence.num_computed)
    most = min(sequence.num_prompt_tokens, sequence.num_tokens - 1)
    for sibling in sequence.request.sequences:
        if sibling.state is State.RUNNING and sibling is not sequence:
            count = min(most, sibling.num_committed)
            if count > hit.num_tokens:
                hit = _prefix_of(sibling, count, pool.block_size)
    return hit


def _prefix_of(sequence: Sequence, num_tokens: int, block_size: int) -> Hit:
    """The first tokens of a running sequence: full blocks, and the block after them, whose beginning is copied."""
    num_full, rest = divmod(num_tokens, block_size)
    partial = (sequence.block_ids[num_full], rest) if rest else None
    return Hit(sequence.block_ids[:num_full], [], partial, num_tokens)
