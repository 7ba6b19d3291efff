"""Finds the parts of a conversation that a chat template leaves out, by rendering it with marks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from runtime.text.tools.past_calls import has_calls
from tokenizer import ChatTemplateError

Messages = Sequence[Mapping[str, Any]]


class Place(NamedTuple):
    """A message's field: "content", "name", or one of its calls, "tool_calls[0]"."""

    message: int
    field: str

    @property
    def path(self) -> str:
        """Its path in messages for users."""
        return f"messages[{self.message}].{self.field}"


def left_out(render: Callable[..., Any], messages: Messages, places: Sequence[Place]) -> list[Place]:
    """The places that the template does not write; empty if this cannot be determined. A call is written if its
    arguments are."""
    if not places:
        return []
    marked = [dict(message) for message in messages]
    marks = {place: f"mark{number}end" for number, place in enumerate(places)}
    for place, mark in marks.items():
        message = marked[place.message]
        if place.field in ("content", "name"):
            message[place.field] = mark
            continue
        message["tool_calls"] = [
            _marked(call, mark) if place.field == f"tool_calls[{i}]" else call
            for i, call in enumerate(message["tool_calls"])
        ]
    try:
        text = render(marked, tokenize=False)
    except ChatTemplateError:
        return []  # it requires more of these fields than their type
    return [place for place, mark in marks.items() if mark not in text]


def call_places(messages: Messages) -> list[Place]:
    """The places of all calls."""
    return [
        Place(i, f"tool_calls[{j}]")
        for i, message in enumerate(messages)
        if has_calls(message)
        for j in range(len(message["tool_calls"]))
    ]


def _marked(call: Mapping[str, Any], mark: str) -> Mapping[str, Any]:
    arguments: Any = {mark: mark}
    if isinstance(call["function"]["arguments"], str):
        arguments = json.dumps(arguments)
    return {**call, "function": {**call["function"], "arguments": arguments}}
