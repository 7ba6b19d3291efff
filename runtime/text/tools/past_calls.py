"""Rewrites a conversation's past calls for a chat template that does not accept them unchanged."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from runtime.engine.errors import RequestError
from tokenizer.templates.written_json import WrittenText, written_object

MAX_ARGUMENTS_DEPTH = 64
"""Deepest nesting of a call's arguments that is passed to a template as objects."""


def has_calls(message: Any) -> bool:
    """Whether it is a message with calls, in the form that templates read."""
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    return (
        isinstance(calls, list)
        and bool(calls)
        and all(
            isinstance(call, Mapping) and isinstance(call.get("function"), Mapping) and "arguments" in call["function"]
            for call in calls
        )
    )


def with_short_ids(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Call ids of nine letters and digits, which Mistral's templates require. Missing ids are numbered; an answer
    without an id belongs to the first call that has no answer."""
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


def with_names(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Adds the names of the called functions to tools' answers, which some templates require."""
    calls = [call for message in messages if has_calls(message) for call in message["tool_calls"]]
    names = {call["id"]: call["function"].get("name") for call in calls if call.get("id")}
    return [
        {**message, "name": names[message["tool_call_id"]]}
        if message.get("role") == "tool" and not message.get("name") and message.get("tool_call_id") in names
        else message
        for message in messages
    ]


def with_responses(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Tools' answers as `tool_responses` of the message with their calls, which Gemma 4's first templates read."""
    changed: list[dict[str, Any]] = []
    for message in with_names(messages):
        last = changed[-1] if changed else {}
        if message.get("role") == "tool" and has_calls(last):
            content = message.get("content")
            if isinstance(content, list):
                content = "".join(part.get("text", "") for part in content)
            response = {"name": message.get("name") or "unknown", "response": content}
            last["tool_responses"] = [*last.get("tool_responses", ()), response]
        else:
            changed.append(dict(message))
    return changed


def _short_id(given: str) -> str:
    if re.fullmatch("[a-zA-Z0-9]{9}", given):
        return given
    return hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def with_arguments(
    messages: Sequence[Mapping[str, Any]], *, takes_objects: bool, takes_text: bool
) -> Sequence[Mapping[str, Any]]:
    """The arguments of calls in the template's form: objects, or JSON text. A template that takes both, or writes none,
    gets objects, except for a text that is not an object. Raises ``RequestError`` naming the call for such a text if
    only objects are accepted. A `WrittenText` becomes an object that keeps the text."""
    if not any(map(has_calls, messages)):
        return messages
    prefers_text, keeps_text = takes_text and not takes_objects, takes_text or not takes_objects
    changed: list[Mapping[str, Any]] = []
    for i, message in enumerate(messages):
        if has_calls(message):
            calls = []
            for j, call in enumerate(message["tool_calls"]):
                arguments = call["function"]["arguments"]
                if prefers_text:
                    arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
                elif isinstance(arguments, str):
                    path = f"messages[{i}].tool_calls[{j}].function.arguments"
                    arguments = _object(arguments, path, keeps_text=keeps_text)
                calls.append({**call, "function": {**call["function"], "arguments": arguments}})
            message = {**message, "tool_calls": calls}
        changed.append(message)
    return changed


def _object(text: str, path: str, *, keeps_text: bool) -> Any:
    try:
        parse = written_object if isinstance(text, WrittenText) else json.loads
        value = parse(text) if text.strip() else {}
        reason = None if isinstance(value, dict) else f"they are no object but {text.strip()[:40]!r}"
    except (ValueError, RecursionError) as error:
        value, reason = None, f"they are no JSON: {error}"
    if reason is None and _is_deeper(value, MAX_ARGUMENTS_DEPTH):
        reason = f"they are nested deeper than {MAX_ARGUMENTS_DEPTH}"
    if reason is None:
        return value
    if keeps_text:
        return text
    raise RequestError(f"{path}: the chat template needs the arguments as a JSON object, and {reason}.", param=path)


def _is_deeper(value: Any, depth: int) -> bool:
    level = [value]
    for _ in range(depth + 1):
        level = [
            item
            for each in level
            for item in (each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())
        ]
    return bool(level)


def with_calls_alone(messages: Sequence[Mapping[str, Any]], places: Collection[int]) -> Sequence[Mapping[str, Any]]:
    """Moves the text beside the calls of these messages to a message before them."""
    changed: list[Mapping[str, Any]] = []
    for i, message in enumerate(messages):
        if i in places:
            changed.append({"role": message["role"], "content": message["content"]})
            message = {**message, "content": None}
        changed.append(message)
    return changed


def with_single_calls(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Each call in a message of its own, followed by its answer."""
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
