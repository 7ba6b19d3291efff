"""Finds the existing content of a waiting sequence, which need not be computed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runtime.engine.scheduling.block_pool import BlockPool, Hit
from runtime.engine.scheduling.sequence import Sequence, State
from runtime.kv.groups import NO_BLOCK


def reusable(sequence: Sequence, pool: BlockPool) -> Hit:
    """The location of the first tokens of a waiting sequence: its own swapped blocks (some of which may still be on the
    device), a running choice of the same request, or the prefix cache.

    At most all tokens but the last, whose logits are needed, and no part of an image that may not be cut. Only its own
    if log probabilities of the prompt were requested, since computing it gives them.
    """
    if sequence.needs_prompt_logprobs and not sequence.host_slots:
        return Hit.none(len(pool.kinds))
    tokens = sequence.prefix_keys(0, sequence.num_tokens - 1)
    if sequence.host_slots:
        return _own(sequence, tokens, pool)
    hit = pool.find(tokens, sequence.chain.salt)
    while (end := sequence.cut(hit.num_tokens)) < hit.num_tokens:
        hit = pool.find(tokens[:end], sequence.chain.salt)
    most = min(sequence.num_prompt_tokens, sequence.num_tokens - 1)
    for sibling in sequence.request.sequences:
        is_alike = sibling.rotary_offset == sequence.rotary_offset
        if sibling.state is State.RUNNING and sibling is not sequence and is_alike:
            count = sequence.cut(min(most, sibling.num_committed))
            if count > hit.num_tokens:
                hit = _prefix_of(sibling, count, pool) or hit
    return hit


def _own(sequence: Sequence, tokens: NDArray[np.int32], pool: BlockPool) -> Hit:
    """A swapped sequence's own pages, from the device if it has them."""
    num_full, rest = divmod(sequence.num_computed, pool.block_size)
    blocks = pool.on_device(tokens, sequence.chain.salt, sequence.first_pages, num_full)
    slots = []
    for ids, own, first in zip(blocks, sequence.host_slots, sequence.first_pages):
        ids += [None] if rest else []
        slots.append([slot for block_id, slot in zip(ids[first:], own) if block_id is None])
    return Hit(blocks, sequence.first_pages, slots, num_tokens=sequence.num_computed)


def _prefix_of(sequence: Sequence, num_tokens: int, pool: BlockPool) -> Hit | None:
    """The first tokens of a running sequence: full pages, and the one after them, whose beginning is copied. None if
    it has given up a page that is needed."""
    num_full, rest = divmod(num_tokens, pool.block_size)
    first_pages = [kind.first_page(num_full * pool.block_size, pool.block_size) for kind in pool.kinds]
    if any(given_up > first for given_up, first in zip(sequence.first_pages, first_pages)):
        return None
    blocks: list[list[int | None]] = [
        [*[NO_BLOCK] * first, *ids[first:num_full]] for ids, first in zip(sequence.blocks, first_pages)
    ]
    partial = [ids[num_full] for ids in sequence.blocks] if rest else []
    return Hit(blocks, first_pages, [[] for _ in blocks], partial, rest, num_tokens)
