"""Byte-level encoding, compiled: UTF-8 in, token ids out, in one pass without the interpreter's lock.

Each turn of the loop finds where the next word ends (`automaton`), looks for the word among those already encoded, and
only where it is new merges its bytes (`merge_kernel`). Added tokens are found on the way by a trie. All tables are
arrays that nobody changes; what changes is a workspace, which belongs to one call at a time (`byte_encoder`).
"""

from __future__ import annotations

import numpy as np

from numba_kernels.cache import njit
from tokenizer.index_kernel import find_token
from tokenizer.kernel_support import PADDING, ZERO, chunk_at, hash_bytes
from tokenizer.merge_kernel import LONGEST_LISTED, merge_heaped, merge_listed

LONGEST_KEPT = 248
"""Bytes of the longest word that is remembered."""
PROBES = 4
"""Slots in which a word may stand."""

# The workspace's counters
POOL_USED = 0  # chunks of 8 bytes of the pool that hold words; the first stays empty
POSITION = 1  # the next byte to encode
STOP = 2  # where the ordinary text in front of the next added token ends; -1: not looked for yet
AFTER = 3  # where that token ends
ADDED = 4  # its number; -1: the text ends first
NUM_COUNTERS = 5

_EIGHT = np.uint64(8)
_SIXTEEN = np.uint64(16)
_LOW_BYTE = np.uint64(0xFF)


@njit
def _code_point(text, position):
    """The character at `position` of valid UTF-8, and how many bytes it has."""
    first = np.int64(text[position])
    second = np.int64(text[position + 1]) & 0x3F
    if first < 0xE0:
        return (first & 0x1F) << 6 | second, 2
    third = np.int64(text[position + 2]) & 0x3F
    if first < 0xF0:
        return (first & 0x0F) << 12 | second << 6 | third, 3
    return (first & 0x07) << 18 | second << 12 | third << 6 | (np.int64(text[position + 3]) & 0x3F), 4


@njit
def word_end(text, start, stop, classes, transitions, width):
    """Where the word that begins at `start` ends, at `stop` at the latest. The tables are an `Automaton`'s."""
    state = width
    position = start
    end = start
    while True:
        size = 1
        if position == stop:
            entry = transitions[state + width - 1]
        else:
            code = np.int64(text[position])
            if code >= 0x80:
                code, size = _code_point(text, position)
            entry = transitions[state + classes[code]]
        if entry & 1:
            end = position
        state = entry >> 1
        if state == 0:
            return end
        position += size


@njit
def next_added(text, position, end, nodes, roots, is_special, skips_special):
    """The next added token at or behind `position`: where it begins and ends, and its number; leftmost, then longest.

    nodes  [num_nodes, 4] int32: byte, first child, next sibling, number of the token that ends here (-1: none)
    roots  [256] int32: the node of each first byte, or -1
    """
    while position < end:
        node = roots[text[position]]
        if node >= 0:
            found = -1
            after = position
            place = position + 1
            while node >= 0:
                if nodes[node, 3] >= 0:
                    found = nodes[node, 3]
                    after = place
                node = nodes[node, 1]
                if place == end:
                    break
                while node >= 0 and nodes[node, 0] != text[place]:
                    node = nodes[node, 2]
                place += 1
            if found >= 0 and not (skips_special and is_special[found]):
                return position, after, found
            if found >= 0:
                position = after
                continue
        position += 1
    return end, end, -1


@njit
def _spell(text, start, end, letters):
    """Bytes in the byte-level alphabet, as UTF-8, and how many those are."""
    spelled = np.empty(2 * (end - start) + PADDING, np.uint8)
    length = 0
    for i in range(start, end):
        spelled[length] = letters[text[i], 0]
        spelled[length + 1] = letters[text[i], 1]
        length += 1 if letters[text[i], 1] == 0 else 2
    return spelled, length


@njit
def _encode_new(
    text, start, end, symbols, ranks, byte_symbols, pairs, shift, letters, whole_words, word_text, word_starts
):
    """Encode a word into `symbols`; how many there are, and the symbols (another array for a long word)."""
    size = end - start
    if whole_words.size > 0:
        spelled, length = _spell(text, start, end, letters)
        found = find_token(spelled, 0, length, word_text, word_starts, whole_words)
        if found >= 0:
            symbols[0] = found
            return 1, symbols
    if size > LONGEST_LISTED:
        symbols = np.empty(size, np.int32)
    count = 0
    for i in range(start, end):
        symbol = byte_symbols[text[i]]
        if symbol >= 0:  # a byte that the vocabulary does not have is left out
            symbols[count] = symbol
            count += 1
    if count <= LONGEST_LISTED:
        return merge_listed(symbols, count, ranks, pairs, shift), symbols
    return merge_heaped(symbols, count, pairs, shift), symbols


@njit
def _find_word(text, start, size, slots, pool):
    """A word among those that are known: its entry (0: unknown), and the slot to keep it in."""
    mask = np.uint64(slots.shape[0] - 1)
    key = hash_bytes(text, start, start + size)
    slot = key & mask
    first = slot
    for _ in range(PROBES):
        entry = slots[slot, 1]
        if entry == ZERO:
            return ZERO, slot, key
        if slots[slot, 0] == key and np.int64((entry >> _EIGHT) & _LOW_BYTE) == size:
            chunk = np.int64(entry >> _SIXTEEN)
            place = 0
            while place < size and pool[chunk] == chunk_at(text, start + place, min(8, size - place)):
                chunk += 1
                place += 8
            if place >= size:
                return entry, slot, key
        slot = (slot + np.uint64(1)) & mask
    return ZERO, first, key  # the one that stands there goes


@njit
def _keep_word(text, start, size, word_ids, slot, key, slots, pool, pool_ids, counters):
    """Remember the ids of a word; when the pool is full, all others are forgotten."""
    num_chunks = (size + 7) >> 3
    used = counters[POOL_USED]
    if used + num_chunks + (word_ids.size + 1) // 2 > pool.size:
        slots[:] = ZERO
        used = 1
    entry = np.uint64(used) << _SIXTEEN | np.uint64(size) << _EIGHT | np.uint64(word_ids.size)
    for place in range(0, size, 8):
        pool[used] = chunk_at(text, start + place, min(8, size - place))
        used += 1
    for i in range(word_ids.size):
        pool_ids[2 * used + i] = word_ids[i]
    counters[POOL_USED] = used + (word_ids.size + 1) // 2
    slots[slot, 0] = key
    slots[slot, 1] = entry


@njit
def encode(
    text, end, is_added_sought, skips_special,
    classes, transitions, width,
    added_nodes, added_roots, added_ids, added_special,
    byte_symbols, ids, pairs, shift, letters, whole_words, word_text, word_starts,
    slots, pool, pool_ids, symbols, ranks, counters, out,
):  # fmt: skip
    """Encode `text[counters[POSITION]:end]` until it is done or `out` is full; how many ids were written.

    text          [end + PADDING] uint8: valid UTF-8
    classes, transitions, width      `Automaton`'s; width is its number of classes and 1
    added_nodes, added_roots         `next_added`'s trie
    added_ids, added_special         of each added token its id (uint32), and whether it is special
    byte_symbols  [256] int32: the symbol of each byte, or -1
    ids           [num_symbols] uint32: the id of each symbol
    pairs, shift  `index_merges`'s table, of 2**(64 - shift) entries
    letters       [256, 2] uint8: the byte-level alphabet in UTF-8; 0: no second byte
    whole_words, word_text, word_starts   `index_tokens`' tables if a word that is a token is not merged, else empty
    slots         [num_slots, 2] uint64: hash; place in the pool << 16 | bytes << 8 | ids; 0: empty
    pool, pool_ids   one array seen as uint64 and as uint32: of each word its bytes in chunks of 8, then its ids
    symbols, ranks   [LONGEST_LISTED] int32, uint64: scratch
    """
    count = 0
    position = counters[POSITION]
    while True:
        if counters[STOP] < 0:
            if is_added_sought:
                stop, after, added = next_added(
                    text, position, end, added_nodes, added_roots, added_special, skips_special
                )
            else:
                stop, after, added = end, end, -1
            counters[STOP], counters[AFTER], counters[ADDED] = stop, after, added
        stop = counters[STOP]
        while position < stop:
            start = position
            position = word_end(text, start, stop, classes, transitions, width)
            size = position - start
            if count + size > out.size:
                counters[POSITION] = start
                return count
            is_kept = size <= LONGEST_KEPT
            slot, key = ZERO, ZERO
            if is_kept:
                entry, slot, key = _find_word(text, start, size, slots, pool)
                if entry != ZERO:
                    place = 2 * (np.int64(entry >> _SIXTEEN) + ((size + 7) >> 3))
                    for i in range(np.int64(entry & _LOW_BYTE)):
                        out[count] = pool_ids[place + i]
                        count += 1
                    continue
            num_symbols, word = _encode_new(
                text, start, position, symbols, ranks, byte_symbols, pairs, shift, letters, whole_words, word_text,
                word_starts,
            )  # fmt: skip
            for i in range(num_symbols):
                out[count + i] = ids[word[i]]
            if is_kept:
                _keep_word(
                    text, start, size, out[count : count + num_symbols], slot, key, slots, pool, pool_ids, counters
                )
            count += num_symbols
        if counters[ADDED] >= 0:
            if count == out.size:
                counters[POSITION] = position
                return count
            out[count] = added_ids[counters[ADDED]]
            count += 1
        position = counters[AFTER]
        counters[STOP] = -1
        if counters[ADDED] < 0:
            counters[POSITION] = position
            return count
