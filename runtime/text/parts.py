"""The parts of an answer's text: content, reasoning, tool calls, and the layout between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

PartKind = Literal["content", "reasoning", "call", "layout"]


class ToolCallDelta(msgspec.Struct, frozen=True, gc=False):
    """A piece of a tool call.

    index      counts the calls of one answer
    id, name   in the first piece of a call, whose `arguments` are ""; else None
    arguments  what this piece adds to the call's arguments: JSON, if the model wrote JSON
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Part(NamedTuple):
    """A stretch of the answer's text, and its kind.

    text   the stretch as the model wrote it: the texts of all parts, concatenated, are the answer
    calls  of a "call": what it adds to the answer's tool calls
    lead   shown before the text without belonging to it: separates two messages
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
    """Classifies a text that comes in pieces. The result is independent of the cuts; errors are never raised."""

    def push(self, text: str, places: Sequence[int] = ()) -> list[Part]:
        """The parts that are certain now. `places`: indices in the text of special tokens that mark tool calls."""

    def finish(self) -> list[Part]:
        """The remaining parts, at the end of the text."""


class ContentParser:
    """Everything is content."""

    def push(self, text: str, places: Sequence[int] = ()) -> list[Part]:
        return [Part("content", text)] if text else []

    def finish(self) -> list[Part]:
        return []


def held_back(text: str, tag: str) -> int:
    """The length of the longest end of ``text`` that may be the start of ``tag``, or all of it."""
    longest = min(len(text), len(tag))
    return next((length for length in range(longest, 0, -1) if text.endswith(tag[:length])), 0)
