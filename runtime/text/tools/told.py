"""Tools for models whose chat template knows nothing of tools: a system message of our own tells them, and past calls
and their results become text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from runtime.text.tools.notation import Notation
from runtime.text.tools.writing import written

if TYPE_CHECKING:
    from tokenizer import Tokenizer

_PROBE = "probe_of_tools"
_SYSTEM_PROBE = "a system message"


def ignores_tools(tokenizer: Tokenizer) -> bool:
    """Whether the chat template leaves out the tools that it is given. Shown by rendering one."""
    from tokenizer import ChatTemplateError

    if not tokenizer.has_chat_template:
        return False
    parameters = {"type": "object", "properties": {"a": {"type": "string", "description": "b"}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": _PROBE, "description": "c", "parameters": parameters}}
    user = {"role": "user", "content": "Hello"}
    for messages in ([user], [{"role": "system", "content": "Hi"}, user]):
        try:
            if _PROBE in tokenizer.apply_chat_template(messages, [tool], True, tokenize=False):
                return False
        except ChatTemplateError:
            continue
    return "tools" not in tokenizer.chat_template(has_tools=True)


def told(
    tokenizer: Tokenizer,
    notation: Notation,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
) -> list[Mapping[str, Any]]:
    """The conversation without tools, calls and results, which stand in its text."""
    plain: list[Mapping[str, Any]] = []
    for message in messages:
        if message.get("role") == "tool":
            result = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
            if plain and plain[-1].get("is_result"):
                plain[-1] = {**plain[-1], "content": f"{plain[-1]['content']}\n{result}"}
            else:
                plain.append({"role": "user", "content": result, "is_result": True})
        elif message.get("tool_calls"):
            calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
            texts = [text for text in (message.get("content"), written(notation, calls)) if text]
            plain.append({**_without(message, "tool_calls"), "content": "\n".join(texts)})
        else:
            plain.append(message)
    plain = [_without(message, "is_result") for message in plain]
    return _with_tools(tokenizer, plain, _told_text(notation, tools)) if tools else plain


def _told_text(notation: Notation, tools: Sequence[Mapping[str, Any]]) -> str:
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = written(notation, [("NAME", {"PARAMETER": "VALUE"})])
    return (
        f"You can call these functions; their parameters are given as JSON schemas:\n{functions}\n\n"
        f"To call one, write exactly this, and nothing behind it:\n{example}\n\n"
        "The result comes between <tool_response> tags. If no function helps, answer without a call."
    )


def _with_tools(tokenizer: Tokenizer, messages: list[Mapping[str, Any]], text: str) -> list[Mapping[str, Any]]:
    """In the system message; where the template takes none, in front of the user's first."""
    first = messages[0] if messages else {}
    if first.get("role") in ("system", "developer"):
        return [{**first, "content": f"{first.get('content') or ''}\n\n{text}"}, *messages[1:]]
    if _shows_system(tokenizer):
        return [{"role": "system", "content": text}, *messages]
    for i, message in enumerate(messages):
        if message.get("role") == "user":
            told_message = {**message, "content": f"{text}\n\n{message.get('content') or ''}"}
            return [*messages[:i], told_message, *messages[i + 1 :]]
    return [{"role": "user", "content": text}, *messages]


def _shows_system(tokenizer: Tokenizer) -> bool:
    from tokenizer import ChatTemplateError

    messages = [{"role": "system", "content": _SYSTEM_PROBE}, {"role": "user", "content": "Hello"}]
    try:
        return _SYSTEM_PROBE in tokenizer.apply_chat_template(messages, tokenize=False)
    except ChatTemplateError:
        return False


def _without(message: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return {key: value for key, value in message.items() if key != name} if name in message else message
