"""Byte-level encoding, compiled: UTF-8 in, token ids out, in one pass without the GIL.

Each iteration finds the end of the next word (`automaton`), looks the word up among those already encoded, and merges
its bytes if it is new (`merge_kernel`). A trie finds added tokens on the way.

Two blocks of int64 hold addresses and numbers. The tables, which are read-only:
"""

from __future__ import annotations

import numpy as np

from numba_kernels.cache import njit
from numba_kernels.pointers import i32_at, i64_at, u8_at, u32_at, u64_at
from tokenizer.bpe.index_kernel import find_token
from tokenizer.bpe.kernel_support import ZERO, chunk_at, hash_bytes
from tokenizer.bpe.merge_kernel import SCRATCH_BYTES as SCRATCH_BYTES
from tokenizer.bpe.merge_kernel import merge, symbols_at

CLASSES = 0  # [0x110000] uint8: `Automaton.classes`
TRANSITIONS = 1  # int32: `Automaton.transitions`
WIDTH = 2  # the automaton's classes, and 1 for the end
NODES = 3  # [num_nodes, 4] int32: the trie: byte, first child, next sibling, number of the token that ends here or -1
ROOTS = 4  # [256] int32: the node of each first byte, or -1
ADDED_IDS = 5  # uint32: the id of each added token
ADDED_SPECIAL = 6  # uint8: whether it is special
BYTE_SYMBOLS = 7  # [256] int32: the symbol of each byte, or -1: it is left out
IDS = 8  # uint32: the id of each symbol
PAIRS = 9  # `index_kernel`'s tables
SHIFT = 10
TOKENS = 11
STARTS = 12
TOKEN_SLOTS = 13
TOKEN_MASK = 14
IGNORES_MERGES = 15  # whether a word that is a token is not merged
LETTERS = 16  # [256, 2] uint8: the byte-level alphabet in UTF-8; 0: no second byte
NUM_TABLES = 17

# The workspace, which belongs to one call at a time:
SLOTS = 0  # [mask + 1, 2] uint64: a word's hash; its place in the pool << 16 | bytes << 8 | ids, or 0: empty
SLOT_MASK = 1
POOL = 2  # uint64: of each word its bytes in chunks of 8, then its ids, two in a chunk; the first chunk stays empty
POOL_CHUNKS = 3
POOL_USED = 4
SCRATCH = 5  # `merge_kernel`'s
ROOM = 6  # symbols that scratch is for
OUT = 7  # uint32: the ids
OUT_ROOM = 8
POSITION = 9  # the next byte to encode
STOP = 10  # end of the ordinary text before the next added token; -1: not searched yet
AFTER = 11  # end of that token
ADDED = 12  # its number; -1: the text ends first
NUM_FIELDS = 13

_LONGEST_KEPT = 248  # bytes of the longest word that is cached
_PROBES = 4  # slots in which a word may stand
_EIGHT, _SIXTEEN, _LOW_BYTE = np.uint64(8), np.uint64(16), np.uint64(0xFF)


@njit
def _character(text, position):
    """The character at `position` that is not ASCII, and how many bytes it has."""
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
    """The end of the word that begins at `start`, at most `stop`."""
    state = width
    position = start
    end = start
    while True:
        size = 1
        if position == stop:
            entry = np.int64(transitions[state + width - 1])
        else:
            code = np.int64(text[position])
            if code >= 0x80:
                code, size = _character(text, position)
            entry = np.int64(transitions[state + classes[code]])
        if entry & 1:
            end = position
        state = entry >> 1
        if state == 0:
            return end
        position += size


@njit
def _next_added(text, position, end, tables, skips_special):
    """The next added token, leftmost, then longest: its beginning, its end and its number."""
    nodes, roots, is_special = i32_at(tables[NODES]), i32_at(tables[ROOTS]), u8_at(tables[ADDED_SPECIAL])
    while position < end:
        node = np.int64(roots[text[position]])
        found = np.int64(-1)
        place = after = position + 1
        while node >= 0:
            if nodes[4 * node + 3] >= 0:
                found = np.int64(nodes[4 * node + 3])
                after = place
            if place == end:
                break
            node = np.int64(nodes[4 * node + 1])
            while node >= 0 and nodes[4 * node] != text[place]:
                node = np.int64(nodes[4 * node + 2])
            place += 1
        if found >= 0 and not (skips_special and is_special[found]):
            return position, after, found
        position = after
    return end, end, np.int64(-1)


@njit
def _find_word(text, start, size, work):
    """Looks a word up in the cache: its entry (0 if it is not cached), its hash, and the slot for it."""
    slots, pool, mask = u64_at(work[SLOTS]), u64_at(work[POOL]), work[SLOT_MASK]
    key = hash_bytes(text, start, start + size)
    slot = np.int64(key & np.uint64(mask))
    first = slot
    for _ in range(_PROBES):
        entry = slots[2 * slot + 1]
        if entry == ZERO:
            return entry, key, slot
        if slots[2 * slot] == key and np.int64(entry >> _EIGHT & _LOW_BYTE) == size:
            chunk = np.int64(entry >> _SIXTEEN)
            place = np.int64(0)
            while place < size and pool[chunk] == chunk_at(text, start + place, min(8, size - place)):
                chunk += 1
                place += 8
            if place >= size:
                return entry, key, slot
        slot = (slot + 1) & mask
    return ZERO, key, first  # evicts another word


@njit
def _keep_word(text, start, size, ids, num_ids, key, slot, work):
    """Caches the ids of a word; when the pool is full, the cache is cleared."""
    slots, pool = u64_at(work[SLOTS]), u64_at(work[POOL])
    chunk = work[POOL_USED]
    if chunk + (size + 7) // 8 + (num_ids + 1) // 2 > work[POOL_CHUNKS]:
        for i in range(2 * work[SLOT_MASK] + 2):
            slots[i] = ZERO
        chunk = 1
    slots[2 * slot] = key
    slots[2 * slot + 1] = np.uint64(chunk) << _SIXTEEN | np.uint64(size) << _EIGHT | np.uint64(num_ids)
    for place in range(0, size, 8):
        pool[chunk] = chunk_at(text, start + place, min(8, size - place))
        chunk += 1
    kept = u32_at(work[POOL] + 8 * chunk)
    for i in range(num_ids):
        kept[i] = ids[i]
    work[POOL_USED] = chunk + (num_ids + 1) // 2


@njit
def _encode_word(text, start, end, ids, tables, scratch, room):
    """Encodes a word that is not cached into `ids`; returns their number."""
    symbols = symbols_at(scratch, room)
    id_of = u32_at(tables[IDS])
    if tables[IGNORES_MERGES]:
        letters, spelled = u8_at(tables[LETTERS]), u8_at(scratch)
        length = np.int64(0)
        for i in range(start, end):
            letter = 2 * np.int64(text[i])
            spelled[length] = letters[letter]
            spelled[length + 1] = letters[letter + 1]
            length += 1 if letters[letter + 1] == 0 else 2
        tokens, starts, slots = u8_at(tables[TOKENS]), i64_at(tables[STARTS]), i32_at(tables[TOKEN_SLOTS])
        found = find_token(spelled, np.int64(0), length, tokens, starts, slots, tables[TOKEN_MASK])
        if found >= 0:
            ids[0] = id_of[found]
            return np.int64(1)
    byte_symbols = i32_at(tables[BYTE_SYMBOLS])
    count = np.int64(0)
    for i in range(start, end):
        symbol = byte_symbols[text[i]]
        if symbol >= 0:
            symbols[count] = symbol
            count += 1
    count = merge(scratch, room, count, u64_at(tables[PAIRS]), tables[SHIFT])
    for i in range(count):
        ids[i] = id_of[symbols[i]]
    return count


@njit
def encode(text_array, end, seeks_added, skips_special, table_array, work_array):
    """Encode from `work[POSITION]` on until `end` is reached or `OUT` is full; returns the number of ids written.

    text_array     [end + PADDING] uint8: valid UTF-8
    seeks_added    whether added tokens are looked for
    skips_special  whether special ones among them are ordinary text

    At the end `work[STOP]` is -1. If nothing was written before that, a word is longer than `OUT` and `SCRATCH`.
    """
    text, tables, work = u8_at(text_array.ctypes.data), i64_at(table_array.ctypes.data), i64_at(work_array.ctypes.data)
    classes, transitions, width = u8_at(tables[CLASSES]), i32_at(tables[TRANSITIONS]), tables[WIDTH]
    out, room = work[OUT], min(work[OUT_ROOM], work[ROOM])
    last = out + 4 * work[OUT_ROOM]
    position = work[POSITION]
    while True:
        if work[STOP] < 0:
            stop, after, added = end, end, np.int64(-1)
            if seeks_added:
                stop, after, added = _next_added(text, position, end, tables, skips_special)
            work[STOP], work[AFTER], work[ADDED] = stop, after, added
        stop = work[STOP]
        while position < stop:
            start = position
            position = word_end(text, start, stop, classes, transitions, width)
            size = position - start
            ids = u32_at(out)
            if size > room or out + 4 * size > last:
                work[POSITION] = start
                return (out - work[OUT]) >> 2
            entry, key, slot = ZERO, ZERO, np.int64(0)
            if size <= _LONGEST_KEPT:
                entry, key, slot = _find_word(text, start, size, work)
            if entry != ZERO:
                num_ids = np.int64(entry & _LOW_BYTE)
                kept = u32_at(work[POOL] + 8 * (np.int64(entry >> _SIXTEEN) + ((size + 7) >> 3)))
                for i in range(num_ids):
                    ids[i] = kept[i]
            else:
                num_ids = _encode_word(text, start, position, ids, tables, work[SCRATCH], size)
                if size <= _LONGEST_KEPT:
                    _keep_word(text, start, size, ids, num_ids, key, slot, work)
            out += 4 * num_ids
        if work[ADDED] >= 0:
            if out == last:
                work[POSITION] = position
                return (out - work[OUT]) >> 2
            u32_at(out)[0] = u32_at(tables[ADDED_IDS])[work[ADDED]]
            out += 4
        position = work[AFTER]
        work[STOP] = -1
        if work[ADDED] < 0:
            return (out - work[OUT]) >> 2
