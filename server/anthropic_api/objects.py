"""The answers of `/v1/messages`, and the events of its streams, as typed objects in Anthropic's shapes; and an answer's
content as it grows: blocks and their events, start, deltas, stop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from runtime.engine.messages import MissReason
from runtime.text.parts import ToolCallDelta
from server.openai_api.answers import AnswerItems, ChatTokenLogprob
from server.requests.structured import tool_input

SIGNATURE = "unsigned"

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str = ""


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """signature: a word that fills the field, since clients send it back; nothing is signed."""

    thinking: str = ""
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any] = {}


Block = TextBlock | ThinkingBlock | ToolUseBlock


class OutputTokensDetails(msgspec.Struct):
    thinking_tokens: int = 0


class MessageUsage(msgspec.Struct, kw_only=True):
    """input_tokens: tokens of the prompt that missed the prefix cache; cache_read_input_tokens: those that hit it.
    miss_reason, first_difference: as in chat's `PromptTokensDetails`."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    output_tokens_details: OutputTokensDetails = msgspec.field(default_factory=OutputTokensDetails)
    miss_reason: MissReason | UnsetType = UNSET
    first_difference: int | UnsetType = UNSET


class MessageAnswer(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block] = msgspec.field(default_factory=list)
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    weight_version: str | UnsetType = UNSET


class TokensCount(msgspec.Struct):
    input_tokens: int


# Events


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, tag_field="type", tag="signature_delta"):
    signature: str


class InputJsonDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    message: MessageAnswer


class Ping(msgspec.Struct, tag_field="type", tag="ping"):
    pass


class BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: Block


class BlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class BlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    index: int


class StopDelta(msgspec.Struct):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    """usage: of the whole answer."""

    delta: StopDelta
    usage: MessageUsage
    weight_version: str | UnsetType = UNSET


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    pass


MessageEvent = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


class MessageContent(AnswerItems[Block, MessageEvent]):
    """`omits_thinking`: blocks of thinking stay empty."""

    def __init__(self, *, omits_thinking: bool = False) -> None:
        super().__init__()
        self.has_calls = False
        self._omits_thinking = omits_thinking
        self._arguments: list[str] = []  # of the last call

    def _new(self, kind: str, call: ToolCallDelta | None) -> Block:
        if call is None:
            return TextBlock() if kind == "text" else ThinkingBlock()
        self.has_calls, self._arguments = True, []
        return ToolUseBlock(id=call.id or "", name=call.name or "")

    def _begin(self, item: Block) -> Iterator[MessageEvent]:
        self.items.append(item)
        yield BlockStart(self.index, item)

    def _add(self, item: Block, text: str, logprobs: Sequence[ChatTokenLogprob]) -> Iterator[MessageEvent]:
        if isinstance(item, TextBlock):
            item.text += text
            yield BlockDelta(self.index, TextDelta(text))
        elif isinstance(item, ToolUseBlock):
            self._arguments.append(text)
            yield BlockDelta(self.index, InputJsonDelta(text))
        elif not self._omits_thinking:
            item.thinking += text
            yield BlockDelta(self.index, ThinkingDelta(text))

    def _end(self, item: Block, *, is_complete: bool) -> Iterator[MessageEvent]:
        if isinstance(item, ThinkingBlock):
            item.signature = SIGNATURE
            yield BlockDelta(self.index, SignatureDelta(SIGNATURE))
        elif isinstance(item, ToolUseBlock):
            item.input = tool_input("".join(self._arguments))
        yield BlockStop(self.index)
