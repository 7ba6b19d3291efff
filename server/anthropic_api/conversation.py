"""Converts a request of `/v1/messages` to a chat's request: its messages of blocks, with each one's place in the
request, its tools, its thinking and its form."""

from __future__ import annotations

from typing import Any

import msgspec

from runtime.text.content import omitted, text_part
from server.anthropic_api.client_noise import without_noise
from server.anthropic_api.schema import (
    SAME_AS_IN_A_CHAT,
    ConversationFields,
    CountTokensRequest,
    DocumentInput,
    ImageInput,
    MessagesRequest,
    MessageTool,
    RedactedThinkingInput,
    SearchResultInput,
    TextInput,
    ThinkingInput,
    ToolChoice,
    ToolResultInput,
    ToolUseInput,
    Turn,
)
from server.errors import invalid, json_text
from server.openai_api.schema import (
    MAX_TOOLS,
    ChatCompletionRequest,
    FunctionCall,
    JsonSchema,
    JsonSchemaFormat,
    Message,
    NamedFunction,
    NamedToolChoice,
    ReasoningEffort,
    ToolCall,
)
from server.requests.thinking import check_agreement, has_variable, nearest_effort, thinking_variables
from server.service import Service
from server.transport.typed import converted

Said = TextInput | ImageInput | DocumentInput | SearchResultInput
Block = Said | ToolUseInput | ToolResultInput | ThinkingInput | RedactedThinkingInput

_SAID: dict[str, type[Block]] = {
    "text": TextInput,
    "image": ImageInput,
    "document": DocumentInput,
    "search_result": SearchResultInput,
}
_USER: dict[str, type[Block]] = {**_SAID, "tool_result": ToolResultInput}
_ASSISTANT: dict[str, type[Block]] = {
    "text": TextInput,
    "tool_use": ToolUseInput,
    "thinking": ThinkingInput,
    "redacted_thinking": RedactedThinkingInput,
}
_TEXT: dict[str, type[Block]] = {"text": TextInput}
_BLOCKS = {"user": _USER, "assistant": _ASSISTANT, "system": _TEXT}
"""The kinds of blocks that a message of each role may have."""

_NOT_READ = {"image": "images are read in user messages and tool results only"}
_OF_SERVERS = ("server_tool_use", "mcp_tool_use", "container_upload", "compaction")
"""Blocks of another server's own tools in an assistant's turn, beside those that end in "_tool_result". They are taken
and not read: what they hold is encrypted, or was read by the server that made them."""


class Conversation:
    """A chat's messages.

    paths      each message's place in the request, such as "messages[2].content[0]"
    parts      a chat's names of parts to their places in the request
    continues  the last message is the assistant's, and the answer continues its text
    """

    def __init__(
        self, asked: ConversationFields, ignored: list[str], *, keeps_noise: bool = False, dropped: list[str]
    ) -> None:
        """`ignored` gets the names of blocks that are not read, `dropped` those of `CLIENT_NOISE`, unless that is kept.
        Raises `ApiError` 400 naming the block's field."""
        self.messages: list[Message] = []
        self.paths: list[str] = []
        self.parts: dict[str, str] = {}
        if asked.system is not None:
            texts = _texts(asked.system, "system")
            first, noise = without_noise(texts[0]) if texts and not keeps_noise else ("", [])
            if noise:
                texts = [first, *texts[1:]] if first else texts[1:]
                dropped += noise
            if texts or not noise:
                self._add(Message(role="system", content="\n".join(texts)), "system")
        for i, fields in enumerate(asked.messages):
            path = f"messages[{i}]"
            message = converted(fields, Turn, path)
            content = message.content
            if isinstance(content, str):
                self._add(Message(role=message.role, content=content), path)
                continue
            blocks = []
            for j, block in enumerate(content):
                where = f"{path}.content[{j}]"
                if message.role == "assistant" and _is_of_a_server(block.get("type")):
                    ignored.append(where)
                else:
                    blocks.append((_block(block, _BLOCKS[message.role], where), where))
            if message.role == "assistant":
                self._add(_assistant([block for block, _ in blocks]), path)
            else:
                self._add_turn(message.role, blocks, path)
        last = self.messages[-1]
        self.continues = last.role == "assistant"
        if self.continues and last.tool_calls:
            raise invalid("messages", "messages: the tool_use blocks of the last message want a tool_result.")

    def names(self) -> dict[str, str]:
        """A chat's names of the messages to the request's."""
        return {f"messages[{i}]": path for i, path in enumerate(self.paths)} | self.parts

    def _add(self, message: Message, path: str) -> None:
        self.messages.append(message)
        self.paths.append(path)

    def _add_turn(self, role: Any, blocks: list[tuple[Block, str]], path: str) -> None:
        """Each tool's result becomes a message of its own; other neighbouring blocks become one message."""
        parts: list[dict[str, Any]] = []
        for block, where in blocks:
            if isinstance(block, ToolResultInput):
                parts = []
                self._add(Message(role="tool", tool_call_id=block.tool_use_id), where)
                self._add_result(block, self.messages[-1], f"{where}.content")
            else:
                if not parts:
                    self._add(Message(role=role, content=parts), path)
                self._add_parts(parts, block, where, is_result=False)
        if not blocks:
            self._add(Message(role=role, content=""), path)

    def _add_parts(self, parts: list[dict[str, Any]], block: Block, path: str, *, is_result: bool) -> None:
        """Adds a block's parts to those of the last message."""
        assert isinstance(block, Said)
        for part, where in _parts(block, path, is_result=is_result):
            self.parts[f"messages[{len(self.messages) - 1}].content[{len(parts)}]"] = where
            parts.append(part)

    def _add_result(self, block: ToolResultInput, message: Message, path: str) -> None:
        if block.content is None or isinstance(block.content, str):
            message.content = _marked(block, block.content or "")
            return
        is_text = all(fields.get("type") == "text" for fields in block.content)
        parts = [text_part("Error:")] if block.is_error and not is_text else []
        for i, fields in enumerate(block.content):
            where = f"{path}[{i}]"
            kind = fields.get("type")
            if isinstance(kind, str) and kind not in _SAID:
                parts.append(text_part(omitted(kind)))
            else:
                self._add_parts(parts, _block(fields, _SAID, where), where, is_result=True)
        has_image = any(part["type"] == "image" for part in parts)
        message.content = parts if has_image else _marked(block, "\n".join(part["text"] for part in parts))


def _is_of_a_server(kind: Any) -> bool:
    return isinstance(kind, str) and (kind in _OF_SERVERS or (kind.endswith("_tool_result")))


def _parts(block: Said, path: str, *, is_result: bool) -> list[tuple[dict[str, Any], str]]:
    """A chat's parts of a block, each with its place in the request."""
    if isinstance(block, TextInput):
        return [(text_part(block.text), path)]
    if isinstance(block, ImageInput):
        return [({"type": "image", "source": msgspec.to_builtins(block.source)}, path)]
    if isinstance(block, SearchResultInput):
        head = text_part(f"{block.title}\n{block.source}")
        return [(head, path), *_inner(block.content, f"{path}.content", is_result=is_result)]
    head_lines = "\n".join(line for line in (block.title, block.context) if line)
    parts: list[tuple[dict[str, Any], str]] = [(text_part(head_lines), path)] if head_lines else []
    kind, where = block.source.get("type"), f"{path}.source"
    if kind == "text" and isinstance(text := block.source.get("data"), str):
        return [*parts, (text_part(text), f"{where}.data")]
    if kind == "content" and isinstance(content := block.source.get("content"), (str, list)):
        return [*parts, *_inner(content, f"{where}.content", is_result=is_result)]
    if is_result:
        return [*parts, (text_part(omitted("documents")), where)]
    name, got = f"{where}.type", f"got {json_text(kind)}"
    message = f"{name} must be text or content, {got}: the model reads no other documents."
    raise invalid(name, message, "unsupported_parameter")


def _inner(content: str | list[dict[str, Any]], path: str, *, is_result: bool) -> list[tuple[dict[str, Any], str]]:
    if isinstance(content, str):
        return [(text_part(content), path)]
    kinds: dict[str, type[Block]] = {"text": TextInput, "image": ImageInput}
    parts: list[tuple[dict[str, Any], str]] = []
    for i, fields in enumerate(content):
        where = f"{path}[{i}]"
        block = _block(fields, kinds, where)
        assert isinstance(block, (TextInput, ImageInput))
        parts += _parts(block, where, is_result=is_result)
    return parts


def _assistant(blocks: list[Block]) -> Message:
    """One assistant turn: its reasoning, text and calls."""
    texts = [block.text for block in blocks if isinstance(block, TextInput)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingInput) and block.thinking]
    calls = [
        ToolCall(function=FunctionCall(block.name, block.input), id=block.id)
        for block in blocks
        if isinstance(block, ToolUseInput)
    ]
    return Message(
        role="assistant",
        content="\n".join(texts) if texts or not calls else None,
        reasoning_content="\n".join(thoughts) or None,
        tool_calls=calls or None,
    )


def _marked(block: ToolResultInput, text: str) -> str:
    """A result's text. An error's begins with "Error", so that the model knows it."""
    return f"Error: {text}" if block.is_error and not text.startswith("Error") else text


def _texts(content: str | list[dict[str, Any]], path: str) -> list[str]:
    """The texts of blocks of text."""
    if isinstance(content, str):
        return [content]
    blocks = [_block(fields, _TEXT, f"{path}[{i}]") for i, fields in enumerate(content)]
    return [block.text for block in blocks if isinstance(block, TextInput)]


def _block(fields: dict[str, Any], kinds: dict[str, type[Block]], path: str) -> Block:
    kind = fields.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        name = f"{path}.type"
        if isinstance(kind, str) and kind in _NOT_READ:
            raise invalid(name, f"Unsupported parameter: {name} ({_NOT_READ[kind]}).", "unsupported_parameter")
        got = "it is missing" if kind is None else f"got {json_text(kind)}"
        raise invalid(name, f"{name} must be one of {', '.join(kinds)}, {got}.")
    return converted(fields, kinds[kind], path)


RENAMED = {
    "continue_final_message": "messages",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
    "reasoning_effort": "output_config.effort",
    "thinking_budget": "thinking.budget_tokens",
}
"""A chat's fields by the names that they have here."""

NAMES_OF_TOOLS = {f"tools[{i}].function.parameters": f"tools[{i}].input_schema" for i in range(MAX_TOOLS)}

LEAST_BUDGETS: dict[ReasoningEffort, int] = {"high": 4096, "medium": 2048, "low": 1024, "minimal": 1}
"""The least `thinking.budget_tokens` that a level of effort stands for, as LiteLLM has them."""


def chat_request(
    service: Service, asked: MessagesRequest | CountTokensRequest, conversation: Conversation, ignored: list[str]
) -> ChatCompletionRequest:
    """The chat's request. `ignored` gets the names of fields that the model's chat template changes or does not use.
    Raises `ApiError` 400."""
    tools = [_tool(fields, f"tools[{i}]") for i, fields in enumerate(asked.tools)] if asked.tools else None
    choice = asked.tool_choice
    has_tools = tools is not None and not (choice is not None and choice.type == "none")
    thinking = None if asked.thinking is None else asked.thinking.type != "disabled"
    variables = thinking_variables(service, thinking, has_tools=has_tools)
    effort, name = (None if asked.output_config is None else asked.output_config.effort), "output_config.effort"
    check_agreement(effort, asked.chat_template_kwargs or {})
    budget, has_budget = None, False
    if asked.thinking is not None:
        budget = asked.thinking.budget_tokens
        has_budget = bool(thinking) and budget is not None and service.reasoning_end is not None
        takes_level = effort is None and has_variable(service, "reasoning_effort", has_tools=has_tools)
        if takes_level and thinking and budget is not None:
            name = "thinking.budget_tokens"
            effort = next(level for level, least in LEAST_BUDGETS.items() if budget >= least)
        elif takes_level and not thinking and not variables:
            effort, name = "none", "thinking"
        elif not variables and not has_budget:
            ignored.append("thinking")
        elif budget is not None and not has_budget:
            ignored.append("thinking.budget_tokens")
    num_ignored = len(ignored)
    variables |= asked.chat_template_kwargs or {}
    is_off = variables.get("enable_thinking") is False
    effort = nearest_effort(service, effort, name, ignored, has_tools=has_tools, is_off=is_off)
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
        thinking_budget=budget if has_budget else None,
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
