"""Tools for models whose chat template does not support tools: a system message of our own describes them, and past
calls and their results become text, the calls in the model's notation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from runtime.text.content import around, beside
from runtime.text.tools.forms import CALL_ID, CALL_NUMBER, KEY, NAME, Listed, Tagged
from runtime.text.tools.past_calls import with_arguments
from runtime.text.tools.table import Notation
from tokenizer import ChatTemplateError, TemplateForms, Tokenizer
from tokenizer.templates.written_json import dumps

_PROBE = "probe_of_tools"


def ignores_tools(tokenizer: Tokenizer) -> bool:
    """Whether the chat template leaves out the given tools, determined by rendering one."""
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
    forms: TemplateForms,
    notation: Notation,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
) -> list[Mapping[str, Any]]:
    """The conversation with tools, calls and results as text."""
    plain: list[Mapping[str, Any]] = []
    for message in messages:
        if message.get("role") == "tool":
            result = around("<tool_response>\n", message.get("content"), "\n</tool_response>")
            if plain and plain[-1].get("is_result"):
                plain[-1] = {**plain[-1], "content": beside(plain[-1]["content"], result, "\n")}
            else:
                plain.append({"role": "user", "content": result, "is_result": True})
        else:
            plain.append(_as_text(message, notation))
    plain = [_without(message, "is_result") for message in plain]
    return _with_tools(forms, plain, _told_text(notation, tools)) if tools else plain


def with_calls_as_text(messages: Sequence[Mapping[str, Any]], notation: Notation) -> list[Mapping[str, Any]]:
    """Writes the calls of messages into their content, in the model's notation. Raises ``RequestError`` for arguments
    that are not an object if the notation writes them one by one."""
    messages = with_arguments(messages, takes_objects=True, takes_text=notation.form.arguments == "json")
    return [_as_text(message, notation) for message in messages]


def _as_text(message: Mapping[str, Any], notation: Notation) -> Mapping[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    text = written(notation, calls)
    content = around("", message["content"], f"\n{text}") if message.get("content") else text
    return {**_without(message, "tool_calls"), "content": content}


def _told_text(notation: Notation, tools: Sequence[Mapping[str, Any]]) -> str:
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = written(notation, [("NAME", {"PARAMETER": "VALUE"})])
    return (
        f"You can call these functions; their parameters are given as JSON schemas:\n{functions}\n\n"
        f"To call one, write exactly this, and nothing behind it:\n{example}\n\n"
        "The result comes between <tool_response> tags. If no function helps, answer without a call."
    )


def _with_tools(forms: TemplateForms, messages: list[Mapping[str, Any]], text: str) -> list[Mapping[str, Any]]:
    """Adds it to the system message, or, if the template takes none, before the user's first text."""
    first = messages[0] if messages else {}
    if first.get("role") in ("system", "developer"):
        return [{**first, "content": around("", first.get("content"), f"\n\n{text}")}, *messages[1:]]
    if forms.content("system").is_known:
        return [{"role": "system", "content": text}, *messages]
    for i, message in enumerate(messages):
        if message.get("role") == "user":
            told_message = {**message, "content": around(f"{text}\n\n", message.get("content"))}
            return [*messages[:i], told_message, *messages[i + 1 :]]
    return [{"role": "user", "content": text}, *messages]


def _without(message: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return {key: value for key, value in message.items() if key != name} if name in message else message


def written(notation: Notation, calls: Sequence[tuple[str, Any]]) -> str:
    """The text of calls, given names and arguments, which are objects, or texts that are not."""
    form = notation.form
    texts = [
        f"{_numbered(form.head, i).replace(NAME, name)}{_arguments(form.arguments, arguments)}{_numbered(form.tail, i)}"
        for i, (name, arguments) in enumerate(calls)
    ]
    return form.before + form.between.join(texts) + form.after


def _numbered(text: str, index: int) -> str:
    return text.replace(CALL_ID, f"call{index:05}").replace(CALL_NUMBER, str(index))


def _arguments(style: Literal["json"] | Tagged | Listed, arguments: Any) -> str:
    if style == "json":
        return _text_or_json(arguments)
    pairs = list(arguments.items()) if isinstance(arguments, Mapping) else []
    if isinstance(style, Tagged):
        return "".join(_tagged(style, key, value) for key, value in pairs)
    write = _gemma_value if style.quote else _python_value
    return style.comma.join(f"{key}{style.separator}{write(value)}" for key, value in pairs)


def _tagged(style: Tagged, key: str, value: Any) -> str:
    head = style.head if isinstance(value, str) or style.other_head is None else style.other_head
    return f"{head.replace(KEY, key)}{_text_or_json(value)}{style.tail}{style.after}"


def _python_value(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_python_value(key)}: {_python_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_python_value, value))}]"
    return str(value)


def _gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_gemma_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_gemma_value, value)) + "]"
    return json.dumps(value)


def _text_or_json(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value, ensure_ascii=False)
