"""Converts a request of `/v1/responses` to a chat's request, and its output back to messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from server.errors import ApiError, invalid, renamed
from server.openai_api.schema import (
    AllowedTool,
    AllowedTools,
    AllowedToolsChoice,
    ChatCompletionRequest,
    FunctionCall,
    JsonSchema,
    JsonSchemaFormat,
    Message,
    NamedFunction,
    NamedToolChoice,
    TextFormat,
    ToolCall,
)
from server.openai_api.schema import ToolChoice as ChatToolChoice
from server.responses_api.input import ItemMessages, flat_name
from server.responses_api.objects import (
    OutputFunctionCall,
    OutputItem,
    OutputMessage,
    ReasoningSettings,
    Response,
)
from server.responses_api.schema import (
    SAME_AS_IN_A_CHAT,
    AllowedFunctionsChoice,
    FunctionChoice,
    NamedJsonSchemaFormat,
    ResponsesRequest,
    TextOptions,
    ToolChoice,
)

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
    instructions = [] if asked.instructions is None else [Message(role="system", content=asked.instructions)]
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


def _response_format(text: TextOptions | None) -> Any:
    form = None if text is None else text.format
    if isinstance(form, NamedJsonSchemaFormat):
        return JsonSchemaFormat(JsonSchema(form.name, form.description, form.schema, form.strict))
    return form


def _tool_choice(choice: ToolChoice | None) -> ChatToolChoice | None:
    if isinstance(choice, FunctionChoice):
        return NamedToolChoice(NamedFunction(flat_name(choice.namespace, choice.name)))
    if isinstance(choice, AllowedFunctionsChoice):
        tools = [AllowedTool("function", NamedFunction(flat_name(tool.namespace, tool.name))) for tool in choice.tools]
        return AllowedToolsChoice(AllowedTools(choice.mode, tools))
    return choice


def names_of_items(items: ItemMessages, num_messages: int) -> dict[str, str]:
    """Maps a chat's names of the last messages, and of their parts, to those of their items."""
    first = num_messages - len(items.messages)
    names = {}
    for own, path in items.names.items():
        index, end, rest = own[1:].partition("]")
        names[f"messages[{first + int(index)}{end}{rest}"] = path
    return names


def in_own_names(error: ApiError, items: Mapping[str, str]) -> ApiError:
    """A chat's error in this endpoint's names; `items` maps those of the messages."""
    return renamed(error, {**RENAMED, **items})


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
        text=TextOptions(format=TextFormat()) if asked.text is None or asked.text.format is None else asked.text,
        tool_choice=asked.tool_choice or "auto",
        tools=asked.tools or [],
        top_logprobs=asked.top_logprobs or 0,
        top_p=top_p,
        metadata=asked.metadata or {},
    )


def output_messages(items: Sequence[OutputItem]) -> list[Message]:
    """The assistant's turn for the next request's conversation, without reasoning."""
    text = "".join(part.text for item in items if isinstance(item, OutputMessage) for part in item.content)
    calls = [
        ToolCall(function=FunctionCall(flat_name(item.namespace or None, item.name), item.arguments), id=item.call_id)
        for item in items
        if isinstance(item, OutputFunctionCall)
    ]
    return [Message(role="assistant", content=text, tool_calls=calls or None)]
