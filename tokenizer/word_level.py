"""The WordLevel model: each word is one token, and a word without a token is the unknown one."""

from __future__ import annotations

from tokenizer.bpe.model import read_vocab
from tokenizer.json_fields import Fields
from tokenizer.warn import warn_once


class WordLevelModel:
    """A vocabulary. Immutable after construction, so that threads may share it."""

    def __init__(self, fields: Fields) -> None:
        """Read the "model" object. Raises `TokenizerFileError`."""
        fields.known(("type", "unk_token", "vocab"))
        self.vocab = read_vocab(fields)
        unknown = fields.string("unk_token", "<unk>")
        if unknown not in self.vocab:
            told = f"unk_token {unknown!r} is not in the vocabulary: words without a token are left out"
            warn_once(f"{fields.file}: {told}")
        self._unknown = [self.vocab[unknown]] if unknown in self.vocab else []

    def encode_word(self, word: str) -> list[int]:
        """The id of one word, which is not empty."""
        found = self.vocab.get(word)
        return self._unknown if found is None else [found]
