"""What an answer's text consists of: content, reasoning, tool calls, and the layout that holds them apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

PartKind = Literal["content", "reasoning", "call", "layout"]


class ToolCallDelta(msgspec.Struct, frozen=True, gc=False):
    """A piece of a tool call.

    index      counts the calls of one answer
    id, name   in the first piece of a call, whose `arguments` are ""; else None
    arguments  what this piece adds to the call's arguments: JSON, as far as the model wrote JSON
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Part(NamedTuple):
    """A stretch of the answer's text, and what it turned out to be.

    text   the stretch as the model wrote it: the texts of all parts, put together, are the answer
    calls  of a "call": what it adds to the answer's tool calls
    lead   what is shown in front of the text without being any of it: it separates two messages
    takes_stops  of content: the request's stop strings count in it

    Content and reasoning are shown as they were written; a call shows its `calls`; layout (tags, and white space
    around them) shows nothing.
    """

    kind: PartKind
    text: str
    calls: tuple[ToolCallDelta, ...] = ()
    lead: str = ""
    takes_stops: bool = True


class PartParser(Protocol):
    """Sorts a text that comes in pieces. However it is cut, what the parts show is the same; none ever raises."""

    def push(self, text: str, places: Sequence[int] = ()) -> list[Part]:
        """The parts that are certain now. `places`: where a special token that marks tool calls begins in the text."""

    def finish(self) -> list[Part]:
        """The rest: the text has ended."""


class ContentParser:
    """All is content."""

    def push(self, text: str, places: Sequence[int] = ()) -> list[Part]:
        return [Part("content", text)] if text else []

    def finish(self) -> list[Part]:
        return []


def held_back(text: str, tag: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``tag``, which has no second "<"."""
    start = text.rfind("<")
    return len(text) - start if start >= 0 and tag.startswith(text[start:]) else 0
