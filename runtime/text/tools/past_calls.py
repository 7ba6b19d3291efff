"""What a conversation's past calls become where a chat template refuses them as they are."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any


def has_calls(message: Any) -> bool:
    """Whether it is a message with calls, in the form that templates read."""
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    return isinstance(calls, list) and bool(calls) and all(
        isinstance(call, Mapping) and isinstance(call.get("function"), Mapping) and "arguments" in call["function"]
        for call in calls
    )


def with_short_ids(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Ids of calls as nine letters and digits, which Mistral's templates ask for. Those without one are counted; an
    answer without one belongs to the first call that has none."""
    changed, unanswered, count = [], list[str](), 0
    for message in messages:
        new = dict(message)
        if has_calls(message):
            calls = []
            for call in message["tool_calls"]:
                count += 1
                calls.append({**call, "id": _short_id(call.get("id") or f"call {count}")})
            unanswered += [call["id"] for call in calls]
            new["tool_calls"] = calls
        elif message.get("role") == "tool":
            given = message.get("tool_call_id")
            new["tool_call_id"] = _short_id(given) if given else next(iter(unanswered), "000000000")
            if new["tool_call_id"] in unanswered:
                unanswered.remove(new["tool_call_id"])
        changed.append(new)
    return changed


def _short_id(given: str) -> str:
    if re.fullmatch("[a-zA-Z0-9]{9}", given):
        return given
    return hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def with_text_arguments(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The arguments of calls as JSON: some templates put them into a text as they are."""
    return [
        {**message, "tool_calls": [_with_text_argument(call) for call in message["tool_calls"]]}
        if has_calls(message)
        else message
        for message in messages
    ]


def with_single_calls(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Each call in a message of its own, with its answer behind it."""
    single: list[Mapping[str, Any]] = []
    answers = {message["tool_call_id"]: message for message in messages if message.get("role") == "tool"}
    moved: list[Mapping[str, Any]] = []
    for message in messages:
        calls = message["tool_calls"] if has_calls(message) else ()
        if len(calls) < 2:
            single += [message] if message not in moved else []
            continue
        for i, call in enumerate(calls):
            single.append({**message, "content": message.get("content") if i == 0 else None, "tool_calls": [call]})
            if call["id"] in answers:
                moved.append(answers[call["id"]])
                single.append(answers[call["id"]])
    return single


def _with_text_argument(call: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}
