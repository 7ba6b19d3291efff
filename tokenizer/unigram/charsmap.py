"""SentencePiece's tables that replace characters before a text is cut (`precompiled_charsmap`), and its normalizer,
which changes blanks after them."""

from __future__ import annotations

import base64
import binascii
import functools
import re
import struct
from typing import Any

import numpy as np

from runtime.later import later
from tokenizer.bpe.merge_table import address
from tokenizer.byte_level import encode_utf8
from tokenizer.json_fields import Fields
from tokenizer.patterns.compiled import compile_raw

_kernels = later("tokenizer.unigram.kernels")

MARK = "▁"
_LONGEST_WHOLE = 6  # bytes of a sequence of combined characters that `tokenizers` seeks as a whole


def tables_of(blob: bytes) -> tuple[np.ndarray, np.ndarray]:
    """The trie and the values of a table. Raises ValueError, which says what is wrong."""
    if len(blob) < 8:
        raise ValueError(f"has {len(blob)} bytes, which are no table")
    (size,) = struct.unpack_from("<I", blob)
    if size < 4 or size % 4 or size >= len(blob) - 4:
        raise ValueError(f"says that {size} of its {len(blob) - 4} bytes are a trie")
    if blob[-1]:
        raise ValueError("does not end in a zero byte")
    return np.frombuffer(blob, np.uint32, size // 4, 4), np.frombuffer(blob, np.uint8, offset=4 + size)


class Charsmap:
    """Rules of a table: the longest key at each place of a text is replaced by its value."""

    def __init__(self, blob: bytes) -> None:
        """Raises ValueError, as `tables_of`."""
        self._units, self._values = tables_of(blob)
        self._value_of = functools.lru_cache(maxsize=4096)(self._find)
        self.replace("a")  # compiles the loop

    def replace(self, text: str) -> str:
        """The text with all rules applied."""
        raw = encode_utf8(text)
        padded = np.frombuffer(raw + bytes(8), np.uint8)
        room = 2 * len(raw) + 64
        while True:
            out = np.empty(room, np.uint8)
            size = _kernels.replace_characters(
                address(padded), len(raw), address(self._units), len(self._units), address(self._values),
                len(self._values), address(out), room,
            )  # fmt: skip
            if size <= room:
                return out[:size].tobytes().decode("utf-8", "replace")
            room = size

    def replace_as_library(self, text: str) -> str:
        """The text as the `tokenizers` library replaces: whole sequences of combined characters if they are short,
        then single characters, each by the shortest key that it begins with."""
        pieces = []
        for combined in _combined().findall(text):
            whole = self._value_of(combined) if len(encode_utf8(combined)) < _LONGEST_WHOLE else None
            if whole is not None:
                pieces.append(whole)
                continue
            for each in combined:
                value = self._value_of(each)
                pieces.append(each if value is None else value)
        return "".join(pieces)

    def _find(self, text: str) -> str | None:
        """The value of the shortest key that a text begins with."""
        raw = encode_utf8(text)
        padded = np.frombuffer(raw + bytes(8), np.uint8)
        rule = int(_kernels.rule_at(address(padded), len(raw), address(self._units), len(self._units), True))
        value = rule >> 32
        if not rule & 0xFFFF_FFFF or value >= len(self._values):
            return None
        blob = self._values[value:].tobytes()
        return blob[: blob.index(0)].decode("utf-8", "replace")


@functools.cache
def _combined() -> Any:
    return compile_raw(r"\X")


def precompiled(fields: Fields, name: str = "precompiled_charsmap") -> Charsmap | None:
    """The table of a field, in base 64 or as bytes; None if it is empty. Raises `TokenizerFileError`."""
    stored = fields.get(name)
    try:
        blob = stored if isinstance(stored, bytes) else base64.b64decode(stored or "", validate=True)
        return Charsmap(blob) if blob else None
    except (ValueError, TypeError, binascii.Error) as error:
        fields.fail(name, str(error))


class SentencePieceNormalizer:
    """SentencePiece's changes of a text before it is cut: characters are replaced, blanks dropped or written as "▁",
    and one is put at the beginning. Tokens that users defined stay as they are."""

    def __init__(self, fields: Fields) -> None:
        """From a "SentencePiece" object (`sentencepiece.normalizer_of`). Raises `TokenizerFileError`."""
        self._charsmap = precompiled(fields)
        self._drops, self._escapes = fields.boolean("drops_blanks"), fields.boolean("escapes")
        self._prefix = fields.choice("prefix", ("never", "first", "always"))
        self._is_suffix = fields.boolean("is_suffix")
        kept = sorted(fields.items("kept"), key=len, reverse=True)
        self._kept = re.compile("(" + "|".join(map(re.escape, kept)) + ")") if kept else None

    def __call__(self, text: str, is_at_start: bool) -> tuple[str, bool]:
        """The normalized text of a stretch between added tokens."""
        if not text:
            return text, is_at_start
        if self._charsmap is not None:
            pieces = self._kept.split(text) if self._kept is not None else [text]
            text = "".join(piece if i % 2 else self._charsmap.replace(piece) for i, piece in enumerate(pieces))
        blank = MARK if self._escapes else " "
        if self._drops:
            text = re.sub(" {2,}", " ", text).lstrip(" ")
            if not text:
                return text, False
        text = text.replace(" ", blank)
        is_first = self._prefix == "first" and is_at_start and not text.startswith(blank)
        has_prefix = self._prefix == "always" or is_first
        if has_prefix and not self._is_suffix:
            text = blank + text
        if self._drops:
            text = text.rstrip(blank)
        return (text + blank if has_prefix and self._is_suffix else text), False
