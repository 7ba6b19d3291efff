"""The texts around calls and their arguments, as a family of models writes them: plain data, from which a call is
written, read, and its grammar made."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

NAME, KEY, CALL_ID, CALL_NUMBER = "NAME", "KEY", "CALLID", "CALLNUMBER"
"""They stand for the function's name, an argument's name, and the call's id: nine letters and digits, or its number."""

MARKER = re.compile(r"<[^<>\s]+>|\[/?[A-Z][A-Z_]*\]")
"""A text that may be one token of a vocabulary."""
_ID = re.compile(f"({CALL_ID}|{CALL_NUMBER})")


@dataclass(frozen=True, slots=True)
class Tagged:
    """Arguments one by one between texts. A value is text as it is, or JSON.

    head, tail  of each; KEY is replaced by the argument's name
    after       of each, too: white space
    other_head  of those that are no text, if it is another one
    """

    head: str
    tail: str
    after: str = ""
    other_head: str | None = None

    @property
    def is_padded(self) -> bool:
        """Whether a value is on lines of its own."""
        return self.head.endswith("\n") and self.tail.startswith("\n")


@dataclass(frozen=True, slots=True)
class Listed:
    """Arguments with commas between, as literals of a language. Strings have special quotes, or JSON's."""

    separator: str
    comma: str
    quote: str = ""


@dataclass(frozen=True, slots=True)
class CallForm:
    """The texts around a call's arguments.

    before, between, after  around all calls, and between two
    head, tail              of each
    arguments               their style: one JSON object, or one by one
    several                 an answer may have more than one call
    """

    head: str
    tail: str
    before: str = ""
    between: str = ""
    after: str = ""
    arguments: Literal["json"] | Tagged | Listed = "json"
    several: bool = True

    @property
    def before_name(self) -> str:
        """All text before the first call's name."""
        return self.before + self.head.partition(NAME)[0]

    @property
    def after_name(self) -> str:
        """The text between a name and the arguments."""
        return self.head.partition(NAME)[2]

    @property
    def closing(self) -> str:
        """All text after the last call's arguments."""
        return self.tail + self.after

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers of the form; a closing tag whose opening one has a name in it is none."""
        style = self.arguments
        inner = style.head + style.tail if isinstance(style, Tagged) else style.quote if style != "json" else ""
        texts = (self.before, self.head, inner, self.tail, self.between, self.after)
        found = [marker for text in texts for marker in MARKER.findall(text)]
        whole = dict.fromkeys(each for each in found if NAME not in each and KEY not in each)
        return tuple(each for each in whole if not each.startswith("</") or f"<{each[2:]}" in whole)

    def example(self) -> str:
        """One call, shortened, in one line."""
        style = self.arguments
        if style == "json":
            inner = "{…}"
        elif isinstance(style, Tagged):
            inner = f"{style.head}…{style.tail}{style.after}"
        else:
            inner = f"{KEY}{style.separator}{style.quote}…{style.quote}"
        text = f"{self.before}{self.head}{inner}{self.tail}{self.after}"
        return text.replace("\n", "\\n")


def pieces(text: str) -> list[str]:
    """The markers of a text, places of ids, and what stands between them, without the white space around each."""
    found: list[str] = []
    at = 0
    for marker in MARKER.finditer(text):
        found += [*_ID.split(text[at : marker.start()]), marker[0]]
        at = marker.end()
    found += _ID.split(text[at:])
    return [piece for each in found if (piece := each.strip())]


def is_marker(piece: str) -> bool:
    """Whether an answer's text has this piece for calls alone."""
    return piece.startswith(("<", "[")) and len(piece) > 1
