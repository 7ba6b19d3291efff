"""The compiled encoder of byte-level tokenizers: text in, ids out, added tokens and all.

It serves a tokenizer whose words are those of one pattern that `automaton` can express and whose model is plain
byte-level BPE. The state that a call changes (words already encoded, scratch) is a workspace taken from a stack and put
back, so that threads never share one and the GIL is released while text is encoded.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from runtime.later import later
from tokenizer.bpe.merge_table import MergeTable, address
from tokenizer.byte_level import BYTE_TO_CHAR
from tokenizer.patterns.automaton import Automaton

_kernel = later("tokenizer.bpe.encode_kernel")  # compiled code, and the compiler with it

_PADDING = b"\0" * 8  # `kernel_support.PADDING`
_NUM_SLOTS = 1 << 15
_POOL_CHUNKS = 1 << 16  # of 8 bytes
_MOST_IDS = 1 << 15  # written by one call of the kernel: the GIL is held while they become a list


class ByteEncoder:
    """UTF-8 to ids. Threads may share it."""

    def __init__(
        self,
        automaton: Automaton,
        table: MergeTable,
        symbol_of_letter: dict[str, int],
        ignores_merges: bool,
        added: Iterable[tuple[str, int, bool]],
    ) -> None:
        """The tables.

        symbol_of_letter  the symbols of the byte-level alphabet's letters in the vocabulary
        added             (string to seek, id, whether it is special) of the added tokens, all different
        """
        nodes, roots, added_ids, added_special = _trie(added)
        self._has_added = bool(added_ids.size)
        letters = b"".join([letter.encode().ljust(2, b"\0") for letter in BYTE_TO_CHAR])
        arrays = {
            _kernel.CLASSES: automaton.classes,
            _kernel.TRANSITIONS: automaton.transitions,
            _kernel.NODES: nodes,
            _kernel.ROOTS: roots,
            _kernel.ADDED_IDS: added_ids,
            _kernel.ADDED_SPECIAL: added_special,
            _kernel.BYTE_SYMBOLS: np.array([symbol_of_letter.get(letter, -1) for letter in BYTE_TO_CHAR], np.int32),
            _kernel.IDS: table.ids,
            _kernel.PAIRS: table.pairs,
            _kernel.TOKENS: table.tokens,
            _kernel.STARTS: table.starts,
            _kernel.TOKEN_SLOTS: table.slots,
            _kernel.LETTERS: np.frombuffer(letters, np.uint8),
        }
        self._kept = arrays
        self._tables = np.zeros(_kernel.NUM_TABLES, np.int64)
        for place, array in arrays.items():
            self._tables[place] = address(array)
        self._tables[_kernel.WIDTH] = automaton.num_classes + 1
        self._tables[_kernel.SHIFT] = table.shift
        self._tables[_kernel.TOKEN_MASK] = table.mask
        self._tables[_kernel.IGNORES_MERGES] = ignores_merges
        self._workspaces: list[_Workspace] = []

    def encode(self, text: str, seeks_added: bool, skips_special: bool) -> list[int]:
        """The ids of `text`, which holds no lone surrogates.

        `seeks_added`: added tokens are found; `skips_special`: special ones among them are ordinary text.
        """
        data = text.encode()
        padded = np.frombuffer(data + _PADDING, np.uint8)
        try:
            workspace = self._workspaces.pop()
        except IndexError:
            workspace = _Workspace()
        ids = workspace.encode(padded, len(data), seeks_added and self._has_added, skips_special, self._tables)
        self._workspaces.append(workspace)
        return ids


class _Workspace:
    """The state of one call: the words already encoded and their ids, scratch and room for the result."""

    def __init__(self) -> None:
        self._encode = _kernel.encode
        self._position, self._stop = _kernel.POSITION, _kernel.STOP
        self._slots = np.zeros((_NUM_SLOTS, 2), np.uint64)
        self._pool = np.zeros(_POOL_CHUNKS, np.uint64)
        self._out = np.empty(_MOST_IDS, np.uint32)
        self._scratch = np.empty(0, np.uint32)
        self._fields = np.zeros(_kernel.NUM_FIELDS, np.int64)
        self._fields[_kernel.SLOTS] = address(self._slots)
        self._fields[_kernel.SLOT_MASK] = _NUM_SLOTS - 1
        self._fields[_kernel.POOL] = address(self._pool)
        self._fields[_kernel.POOL_CHUNKS] = _POOL_CHUNKS
        self._fields[_kernel.POOL_USED] = 1
        self._make_room(_MOST_IDS)

    def encode(
        self, text: np.ndarray, end: int, seeks_added: bool, skips_special: bool, tables: np.ndarray
    ) -> list[int]:
        """The ids of `text[:end]`; `end` is followed by padding."""
        fields, encode = self._fields, self._encode
        fields[self._position] = 0
        fields[self._stop] = -1
        count = encode(text, end, seeks_added, skips_special, tables, fields)
        ids: list[int] = self._out[:count].tolist()
        while fields[self._stop] >= 0:  # the text goes on
            if count == 0:  # with a word that finds no room
                self._make_room(end)
            count = encode(text, end, seeks_added, skips_special, tables, fields)
            ids += self._out[:count].tolist()
        if len(self._out) > _MOST_IDS:
            self._make_room(_MOST_IDS)
        return ids

    def _make_room(self, size: int) -> None:
        """Room for words of `size` bytes."""
        self._out = np.empty(size, np.uint32)
        self._scratch = np.empty(_kernel.SCRATCH_BYTES * size, np.uint8)
        self._fields[_kernel.OUT] = address(self._out)
        self._fields[_kernel.SCRATCH] = address(self._scratch)
        self._fields[_kernel.OUT_ROOM] = self._fields[_kernel.ROOM] = size


def _trie(added: Iterable[tuple[str, int, bool]]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The strings as a trie in arrays (`encode_kernel.next_added`), their ids, and which are special."""
    nodes: list[list[int]] = []  # byte, first child, next sibling, number of the token
    children: dict[tuple[int, int], int] = {}  # node (-1: none yet), byte: node
    ids: list[int] = []
    specials: list[bool] = []
    for text, token_id, is_special in added:
        node = -1
        for byte in text.encode("utf-8", "surrogatepass"):
            child = children.get((node, byte))
            if child is None:
                child = children[node, byte] = len(nodes)
                nodes.append([byte, -1, -1, -1])
                if node >= 0:
                    nodes[child][2], nodes[node][1] = nodes[node][1], child
            node = child
        nodes[node][3] = len(ids)
        ids.append(token_id)
        specials.append(is_special)
    roots = [children.get((-1, byte), -1) for byte in range(256)]
    return (
        np.array(nodes, np.int32).reshape(-1, 4),
        np.array(roots, np.int32),
        np.array(ids, np.uint32),
        np.array(specials, np.uint8),
    )
