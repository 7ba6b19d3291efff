"""From Anthropic's messages of blocks to a chat's messages, with where each came from."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from server.anthropic_api.schema import (
    ConversationFields,
    ImageInput,
    ImageSource,
    RedactedThinkingInput,
    TextInput,
    ThinkingInput,
    ToolResultInput,
    ToolUseInput,
    Turn,
)
from server.errors import below, invalid
from server.openai_api.schema import FunctionCall, Message, ToolCall
from server.transport.body import schema_error

T = TypeVar("T", bound=msgspec.Struct)
Block = TextInput | ImageInput | ToolUseInput | ToolResultInput | ThinkingInput | RedactedThinkingInput

_USER: dict[str, type[Block]] = {"text": TextInput, "image": ImageInput, "tool_result": ToolResultInput}
_ASSISTANT: dict[str, type[Block]] = {
    "text": TextInput,
    "tool_use": ToolUseInput,
    "thinking": ThinkingInput,
    "redacted_thinking": RedactedThinkingInput,
}
_TEXT: dict[str, type[Block]] = {"text": TextInput}
_BLOCKS = {"user": _USER, "assistant": _ASSISTANT, "system": _TEXT}
"""The kinds of blocks that a message of each role may have."""

_NOT_READ = {"image": "images: only in the user's own blocks", "document": "documents: the model reads none"}


class Conversation:
    """A chat's messages.

    paths      each message's place in the request, such as "messages[2].content[0]"
    parts      a chat's names of parts to their places in the request
    continues  the last message is the assistant's, whose text the answer goes on with
    """

    def __init__(self, asked: ConversationFields) -> None:
        """Raises `ApiError` 400 naming the block's field."""
        self.messages: list[Message] = []
        self.paths: list[str] = []
        self.parts: dict[str, str] = {}
        if asked.system is not None:
            self._add(Message(role="system", content=_text(asked.system, "system")), "system")
        for i, fields in enumerate(asked.messages):
            path = f"messages[{i}]"
            message = _converted(fields, Turn, path)
            content = message.content
            if isinstance(content, str):
                self._add(Message(role=message.role, content=content), path)
                continue
            blocks = [
                (_block(block, _BLOCKS[message.role], f"{path}.content[{j}]"), f"{path}.content[{j}]")
                for j, block in enumerate(content)
            ]
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
        """Each tool's result is a message of its own; texts and images beside each other are one."""
        parts: list[dict[str, Any]] = []
        for block, where in blocks:
            if isinstance(block, (TextInput, ImageInput)):
                if not parts:
                    self._add(Message(role=role, content=parts), path)
                name = f"messages[{len(self.messages) - 1}].content[{len(parts)}]"
                self.parts[name] = where
                if isinstance(block, TextInput):
                    parts.append({"type": "text", "text": block.text})
                else:
                    parts.append({"type": "image_url", "image_url": {"url": _url(block.source, f"{where}.source")}})
                    self.parts[f"{name}.image_url"] = self.parts[f"{name}.image_url.url"] = f"{where}.source"
            else:
                assert isinstance(block, ToolResultInput)
                parts = []
                self._add(Message(role="tool", tool_call_id=block.tool_use_id, content=_result(block, where)), where)
        if not blocks:
            self._add(Message(role=role, content=""), path)


def _assistant(blocks: list[Block]) -> Message:
    """One turn: what was thought, what was said, what was called."""
    texts = [block.text for block in blocks if isinstance(block, TextInput)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingInput) and block.thinking]
    calls = [
        ToolCall(function=FunctionCall(block.name, msgspec.json.encode(block.input).decode()), id=block.id)
        for block in blocks
        if isinstance(block, ToolUseInput)
    ]
    return Message(
        role="assistant",
        content="\n".join(texts) if texts or not calls else None,
        reasoning_content="\n".join(thoughts) or None,
        tool_calls=calls or None,
    )


def _url(source: ImageSource, path: str) -> str:
    """Where the image is, or a URI that is the image."""
    field, others = ("data", ("url",)) if source.type == "base64" else ("url", ("data", "media_type"))
    if getattr(source, field) is None:
        raise invalid(f"{path}.{field}", f"{path}.{field} is missing: the source's type is {source.type!r}.")
    for other in others:
        if getattr(source, other) is not None:
            raise invalid(f"{path}.{other}", f"{path}.{other}: the source's type is {source.type!r}.")
    return source.url or f"data:{source.media_type or ''};base64,{source.data}"


def _result(block: ToolResultInput, path: str) -> str:
    text = "" if block.content is None else _text(block.content, f"{path}.content")
    if block.is_error and not text.startswith("Error"):
        return f"Error: {text}"
    return text


def _text(content: str | list[dict[str, Any]], path: str) -> str:
    """Blocks of text, joined by line ends."""
    if isinstance(content, str):
        return content
    blocks = [_block(fields, _TEXT, f"{path}[{i}]") for i, fields in enumerate(content)]
    return "\n".join(block.text for block in blocks if isinstance(block, TextInput))


def _block(fields: dict[str, Any], kinds: dict[str, type[Block]], path: str) -> Block:
    kind = fields.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        name = f"{path}.type"
        if isinstance(kind, str) and kind in _NOT_READ:
            raise invalid(name, f"Unsupported parameter: {name} ({_NOT_READ[kind]}).", "unsupported_parameter")
        raise invalid(name, f"{name} must be one of {', '.join(kinds)}.")
    return _converted(fields, kinds[kind], path)


def _converted(fields: dict[str, Any], schema: type[T], path: str) -> T:
    try:
        return msgspec.convert(fields, schema)
    except msgspec.ValidationError as error:
        raise below(path, schema_error(str(error))) from None
