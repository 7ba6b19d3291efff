"""The WordPiece model (https://arxiv.org/abs/1609.08144): the longest tokens from a word's beginning on.

Tokens that do not begin a word are written with a prefix, "##". A word with a part that no token has, or of too many
characters, is one unknown token.
"""

from __future__ import annotations

from tokenizer.bpe.model import read_vocab
from tokenizer.json_fields import Fields

_KNOWN = ("type", "unk_token", "continuing_subword_prefix", "max_input_chars_per_word", "vocab")


class WordPieceModel:
    """A vocabulary. Immutable after construction, so that threads may share it."""

    def __init__(self, fields: Fields) -> None:
        """Read the "model" object. Raises `TokenizerFileError`."""
        fields.known(_KNOWN)
        self.vocab = read_vocab(fields)
        prefix = fields.optional_string("continuing_subword_prefix")
        self._prefix = "##" if prefix is None else prefix
        self._most = fields.count("max_input_chars_per_word", 100)
        unknown = fields.string("unk_token", "[UNK]")
        if unknown not in self.vocab:
            fields.fail("unk_token", f"the token {unknown!r} is not in the vocabulary")
        self._unknown = [self.vocab[unknown]]
        self._longest = max(map(len, self.vocab))

    def encode_word(self, word: str) -> list[int]:
        """The ids of one word, which is not empty."""
        if len(word) > self._most:
            return self._unknown
        ids: list[int] = []
        start = 0
        while start < len(word):
            prefix = self._prefix if start else ""
            for end in range(min(len(word), start + self._longest), start, -1):
                if (found := self.vocab.get(prefix + word[start:end])) is not None:
                    ids.append(found)
                    start = end
                    break
            else:
                return self._unknown
        return ids
