"""Schema details of `/v1/messages` that its types do not express."""

from __future__ import annotations

from typing import Any

from server.anthropic_api.schema import (
    DocumentInput,
    ImageInput,
    MessageTool,
    RedactedThinkingInput,
    SearchResultInput,
    TextInput,
    ThinkingInput,
    ToolResultInput,
    ToolUseInput,
)

_OF_A_RESULT = (TextInput, ImageInput, DocumentInput, SearchResultInput)
PARTS = (*_OF_A_RESULT, MessageTool, ToolUseInput, ToolResultInput, ThinkingInput, RedactedThinkingInput)
"""Types that no other names: the requests hold them as plain objects, so that an error can tell which one it means."""

_NULL = {"type": "null"}


def complete(components: dict[str, Any], *, reads_images: bool) -> None:
    """Put the parts into the requests' schemas."""
    text = _texts(TextInput)
    tools = {"type": "array", "items": _reference(MessageTool), "maxItems": 128}
    turns = [
        _turn("user", *(each for each in _OF_A_RESULT if reads_images or each is not ImageInput), ToolResultInput),
        _turn("assistant", TextInput, ToolUseInput, ThinkingInput, RedactedThinkingInput),
        _turn("system", TextInput),
    ]
    for request in ("MessagesRequest", "CountTokensRequest"):
        fields = components[request]["properties"]
        fields["messages"] = {"type": "array", "items": {"anyOf": turns}, "minItems": 1}
        fields["system"] = {"anyOf": [*text, _NULL], "default": None}
        fields["tools"] = {"anyOf": [tools, _NULL], "default": None}
    result = {"anyOf": [*_texts(*_OF_A_RESULT), _NULL], "default": None}
    components["ToolResultInput"]["properties"]["content"] = result
    inner = _texts(TextInput, *([ImageInput] if reads_images else []))
    components["SearchResultInput"]["properties"]["content"] = inner[1]
    components["DocumentInput"]["properties"]["source"] = {"anyOf": [_TEXT_SOURCE, _content_source(inner)]}


_TEXT_SOURCE = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "media_type": {"type": "string"}, "data": {"type": "string"}},
    "required": ["type", "data"],
    "additionalProperties": False,
}


def _content_source(content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"type": {"const": "content"}, "content": {"anyOf": content}},
        "required": ["type", "content"],
        "additionalProperties": False,
    }


def _turn(role: str, *blocks: type) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"role": {"const": role}, "content": {"anyOf": _texts(*blocks)}},
        "required": ["role", "content"],
        "additionalProperties": False,
    }


def _texts(*blocks: type) -> list[dict[str, Any]]:
    return [{"type": "string"}, {"type": "array", "items": {"anyOf": [_reference(block) for block in blocks]}}]


def _reference(part: type) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{part.__name__}"}
