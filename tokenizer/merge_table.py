"""A vocabulary and its merges as tables: what the compiled loops look tokens and pairs up in.

A symbol is a token's place in the vocabulary's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

END = "\udcff"
"""Ends a string: becomes the byte 0xFF, which UTF-8 does not have."""

_PADDING = b"\0" * 8  # `kernel_support.PADDING`


class MergeTable:
    """The tables of one vocabulary, in the layouts of `index_kernel`. Immutable.

    tokens       [bytes] uint8: the tokens' strings in UTF-8, each ended by 0xFF
    starts       [num_tokens + 1] int64: where each begins
    slots        [power of two] int32: a hash table of symbols by string
    ids          [num_tokens] uint32: the id of each symbol
    pairs        [2**(64 - shift), 2] uint64: a hash table of merges by pair of symbols
    missing      -1, or the place of the first merge that names a token that is not there
    """

    def __init__(self, vocab: dict[str, int], merges: str, num_merges: int, prefix: str) -> None:
        """`merges`: left and right of each merge, each ended by `END`; `prefix`: what the right one loses.

        Raises UnicodeEncodeError for a lone surrogate.
        """
        import numpy as np

        from tokenizer.index_kernel import index_merges, index_tokens
        from tokenizer.kernel_support import NOTHING

        self.tokens = _packed(END.join([*vocab, ""]))
        self.starts = np.empty(len(vocab) + 1, np.int64)
        self.slots = np.full(_table_size(len(vocab)), -1, np.int32)
        self.ids = np.fromiter(vocab.values(), np.uint32, len(vocab))
        index_tokens(self.tokens, self.starts, self.slots)
        size = _table_size(num_merges)
        self.pairs = np.full((size, 2), NOTHING, np.uint64)
        self.shift = 65 - size.bit_length()
        tables = self.tokens, self.starts, self.slots, self.pairs, self.shift
        self.missing: int = index_merges(_packed(merges), num_merges, len(prefix.encode()), *tables)

    def encode(self, tokens: Sequence[str]) -> list[int]:
        """The ids of a word, given as the tokens to begin with; all are in the vocabulary."""
        import numpy as np

        from tokenizer.merge_kernel import merge_tokens

        symbols = np.empty(len(tokens), np.int32)
        text = _packed(END.join([*tokens, ""]))
        size = merge_tokens(text, symbols, self.tokens, self.starts, self.slots, self.pairs, self.shift)
        ids: list[int] = self.ids[symbols[:size]].tolist()
        return ids


def _packed(text: str) -> np.ndarray:
    """Strings that `END` ends, as bytes with what the kernels need behind them."""
    import numpy as np

    return np.frombuffer(text.encode("utf-8", "surrogateescape") + _PADDING, np.uint8)


def _table_size(num_entries: int) -> int:
    """A power of two that leaves a hash table a third empty, at the least."""
    return max(2, 1 << (3 * num_entries // 2).bit_length())
