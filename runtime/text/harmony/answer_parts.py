"""Parses an answer in harmony for the text pipeline: analysis is reasoning, the assistant's function calls are tool
calls, the assistant's other text is content. Headers are layout, and so are messages of other roles.

A newline separates two messages of one kind, as in vLLM. Stop strings do not count in commentary, which a model writes
before a call."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.text.harmony.header import Header
from runtime.text.harmony.prompt import AnswerStart
from runtime.text.harmony.reader import Event, HarmonyReader
from runtime.text.parts import Part, PartKind, ToolCallDelta
from runtime.text.tools.notation import ToolReading
from runtime.text.tools.reader import long_id


class HarmonyParser:
    """
    tools  the functions that may be called; with None a call is content, or reasoning, by its channel
    """

    def __init__(self, start: AnswerStart, tools: ToolReading | None) -> None:
        self._reader = HarmonyReader(start)
        self._tools = tools
        self._kind: PartKind = "layout"  # of the current message
        self._takes_stops = True
        self._is_new = True  # nothing of the message has come
        self._shown: set[PartKind] = set()  # the kinds of the messages that had text
        self._num_calls = 0

    @property
    def num_malformed(self) -> int:
        """`HarmonyReader.num_malformed`."""
        return self._reader.num_malformed

    def push(self, text: str, places: Sequence[int] = ()) -> list[Part]:
        return [self._part(event) for event in self._reader.push(text, places)]

    def finish(self) -> list[Part]:
        return [self._part(event) for event in self._reader.finish()]

    def _part(self, event: Event) -> Part:
        if event.kind == "begin":
            assert event.header is not None
            return self._begin(event.header, event.text)
        if event.kind == "text":
            return self._text(event.text)
        return Part("layout", event.text)

    def _text(self, text: str) -> Part:
        if self._kind == "call":
            return Part("call", text, (ToolCallDelta(self._num_calls - 1, arguments=text),))
        lead = "\n" if self._is_new and self._kind in self._shown else ""
        self._is_new = False
        self._shown.add(self._kind)
        return Part(self._kind, text, lead=lead, takes_stops=self._takes_stops)

    def _begin(self, header: Header, text: str) -> Part:
        self._is_new, self._takes_stops = True, header.channel != "commentary"
        name = header.function
        if name is not None and self._may_call(name):
            if self._num_calls and self._tools is not None and not self._tools.parallel:
                self._kind = "layout"
                return Part("layout", text)
            self._kind = "call"
            self._num_calls += 1
            return Part("call", text, (ToolCallDelta(self._num_calls - 1, long_id(), name),))
        if header.role != "assistant":
            self._kind = "layout"
        else:
            self._kind = "reasoning" if header.channel == "analysis" else "content"
        return Part("layout", text)

    def _may_call(self, name: str) -> bool:
        tools = self._tools
        return tools is not None and (not tools.is_closed or name in tools.functions)
