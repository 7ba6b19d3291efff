"""Byte pair encoding, compiled: merge the symbols of one word, always the pair of lowest rank, leftmost first.

Short words keep the rank of each neighbouring pair in an array beside the symbols and look for the least; longer ones
keep a heap over a linked list, so that a word of n symbols costs O(n log n).

Scratch for a word of at most n symbols is one block of `SCRATCH_BYTES` * n: ranks or heap, symbols, neighbours.
"""

from __future__ import annotations

import numpy as np

from numba_kernels.cache import njit
from numba_kernels.pointers import i32_at, i64_at, u8_at, u64_at
from tokenizer.bpe.index_kernel import find_token, string_end
from tokenizer.bpe.kernel_support import NOTHING, pair_key, pair_slot

SCRATCH_BYTES = 28
"""Bytes of scratch for each symbol: two entries of the heap, the symbol, the places of both neighbours."""

_LONGEST_LISTED = 64  # symbols of the longest word that is not worth a heap
_CHILDREN = 8  # of an entry of the heap: they fill a cache line
_LOW = np.uint64(0xFFFF_FFFF)
_HIGH = ~_LOW


@njit
def symbols_at(scratch, room):
    """The address of the symbols in scratch for `room` symbols."""
    return i32_at(scratch + 16 * room)


@njit
def _find_pair(left, right, pairs, shift):
    """Rank << 32 | merged symbol of a pair, or NOTHING; the table is `index_kernel`'s."""
    key = pair_key(left, right)
    mask = (1 << (64 - shift)) - 1
    slot = pair_slot(key, shift)
    while True:
        found = pairs[2 * slot]
        if found == key:
            return pairs[2 * slot + 1]
        if found == NOTHING:
            return NOTHING
        slot = (slot + 1) & mask


@njit
def _merge_listed(symbols, num_symbols, ranks, pairs, shift):
    for i in range(num_symbols - 1):
        ranks[i] = _find_pair(symbols[i], symbols[i + 1], pairs, shift)
    while num_symbols > 1:
        least = NOTHING
        place = 0
        for i in range(num_symbols - 1):
            if ranks[i] < least:
                least = ranks[i]
                place = i
        if least == NOTHING:
            break
        symbols[place] = np.int32(least & _LOW)
        num_symbols -= 1
        for i in range(place + 1, num_symbols):
            symbols[i] = symbols[i + 1]
            ranks[i - 1] = ranks[i]
        if place + 1 < num_symbols:
            ranks[place] = _find_pair(symbols[place], symbols[place + 1], pairs, shift)
        if place > 0:
            ranks[place - 1] = _find_pair(symbols[place - 1], symbols[place], pairs, shift)
    return num_symbols


@njit
def _sift_down(heap, size, place):
    value = heap[place]
    while True:
        first = _CHILDREN * place + 1
        if first >= size:
            break
        least = heap[first]
        child = first
        for i in range(first + 1, min(first + _CHILDREN, size)):
            if heap[i] < least:
                least = heap[i]
                child = i
        if least >= value:
            break
        heap[place] = least
        place = child
    heap[place] = value


@njit
def _queue(heap, size, left, right, place, symbols, pairs, shift):
    """Pushes the pair of symbols at `left` and `right` onto the heap, if it is a merge; returns the heap's size."""
    found = _find_pair(symbols[left], symbols[right], pairs, shift)
    if found == NOTHING:
        return size
    value = found & _HIGH | np.uint64(place)
    at = size
    while at > 0:
        parent = (at - 1) // _CHILDREN
        if heap[parent] <= value:
            break
        heap[at] = heap[parent]
        at = parent
    heap[at] = value
    return size + 1


@njit
def _merge_heaped(symbols, num_symbols, heap, following, preceding, pairs, shift):
    """A heap entry is rank << 32 | place. A merge takes one out and puts at most two in: 2n are enough."""
    size = np.int64(0)
    for i in range(num_symbols):
        following[i] = i + 1
        preceding[i] = i - 1
        if i + 1 < num_symbols:
            found = _find_pair(symbols[i], symbols[i + 1], pairs, shift)
            if found != NOTHING:
                heap[size] = found & _HIGH | np.uint64(i)
                size += 1
    for i in range((size - 2) // _CHILDREN, -1, -1):
        _sift_down(heap, size, i)
    while size > 0:
        entry = heap[0]
        size -= 1
        heap[0] = heap[size]
        _sift_down(heap, size, np.int64(0))
        place = np.int64(entry & _LOW)
        right = np.int64(following[place])
        if symbols[place] < 0 or right == num_symbols:
            continue
        found = _find_pair(symbols[place], symbols[right], pairs, shift)
        if found == NOTHING or found & _HIGH != entry & _HIGH:
            continue  # the pair has changed since it was queued
        symbols[place] = np.int32(found & _LOW)
        symbols[right] = -1  # merged away
        after = np.int64(following[right])
        following[place] = after
        if after < num_symbols:
            preceding[after] = place
            size = _queue(heap, size, place, after, place, symbols, pairs, shift)
        before = np.int64(preceding[place])
        if before >= 0:
            size = _queue(heap, size, before, place, before, symbols, pairs, shift)
    kept = np.int64(0)
    for i in range(num_symbols):
        if symbols[i] >= 0:
            symbols[kept] = symbols[i]
            kept += 1
    return kept


@njit
def merge(scratch, room, num_symbols, pairs, shift):
    """Merge the first `num_symbols` symbols in `scratch` (for `room`) in place; returns how many are left."""
    symbols = symbols_at(scratch, room)
    if num_symbols <= _LONGEST_LISTED:
        return _merge_listed(symbols, num_symbols, u64_at(scratch), pairs, shift)
    following, preceding = i32_at(scratch + 20 * room), i32_at(scratch + 24 * room)
    return _merge_heaped(symbols, num_symbols, u64_at(scratch), following, preceding, pairs, shift)


@njit
def merge_tokens(
    text_address, num_tokens, tokens_address, starts_address, slots_address, mask, pairs_address, shift, scratch
):
    """Merges a word of joined strings, each of the vocabulary; returns the number of symbols (`symbols_at`)."""
    text = u8_at(text_address)
    symbols = symbols_at(scratch, num_tokens)
    tokens, starts, slots = u8_at(tokens_address), i64_at(starts_address), i32_at(slots_address)
    position = np.int64(0)
    for i in range(num_tokens):
        end = string_end(text, position)
        symbols[i] = find_token(text, position, end, tokens, starts, slots, mask)
        position = end + 1
    return merge(scratch, num_tokens, num_tokens, u64_at(pairs_address), shift)
