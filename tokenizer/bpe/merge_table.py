"""A vocabulary and its merges as hash tables for the compiled loops.

A symbol is a token's place in the vocabulary's order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from runtime.later import later
from tokenizer.errors import TokenizerError

_merging, _indexing = later("tokenizer.bpe.merge_kernel"), later("tokenizer.bpe.index_kernel")

MIDDLE = "\udcfe"
"""May stand between left and right of a merge: becomes a byte that UTF-8 does not have, as what ends a string does."""

_END = "\udcff"
_PADDING = b"\0" * 8  # `kernel_support.PADDING`


class MergeError(TokenizerError):
    """A merge that is not a pair, or names an unknown token."""

    def __init__(self, place: int) -> None:
        super().__init__(f"merge {place} is not one of two known tokens")
        self.place = place


class MergeTable:
    """The tables of one vocabulary, in the layouts of `index_kernel`. Immutable.

    tokens, starts, slots, mask   the tokens' strings and their hash table
    ids                           [num_tokens] uint32: the id of each symbol
    pairs, shift                  the merges' hash table
    """

    def __init__(self, vocab: dict[str, int], merges: Sequence[str], separator: str, prefix: str) -> None:
        """`merges`: left, `separator` and right of each, by rank; `prefix`: removed from the right one.

        Raises `MergeError`, and UnicodeEncodeError for a lone surrogate.
        """
        self._index(vocab)
        packed = _packed(merges)
        middle = separator.encode("utf-8", "surrogateescape")[0]
        room = np.empty(2 * int(np.diff(self.starts).max(initial=0)) + len(_PADDING), np.uint8)
        self._make_pairs(len(merges))
        offender = _indexing.index_merges(
            address(packed), len(merges), middle, len(prefix.encode()), *self._tables, address(room)
        )
        if offender >= 0:
            raise MergeError(offender)

    @classmethod
    def of_ranks(cls, vocab: dict[str, int], ranks: Sequence[int]) -> MergeTable:
        """Any two tokens merge whose joined string is a token, the one of the lowest rank first: tiktoken's and
        SentencePiece's rule. `ranks`: of each token of `vocab`, in its order; tokens of rank -1 neither merge nor are
        merged into. Raises UnicodeEncodeError for a lone surrogate."""
        self = cls.__new__(cls)
        self._index(vocab)
        numbers = np.asarray(ranks, np.int32)
        tables = *self._token_tables, address(numbers)
        self._make_pairs(_indexing.count_splits(len(vocab), *tables))
        _indexing.index_splits(len(vocab), *tables, address(self.pairs), self.shift)
        return self

    def _index(self, vocab: dict[str, int]) -> None:
        """Makes the tables of tokens."""
        self.tokens = _packed(vocab)
        self.starts = np.empty(len(vocab) + 1, np.int64)
        self.slots = np.full(_table_size(len(vocab)), -1, np.int32)
        self.mask = len(self.slots) - 1
        self.ids = np.fromiter(vocab.values(), np.uint32, len(vocab))
        _indexing.index_tokens(address(self.tokens), len(vocab), address(self.starts), address(self.slots), self.mask)
        self._token_tables = address(self.tokens), address(self.starts), address(self.slots), self.mask

    def _make_pairs(self, count: int) -> None:
        """Makes the table of merges, which is empty and has room for `count`."""
        self.pairs = np.full((_table_size(count), 2), _indexing.NOTHING, np.uint64)
        self.shift = 65 - len(self.pairs).bit_length()
        self._tables = *self._token_tables, address(self.pairs), self.shift

    def encode(self, tokens: Sequence[str]) -> list[int]:
        """The ids of a word, given as its initial tokens; all are in the vocabulary."""
        text = _packed(tokens)
        count = len(tokens)
        scratch = np.empty(_merging.SCRATCH_BYTES * count // 4, np.int32)
        size = _merging.merge_tokens(address(text), count, *self._tables, address(scratch))
        ids: list[int] = self.ids[scratch[4 * count : 4 * count + size]].tolist()
        return ids


def address(array: np.ndarray) -> int:
    """The address of an array's data, for the compiled loops; the caller keeps the array alive."""
    return int(array.ctypes.data)


def _packed(strings: Iterable[str]) -> np.ndarray:
    """Strings, each ended by 0xFF, as bytes followed by the kernels' padding."""
    joined = _END.join([*strings, ""])
    return np.frombuffer(joined.encode("utf-8", "surrogateescape") + _PADDING, np.uint8)


def _table_size(num_entries: int) -> int:
    """A power of two that leaves at least a third of a hash table empty."""
    return max(2, 1 << (3 * num_entries // 2).bit_length())
