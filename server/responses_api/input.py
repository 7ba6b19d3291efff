"""Converts the input items of `/v1/responses` to a chat's messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from server.errors import invalid, json_text
from server.openai_api.schema import FunctionCall, Message, ToolCall
from server.responses_api.namespaces import flat_name
from server.responses_api.schema import (
    InputFunctionCall,
    InputFunctionCallOutput,
    InputMessage,
    InputReasoning,
)
from server.transport.typed import converted

Item = InputMessage | InputFunctionCall | InputFunctionCallOutput | InputReasoning

_SCHEMAS: dict[str, type[Item]] = {
    "message": InputMessage,
    "function_call": InputFunctionCall,
    "function_call_output": InputFunctionCallOutput,
    "reasoning": InputReasoning,
}
_NOT_READ = (
    "compaction", "compaction_summary", "context_compaction", "web_search_call", "file_search_call",
    "code_interpreter_call", "image_generation_call", "mcp_list_tools", "mcp_call",
)  # fmt: skip
"""Items that another server made for itself: conversations that it alone can read, and calls of its own tools."""
"""Items of another server's that hold what it alone can decrypt."""


@dataclass(slots=True)
class ItemMessages:
    """The messages of a request's items.

    names    a chat's names of them, and of their fields, counted from the first: "[1].content" is "input[2].output"
    ignored  the names of items that another server has encrypted or that only it can read
    """

    messages: list[Message] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)

    def add(self, message: Message, path: str) -> Message:
        self.names[f"[{len(self.messages)}]"] = path
        self.messages.append(message)
        return message

    def name(self, own: str, path: str) -> None:
        """The place of a field of the last message."""
        self.names[f"[{len(self.messages) - 1}].{own}"] = path


def input_messages(given: str | Sequence[dict[str, Any]]) -> ItemMessages:
    """Reasoning, text and function calls of an assistant's turn, in this order, become one message, as in the answer.
    Raises `ApiError` 400 naming the item's field."""
    found = ItemMessages()
    if isinstance(given, str):
        found.add(Message(role="user", content=given), "input")
        return found
    for i, fields in enumerate(given):
        path = f"input[{i}]"
        if fields.get("type") in _NOT_READ:
            found.ignored.append(path)
        else:
            if fields.get("encrypted_content") is not None:
                found.ignored.append(f"{path}.encrypted_content")
            _append(found, _item(fields, path), path)
    if not found.messages:
        raise invalid("input", "input must have an item that the model reads.")
    return found


def _item(fields: dict[str, Any], path: str) -> Item:
    kind = fields.get("type", "message")
    schema = _SCHEMAS.get(kind) if isinstance(kind, str) else None
    if schema is None:
        if kind == "item_reference":
            raise invalid(f"{path}.type", f"Unsupported parameter: {path} (send the item itself).")
        got = f"got {json_text(kind)}"
        raise invalid(f"{path}.type", f"{path}.type must be one of {', '.join(_SCHEMAS)}, {got}.")
    return converted(fields, schema, path)


def _append(found: ItemMessages, item: Item, path: str) -> None:
    if isinstance(item, InputFunctionCallOutput):
        output = _content(item.output, f"{path}.output")
        found.add(Message(role="tool", tool_call_id=item.call_id, content=output), path)
        found.name("content", f"{path}.output")
    elif isinstance(item, InputReasoning):
        if text := "".join(part.text for part in item.content or item.summary):
            found.add(Message(role="assistant", reasoning_content=text), path)
    elif isinstance(item, InputFunctionCall):
        call = ToolCall(function=FunctionCall(flat_name(item.namespace, item.name), item.arguments), id=item.call_id)
        turn = _open_turn(found, path)
        turn.tool_calls = [*(turn.tool_calls or ()), call]
        own = f"tool_calls[{len(turn.tool_calls) - 1}]"
        found.name(own, path)
        found.name(f"{own}.function.arguments", f"{path}.arguments")
    elif item.role == "assistant":
        turn = _open_turn(found, path, is_open=lambda last: last.content is None and not last.tool_calls)
        turn.content = _content(item.content, f"{path}.content")
        found.name("content", f"{path}.content")
    else:
        found.add(Message(role=item.role, content=_content(item.content, f"{path}.content")), path)


def _open_turn(found: ItemMessages, path: str, is_open: Any = lambda last: True) -> Message:
    """The assistant's message to which an item belongs: the last, or a new one."""
    last = found.messages[-1] if found.messages else None
    if last is not None and last.role == "assistant" and is_open(last):
        return last
    return found.add(Message(role="assistant"), path)


def _content(content: str | list[dict[str, Any]], path: str) -> str | list[dict[str, Any]]:
    """Content in a chat's form, whose parts `server.requests.conversation` reads. Files by id are refused, since none
    are kept."""
    if isinstance(content, str):
        return content
    for i, part in enumerate(content):
        if part.get("type") == "input_image" and part.get("file_id") is not None:
            name = f"{path}[{i}].file_id"
            raise invalid(name, f"Unsupported parameter: {name} (send image_url).", "unsupported_parameter")
    return content
