"""Compiled loops over a whole vocabulary: the tables of tokens and of merges, made when a tokenizer is loaded.

A symbol is a token's place in the vocabulary's order. Strings come joined, each ended by the byte 0xFF, which UTF-8
does not have.
"""

from __future__ import annotations

import numpy as np

from numba_kernels.cache import njit
from tokenizer.kernel_support import NOTHING, are_equal, hash_bytes, pair_key, pair_slot

END = 0xFF
"""The byte behind each string."""

_RANK_SHIFT = np.uint64(32)


@njit
def index_tokens(text, starts, slots):
    """Enter the strings of `text` into a hash table.

    text    [bytes] uint8, padded by `PADDING` bytes
    starts  [num_tokens + 1] int64, filled: where each token begins; the next one's less 1 is where it ends
    slots   [power of two] int32 of -1, filled: symbols
    """
    mask = np.uint64(slots.size - 1)
    position = 0
    for symbol in range(starts.size - 1):
        start = position
        while text[position] != END:
            position += 1
        starts[symbol] = start
        slot = hash_bytes(text, start, position) & mask
        while slots[slot] >= 0:
            slot = (slot + np.uint64(1)) & mask
        slots[slot] = symbol
        position += 1
    starts[starts.size - 1] = position


@njit
def find_token(text, start, end, tokens, starts, slots):
    """The symbol of the string `text[start:end]`, or -1. The tables are those of `index_tokens`."""
    mask = np.uint64(slots.size - 1)
    size = end - start
    slot = hash_bytes(text, start, end) & mask
    while True:
        symbol = slots[slot]
        if symbol < 0:
            return -1
        if starts[symbol + 1] - 1 - starts[symbol] == size and are_equal(text, start, tokens, starts[symbol], size):
            return symbol
        slot = (slot + np.uint64(1)) & mask


@njit
def index_merges(merges, num_merges, prefix_size, tokens, starts, slots, pairs, shift):
    """Enter merges into a hash table, by pair of symbols.

    merges       [bytes] uint8, padded: left and right of each merge, two strings
    prefix_size  bytes of the right one that its merged token lacks
    pairs        [2**(64 - shift), 2] uint64 of NOTHING, filled: the pair's key; rank << 32 | merged symbol
    Returns -1, or the first merge that names a token which is not in the vocabulary.
    """
    mask = pairs.shape[0] - 1
    joined = np.zeros(64, np.uint8)
    position = 0
    for rank in range(num_merges):
        left_start = position
        while merges[position] != END:
            position += 1
        left_end = position
        position += 1
        right_start = position
        while merges[position] != END:
            position += 1
        right_end = position
        position += 1
        left_size = left_end - left_start
        size = left_size + max(right_end - right_start - prefix_size, 0)
        if size + 8 > joined.size:
            joined = np.zeros(2 * size + 8, np.uint8)
        joined[:left_size] = merges[left_start:left_end]
        joined[left_size:size] = merges[right_start + prefix_size : right_end]
        left = find_token(merges, left_start, left_end, tokens, starts, slots)
        right = find_token(merges, right_start, right_end, tokens, starts, slots)
        merged = find_token(joined, 0, size, tokens, starts, slots)
        if left < 0 or right < 0 or merged < 0:
            return rank
        key = pair_key(left, right)
        slot = pair_slot(key, shift)
        while pairs[slot, 0] != NOTHING and pairs[slot, 0] != key:
            slot = (slot + 1) & mask
        pairs[slot, 0] = key
        pairs[slot, 1] = (np.uint64(rank) << _RANK_SHIFT) | np.uint64(merged)
    return -1
