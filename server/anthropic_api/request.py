"""Converts a request of `/v1/messages` to a chat's request."""

from __future__ import annotations

from typing import Any

from runtime.text.formats import AnswerFormat
from server.anthropic_api.conversation import Conversation
from server.anthropic_api.schema import (
    SAME_AS_IN_A_CHAT,
    ConversationFields,
    CountTokensRequest,
    MessagesRequest,
    MessageTool,
    ToolChoice,
)
from server.errors import invalid
from server.openai_api.schema import (
    MAX_TOOLS,
    ChatCompletionRequest,
    JsonSchema,
    JsonSchemaFormat,
    NamedFunction,
    NamedToolChoice,
    ReasoningEffort,
)
from server.requests.thinking import check_agreement, has_variable, nearest_effort, thinking_variables
from server.transport.typed import converted
from tokenizer import Tokenizer

RENAMED = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
    "reasoning_effort": "output_config.effort",
}
"""A chat's fields by the names that they have here."""

NAMES_OF_TOOLS = {f"tools[{i}].function.parameters": f"tools[{i}].input_schema" for i in range(MAX_TOOLS)}

LEAST_BUDGETS: dict[ReasoningEffort, int] = {"high": 4096, "medium": 2048, "low": 1024, "minimal": 1}
"""The least `thinking.budget_tokens` that a level of effort stands for, as LiteLLM has them."""


def chat_request(
    asked: MessagesRequest | CountTokensRequest,
    conversation: Conversation,
    tokenizer: Tokenizer | None,
    answer_format: AnswerFormat,
    ignored: list[str],
) -> ChatCompletionRequest:
    """The chat's request. `ignored` gets the names of fields that the model's chat template changes or does not use.
    Raises `ApiError` 400."""
    tools = [_tool(fields, f"tools[{i}]") for i, fields in enumerate(asked.tools)] if asked.tools else None
    choice = asked.tool_choice
    has_tools = tools is not None and not (choice is not None and choice.type == "none")
    thinking = None if asked.thinking is None else asked.thinking.type != "disabled"
    variables = thinking_variables(tokenizer, thinking, has_tools=has_tools)
    effort, name = (None if asked.output_config is None else asked.output_config.effort), "output_config.effort"
    check_agreement(effort, asked.chat_template_kwargs or {})
    if asked.thinking is not None:
        budget = asked.thinking.budget_tokens
        takes_level = effort is None and has_variable(tokenizer, "reasoning_effort", has_tools=has_tools)
        if takes_level and thinking and budget is not None:
            name = "thinking.budget_tokens"
            effort = next(level for level, least in LEAST_BUDGETS.items() if budget >= least)
        elif takes_level and not thinking and not variables:
            effort, name = "none", "thinking"
        elif not variables:
            ignored.append("thinking")
        elif budget is not None:
            ignored.append("thinking.budget_tokens")
    num_ignored = len(ignored)
    variables |= asked.chat_template_kwargs or {}
    is_off = variables.get("enable_thinking") is False
    effort = nearest_effort(effort, name, tokenizer, answer_format, ignored, has_tools=has_tools, is_off=is_off)
    if name == "thinking.budget_tokens" and len(ignored) == num_ignored:  # a budget is never an exact level
        ignored.append(f"{name}={effort}")
    own: dict[str, Any] = {}
    if isinstance(asked, MessagesRequest):
        own = {name: getattr(asked, name) for name in SAME_AS_IN_A_CHAT} | {"stop": asked.stop_sequences}
    return ChatCompletionRequest(
        model=asked.model,
        messages=conversation.messages,
        tools=tools,
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=None if choice is None else not choice.disable_parallel_tool_use,
        response_format=_response_format(asked),
        reasoning_effort=effort,
        continue_final_message=conversation.continues,
        chat_template_kwargs=variables or None,
        **own,
    )


def _tool(fields: dict[str, Any], path: str) -> dict[str, Any]:
    kind = fields.get("type")
    if isinstance(kind, str) and kind != "custom":
        name = f"{path}.type"
        message = f"Unsupported parameter: {name} (there are no tools of Anthropic's own)."
        raise invalid(name, message, "unsupported_parameter")
    tool = converted(fields, MessageTool, path)
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    function |= {name: value for name in ("description", "strict") if (value := getattr(tool, name)) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice | None) -> Any:
    if choice is None:
        return None
    if (choice.name is None) == (choice.type == "tool"):
        raise invalid("tool_choice.name", 'tool_choice.name belongs to type "tool", and to no other.')
    if choice.name is not None:
        return NamedToolChoice(NamedFunction(choice.name))
    return "required" if choice.type == "any" else choice.type


def _response_format(asked: ConversationFields) -> JsonSchemaFormat | None:
    form = None if asked.output_config is None else asked.output_config.format
    return None if form is None else JsonSchemaFormat(JsonSchema("output", schema=form.schema))
