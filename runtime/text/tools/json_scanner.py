"""Where a JSON value ends, in a text that comes in pieces (RFC 8259)."""

from __future__ import annotations

import re
from enum import IntEnum, auto

_WHITE_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
_WHOLE_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_MAX_SCALAR_LENGTH = 1024


class _State(IntEnum):
    """What may come next, or what the next character is within."""

    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    SCALAR = auto()
    COMPLETE = auto()
    BROKEN = auto()


class JsonScanner:
    """Reads one value. It is `is_complete` behind its last character (a number at the first that is none of its own),
    and `is_broken` at the first character with which it cannot be JSON. Each character costs O(1)."""

    def __init__(self) -> None:
        self._state = _State.VALUE
        self._closers: list[str] = []  # of the arrays and objects that are open
        self._is_key = False
        self._num_hex = 0
        self._scalar = ""

    @property
    def is_complete(self) -> bool:
        return self._state is _State.COMPLETE

    @property
    def is_broken(self) -> bool:
        return self._state is _State.BROKEN

    def push(self, text: str, start: int) -> int:
        """Reads `text[start:]`, which goes on where the last push ended; the place of the first character that is no
        part of the value."""
        at, end = start, len(text)
        while at < end and self._state < _State.COMPLETE:
            if self._state is _State.STRING:
                at = _end(_PLAIN, text, at)
                if at < end:
                    at += self._string(text[at])
            elif self._state is _State.SCALAR:
                begin, at = at, _end(_SCALAR, text, at)
                self._scalar += text[begin:at]
                if at < end or len(self._scalar) > _MAX_SCALAR_LENGTH:
                    self._end_scalar()
            elif self._state in (_State.ESCAPE, _State.HEX):
                at += self._escape(text[at])
            else:
                at = _end(_WHITE_SPACE, text, at)
                if at < end:
                    at += self._structure(text[at])
        return at

    def _structure(self, character: str) -> int:
        """Reads a character between values; how many of it are read."""
        state, may_have_value = self._state, self._state in (_State.VALUE, _State.VALUE_OR_END)
        may_end = state in (_State.VALUE_OR_END, _State.KEY_OR_END, _State.COMMA_OR_END)
        if may_end and character == self._closers[-1]:
            self._closers.pop()
            self._end_value()
        elif character == '"' and (may_have_value or state in (_State.KEY, _State.KEY_OR_END)):
            self._is_key = not may_have_value
            self._state = _State.STRING
        elif may_have_value and character in "{[":
            self._closers.append("}" if character == "{" else "]")
            self._state = _State.KEY_OR_END if character == "{" else _State.VALUE_OR_END
        elif may_have_value and _SCALAR.fullmatch(character):
            self._scalar = ""
            self._state = _State.SCALAR
            return 0
        elif character == ":" and state is _State.COLON:
            self._state = _State.VALUE
        elif character == "," and state is _State.COMMA_OR_END:
            self._state = _State.KEY if self._closers[-1] == "}" else _State.VALUE
        else:
            self._state = _State.BROKEN
            return 0
        return 1

    def _string(self, character: str) -> int:
        if character == '"':
            if self._is_key:
                self._state = _State.COLON
            else:
                self._end_value()
        elif character == "\\":
            self._state = _State.ESCAPE
        else:  # a control character
            self._state = _State.BROKEN
            return 0
        return 1

    def _escape(self, character: str) -> int:
        if self._state is _State.HEX and character in "0123456789abcdefABCDEF":
            self._num_hex -= 1
            self._state = _State.HEX if self._num_hex else _State.STRING
        elif self._state is _State.ESCAPE and character == "u":
            self._num_hex = 4
            self._state = _State.HEX
        elif self._state is _State.ESCAPE and character in '"\\/bfnrt':
            self._state = _State.STRING
        else:
            self._state = _State.BROKEN
            return 0
        return 1

    def _end_scalar(self) -> None:
        if len(self._scalar) <= _MAX_SCALAR_LENGTH and _WHOLE_SCALAR.fullmatch(self._scalar):
            self._end_value()
        else:
            self._state = _State.BROKEN

    def _end_value(self) -> None:
        self._state = _State.COMMA_OR_END if self._closers else _State.COMPLETE


def _end(pattern: re.Pattern[str], text: str, start: int) -> int:
    """Where the longest match at `start` ends; the patterns here match the empty string, too."""
    match = pattern.match(text, start)
    assert match is not None
    return match.end()
