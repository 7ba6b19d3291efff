"""Converts a request of `/v1/responses` to a chat's request, its input items and tools to messages and tools, and its
output back to messages.

Agents send functions in namespaces, for their MCP servers and subagents. A model reads one list of functions, so such a
function has both names there, "files__read". A call is mapped back by the request's tools, since a function's name may
also contain "__"."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.errors import invalid, json_text
from server.openai_api import schema as chat
from server.openai_api.schema import (
    MAX_NAME_CHARACTERS,
    MAX_TOOLS,
    ChatCompletionRequest,
    FunctionCall,
    Message,
    ToolCall,
)
from server.responses_api import schema
from server.responses_api.objects import (
    Names,
    OutputCustomToolCall,
    OutputFunctionCall,
    OutputItem,
    OutputMessage,
    ReasoningSettings,
    Response,
)
from server.responses_api.schema import SAME_AS_IN_A_CHAT, FunctionTool, NamespaceTool, ResponsesRequest, ResponsesTool
from server.transport.typed import converted


def flat_name(namespace: str | None, name: str) -> str:
    """A function's name for the model."""
    return name if namespace is None else f"{namespace}__{name}"


_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""The parameters of a custom tool."""


def custom_arguments(text: str) -> str:
    """The arguments of a custom tool's call with this input."""
    return json.dumps({"input": text}, ensure_ascii=False)


def absent_tools(tools: Iterable[ResponsesTool]) -> dict[str, str]:
    """The kinds of the tools that cannot be run here, by their places."""
    kinds = {schema.WebSearchTool: "web_search", schema.WebSearchPreviewTool: "web_search_preview"}
    return {f"tools[{i}]": kinds[type(tool)] for i, tool in enumerate(tools) if isinstance(tool, schema.AbsentTool)}


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
        elif isinstance(tool, schema.CustomTool):
            yield f"tools[{i}]", None, _function_of(tool)
        elif isinstance(tool, NamespaceTool):
            for j, function in enumerate(tool.tools):
                yield f"tools[{i}].tools[{j}]", tool, function


def _function_of(tool: schema.CustomTool) -> FunctionTool:
    """A custom tool as a function of one text, whose description has the form of the text."""
    form = tool.format or {}
    told = (
        f"The input is a text of this {form.get('syntax', '')} grammar:\n{form['definition']}"
        if "definition" in form
        else None
    )
    about = "\n\n".join(filter(None, (tool.description, told)))
    return FunctionTool(tool.name, _TEXT, description=about or None)


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


Item = (
    schema.InputMessage
    | schema.InputFunctionCall
    | schema.InputFunctionCallOutput
    | schema.InputCustomToolCall
    | schema.InputReasoning
)

_SCHEMAS: dict[str, type[Item]] = {
    "message": schema.InputMessage,
    "function_call": schema.InputFunctionCall,
    "function_call_output": schema.InputFunctionCallOutput,
    "custom_tool_call": schema.InputCustomToolCall,
    "custom_tool_call_output": schema.InputFunctionCallOutput,
    "reasoning": schema.InputReasoning,
}
_NOT_READ = (
    "compaction", "compaction_summary", "context_compaction", "web_search_call", "file_search_call",
    "code_interpreter_call", "image_generation_call", "mcp_list_tools", "mcp_call",
)  # fmt: skip
"""Items that another server made for itself: conversations that it alone can read, and calls of its own tools."""


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
    item_type = _SCHEMAS.get(kind) if isinstance(kind, str) else None
    if item_type is None:
        if kind == "item_reference":
            raise invalid(f"{path}.type", f"Unsupported parameter: {path} (send the item itself).")
        got = f"got {json_text(kind)}"
        raise invalid(f"{path}.type", f"{path}.type must be one of {', '.join(_SCHEMAS)}, {got}.")
    return converted(fields, item_type, path)


def _append(found: ItemMessages, item: Item, path: str) -> None:
    if isinstance(item, schema.InputFunctionCallOutput):
        output = _content(item.output, f"{path}.output")
        found.add(Message(role="tool", tool_call_id=item.call_id, content=output), path)
        found.name("content", f"{path}.output")
    elif isinstance(item, schema.InputReasoning):
        if text := "".join(part.text for part in item.content or item.summary):
            found.add(Message(role="assistant", reasoning_content=text), path)
    elif isinstance(item, (schema.InputFunctionCall, schema.InputCustomToolCall)):
        is_custom = isinstance(item, schema.InputCustomToolCall)
        arguments = custom_arguments(item.input) if isinstance(item, schema.InputCustomToolCall) else item.arguments
        call = ToolCall(function=FunctionCall(flat_name(item.namespace, item.name), arguments), id=item.call_id)
        turn = _open_turn(found, path)
        turn.tool_calls = [*(turn.tool_calls or ()), call]
        own = f"tool_calls[{len(turn.tool_calls) - 1}]"
        found.name(own, path)
        found.name(f"{own}.function.arguments", f"{path}.{'input' if is_custom else 'arguments'}")
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


LOGPROBS = "message.output_text.logprobs"
"""The value of `include` for log probabilities."""

RENAMED = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.allowed_tools": "tool_choice",
}
"""A chat's fields by the names that they have here."""


def chat_request(
    asked: ResponsesRequest, conversation: Sequence[Message], tools: list[dict[str, Any]]
) -> ChatCompletionRequest:
    """The chat's request with the tools in a chat's form. Raises `ApiError` 400."""
    if asked.stream_options is not None:
        if not asked.stream:
            raise invalid("stream_options", "stream_options is only for stream: true.")
        if asked.stream_options.include_obfuscation:
            name = "stream_options.include_obfuscation"
            raise invalid(name, f"Unsupported parameter: {name} (not built).", "unsupported_parameter")
    has_logprobs = LOGPROBS in (asked.include or ())
    if asked.top_logprobs and not has_logprobs:
        raise invalid("top_logprobs", f'top_logprobs asks for include to have "{LOGPROBS}".')
    told = asked.instructions
    if absent := sorted(set(absent_tools(asked.tools or ()).values())):
        told = "\n\n".join(filter(None, (told, f"These tools are not available here: {', '.join(absent)}.")))
    instructions = [] if told is None else [Message(role="system", content=told)]
    return ChatCompletionRequest(
        model=asked.model,
        messages=[*instructions, *conversation],
        max_completion_tokens=asked.max_output_tokens,
        logprobs=has_logprobs,
        top_logprobs=asked.top_logprobs if has_logprobs else None,
        response_format=_response_format(asked.text),
        reasoning_effort=None if asked.reasoning is None else asked.reasoning.effort,
        tools=tools or None,
        tool_choice=_tool_choice(asked.tool_choice),
        **{name: getattr(asked, name) for name in SAME_AS_IN_A_CHAT},
    )


def _response_format(text: schema.TextOptions | None) -> Any:
    form = None if text is None else text.format
    if isinstance(form, schema.NamedJsonSchemaFormat):
        return chat.JsonSchemaFormat(chat.JsonSchema(form.name, form.description, form.schema, form.strict))
    return form


def _tool_choice(choice: schema.ToolChoice | None) -> chat.ToolChoice | None:
    if isinstance(choice, schema.FunctionChoice):
        return chat.NamedToolChoice(chat.NamedFunction(flat_name(choice.namespace, choice.name)))
    if isinstance(choice, schema.AllowedFunctionsChoice):
        tools = [
            chat.AllowedTool("function", chat.NamedFunction(flat_name(tool.namespace, tool.name)))
            for tool in choice.tools
        ]
        return chat.AllowedToolsChoice(chat.AllowedTools(choice.mode, tools))
    return choice


def names_of_items(items: ItemMessages, num_messages: int) -> dict[str, str]:
    """Maps a chat's names of the last messages, and of their parts, to those of their items."""
    first = num_messages - len(items.messages)
    names = {}
    for own, path in items.names.items():
        index, end, rest = own[1:].partition("]")
        names[f"messages[{first + int(index)}{end}{rest}"] = path
    return names


def begun_response(
    asked: ResponsesRequest, response_id: str, created: int, model: str, temperature: float, top_p: float
) -> Response:
    """The response before it has any output."""
    reasoning = asked.reasoning
    return Response(
        id=response_id,
        created_at=created,
        model=model,
        instructions=asked.instructions,
        max_output_tokens=asked.max_output_tokens,
        parallel_tool_calls=asked.parallel_tool_calls is not False,
        previous_response_id=asked.previous_response_id,
        reasoning=ReasoningSettings(None, None) if reasoning is None else ReasoningSettings(reasoning.effort, None),
        store=asked.store is not False,
        temperature=temperature,
        text=schema.TextOptions(format=chat.TextFormat())
        if asked.text is None or asked.text.format is None
        else asked.text,
        tool_choice=asked.tool_choice or "auto",
        tools=asked.tools or [],
        top_logprobs=asked.top_logprobs or 0,
        top_p=top_p,
        metadata=asked.metadata or {},
    )


def output_messages(items: Sequence[OutputItem]) -> list[Message]:
    """The assistant's turn for the next request's conversation, without reasoning."""
    text = "".join(part.text for item in items if isinstance(item, OutputMessage) for part in item.content)
    calls = []
    for item in items:
        if isinstance(item, OutputFunctionCall):
            function = FunctionCall(flat_name(item.namespace or None, item.name), item.arguments)
            calls.append(ToolCall(function=function, id=item.call_id))
        elif isinstance(item, OutputCustomToolCall):
            function = FunctionCall(item.name, custom_arguments(item.input))
            calls.append(ToolCall(function=function, id=item.call_id))
    return [Message(role="assistant", content=text, tool_calls=calls or None)]
