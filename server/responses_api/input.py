"""From the input items of `/v1/responses` to a chat's messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from server.errors import below, invalid
from server.openai_api.schema import FunctionCall, Message, ToolCall
from server.responses_api.namespaces import flat_name
from server.responses_api.schema import (
    InputFunctionCall,
    InputFunctionCallOutput,
    InputMessage,
    InputReasoning,
)
from server.transport.body import schema_error

Item = InputMessage | InputFunctionCall | InputFunctionCallOutput | InputReasoning

_SCHEMAS: dict[str, type[Item]] = {
    "message": InputMessage,
    "function_call": InputFunctionCall,
    "function_call_output": InputFunctionCallOutput,
    "reasoning": InputReasoning,
}
_TEXT_PARTS = ("input_text", "output_text", "text")
_MEDIA_PARTS = ("input_file", "input_audio")


def input_messages(given: str | Sequence[dict[str, Any]]) -> tuple[list[Message], list[str]]:
    """The messages that the items are, and the item that each begins with, "input[2]". What an assistant's turn
    consists of, reasoning, text and function calls in this order, becomes one message, as it was answered. Raises
    `ApiError` 400 naming the item's field."""
    if isinstance(given, str):
        return [Message(role="user", content=given)], ["input"]
    messages: list[Message] = []
    paths: list[str] = []
    for i, fields in enumerate(given):
        path = f"input[{i}]"
        _append(messages, _item(fields, path), path)
        paths += [path] * (len(messages) - len(paths))
    return messages, paths


def _item(fields: dict[str, Any], path: str) -> Item:
    kind = fields.get("type", "message")
    schema = _SCHEMAS.get(kind) if isinstance(kind, str) else None
    if schema is None:
        if kind == "item_reference":
            raise invalid(f"{path}.type", f"Unsupported parameter: {path} (send the item itself).")
        raise invalid(f"{path}.type", f"{path}.type must be one of {', '.join(_SCHEMAS)}.")
    try:
        return msgspec.convert(fields, schema)
    except msgspec.ValidationError as error:
        raise below(path, schema_error(str(error))) from None


def _append(messages: list[Message], item: Item, path: str) -> None:
    if isinstance(item, InputFunctionCallOutput):
        output = _content(item.output, f"{path}.output")
        messages.append(Message(role="tool", tool_call_id=item.call_id, content=output))
    elif isinstance(item, InputReasoning):
        if text := "".join(part.text for part in item.content or item.summary):
            messages.append(Message(role="assistant", reasoning_content=text))
    elif isinstance(item, InputFunctionCall):
        call = ToolCall(function=FunctionCall(flat_name(item.namespace, item.name), item.arguments), id=item.call_id)
        turn = _open_turn(messages)
        turn.tool_calls = [*(turn.tool_calls or ()), call]
    elif item.role == "assistant":
        turn = _open_turn(messages, is_open=lambda last: last.content is None and not last.tool_calls)
        turn.content = _content(item.content, f"{path}.content")
    else:
        messages.append(Message(role=item.role, content=_content(item.content, f"{path}.content")))


def _open_turn(messages: list[Message], is_open: Any = lambda last: True) -> Message:
    """The assistant's message to which an item belongs: the last, or a new one."""
    if not messages or messages[-1].role != "assistant" or not is_open(messages[-1]):
        messages.append(Message(role="assistant"))
    return messages[-1]


def _content(content: str | list[dict[str, Any]], path: str) -> str | list[dict[str, Any]]:
    """In a chat's form; `server.requests.conversation` checks the parts further."""
    if isinstance(content, str):
        return content
    parts = []
    for i, part in enumerate(content):
        where, kind = f"{path}[{i}]", part.get("type")
        if kind == "input_image":
            if part.get("file_id") is not None:
                name = f"{where}.file_id"
                raise invalid(name, f"Unsupported parameter: {name} (send image_url).", "unsupported_parameter")
            parts.append({name: value for name, value in part.items() if name != "file_id"})
            continue
        if kind in _MEDIA_PARTS:
            message = f"Unsupported parameter: {where}.type (the model reads text only)."
            raise invalid(f"{where}.type", message, "unsupported_parameter")
        field = "refusal" if kind == "refusal" else "text"
        if kind not in (*_TEXT_PARTS, "refusal"):
            raise invalid(f"{where}.type", f"{where}.type must be one of {', '.join(_TEXT_PARTS)}.")
        if unknown := sorted(set(part) - {"type", field, "annotations", "logprobs"}):
            raise invalid(f"{where}.{unknown[0]}", f"Unknown parameter: {where}.{unknown[0]}.", "unknown_parameter")
        if not isinstance(part.get(field), str):
            raise invalid(f"{where}.{field}", f"{where}.{field} must be a string.", "invalid_type")
        parts.append({"type": "refusal" if kind == "refusal" else "text", field: part[field]})
    return parts
