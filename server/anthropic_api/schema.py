"""The requests of `/v1/messages`: Anthropic's fields, and ours that a chat also has.

Fields without effect and unsupported ones are in `server.openai_api.fields`. `cache_control` is accepted everywhere:
prefixes are always cached."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_type_hints

import msgspec

from server.openai_api.schema import MAX_TOOLS, CommonFields, Int, Name, ReasoningEffort, held

CacheControl = dict[str, Any]


class ThinkingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether the model may think: the chat template's variable `enable_thinking`.

    budget_tokens  most tokens of thinking, after which it is closed; mapped to a level of effort, if the template has
                   levels
    display        "omitted": the thinking blocks of the answer are empty
    """

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class JsonOutputFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """effort: the chat template's variable `reasoning_effort`, if it has one. format: the answer's required form."""

    effort: ReasoningEffort | None = None
    format: JsonOutputFormat | None = None


class ToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """name: with type "tool", the tool that must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class MessageTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool of the client; Anthropic's have other types and are refused.

    eager_input_streaming  accepted without effect: the input is always streamed
    allowed_callers        only "direct"
    """

    name: Name
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class ConversationFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The common fields of `/v1/messages` and `/v1/messages/count_tokens`."""

    model: str
    messages: Annotated[list[dict[str, Any]], held(Turn, min_length=1)]
    system: str | Annotated[list[dict[str, Any]], held(*_BLOCKS)] | None = None
    tools: Annotated[list[dict[str, Any]], held(MessageTool, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CountTokensRequest(ConversationFields, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/messages/count_tokens`."""


class GeneratingConversation(ConversationFields, kw_only=True):
    """The same with a chat's `CommonFields`: msgspec takes one parent."""

    __annotations__ = get_type_hints(CommonFields, include_extras=True)
    vars().update(dict.fromkeys(CommonFields.__struct_fields__))


class MessagesRequest(GeneratingConversation, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/messages`.

    system          the system message: a text, or blocks of text
    messages        turns of texts or blocks; if the last is the assistant's, its text is continued
    tool_choice     "any" and "tool" force a call
    thinking        see `ThinkingConfig`
    """

    max_tokens: Int
    stop_sequences: list[str] | None = None


SAME_AS_IN_A_CHAT = (*CommonFields.__struct_fields__, "max_tokens")
"""Fields that mean what they mean in a chat."""


# The conversation


class Turn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[dict[str, Any]], held(*_BLOCKS)]


class TextInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = None


class ImageSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """data, of the media_type: base64; or a url."""

    type: Literal["base64", "url"]
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class ImageInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["image"]
    source: ImageSource
    cache_control: CacheControl | None = None


class DocumentInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """source: a text, or blocks. A PDF, a URL or a file is refused; in a tool's result a note replaces it."""

    type: Literal["document"]
    source: dict[str, Any]
    title: str | None = None
    context: str | None = None
    citations: dict[str, Any] | None = None
    cache_control: CacheControl | None = None


class SearchResultInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A result of a search. The model reads its title, its source and its texts."""

    type: Literal["search_result"]
    source: str
    title: str
    content: list[dict[str, Any]]
    citations: dict[str, Any] | None = None
    cache_control: CacheControl | None = None


class ToolUseInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: dict[str, Any] | None = None
    toolset_name: None = None


class ToolResultInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """is_error: the model reads "Error: " before the content."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[dict[str, Any]], held(*_BLOCKS)] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: None = None


class ThinkingInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Thinking encrypted by another server. It is accepted and not read."""

    type: Literal["redacted_thinking"]
    data: str


_BLOCKS = (TextInput, ToolUseInput, ToolResultInput, ThinkingInput, RedactedThinkingInput)
_OF_A_RESULT = (TextInput, ImageInput, DocumentInput, SearchResultInput)
MESSAGE_PARTS = (*_OF_A_RESULT, MessageTool, ToolUseInput, ToolResultInput, ThinkingInput, RedactedThinkingInput)
"""Types that no other names: the requests hold them as plain objects, so that an error can tell which one it means."""

_NULL = {"type": "null"}


def complete_messages(components: dict[str, Any], *, reads_images: bool) -> None:
    """Put the parts into the requests' schemas."""
    text = _texts(TextInput)
    turns = [
        _turn("user", *(each for each in _OF_A_RESULT if reads_images or each is not ImageInput), ToolResultInput),
        _turn("assistant", TextInput, ToolUseInput, ThinkingInput, RedactedThinkingInput),
        _turn("system", TextInput),
    ]
    for request in ("MessagesRequest", "CountTokensRequest"):
        fields = components[request]["properties"]
        fields["messages"] = {"type": "array", "items": {"anyOf": turns}, "minItems": 1}
        fields["system"] = {"anyOf": [*text, _NULL], "default": None}
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
