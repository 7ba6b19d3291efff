"""Readers of calls with keyword arguments, as in Python: "f(a=1, b=['x'])"."""

from __future__ import annotations

import json
import re
from typing import Any

from runtime.text.tools.reader import WHITE_SPACE, AnswerReader, Reader, Reading

MAX_DEPTH = 64
"""Deepest nesting of lists and objects in an argument."""

_QUOTES = ('"', "'")
_NUMBER = re.compile(r"[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][-+]?\d+)?")
_BARE = re.compile(r"[^\W\d][\w.$-]*")
_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_PAIR = r"u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPE = re.compile(rf"\\(?:{_PAIR}|u[0-9a-fA-F]{{4}}|x[0-9a-fA-F]{{2}}|.|\n)")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", "\\": "\\", "'": "'", '"': '"', "/": "/"}


class NoLiteralError(ValueError):
    """The text is not a literal."""


class Literals:
    """Parses arguments out of a complete text. Raises `NoLiteralError`."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def arguments(self, closer: str = "") -> dict[str, Any]:
        """ "key=value" after "key=value", up to the bracket that closes them, or the whole text."""
        found: dict[str, Any] = {}
        while not self._is_behind(closer):
            key = self._key()
            self._expect("=")
            found[key] = self._value(0)
            if not self._is_at(closer):
                self._expect(",")
        return found

    def calls(self) -> list[tuple[str, dict[str, Any]]]:
        """The whole text: "[f(a=1), g()]"."""
        found: list[tuple[str, dict[str, Any]]] = []
        self._expect("[")
        while not self._is_behind("]"):
            name = self._key()
            self._expect("(")
            found.append((name, self.arguments(")")))
            if not self._is_at("]"):
                self._expect(",")
        if self._skip() < len(self._text):
            raise NoLiteralError
        return found

    def _is_at(self, closer: str) -> bool:
        """Whether the closer is next, or the text ends if there is none."""
        self._skip()
        return self._text.startswith(closer, self._at) if closer else self._at >= len(self._text)

    def _is_behind(self, closer: str) -> bool:
        """The same; a closer is read."""
        is_at = self._is_at(closer)
        self._at += len(closer) if is_at else 0
        return is_at

    def _skip(self) -> int:
        while self._at < len(self._text) and self._text[self._at] in WHITE_SPACE:
            self._at += 1
        return self._at

    def _expect(self, wanted: str) -> None:
        self._skip()
        if not self._text.startswith(wanted, self._at):
            raise NoLiteralError
        self._at += len(wanted)

    def _quote(self) -> str | None:
        return next((quote for quote in _QUOTES if self._text.startswith(quote, self._at)), None)

    def _key(self) -> str:
        self._skip()
        if self._quote() is not None:
            return self._string()
        found = _BARE.match(self._text, self._at)
        if found is None:
            raise NoLiteralError
        self._at = found.end()
        return found[0]

    def _value(self, depth: int) -> Any:
        self._skip()
        if self._quote() is not None:
            return self._string()
        first = self._text[self._at : self._at + 1]
        if first in ("[", "(", "{") and depth >= MAX_DEPTH:
            raise NoLiteralError
        if first in ("[", "("):
            return self._items("]" if first == "[" else ")", depth)
        if first == "{":
            return self._object(depth)
        if (found := _NUMBER.match(self._text, self._at)) is not None:
            self._at = found.end()
            return _number(found[0])
        found = _BARE.match(self._text, self._at)
        if found is None or found[0] not in _WORDS:
            raise NoLiteralError
        self._at = found.end()
        return _WORDS[found[0]]

    def _string(self) -> str:
        quote = self._quote()
        assert quote is not None
        start = self._at = self._at + len(quote)
        while not self._text.startswith(quote, self._at):
            if self._at >= len(self._text):
                raise NoLiteralError
            self._at += 2 if self._text[self._at] == "\\" else 1
        raw = self._text[start : self._at]
        self._at += len(quote)
        return _ESCAPE.sub(_unescaped, raw)

    def _items(self, closer: str, depth: int) -> list[Any]:
        self._at += 1
        items: list[Any] = []
        while not self._text.startswith(closer, self._skip()):
            items.append(self._value(depth + 1))
            if not self._text.startswith(closer, self._skip()):
                self._expect(",")
        self._at += 1
        return items

    def _object(self, depth: int) -> dict[str, Any]:
        self._at += 1
        found: dict[str, Any] = {}
        while not self._text.startswith("}", self._skip()):
            key = self._key()
            self._expect(":")
            found[key] = self._value(depth + 1)
            if not self._text.startswith("}", self._skip()):
                self._expect(",")
        self._at += 1
        return found


def _number(text: str) -> float | int:
    digits = text.replace("_", "")
    try:
        value = float(digits) if re.search(r"[.eE]", digits) else int(digits)
    except ValueError:  # too many digits
        raise NoLiteralError from None
    if value in (float("inf"), float("-inf")):
        raise NoLiteralError
    return value


def _unescaped(found: re.Match[str]) -> str:
    body = found[0][1:]
    if body[0] in "ux" and len(body) > 1:
        text = bytes(found[0], "ascii").decode("unicode_escape")
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return _ESCAPES.get(body, found[0])


def arguments_of(text: str) -> str | None:
    """The arguments as a JSON object; None if they cannot be parsed."""
    try:
        return json.dumps(Literals(text).arguments(), ensure_ascii=False)
    except NoLiteralError:
        return None


def python_call(answer: AnswerReader, method: str = "") -> Reading[bool]:
    """Reads "name(key=value, …)", after the name `method`. Returns whether it is one; handed out once complete."""
    start = answer.at
    name = yield from answer.name(("(",))
    if name is None or not name.endswith(method) or not name.removesuffix(method):
        answer.at = start
        return False
    end = yield from _closing(answer, answer.at)
    arguments = None if end is None else arguments_of(answer.held[answer.at + 1 : end])
    if end is None or arguments is None:
        answer.at = start
        return False
    answer.at = end + 1
    return answer.begin(name.removesuffix(method), arguments)


def _closing(answer: AnswerReader, at: int) -> Reading[int | None]:
    """The index of the bracket that closes the one at `at`."""
    depth, quote = 0, ""
    while True:
        while at < len(answer.held):
            character = answer.held[at]
            if quote:
                if character == "\\":
                    at += 1
                elif character == quote:
                    quote = ""
            elif character in "'\"":
                quote = character
            elif character in "([{":
                depth += 1
            elif character in ")]}":
                depth -= 1
                if depth == 0:
                    return at
            at += 1
        if answer.has_ended or depth > MAX_DEPTH + 1:
            return None
        yield


def python_calls(openings: tuple[str, ...], closings: tuple[str, ...]) -> Reader:
    """A list of calls, "[f(a=1), g()]", at the start of an answer, or between tags; between tags, calls without the
    brackets, too."""

    def read(answer: AnswerReader) -> Reading[None]:
        if (yield from answer.next_character()) == "[":
            yield from python_list(answer)
        while (yield from answer.content_until(openings)) is not None:
            num_calls = answer.num_begun
            if (yield from answer.next_character()) == "[":
                yield from python_list(answer)
            else:
                while (yield from python_call(answer)):
                    answer.end_call()
                    yield from answer.next_character()
            if answer.num_begun > num_calls:
                yield from answer.close(*closings)

    return read


def python_list(answer: AnswerReader) -> Reading[None]:
    """Reads "[f(a=1), g()]", whose bracket is the next character."""
    answer.at += 1
    first: str | None = ","
    while first == ",":
        yield from answer.next_character()
        if not (yield from python_call(answer)):
            return
        answer.end_call()
        first = yield from answer.next_character()
        if first in (",", "]"):
            answer.at += 1
            answer.layout()
