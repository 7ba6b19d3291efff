"""Answers put together from parts, cut anywhere, and what parsers and pipelines make of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

from hypothesis import strategies as st

from runtime.text.parts import Part, PartParser, ToolCallDelta
from runtime.text.pipeline import TextDelta
from runtime.text.stop import StopMatch
from tests.runtime.text.test_stop import first_match

FRAGMENTS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_call>\n",
    "\n</tool_call>",
    '{"name": "f", "arguments": {"a": 1}}',
    '{"name": "get_weather", "arguments": ',
    '{"arguments": {"b": [true, null]}, "name": "g"}',
    '{"name": "h"}',
    '{"city": "Zürich 😀", "tags": ["</tool_call>", "\\u00e9\\"{"]}',
    '"arguments": "{\\"a\\": 1}"}',
    '"name": ',
    '"',
    "{",
    "}",
    "}}",
    "[",
    ",",
    ":",
    "\\",
    "\n",
    "\n\n",
    " ",
    "<",
    "<t",
    "</",
    "</thi",
    "</tool_c",
    "-1.5e3",
    "nul",
    "Hello",
    " world",
    "é",
    "日本",
    "😀",
)
"""What makes parsers stumble, and what does not."""

WHOLES = (
    '<tool_call>\n{"name": "f", "arguments": {"a": 1, "ü": ["😀", null]}}\n</tool_call>',
    '<tool_call>{"name": "get_weather", "arguments": {"city": "</tool_call>", "x": {}}}</tool_call>',
    '\n<tool_call>\n{"arguments": {"b": "\\u00e9"}, "name": "g"}\n</tool_call>\n',
    '<tool_call>{"name": "h", "arguments": "{\\"a\\": 1}", "id": 7}</tool_call>',
    '<tool_call>\n{"name": "f", "arguments": {\'a\': "b"}}\n</tool_call>',
    "<think>\nWell, <b>.\n\nSo.\n</think>\n\n",
    "<think></think>",
)
"""What parsers read."""


def damaged(whole: str, place: int, length: int, inserted: str) -> str:
    place %= len(whole)
    return whole[:place] + inserted + whole[place + length :]


pieces = st.one_of(
    st.sampled_from(FRAGMENTS),
    st.sampled_from(WHOLES),
    st.builds(
        damaged,
        st.sampled_from(WHOLES),
        st.integers(0, 99),
        st.sampled_from([0, 1, 2, 99]),
        st.sampled_from(["", *FRAGMENTS]),
    ),
)
texts = st.lists(pieces, max_size=7).map("".join)


@dataclass
class Message:
    """What a client sees of an answer."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[tuple[str, str]] = field(default_factory=list)

    def add_calls(self, calls: Iterable[ToolCallDelta]) -> None:
        """Holds each piece to its shape: a call begins with its id and its name and no arguments, and goes on until
        the next begins."""
        for call in calls:
            if call.id is not None:
                assert call.name
                assert call.arguments == ""
                assert call.index == len(self.tool_calls)
                self.tool_calls.append((call.name, ""))
            else:
                assert call.name is None
                assert call.arguments
                assert call.index == len(self.tool_calls) - 1
                name, arguments = self.tool_calls[-1]
                self.tool_calls[-1] = (name, arguments + call.arguments)


def cut(text: str, places: Sequence[int]) -> list[str]:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in pairwise(edges)]


def parse(parser: PartParser, cut_text: Iterable[str]) -> Message:
    return message_of_parts(parts_of(parser, cut_text))


def parts_of(parser: PartParser, cut_text: Iterable[str]) -> list[Part]:
    """The parts' texts, put together, must be all of the answer's."""
    parts, text = list[Part](), ""
    for piece in cut_text:
        text += piece
        parts += parser.push(piece)
    parts += parser.finish()
    assert "".join(part.text for part in parts) == text
    return parts


def message_of_parts(parts: Iterable[Part]) -> Message:
    message = Message()
    for part in parts:
        assert part.text
        if part.kind == "content":
            message.content += part.text
        elif part.kind == "reasoning":
            message.reasoning += part.text
        assert not part.calls or part.kind == "call"
        message.add_calls(part.calls)
    return message


def stopped(
    parts: Iterable[Part], stops: list[str], floor: int, *, keeps_stop: bool
) -> tuple[list[Part], StopMatch | None]:
    """What the first stop string in a stretch of content leaves of an answer, and where in it that is."""
    kept, at = list[Part](), 0
    for kind, group in groupby(parts, lambda part: part.kind):
        stretch = list(group)
        text = "".join(part.text for part in stretch)
        match = first_match(text, stops, floor - at) if kind == "content" else None
        if match is not None:
            shown = text[: match.end if keeps_stop else match.start]
            kept += [Part("content", shown)] if shown else []
            return kept, StopMatch(at + match.start, at + match.end, match.stop)
        kept += stretch
        at += len(text)
    return kept, None


def message_of(deltas: Iterable[TextDelta]) -> Message:
    message = Message()
    for delta in deltas:
        message.content += delta.text
        message.reasoning += delta.reasoning
        message.add_calls(delta.tool_calls)
    return message
