"""Compiled loops over a whole vocabulary: the tables of tokens and of merges, made when a tokenizer is loaded.

A symbol is a token's place in the vocabulary's order. Strings are joined, each ended by the byte 0xFF, which never
occurs in UTF-8. The tables:

    tokens   uint8: the tokens' strings
    starts   [num_tokens + 1] int64: where each begins
    slots    [mask + 1] int32: a hash table of symbols by string; -1: empty
    pairs    [2**(64 - shift), 2] uint64: a hash table of merges by pair of symbols: key, rank << 32 | merged symbol
"""

from __future__ import annotations

import numpy as np

from numba_kernels.cache import njit
from numba_kernels.pointers import i32_at, i64_at, u8_at, u64_at
from tokenizer.bpe.kernel_support import NOTHING, are_equal, hash_bytes, pair_key, pair_slot

END = 0xFF
"""The byte after each string."""

_RANK_SHIFT = np.uint64(32)


@njit
def string_end(text, position):
    """The end of the string that begins at `position`."""
    while text[position] != END:
        position += 1
    return position


@njit
def find_token(text, start, end, tokens, starts, slots, mask):
    """The symbol of the string `text[start:end]`, or -1. All are pointers."""
    size = end - start
    slot = np.int64(hash_bytes(text, start, end) & np.uint64(mask))
    while True:
        symbol = np.int64(slots[slot])
        if symbol < 0:
            return symbol
        if starts[symbol + 1] - 1 - starts[symbol] == size and are_equal(text, start, tokens, starts[symbol], size):
            return symbol
        slot = (slot + 1) & mask


@njit
def index_tokens(tokens_address, num_tokens, starts_address, slots_address, mask):
    """Fills `starts` and `slots`; `slots` is -1 throughout before."""
    tokens, starts, slots = u8_at(tokens_address), i64_at(starts_address), i32_at(slots_address)
    position = np.int64(0)
    for symbol in range(num_tokens):
        starts[symbol] = position
        end = string_end(tokens, position)
        slot = np.int64(hash_bytes(tokens, position, end) & np.uint64(mask))
        while slots[slot] >= 0:
            slot = (slot + 1) & mask
        slots[slot] = symbol
        position = end + 1
    starts[num_tokens] = position


@njit
def index_merges(
    merges_address, num_merges, middle, prefix_size,
    tokens_address, starts_address, slots_address, mask, pairs_address, shift, joined_address,
):  # fmt: skip
    """Fills `pairs`, which is NOTHING throughout before.

    merges       strings: left, the byte `middle` and right of each merge
    prefix_size  bytes of the right one that its merged token lacks
    joined       room for two tokens
    Returns -1, or the first merge that is no pair or names a token which is not in the vocabulary.
    """
    merges, tokens, starts = u8_at(merges_address), u8_at(tokens_address), i64_at(starts_address)
    slots, pairs = i32_at(slots_address), u64_at(pairs_address)
    pair_mask = (1 << (64 - shift)) - 1
    joined = u8_at(joined_address)
    position = np.int64(0)
    for rank in range(num_merges):
        left_end = position
        while merges[left_end] != middle and merges[left_end] != END:
            left_end += 1
        right_start = left_end + 1
        right_end = right_start
        while merges[left_end] == middle and merges[right_end] != END and merges[right_end] != middle:
            right_end += 1
        if merges[left_end] == END or merges[right_end] == middle:
            return rank
        left = find_token(merges, position, left_end, tokens, starts, slots, mask)
        right = find_token(merges, right_start, right_end, tokens, starts, slots, mask)
        if left < 0 or right < 0:
            return rank
        length = np.int64(0)
        for i in range(position, left_end):
            joined[length] = merges[i]
            length += 1
        for i in range(right_start + prefix_size, right_end):
            joined[length] = merges[i]
            length += 1
        merged = find_token(joined, np.int64(0), length, tokens, starts, slots, mask)
        if merged < 0:
            return rank
        key = pair_key(left, right)
        slot = pair_slot(key, shift)
        while pairs[2 * slot] != NOTHING and pairs[2 * slot] != key:
            slot = (slot + 1) & pair_mask
        pairs[2 * slot] = key
        pairs[2 * slot + 1] = np.uint64(rank) << _RANK_SHIFT | np.uint64(merged)
        position = right_end + 1
    return -1


@njit
def _part(tokens, first, end, starts, slots, mask, ranks):
    """The symbol of a part of a token that may be merged, or -1."""
    symbol = find_token(tokens, first, end, tokens, starts, slots, mask)
    return symbol if symbol >= 0 and ranks[symbol] >= 0 else np.int64(-1)


@njit
def count_splits(num_tokens, tokens_address, starts_address, slots_address, mask, ranks_address):
    """How many splits of tokens into two others `index_splits` enters."""
    tokens, starts = u8_at(tokens_address), i64_at(starts_address)
    slots, ranks = i32_at(slots_address), i32_at(ranks_address)
    count = np.int64(0)
    for symbol in range(num_tokens):
        first, end = starts[symbol], starts[symbol + 1] - 1
        for cut in range(first + 1, end if ranks[symbol] >= 0 else first):
            if tokens[cut] & 0xC0 == 0x80 or _part(tokens, first, cut, starts, slots, mask, ranks) < 0:
                continue
            if _part(tokens, cut, end, starts, slots, mask, ranks) >= 0:
                count += 1
    return count


@njit
def index_splits(
    num_tokens, tokens_address, starts_address, slots_address, mask, ranks_address, pairs_address, shift,
):  # fmt: skip
    """Fills `pairs` with each split of a token between characters into two others, by the token's rank.

    ranks   [num_tokens] int32; tokens of a negative rank are neither whole nor part
    """
    tokens, starts = u8_at(tokens_address), i64_at(starts_address)
    slots, ranks, pairs = i32_at(slots_address), i32_at(ranks_address), u64_at(pairs_address)
    pair_mask = (1 << (64 - shift)) - 1
    for symbol in range(num_tokens):
        first, end = starts[symbol], starts[symbol + 1] - 1
        for cut in range(first + 1, end if ranks[symbol] >= 0 else first):
            if tokens[cut] & 0xC0 == 0x80:
                continue
            left = _part(tokens, first, cut, starts, slots, mask, ranks)
            right = np.int64(-1) if left < 0 else _part(tokens, cut, end, starts, slots, mask, ranks)
            if right < 0:
                continue
            key = pair_key(left, right)
            slot = pair_slot(key, shift)
            while pairs[2 * slot] != NOTHING:
                slot = (slot + 1) & pair_mask
            pairs[2 * slot] = key
            pairs[2 * slot + 1] = np.uint64(ranks[symbol]) << _RANK_SHIFT | np.uint64(symbol)
