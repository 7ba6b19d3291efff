"""The compiled loops: the best segmentation of a text by Unigram's scores, and the replacement of characters.

Texts and tables are passed as addresses; the tables of tokens are `bpe.index_kernel`'s.
"""

from __future__ import annotations

import numpy as np

from numba_kernels.cache import njit
from numba_kernels.pointers import f64_at, i32_at, i64_at, u8_at, u32_at
from tokenizer.bpe.index_kernel import find_token

EXCLUDED = float("-inf")
"""The score of a token that no text is segmented into."""

UNKNOWN = np.int32(-1)
"""The symbol of a character without a token."""

_VALUE, _LEAF, _LABEL = np.uint32(0x7FFF_FFFF), np.uint32(0x100), np.uint32(0x8000_00FF)


@njit
def character_size(first):
    """Bytes of the UTF-8 character that begins with this byte."""
    if first < 0xC0:
        return 1
    return 2 if first < 0xE0 else 3 if first < 0xF0 else 4


@njit
def segment(
    text_address, size, tokens_address, starts_address, slots_address, mask, scores_address, longest, unknown_score,
    is_single, best_address, from_address, symbols_address,
):  # fmt: skip
    """Finds the segmentation of the highest sum of scores; returns its number of tokens.

    scores     [num_tokens] float64
    longest    bytes of the longest token
    is_single  sums are rounded to float32, as SentencePiece has them
    best       [size + 1] float64, scratch
    from       [size + 1] int32, scratch; then where each token ends, in order
    symbols    [size + 1] int32, scratch; then the symbol of each token, or UNKNOWN
    """
    text, tokens, starts = u8_at(text_address), u8_at(tokens_address), i64_at(starts_address)
    slots, scores, best = i32_at(slots_address), f64_at(scores_address), f64_at(best_address)
    origin, symbols = i32_at(from_address), i32_at(symbols_address)
    for i in range(size + 1):
        best[i], origin[i] = 0.0, -1
    start = np.int64(0)
    while start < size:
        single = np.int64(min(start + character_size(text[start]), size))
        has_single = False
        end, last = single, min(size, start + longest)
        while end <= last:
            symbol = find_token(text, start, end, tokens, starts, slots, mask)
            if symbol >= 0 and scores[symbol] > EXCLUDED:
                has_single = has_single or end == single
                total = best[start] + scores[symbol]
                total = np.float64(np.float32(total)) if is_single else total
                if origin[end] < 0 or total > best[end]:
                    best[end] = total
                    origin[end], symbols[end] = start, symbol
            if end == size:
                break
            end += character_size(text[end])
        if not has_single:
            total = best[start] + unknown_score
            total = np.float64(np.float32(total)) if is_single else total
            if origin[single] < 0 or total > best[single]:
                best[single], origin[single], symbols[single] = total, start, UNKNOWN
        start = single
    count = np.int64(0)
    end = size
    while end > 0:
        end, count = np.int64(origin[end]), count + 1
    end, place = size, count
    best_as_places = i32_at(best_address)
    while end > 0:
        place -= 1
        best_as_places[2 * place], best_as_places[2 * place + 1] = end, symbols[end]
        end = np.int64(origin[end])
    for i in range(count):
        origin[i], symbols[i] = best_as_places[2 * i], best_as_places[2 * i + 1]
    return count


@njit
def _offset(unit):
    return (unit >> np.uint32(10)) << ((unit & np.uint32(0x200)) >> np.uint32(6))


@njit
def longest_rule(text, start, end, units, num_units, is_shortest):
    """The rule whose key is the longest (or shortest) beginning of `text[start:end]`: its value << 32 | its key's
    bytes, or 0. `units` is a double array trie (https://github.com/s-yata/darts-clone)."""
    found = np.int64(0)
    node = _offset(units[0])
    for at in range(start, end):
        byte = np.uint32(text[at])
        node ^= byte
        if np.int64(node) >= num_units:
            break
        unit = units[node]
        if unit & _LABEL != byte:
            break
        node ^= _offset(unit)
        if np.int64(node) >= num_units:
            break
        if unit & _LEAF:
            found = np.int64(units[node] & _VALUE) << 32 | np.int64(at + 1 - start)
            if is_shortest:
                break
    return found


@njit
def replace_characters(text_address, size, units_address, num_units, values_address, num_values, out_address, room):
    """Replaces the longest key at each place by its rule's value, other characters by themselves.

    values   strings, each ended by a zero byte
    Returns the bytes of the result, which are written as far as `room` goes.
    """
    text, units, values, out = u8_at(text_address), u32_at(units_address), u8_at(values_address), u8_at(out_address)
    position, written = np.int64(0), np.int64(0)
    while position < size:
        rule = longest_rule(text, position, size, units, num_units, False)
        value, length = rule >> 32, rule & 0xFFFF_FFFF
        if length == 0 or value >= num_values:
            for i in range(position, min(position + character_size(text[position]), size)):
                if written < room:
                    out[written] = text[i]
                written += 1
            position += character_size(text[position])
            continue
        while value < num_values and values[value] != 0:
            if written < room:
                out[written] = values[value]
            written += 1
            value += 1
        position += length
    return written


@njit
def rule_at(text_address, size, units_address, num_units, is_shortest):
    """`longest_rule` of a whole text."""
    return longest_rule(u8_at(text_address), np.int64(0), size, u32_at(units_address), num_units, is_shortest)
