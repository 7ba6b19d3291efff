"""An answer as items one after the other: its reasoning, its text, its calls.

An item is open until a delta of another kind, or of another call, comes. A whole answer holds the final items, so that
it agrees with the events of a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Generic, Literal, TypeVar

from runtime.text.parts import ToolCallDelta
from runtime.text.pipeline import TextDelta
from server.openai_api.answers import ChatTokenLogprob

Item = TypeVar("Item")
Event = TypeVar("Event")


class AnswerItems(ABC, Generic[Item, Event]):
    """The items so far. The events of `push` and `finish` must be encoded at once: they hold the items themselves,
    which still change."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._open: tuple[str, int] | None = None  # the kind of the last item, and its number among the calls

    @property
    def index(self) -> int:
        """The last item's."""
        return len(self.items) - 1

    def push(self, delta: TextDelta, logprobs: Sequence[ChatTokenLogprob] = ()) -> Iterator[Event]:
        """Adds a delta; returns its events. `logprobs` belong to its text."""
        if delta.reasoning:
            yield from self._grow("reasoning", None, delta.reasoning)
        if delta.text or logprobs:
            yield from self._grow("text", None, delta.text, logprobs)
        for call in delta.tool_calls:
            yield from self._grow("call", call, call.arguments)

    def finish(self, *, is_complete: bool = True) -> Iterator[Event]:
        """Ends the open item. Only an answer's last can be incomplete."""
        if self._open is not None:
            self._open = None
            yield from self._end(self.items[-1], is_complete=is_complete)

    def _grow(
        self,
        kind: Literal["reasoning", "text", "call"],
        call: ToolCallDelta | None,
        text: str,
        logprobs: Sequence[ChatTokenLogprob] = (),
    ) -> Iterator[Event]:
        key = (kind, 0 if call is None else call.index)
        if self._open != key:
            yield from self.finish()
            self._open = key
            yield from self._begin(self._new(kind, call))
        if text or logprobs:
            yield from self._add(self.items[-1], text, logprobs)

    @abstractmethod
    def _new(self, kind: str, call: ToolCallDelta | None) -> Item:
        """An empty item; `call` is a call's first piece."""

    @abstractmethod
    def _begin(self, item: Item) -> Iterator[Event]:
        """Appends an item."""

    @abstractmethod
    def _add(self, item: Item, text: str, logprobs: Sequence[ChatTokenLogprob]) -> Iterator[Event]:
        """Adds to the last item."""

    @abstractmethod
    def _end(self, item: Item, *, is_complete: bool) -> Iterator[Event]:
        """Completes the last item."""
