"""N-gram lookup: finds the end of a text earlier in itself, or in another text.

A text has an index: for each place the latest place before it that has the same token, and a hash table of the latest
place of each token. The table's keys are the tokens at these places. So a lookup goes from place to place of the last
token, the latest first, and compares backwards; a token that is added costs one access of the table.
"""

from __future__ import annotations

import functools

from numba import carray, njit

from numba_kernels.cpu.running.launch import Fields, Kernel, int32_at, int64_at

TOKENS, PREVIOUS, HEADS, NUM_HEADS, NUM_INDEXED, NUM_DISTINCT, START, END, TEXT_WORDS = range(9)
"""Words of a text: addresses of ``tokens [END]``, ``previous [END]`` and ``heads [NUM_HEADS]``, all int32; there is a
power of two of heads, -1 if empty. Then how many tokens are indexed, and how many of them are different;
from where on tokens count, and where they end."""

LIMIT, COUNT, DEPTH, PLACE, IDS = range(5)
"""The query, int32: at most so many tokens. The answer: how many there are, how many agree before them, and at which
place of ``first`` they begin (-1 if there is none, or in ``second``); then the tokens."""

LEAST_MATCH, MOST_MATCH = 2, 15
"""The least tokens that must agree (a single one predicts little), and the most compared."""

MOST_PLACES = 64
"""Places that are compared; the latest."""

BREAK = -1
"""Separates texts in one array: no match begins before it, and no continuation goes past it."""

FIELDS = Fields("*ending *first *second *answer room")


@njit(nogil=True)
def _slot(tokens, heads, num_heads, token):
    """The slot of the token's latest place, or an empty one for it."""
    mask = num_heads - 1
    slot = (token * 0x9E3779B1 >> 8) & mask
    while heads[slot] >= 0 and tokens[heads[slot]] != token:
        slot = (slot + 1) & mask
    return slot


@njit(nogil=True)
def _follow(text):
    """Indexes added tokens. False if the table is three quarters full."""
    end, num_heads = text[END], text[NUM_HEADS]
    tokens, previous = int32_at(text[TOKENS], end), int32_at(text[PREVIOUS], end)
    heads = int32_at(text[HEADS], num_heads)
    for place in range(text[NUM_INDEXED], end):
        slot = _slot(tokens, heads, num_heads, tokens[place])
        if heads[slot] < 0:
            if 4 * (text[NUM_DISTINCT] + 1) > 3 * num_heads:
                return False
            text[NUM_DISTINCT] += 1
        previous[place] = heads[slot]
        heads[slot] = place
        text[NUM_INDEXED] = place + 1
    return True


@njit(nogil=True)
def _find(text, ending, length, least):
    """The place after the longest match of the end of a text, the latest of equals, and the match's length, if at least
    ``least``; else (-1, 0). ``ending [length]`` are the last tokens."""
    end, start, num_heads = text[END], text[START], text[NUM_HEADS]
    tokens, previous = int32_at(text[TOKENS], end), int32_at(text[PREVIOUS], end)
    heads = int32_at(text[HEADS], num_heads)
    best, longest, last = -1, least - 1, ending[length - 1]
    place, num_left = heads[_slot(tokens, heads, num_heads, last)], MOST_PLACES
    while place >= start and num_left > 0 and longest < length:
        if place < end - 1:  # the last has no successor
            num_left -= 1
            if tokens[place + 1] != BREAK:
                depth, most = 1, min(length, place - start + 1)
                while depth < most and tokens[place - depth] == ending[length - 1 - depth]:
                    depth += 1
                if depth > longest:
                    best, longest = place + 1, depth
        place = previous[place]
    return best, longest if best >= 0 else 0


@functools.cache
def ngram_lookup_kernel() -> Kernel:
    """Finds the end of the text ``ending`` in ``first``, and in ``second`` (0 for none) if that may match longer.
    ``answer [IDS + room]`` int32 gets the tokens that follow there, up to a break; past the text's end they repeat.
    Updates the texts' indices first. Status 1: the first's table is full; 2: the second's. One work item."""

    def ngram_lookup(arguments, work_item):
        a = carray(arguments, 1)[0]
        text = int64_at(a.ending, TEXT_WORDS)
        first = int64_at(a.first, TEXT_WORDS)
        answer = int32_at(a.answer, IDS + a.room)
        answer[COUNT], answer[DEPTH], answer[PLACE] = 0, 0, -1
        if not _follow(first):
            a.status = 1
            return
        length = min(text[END] - text[START], MOST_MATCH)
        if length < LEAST_MATCH:
            return
        ending = int32_at(text[TOKENS] + 4 * (text[END] - length), length)
        where, depth = _find(first, ending, length, LEAST_MATCH)
        found = first
        if a.second != 0 and depth < MOST_MATCH:
            second = int64_at(a.second, TEXT_WORDS)
            if not _follow(second):
                a.status = 2
                return
            there, deeper = _find(second, ending, length, max(depth + 1, LEAST_MATCH))
            if there >= 0:
                where, depth, found = there, deeper, second
        if where < 0:
            return
        answer[DEPTH], answer[PLACE] = depth, where if found[TOKENS] == first[TOKENS] else -1
        tokens, place = int32_at(found[TOKENS], found[END]), where
        for i in range(min(answer[LIMIT], a.room)):
            if tokens[place] == BREAK:
                break
            answer[IDS + i] = tokens[place]
            answer[COUNT] = i + 1
            place = place + 1 if place + 1 < found[END] else where

    return Kernel(ngram_lookup, FIELDS)
