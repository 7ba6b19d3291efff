"""Reader of Gemma's notation, "call:name{key:value,…}" between tags: keys without quotes, strings in special ones."""

from __future__ import annotations

import json

from runtime.text.tools.reader import MAX_NAME_LENGTH, WHITE_SPACE, AnswerReader, Reader, Reading

MAX_DEPTH = 64
"""Deepest nesting of lists and objects in an argument."""
_MOST_SCALAR = 4096
"""Most characters of a value without quotes."""


def gemma_calls(opening: str, closing: str, quote: str) -> Reader:
    """Calls of FunctionGemma and Gemma 4. Arguments are handed out as JSON as they come; a word without quotes is a
    string. From where they cannot be read on, they are handed out unchanged, up to the closing tag."""

    def read(answer: AnswerReader) -> Reading[None]:
        while (yield from answer.content_until((opening,))) is not None:
            start = answer.at
            yield from answer.next_character()
            name = None
            if (yield from answer.accept("call:")) is not None:
                name = yield from answer.name(("{",))
            if name is None or not answer.begin(name):
                answer.at = start
                continue
            if (yield from _Arguments(answer, closing, quote).read()):
                yield from answer.close(closing)
            else:
                answer.end_call()

    return read


class _Arguments:
    """Reads the object at the current place."""

    def __init__(self, answer: AnswerReader, closing: str, quote: str) -> None:
        self._answer, self._closing, self._quote = answer, closing, quote
        self._before = ""  # JSON that is said with the next text

    def read(self) -> Reading[bool]:
        """Returns whether the closing tag is still to be read."""
        answer = self._answer
        is_whole = yield from self._value(0)
        self._say("")
        if is_whole:
            return True
        while True:  # the rest unchanged
            found = answer.first_of((self._closing,), answer.at)
            answer.at = answer.safe_end((self._closing,), answer.at) if found is None else found[0]
            if answer.at:
                self._say(answer.held[: answer.at])
            if found is not None or answer.has_ended:
                return found is not None
            yield

    def _say(self, text: str) -> None:
        """Hands out the text read so far as this JSON."""
        self._before += text
        if self._answer.at:
            self._answer.argue(self._before)
            self._before = ""

    def _value(self, depth: int) -> Reading[bool]:
        answer = self._answer
        first = yield from answer.next_character()
        if (yield from answer.accept(self._quote)) is not None:
            return (yield from self._string())
        if first == '"':
            return (yield from self._json_string())
        if first in ("{", "["):
            return depth < MAX_DEPTH and (yield from self._items(first, depth))
        return (yield from self._scalar())

    def _items(self, opener: str, depth: int) -> Reading[bool]:
        """A list, or an object."""
        answer, closer = self._answer, "}" if opener == "{" else "]"
        answer.at += 1
        self._say(opener)
        comma = ""
        while (first := (yield from answer.next_character())) != closer:
            if first is None or first in "}]":
                return False
            self._before += comma
            if opener == "{" and not (yield from self._key()):
                return False
            if not (yield from self._value(depth + 1)):
                return False
            first = yield from answer.next_character()
            if first == ",":
                answer.at += 1
            elif first != closer:
                return False
            comma = ", "
        answer.at += 1
        self._say(closer)
        return True

    def _key(self) -> Reading[bool]:
        answer = self._answer
        first = yield from answer.next_character()
        if (yield from answer.accept(self._quote)) is not None:
            is_read = yield from self._string()
        elif first == '"':
            is_read = yield from self._json_string()
        else:
            found = yield from answer.find((":", self._closing), answer.at, most=MAX_NAME_LENGTH)
            is_read = found is not None and found[1] == ":"
            if found is not None and is_read:
                key = answer.held[answer.at : found[0]].strip(WHITE_SPACE)
                answer.at = found[0]
                self._say(json.dumps(key, ensure_ascii=False))
        if not is_read or (yield from answer.next_character()) != ":":
            return False
        answer.at += 1
        self._say(": ")
        return True

    def _string(self) -> Reading[bool]:
        """The rest of a string, handed out as it comes."""
        answer, quote = self._answer, self._quote
        self._say('"')
        while True:
            found = answer.first_of((quote,), answer.at)
            end = answer.safe_end((quote,), answer.at) if found is None else found[0]
            text, answer.at = answer.held[answer.at : end], end
            self._say(json.dumps(text, ensure_ascii=False)[1:-1])
            if found is not None:
                answer.at += len(quote)
                self._say('"')
                return True
            if answer.has_ended:
                return False
            yield

    def _json_string(self) -> Reading[bool]:
        text = yield from self._answer.json_value()
        self._say(text or "")
        return text is not None

    def _scalar(self) -> Reading[bool]:
        answer = self._answer
        found = yield from answer.find((",", "}", "]", self._closing), answer.at, most=_MOST_SCALAR)
        if found is None or found[1] == self._closing:
            return False
        text = answer.held[answer.at : found[0]].strip(WHITE_SPACE)
        answer.at = found[0]
        self._say(_scalar_as_json(text))
        return True


def _scalar_as_json(text: str) -> str:
    word = {"True": "true", "False": "false", "None": "null"}.get(text, text)
    try:
        value = json.loads(word, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return word if value is None or isinstance(value, bool | int | float) else json.dumps(text, ensure_ascii=False)


def _no_constant(name: str) -> None:
    raise ValueError(name)
