"""Marks that keep the text of special tokens in users' messages from becoming those tokens.

A chat template writes special tokens around the messages, and the rendered text is encoded as one; so
"<|im_end|>" in a message would end its turn. Before rendering, a mark (a character that occurs nowhere) is put into
each such text in messages, tools and variables. The template handles the strings as usual; while the text is encoded, a
token that holds a mark is not found, and the mark is dropped. Strings without marks are untouched.

A template may join strings into a token that none of them held (a tool's parameter is named "|im_end|", and the
template writes it between "<" and ">"). Therefore, if a string holds a protected token's first character, or begins
with one from inside a token, the conversation is rendered again with a mark at each such place. If the two renderings
differ in special tokens, the second is used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from tokenizer.errors import ChatTemplateError
from tokenizer.templates.written_json import rebuilt, text_of

_CANDIDATES = (*range(0xFDD0, 0xFDF0), *range(0xE000, 0xF900))
"""Characters that mean nothing, then those for private use."""

_NO_TURN = re.compile("think|tool", re.IGNORECASE)
"""In the text of tokens around reasoning and calls."""

_LOOKS_FOR = (
    r"""(?:r?split|r?partition|startswith|endswith|replace|r?find|count)\s*\(\s*(['"])(?:\\n)*{token}""",
    r"""(['"]){token}(?:\\n)*\1\s*(?:not\s+)?in\b""",
)
"""How a template looks for a token's text in an assistant's content."""

_PLAIN = (" ", "\t", "\n")


class ContentMarks:
    """The protected tokens' texts, compiled.

    turn_ids  the tokens' ids, without those that the template looks for in the assistant's content: there they stay
              tokens, if they are around reasoning and calls
    """

    def __init__(self, tokens: Mapping[str, int], template: str) -> None:
        sought = {text for text in tokens if is_no_turn(text) and _is_sought(text, template)}
        self.turn_ids = frozenset(i for text, i in tokens.items() if text not in sought)
        texts = sorted({text for text in tokens if len(text) > 1}, key=len, reverse=True)
        self._whole = _inside(texts)
        self._turns = _inside([text for text in texts if text not in sought])
        firsts = {text[0] for text in texts}
        inner = set("".join(text[1:] for text in texts))
        self._first = _any_of(firsts)
        self._inner = _any_of(inner)

    def concerns(self, value: Any) -> bool:
        """Whether any string of the value could be a part of a token."""
        return any(self._at(text) is not None for text in strings_of(value))

    def strict(self, mark: str) -> Callable[[str], str]:
        """Marks each place where a token could begin or continue."""

        def put(text: str) -> str:
            marked = text if self._first is None else self._first.sub(lambda found: found.group() + mark, text)
            start = len(text) - len(text.lstrip())
            if self._inner is not None and self._inner.match(text, start):
                marked = marked[:start] + mark + marked[start:]
            return marked

        return put

    def exact(self, mark: str, *, is_answer: bool) -> Callable[[str], str]:
        """Marks the texts of whole tokens, except those in the assistant's messages that the template looks for."""
        pattern = self._turns if is_answer else self._whole

        def put(text: str) -> str:
            return text if pattern is None else pattern.sub(lambda found: found.group() + mark, text)

        return put

    def _at(self, text: str) -> Any:
        if self._first is not None and (found := self._first.search(text)) is not None:
            return found
        return None if self._inner is None else self._inner.match(text, len(text) - len(text.lstrip()))


def is_no_turn(text: str) -> bool:
    """Whether a token stands around reasoning or calls."""
    return _NO_TURN.search(text) is not None


def _is_sought(text: str, template: str) -> bool:
    return any(re.search(pattern.replace("{token}", re.escape(text)), template) for pattern in _LOOKS_FOR)


def _inside(texts: Sequence[str]) -> re.Pattern[str] | None:
    """The first character of each token, wherever the rest follows."""
    if not texts:
        return None
    return re.compile("|".join(f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in texts))


def _any_of(characters: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern of these characters, without letters and digits: templates compare names."""
    kept = [c for c in characters if not c.isalnum() and c not in _PLAIN]
    return re.compile(f"[{''.join(map(re.escape, sorted(kept)))}]") if kept else None


def strings_of(value: Any) -> Iterator[str]:
    """Every string in a value of plain types, keys included. Iterates by levels, so no depth overflows the stack."""
    level = [value]
    while level:
        following: list[Any] = []
        for each in level:
            if (written := text_of(each)) is not None:
                yield written
            if isinstance(each, str):
                yield each
            elif isinstance(each, Mapping):
                following += chain(each.keys(), each.values())
            elif isinstance(each, (list, tuple)):
                following += each
        level = following


def mapped(value: Any, put: Callable[[str], str]) -> Any:
    """The value with each string replaced, keys included. Raises `RecursionError` if it is nested too deeply."""
    if isinstance(value, str):
        return put(value)
    if isinstance(value, Mapping):
        return rebuilt(value, {mapped(key, put): mapped(item, put) for key, item in value.items()}, put)
    if isinstance(value, (list, tuple)):
        return rebuilt(value, [mapped(item, put) for item in value], put)
    return value


def free_mark(value: Any, template: str) -> str:
    """A character that neither the value nor the template holds, nor its escape. Raises `ChatTemplateError`."""
    used = set().union(*map(set, strings_of(value)), template)
    texts: list[str] | None = None
    for code in _CANDIDATES:
        if chr(code) in used:
            continue
        if "\\" in used:
            if texts is None:
                texts = [text.lower() for text in (*strings_of(value), template) if "\\" in text]
            if any(escape_of(chr(code)) in text for text in texts):
                continue
        return chr(code)
    raise ChatTemplateError("the conversation holds every character for private use")


def escape_of(mark: str) -> str:
    """The mark's escape, as in ASCII-only JSON and Python."""
    return f"\\u{ord(mark):04x}"


def without(text: str, mark: str) -> str:
    """The text without marks."""
    return text.replace(mark, "").replace(escape_of(mark), "")
