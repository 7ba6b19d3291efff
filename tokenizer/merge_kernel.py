"""Byte pair encoding, compiled: merge the symbols of one word, always the pair of lowest rank, leftmost first.

Short words keep the rank of each neighbouring pair in an array beside the symbols and look for the least; longer ones
keep a heap over a linked list, so that a word of n symbols costs O(n log n).
"""

from __future__ import annotations

import numpy as np

from numba_kernels.cache import njit
from tokenizer.index_kernel import END, find_token
from tokenizer.kernel_support import NOTHING, pair_key, pair_slot

LONGEST_LISTED = 64
"""Symbols of the longest word that is not worth a heap."""

_RANK_SHIFT = np.uint64(32)
_LOW = np.uint64(0xFFFF_FFFF)


@njit
def find_pair(left, right, pairs, shift):
    """Rank << 32 | merged symbol of a pair, or NOTHING; `pairs`, `shift`: `index_merges`'s table."""
    key = pair_key(left, right)
    mask = pairs.shape[0] - 1
    slot = pair_slot(key, shift)
    while True:
        found = pairs[slot, 0]
        if found == key:
            return pairs[slot, 1]
        if found == NOTHING:
            return NOTHING
        slot = (slot + 1) & mask


@njit
def merge_listed(symbols, num_symbols, ranks, pairs, shift):
    """Merge `symbols[:num_symbols]` in place; how many are left. `ranks` is scratch of the same size."""
    for i in range(num_symbols - 1):
        ranks[i] = find_pair(symbols[i], symbols[i + 1], pairs, shift)
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
        # ranks[place] is now that of the old right neighbour's pair, which has changed like the one on the left
        if place + 1 < num_symbols:
            ranks[place] = find_pair(symbols[place], symbols[place + 1], pairs, shift)
        if place > 0:
            ranks[place - 1] = find_pair(symbols[place - 1], symbols[place], pairs, shift)
    return num_symbols


@njit
def _sift_down(heap, size, place):
    value = heap[place]
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= value:
            break
        heap[place] = heap[child]
        place = child
    heap[place] = value


@njit
def _sift_up(heap, place):
    value = heap[place]
    while place > 0:
        parent = (place - 1) >> 1
        if heap[parent] <= value:
            break
        heap[place] = heap[parent]
        place = parent
    heap[place] = value


@njit
def merge_heaped(symbols, num_symbols, pairs, shift):
    """The same with a heap of rank << 32 | place and a linked list; a symbol that was merged away is -1."""
    following = np.empty(num_symbols, np.int32)
    preceding = np.empty(num_symbols, np.int32)
    heap = np.empty(2 * num_symbols, np.uint64)  # a merge takes one entry out and puts at most two in
    size = 0
    for i in range(num_symbols):
        following[i] = i + 1
        preceding[i] = i - 1
        if i + 1 < num_symbols:
            found = find_pair(symbols[i], symbols[i + 1], pairs, shift)
            if found != NOTHING:
                heap[size] = (found & ~_LOW) | np.uint64(i)
                size += 1
    for i in range(size // 2 - 1, -1, -1):
        _sift_down(heap, size, i)
    while size > 0:
        entry = heap[0]
        size -= 1
        heap[0] = heap[size]
        _sift_down(heap, size, 0)
        place = np.int64(entry & _LOW)
        right = following[place]
        if symbols[place] < 0 or right == num_symbols:
            continue
        found = find_pair(symbols[place], symbols[right], pairs, shift)
        if found == NOTHING or (found & ~_LOW) != (entry & ~_LOW):
            continue  # the pair has changed since it was queued
        symbols[place] = np.int32(found & _LOW)
        symbols[right] = -1
        after = following[right]
        following[place] = after
        if after < num_symbols:
            preceding[after] = place
            found = find_pair(symbols[place], symbols[after], pairs, shift)
            if found != NOTHING:
                heap[size] = (found & ~_LOW) | np.uint64(place)
                _sift_up(heap, size)
                size += 1
        before = preceding[place]
        if before >= 0:
            found = find_pair(symbols[before], symbols[place], pairs, shift)
            if found != NOTHING:
                heap[size] = (found & ~_LOW) | np.uint64(before)
                _sift_up(heap, size)
                size += 1
    kept = 0
    for i in range(num_symbols):
        if symbols[i] >= 0:
            symbols[kept] = symbols[i]
            kept += 1
    return kept


@njit
def merge_tokens(text, symbols, tokens, starts, slots, pairs, shift):
    """Merge a word that comes as tokens: joined strings, each of the vocabulary and ended by `END`.

    symbols  [num_tokens] int32, filled; the first ones are the result, how many is returned
    """
    position = 0
    for i in range(symbols.size):
        start = position
        while text[position] != END:
            position += 1
        symbols[i] = find_token(text, start, position, tokens, starts, slots)
        position += 1
    if symbols.size <= LONGEST_LISTED:
        return merge_listed(symbols, symbols.size, np.empty(symbols.size, np.uint64), pairs, shift)
    return merge_heaped(symbols, symbols.size, pairs, shift)
