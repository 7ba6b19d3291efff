"""Added tokens: strings that become one id wherever they stand in a text, before the model sees it.

The rules are those of the `tokenizers` library: tokens that are not `normalized` are sought in the text as
it came, the others in the normalized text, by their normalized content; at each place the longest token
wins; `single_word` asks for a word boundary on both sides, `lstrip` and `rstrip` swallow the white space
around.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tokenizer.json_fields import Fields
from tokenizer.patterns import unicode_tables
from tokenizer.patterns.compiled import RUST_WORD, compile_raw


@dataclass(frozen=True, slots=True)
class AddedToken:
    """One added token and its rules."""

    content: str
    is_special: bool = False
    is_normalized: bool = False
    is_single_word: bool = False
    strips_left: bool = False
    strips_right: bool = False

    @classmethod
    def read(cls, fields: Fields) -> AddedToken:
        """Read `{"content": ..., "lstrip": ..., ...}` as both tokenizer.json and tokenizer_config.json write
        it."""
        is_special = fields.boolean("special", False)
        return cls(
            content=fields.string("content"),
            is_special=is_special,
            is_normalized=fields.boolean("normalized", not is_special),
            is_single_word=fields.boolean("single_word", False),
            strips_left=fields.boolean("lstrip", False),
            strips_right=fields.boolean("rstrip", False),
        )


class AddedTokenFinder:
    """Finds a set of added tokens in a text: leftmost, then longest, without overlaps."""

    def __init__(self, tokens: Iterable[tuple[str, int, AddedToken]]) -> None:
        """`tokens`: (string to seek, id, token)."""
        self.tokens = {text: (i, token) for text, i, token in tokens if text}
        """Strings to seek: id, token."""
        self.has_rules = any(
            token.is_single_word or token.strips_left or token.strips_right for _, token in self.tokens.values()
        )
        """Whether what stands around a token matters."""
        lengths: dict[str, set[int]] = {}
        for text in self.tokens:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}
        firsts = "".join(map(re.escape, self._lengths))
        self._candidates = re.compile(f"[{firsts}]") if firsts else None

    def split(self, text: str, is_special_split: bool) -> list[tuple[str, int, int]]:
        """Cut `text` into (piece, start, id): id -1 is ordinary text, of which no piece is empty.

        With `is_special_split`, special tokens are ordinary text.
        """
        if self._candidates is None:
            return [(text, 0, -1)] if text else []
        pieces: list[tuple[str, int, int]] = []
        done = 0
        for start, end, i, token in self._matches(text):
            if is_special_split and token.is_special:
                continue
            if token.is_single_word and not _is_single_word(text, start, end):
                continue
            if token.strips_left:
                start = max(start, done)  # the token before may have swallowed this one's beginning
                while start > done and text[start - 1] in unicode_tables.WHITE_SPACE:
                    start -= 1
            if token.strips_right:
                while end < len(text) and text[end] in unicode_tables.WHITE_SPACE:
                    end += 1
            if start >= end:  # nothing is left of it
                continue
            if done < start:
                pieces.append((text[done:start], done, -1))
            pieces.append((text[start:end], start, i))
            done = end
        if done < len(text):
            pieces.append((text[done:], done, -1))
        return pieces

    def _matches(self, text: str) -> Iterator[tuple[int, int, int, AddedToken]]:
        if self._candidates is None:
            return
        position = 0
        while (candidate := self._candidates.search(text, position)) is not None:
            start = candidate.start()
            position = start + 1
            for length in self._lengths[text[start]]:
                found = self.tokens.get(sought := text[start : start + length])
                if found is not None:
                    position = start + len(sought)  # the text may end before
                    yield start, position, *found
                    break


@functools.cache
def _word_character() -> Any:
    return compile_raw(f"[{RUST_WORD}]")


def _is_single_word(text: str, start: int, end: int) -> bool:
    is_word = _word_character().match
    return not (start and is_word(text[start - 1])) and not (end < len(text) and is_word(text[end]))
