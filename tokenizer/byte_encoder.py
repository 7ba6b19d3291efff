"""The compiled encoder of byte-level tokenizers: text in, ids out, added tokens and all.

It serves a tokenizer whose words are those of one pattern that `automaton` can express and whose model is plain
byte-level BPE. What a call changes (the words already encoded, scratch) is a workspace that it takes from a stack and
puts back, so that threads never share one, and the interpreter's lock is free while text is encoded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tokenizer.automaton import Automaton
from tokenizer.byte_level import BYTE_TO_CHAR
from tokenizer.merge_table import MergeTable

if TYPE_CHECKING:
    import numpy as np

_PADDING = b"\0" * 8  # `kernel_support.PADDING`
_NUM_SLOTS = 1 << 15
_POOL_CHUNKS = 1 << 16  # of 8 bytes
_MOST_IDS = 1 << 15  # that one call of the kernel writes: the interpreter's lock is held while they become a list


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

        symbol_of_letter  the symbols of the byte-level alphabet, as far as the vocabulary has them
        added             (string to seek, id, whether it is special) of the added tokens, all different
        """
        import numpy as np

        nodes, roots, ids, is_special = _trie(added)
        symbols = [symbol_of_letter.get(letter, -1) for letter in BYTE_TO_CHAR]
        letters = [letter.encode().ljust(2, b"\0") for letter in BYTE_TO_CHAR]
        self._has_added = bool(ids.size)
        self._tables = (
            automaton.classes, automaton.transitions, automaton.num_classes + 1,
            nodes, roots, ids, is_special,
            np.array(symbols, np.int32), table.ids, table.pairs, table.shift,
            np.frombuffer(b"".join(letters), np.uint8).reshape(256, 2),
            table.slots if ignores_merges else np.empty(0, np.int32), table.tokens, table.starts,
        )  # fmt: skip
        self._workspaces: list[_Workspace] = []

    def encode(self, text: str, is_added_sought: bool, skips_special: bool) -> list[int]:
        """The ids of `text`, which holds no lone surrogates.

        `skips_special`: of the added tokens, those that are special are ordinary text.
        """
        from tokenizer.encode_kernel import POSITION, STOP, encode

        data = text.encode()
        end = len(data)
        padded = _as_array(data + _PADDING)
        is_added_sought = is_added_sought and self._has_added
        try:
            workspace = self._workspaces.pop()
        except IndexError:
            workspace = _Workspace()
        counters, out = workspace.counters, workspace.out
        counters[POSITION] = 0
        counters[STOP] = -1
        ids: list[int] = []
        while True:
            count = encode(
                padded, end, is_added_sought, skips_special, *self._tables, *workspace.arrays, counters, out
            )
            ids += out[:count].tolist()
            if counters[POSITION] == end and counters[STOP] < 0:
                break
            if count == 0:  # a word that is too long
                out = workspace.large_out(end)
        self._workspaces.append(workspace)
        return ids


class _Workspace:
    """What one call at a time changes: the words already encoded and their ids, and scratch."""

    def __init__(self) -> None:
        import numpy as np

        from tokenizer.encode_kernel import NUM_COUNTERS, POOL_USED
        from tokenizer.merge_kernel import LONGEST_LISTED

        pool = np.zeros(_POOL_CHUNKS, np.uint64)
        self.arrays = (
            np.zeros((_NUM_SLOTS, 2), np.uint64), pool, pool.view(np.uint32),
            np.empty(LONGEST_LISTED, np.int32), np.empty(LONGEST_LISTED, np.uint64),
        )  # fmt: skip
        self.counters = np.zeros(NUM_COUNTERS, np.int64)
        self.counters[POOL_USED] = 1
        self.out = np.empty(_MOST_IDS, np.uint32)

    @staticmethod
    def large_out(size: int) -> Any:
        """Room for `size` ids, which is not kept."""
        import numpy as np

        return np.empty(size, np.uint32)


def _as_array(data: bytes) -> Any:
    import numpy as np

    return np.frombuffer(data, np.uint8)


def _trie(added: Iterable[tuple[str, int, bool]]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The strings as a trie in arrays (`encode_kernel.next_added`), their ids, and which are special."""
    import numpy as np

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
        np.array(specials, np.bool_),
    )
