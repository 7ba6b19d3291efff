"""The BPE model: one word in, its token ids out.

Byte pair encoding (Sennrich et al. 2016, https://arxiv.org/abs/1508.07909): the word's characters are merged
pair by pair, always the pair of lowest rank, leftmost first. This module makes the word's initial tokens; the merging
is compiled (`merge_kernel`).

The pre-tokenizer makes the words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizer.bpe.merge_table import MIDDLE, MergeError, MergeTable
from tokenizer.byte_level import BYTE_TO_CHAR
from tokenizer.components.added_tokens import AddedToken, AddedTokenFinder
from tokenizer.json_fields import Fields, shown
from tokenizer.warn import warn_once

_LONGEST_CACHED = 256
_MOST_CACHED = 1 << 16
_KNOWN = (
    "type",
    "dropout",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
    "vocab",
    "merges",
    "ranks",
    "whole",
)


class BpeModel:
    """A vocabulary and its merges. Immutable after construction, so that threads may share it.

    Beside the fields of a tokenizer.json, the model may have `ranks`, one for each token in the vocabulary's order
    (`MergeTable.of_ranks`), instead of `merges`; and `whole`: tokens that are found in a word first and never merged.
    """

    def __init__(self, fields: Fields, *, passes_over_merges: bool = False) -> None:
        """Read the "model" object; with `passes_over_merges`, skip those of unknown tokens. Raises
        `TokenizerFileError`."""
        if fields.get("type") is not None:
            fields.one_of("model", ["BPE"])
        fields.known(_KNOWN)
        _pass_over_dropout(fields)
        self.vocab = read_vocab(fields)
        self._prefix = fields.optional_string("continuing_subword_prefix") or ""
        self._suffix = fields.optional_string("end_of_word_suffix") or ""
        self._fuse_unk = fields.boolean("fuse_unk", False)
        self.ignores_merges = fields.boolean("ignore_merges", False)
        self._unk_token = self._read_unk(fields)
        self._falls_back = fields.boolean("byte_fallback", False)
        whole = fields.items("whole") if fields.get("whole") else []
        self._whole = AddedTokenFinder((word, self.vocab[word], AddedToken(word)) for word in whole) if whole else None
        self._is_plain = not self._prefix and not self._suffix
        self._read_merges(fields, passes_over_merges)

    def _read_unk(self, fields: Fields) -> str | None:
        token = fields.optional_string("unk_token")
        if token is not None and token not in self.vocab:
            warn_once(f"{fields.file}: unk_token {token!r} is not in the vocabulary: text without a token is left out")
            return None
        return token

    def _read_merges(self, fields: Fields, passes_over: bool) -> None:
        if fields.get("ranks") is not None:
            self.table = MergeTable.of_ranks(self.vocab, fields.items("ranks"))
            return
        merges = fields.items("merges")
        is_written_as_strings = bool(merges) and isinstance(merges[0], str)
        pairs = _without_version(fields, merges) if is_written_as_strings else _joined_pairs(fields, merges)
        separator = " " if is_written_as_strings else MIDDLE
        try:
            self.table = MergeTable(self.vocab, pairs, separator, self._prefix)
        except UnicodeEncodeError:
            fields.fail("vocab", "it or the merges hold a lone surrogate")
        except MergeError as error:
            if passes_over:
                self.table = self._table_of_known(fields, pairs, separator)
                return
            pair = pairs[error.place].split(separator)
            if len(pair) != 2:
                fields.fail(f"merges[{error.place}]", f"expected a pair of tokens, found {shown(pairs[error.place])}")
            left, right = pair
            tokens = (left + right[len(self._prefix) :], left, right)
            missing = next(token for token in tokens if token not in self.vocab)
            fields.fail(f"merges[{error.place}]", f"the token {shown(missing)} is not in the vocabulary")

    def _table_of_known(self, fields: Fields, pairs: list[str], separator: str) -> MergeTable:
        """The table without merges of, or to, an unknown token."""
        known = []
        for pair in pairs:
            left, _, right = pair.partition(separator)
            if {left, right, left + right[len(self._prefix) :]} <= self.vocab.keys():
                known.append(pair)
        first = next(pair for pair, kept in zip(pairs, [*known, ""]) if pair != kept)
        count = f"{len(pairs) - len(known)} of {len(pairs)} merges name a token that is not in the vocabulary"
        warn_once(
            f"{fields.file}: {fields.field('merges')}: {count}, such as {shown(first)}; they are passed over, and words"
            " are encoded without them"
        )
        return MergeTable(self.vocab, known, separator, self._prefix)

    @property
    def is_byte_level(self) -> bool:
        """Whether a word of the byte-level alphabet is encoded letter by letter, without unknown ones."""
        letters = set(BYTE_TO_CHAR)
        has_all = letters <= self.vocab.keys()
        return self._is_plain and (has_all or (self._unk_token is None and not self._falls_back))

    def letter_symbols(self) -> dict[str, int]:
        """The symbols of the byte-level alphabet that the vocabulary has, in `table`."""
        symbols = dict(zip(self.vocab, range(len(self.vocab))))
        return {letter: symbols[letter] for letter in BYTE_TO_CHAR if letter in symbols}

    def encode_word(self, word: str) -> list[int]:
        """The ids of one word, which is not empty."""
        if self._whole is not None:
            pieces = self._whole.split(word, False)
            return [i for piece, _, whole in pieces for i in ([whole] if whole >= 0 else self._merged(piece))]
        return self._merged(word)

    def _merged(self, word: str) -> list[int]:
        if self.ignores_merges and (whole := self.vocab.get(word)) is not None:
            return [whole]
        return self.table.encode(self._character_tokens(word))

    def _character_tokens(self, word: str) -> list[str]:
        """The word's initial tokens, one for each character in the vocabulary."""
        if self._is_plain and all(map(self.vocab.__contains__, word)):
            return list(word)
        tokens: list[str] = []
        is_unk_pending = False
        for i, character in enumerate(word):
            symbol = (self._prefix if i else "") + character + (self._suffix if i == len(word) - 1 else "")
            if symbol in self.vocab:
                if is_unk_pending and self._unk_token is not None:
                    tokens.append(self._unk_token)
                    is_unk_pending = False
                tokens.append(symbol)
                continue
            fallback = [f"<0x{byte:02X}>" for byte in symbol.encode("utf-8", "replace")]
            if self._falls_back and all(map(self.vocab.__contains__, fallback)):
                tokens += fallback
            elif self._unk_token is not None:
                if is_unk_pending and not self._fuse_unk:
                    tokens.append(self._unk_token)
                is_unk_pending = True
        if is_unk_pending and self._unk_token is not None:
            tokens.append(self._unk_token)
        return tokens


class WordCache(dict[str, tuple[int, ...]]):
    """Words already encoded. `cache[word]` encodes what is missing.

    Bounded: it starts anew when it holds 65,536 words, and holds none longer than 256 characters. Threads
    may share it: each operation is one step of the interpreter, and the worst race encodes a word twice.
    """

    def __init__(self, encode_word: Callable[[str], list[int]]) -> None:
        super().__init__()
        self._encode_word = encode_word

    def __missing__(self, word: str) -> tuple[int, ...]:
        ids = tuple(self._encode_word(word))
        if len(word) <= _LONGEST_CACHED:
            if len(self) >= _MOST_CACHED:
                self.clear()
            self[word] = ids
        return ids


def _pass_over_dropout(fields: Fields) -> None:
    """Refuses dropout of merges, which is for training: a text would get other ids each time."""
    share = fields.get("dropout")
    if share is None:
        return
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        fields.fail("dropout", f"must be null or a number from 0 to 1, found {shown(share)}")
    if share:
        warn_once(f"{fields.file}: {fields.field('dropout')} is {share}, which is of training: no merge is left out")


def read_vocab(fields: Fields) -> dict[str, int]:
    vocab: dict[str, int] = fields.object("vocab").values  # type: ignore[assignment]
    ids = vocab.values()
    if set(map(type, ids)) - {int} or (vocab and not 0 <= min(ids) <= max(ids) < 1 << 32):
        for token, i in vocab.items():
            if type(i) is not int or not 0 <= i < 1 << 32:
                fields.fail(
                    "vocab",
                    f"the id of {shown(token)} must be an integer from 0 to 2**32 - 1, found {shown(i)}",
                )
    return vocab


def _without_version(fields: Fields, merges: list[Any]) -> list[str]:
    """Merges written "left right", without the line that names the file's version."""
    for i, merge in enumerate(merges) if set(map(type, merges)) != {str} else ():
        if not isinstance(merge, str):
            fields.fail(f"merges[{i}]", f"expected a pair of tokens, found {shown(merge)}")
    if merges[0].startswith("#version"):
        return merges[1:]
    return merges


def _joined_pairs(fields: Fields, merges: list[Any]) -> list[str]:
    """Merges written ["left", "right"], whose tokens may hold spaces: each as left, `MIDDLE` and right."""
    for i, merge in enumerate(merges):
        if not isinstance(merge, list) or len(merge) != 2 or not all(isinstance(part, str) for part in merge):
            fields.fail(f"merges[{i}]", f"expected a pair of tokens, found {shown(merge)}")
    return list(map(MIDDLE.join, merges))
