"""Finds the end of a JSON value in a text that comes in pieces (RFC 8259), and repairs invalid JSON: control characters
and unknown escapes in strings, Python's single quotes and words, trailing commas."""

from __future__ import annotations

import json
import re
import sys
from enum import IntEnum, auto

_WHITE_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r"""[^"'\\\x00-\x1f]*""")
_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
_WHOLE_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null|True|False|None")
_MAX_SCALAR_LENGTH = 1024
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_NUM_HEX = {"u": 4, "x": 2, "U": 8}
"""Digits of an escape; the last two are Python's."""


class _State(IntEnum):
    """The expected next element, or the one that contains the next character."""

    VALUE = auto()
    VALUE_OR_END = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()
    STRING = auto()
    ESCAPE = auto()
    SCALAR = auto()
    COMPLETE = auto()
    BROKEN = auto()


class JsonScanner:
    """Reads one value. It is `is_complete` after its last character (a number, at the first character after it), and
    `is_broken` at the first character with which it cannot be read. Each character costs O(1).

    waiting  the end of the read text, whose form as JSON is not known yet
    """

    def __init__(self) -> None:
        self.waiting = ""
        self._state = _State.VALUE
        self._closers: list[str] = []  # of the arrays and objects that are open
        self._is_key = False
        self._quote = '"'
        self._written: list[str] = []

    @property
    def is_complete(self) -> bool:
        return self._state is _State.COMPLETE

    @property
    def is_broken(self) -> bool:
        return self._state is _State.BROKEN

    def take(self) -> str:
        """The text read since the last call, except `waiting`, as JSON. Valid JSON keeps its bytes."""
        written, self._written = "".join(self._written), []
        return written

    def push(self, text: str, start: int) -> int:
        """Reads `text[start:]`, which continues the last push; returns the index of the first character after the
        value."""
        at, end = start, len(text)
        while at < end and self._state < _State.COMPLETE:
            begin = at
            if self._state is _State.STRING:
                at = _end(_PLAIN, text, at)
                self._written.append(text[begin:at])
                if at < end:
                    self._string(text[at])
                    at += 1
            elif self._state is _State.SCALAR:
                at = _end(_SCALAR, text, at)
                self.waiting += text[begin:at]
                if at < end or len(self.waiting) > _MAX_SCALAR_LENGTH:
                    self._end_scalar()
            elif self._state is _State.ESCAPE:
                at += self._escape(text[at])
            else:
                at = _end(_WHITE_SPACE, text, at)
                if self.waiting:
                    self.waiting += text[begin:at]
                else:
                    self._written.append(text[begin:at])
                if at < end:
                    at += self._structure(text[at])
        return at

    def _structure(self, character: str) -> int:
        """Reads a character between values; returns how many of it are read."""
        state, may_have_value = self._state, self._state in (_State.VALUE, _State.VALUE_OR_END)
        may_end = state in (_State.VALUE_OR_END, _State.KEY_OR_END, _State.COMMA_OR_END)
        if may_end and character == self._closers[-1]:
            self._write(self.waiting.removeprefix(",") + self._closers.pop())
            self._end_value()
        elif character in "\"'" and (may_have_value or state is _State.KEY_OR_END):
            self._is_key, self._quote = not may_have_value, character
            self._write(self.waiting + '"')
            self._state = _State.STRING
        elif may_have_value and character in "{[":
            self._closers.append("}" if character == "{" else "]")
            self._write(self.waiting + character)
            self._state = _State.KEY_OR_END if character == "{" else _State.VALUE_OR_END
        elif may_have_value and _SCALAR.fullmatch(character):
            self._write(self.waiting)
            self._state = _State.SCALAR
            return 0
        elif character == ":" and state is _State.COLON:
            self._write(character)
            self._state = _State.VALUE
        elif character == "," and state is _State.COMMA_OR_END:
            self.waiting = character
            self._state = _State.KEY_OR_END if self._closers[-1] == "}" else _State.VALUE_OR_END
        else:
            self._state = _State.BROKEN
            return 0
        return 1

    def _string(self, character: str) -> None:
        """Reads a character that is not plain."""
        if character == self._quote:
            self._write('"')
            if self._is_key:
                self._state = _State.COLON
            else:
                self._end_value()
        elif character == "\\":
            self.waiting = character
            self._state = _State.ESCAPE
        elif character == "'":
            self._write(character)
        else:  # a control character, or JSON's quote within Python's
            self._write(json.dumps(character)[1:-1])

    def _escape(self, character: str) -> int:
        """Reads a character after a backslash; returns how many are read. A character that does not start or continue
        an escape stays as it is."""
        escape = self.waiting[1:]
        if escape:
            num_hex = _NUM_HEX[escape[0]]
            if character not in "0123456789abcdefABCDEF":
                return self._end_escape("\\" + self.waiting, 0)
            self.waiting += character
            if len(escape) == num_hex:
                return self._end_escape(_character(self.waiting), 1)
        elif character in _NUM_HEX:
            self.waiting += character
        elif character in '"\\/bfnrt':
            return self._end_escape("\\" + character, 1)
        elif character == "'":
            return self._end_escape(character, 1)
        else:
            return self._end_escape("\\\\", 0)
        return 1

    def _end_escape(self, written: str, num_read: int) -> int:
        self._write(written)
        self._state = _State.STRING
        return num_read

    def _end_scalar(self) -> None:
        if len(self.waiting) <= _MAX_SCALAR_LENGTH and _WHOLE_SCALAR.fullmatch(self.waiting):
            self._write(_PYTHON.get(self.waiting, self.waiting))
            self._end_value()
        else:
            self._state = _State.BROKEN

    def _end_value(self) -> None:
        self._state = _State.COMMA_OR_END if self._closers else _State.COMPLETE

    def _write(self, text: str) -> None:
        """Writes the waiting text."""
        self._written.append(text)
        self.waiting = ""


def _character(escape: str) -> str:
    """A hexadecimal escape as one of JSON's."""
    kind, digits = escape[1], escape[2:]
    if kind == "U":
        number = int(digits, 16)
        return json.dumps(chr(number))[1:-1] if number <= sys.maxunicode else "\\" + escape
    return "\\u" + digits.rjust(4, "0")


def as_json(text: str) -> str | None:
    """The text as JSON, if it is one object or array, possibly with white space around it; else None."""
    scanner = JsonScanner()
    end = scanner.push(text, 0)
    written = scanner.take().strip()
    is_whole = scanner.is_complete and not text[end:].strip()
    return written if is_whole and written[:1] in ("{", "[") else None


def _end(pattern: re.Pattern[str], text: str, start: int) -> int:
    """The end of the longest match at `start`; the patterns here match the empty string, too."""
    match = pattern.match(text, start)
    assert match is not None
    return match.end()
