"""Converts the input items and tools of `/v1/responses` to a chat's messages and tools.

Agents send functions in namespaces, for their MCP servers and subagents. A model reads one list of functions, so such a
function has both names there, "files__read". A call is mapped back by the request's tools, since a function's name may
also contain "__"."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.errors import invalid, json_text
from server.openai_api.schema import MAX_NAME_CHARACTERS, MAX_TOOLS, FunctionCall, Message, ToolCall
from server.responses_api.schema import (
    FunctionTool,
    InputFunctionCall,
    InputFunctionCallOutput,
    InputMessage,
    InputReasoning,
    NamespaceTool,
    ResponsesTool,
)
from server.transport.typed import converted

Names = Mapping[str, tuple[str, str]]
"""The model's name of a function: its namespace, and its name there."""


def flat_name(namespace: str | None, name: str) -> str:
    """A function's name for the model."""
    return name if namespace is None else f"{namespace}__{name}"


def flat_tools(tools: Iterable[ResponsesTool]) -> tuple[list[dict[str, Any]], Names]:
    """The tools in a chat's form. Raises `ApiError` 400."""
    flat: list[dict[str, Any]] = []
    seen: set[str] = set()
    names: dict[str, tuple[str, str]] = {}
    for path, namespace, tool in _functions(tools):
        name = tool.name
        if namespace is not None:
            name = flat_name(namespace.name, tool.name)
            names[name] = (namespace.name, tool.name)
        if len(name) > MAX_NAME_CHARACTERS:
            raise invalid(
                f"{path}.name",
                f"{path}.name and its namespace's come to {len(name)} characters as {name!r}; "
                f"at most {MAX_NAME_CHARACTERS} are allowed.",
            )
        if name in seen:
            raise invalid(f"{path}.name", f"{path}.name: there are two functions that the model sees as {name!r}.")
        seen.add(name)
        flat.append(_chat_tool(tool, name, namespace))
    if len(flat) > MAX_TOOLS:
        raise invalid("tools", f"tools must have at most {MAX_TOOLS} functions, got {len(flat)}.")
    return flat, names


def names_of_tools(tools: Iterable[ResponsesTool]) -> dict[str, str]:
    """Maps a chat's names of the functions to their names here."""
    return {f"tools[{i}].function": path for i, (path, _, _) in enumerate(_functions(tools))}


def _functions(tools: Iterable[ResponsesTool]) -> Iterator[tuple[str, NamespaceTool | None, FunctionTool]]:
    """Each function with its path in the request and its namespace."""
    for i, tool in enumerate(tools):
        if isinstance(tool, FunctionTool):
            yield f"tools[{i}]", None, tool
        else:
            for j, function in enumerate(tool.tools):
                yield f"tools[{i}].tools[{j}]", tool, function


def _chat_tool(tool: FunctionTool, name: str, namespace: NamespaceTool | None) -> dict[str, Any]:
    """A chat's tool; the namespace's description comes before the function's own."""
    about = (None if namespace is None else namespace.description, tool.description)
    fields = {
        "name": name,
        "description": "\n\n".join(filter(None, about)) or None,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}


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
    """Content in a chat's form, whose parts `server.requests.prompt` reads. Files by id are refused, since none
    are kept."""
    if isinstance(content, str):
        return content
    for i, part in enumerate(content):
        if part.get("type") == "input_image" and part.get("file_id") is not None:
            name = f"{path}[{i}].file_id"
            raise invalid(name, f"Unsupported parameter: {name} (send image_url).", "unsupported_parameter")
    return content
