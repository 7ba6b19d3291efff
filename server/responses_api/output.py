"""One response's output as it grows: deltas of text, reasoning and tool calls become items and their events, in
OpenAI's order.

    added → (part added → deltas → text done → part done) → done         a message, or reasoning
    added → deltas → arguments done → done                               a function call

An item is open until a delta of another kind, or of another call, comes. A whole answer holds the final items, so both
agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from uuid import uuid4

from msgspec import UNSET

from runtime.text.pipeline import TextDelta
from server.openai_api.answers import ChatTokenLogprob
from server.responses_api.input import Names
from server.responses_api.objects import (
    ArgumentsDelta,
    ArgumentsDone,
    ContentPartAdded,
    ContentPartDone,
    Event,
    OutputFunctionCall,
    OutputItem,
    OutputItemAdded,
    OutputItemDone,
    OutputMessage,
    OutputReasoning,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    ReasoningText,
    ReasoningTextDelta,
    ReasoningTextDone,
)


class ResponseOutput:
    """The items so far. The events of `push` and `finish` must be encoded at once: they hold the items themselves,
    which still change.

    namespaced  functions in namespaces, by the model's names for them
    """

    def __init__(self, namespaced: Names) -> None:
        self.items: list[OutputItem] = []
        self._open: OutputItem | None = None
        self._open_call = -1
        self._namespaced = namespaced

    def push(self, delta: TextDelta, logprobs: Sequence[ChatTokenLogprob] = ()) -> Iterator[Event]:
        """Adds a delta; returns its events. `logprobs` belong to its text."""
        if delta.reasoning:
            yield from self._add_reasoning(delta.reasoning)
        if delta.text or logprobs:
            yield from self._add_text(delta.text, logprobs)
        for call in delta.tool_calls:
            if call.index != self._open_call or not isinstance(self._open, OutputFunctionCall):
                yield from self._close()
                namespace, name = self._namespaced.get(call.name or "", (UNSET, call.name or ""))
                item = OutputFunctionCall(_new_id("fc"), call.id or _new_id("call"), name, namespace=namespace)
                yield from self._begin(item)
                self._open_call = call.index
            assert isinstance(self._open, OutputFunctionCall)
            if call.arguments:
                self._open.arguments += call.arguments
                yield ArgumentsDelta(self._open.id, self._index, call.arguments)

    def finish(self, *, is_complete: bool) -> Iterator[Event]:
        """Ends the output: an answer has at least one item. Only the last can be incomplete."""
        if not self.items:
            yield from self._begin(OutputMessage(_new_id("msg")))
        yield from self._close(is_complete=is_complete)

    @property
    def _index(self) -> int:
        return len(self.items) - 1

    def _add_reasoning(self, text: str) -> Iterator[Event]:
        if not isinstance(self._open, OutputReasoning):
            yield from self._close()
            yield from self._begin(OutputReasoning(_new_id("rs")))
        assert isinstance(self._open, OutputReasoning)
        self._open.content[0].text += text
        yield ReasoningTextDelta(self._open.id, self._index, 0, text)

    def _add_text(self, text: str, logprobs: Sequence[ChatTokenLogprob]) -> Iterator[Event]:
        if not isinstance(self._open, OutputMessage):
            yield from self._close()
            yield from self._begin(OutputMessage(_new_id("msg")))
        assert isinstance(self._open, OutputMessage)
        part = self._open.content[0]
        part.text += text
        part.logprobs += logprobs
        yield OutputTextDelta(self._open.id, self._index, 0, text, list(logprobs))

    def _begin(self, item: OutputItem) -> Iterator[Event]:
        self.items.append(item)
        self._open = item
        yield OutputItemAdded(self._index, item)
        if isinstance(item, OutputMessage):
            item.content.append(OutputText())
            yield ContentPartAdded(item.id, self._index, 0, item.content[0])
        elif isinstance(item, OutputReasoning):
            item.content.append(ReasoningText())
            yield ContentPartAdded(item.id, self._index, 0, item.content[0])

    def _close(self, *, is_complete: bool = True) -> Iterator[Event]:
        item, self._open = self._open, None
        if item is None:
            return
        if isinstance(item, OutputMessage):
            part = item.content[0]
            yield OutputTextDone(item.id, self._index, 0, part.text, part.logprobs)
            yield ContentPartDone(item.id, self._index, 0, part)
        elif isinstance(item, OutputReasoning):
            thought = item.content[0]
            yield ReasoningTextDone(item.id, self._index, 0, thought.text)
            yield ContentPartDone(item.id, self._index, 0, thought)
        else:
            yield ArgumentsDone(item.id, self._index, item.name, item.arguments)
        item.status = "completed" if is_complete else "incomplete"
        yield OutputItemDone(self._index, item)


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid4().hex}"
