"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's chat API. A request is converted to a chat's
request, and handled as one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from uuid import uuid4

import msgspec

from runtime.text.parts import ToolCallDelta
from server.anthropic_api.conversation import NAMES_OF_TOOLS, RENAMED, Conversation, chat_request
from server.anthropic_api.schema import CountTokensRequest, MessagesRequest
from server.errors import in_own_names, own_name
from server.openai_api.answers import ChatTokenLogprob
from server.openai_api.chat import Chat, prepare_chat
from server.requests.answering import Answer, AnswerItems, answered
from server.requests.generation import GenerationError, Piece
from server.requests.prompt import whole_conversation
from server.requests.structured import tool_input
from server.service import Service
from server.transport.body import Body, decode_body
from server.transport.sse import EventStreamResponse, event_frame, named_frame

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
    """input_tokens: tokens of the prompt that missed the prefix cache; cache_read_input_tokens: those that hit it."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    output_tokens_details: OutputTokensDetails = msgspec.field(default_factory=OutputTokensDetails)


class MessageAnswer(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block] = msgspec.field(default_factory=list)
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


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


class _MessageStream(EventStreamResponse):
    ping = named_frame(Ping())


@dataclass(slots=True, kw_only=True)
class RunningMessage(Answer):
    """A message while it is generated, in Anthropic's order: the message's start, each block with its deltas, the
    message's delta and stop."""

    stream_type = _MessageStream
    asked: Chat
    answer: MessageAnswer
    content: MessageContent

    def begins(self) -> Iterable[MessageStart | Ping]:
        return MessageStart(self.answer), Ping()

    def events(self, piece: Piece) -> Iterator[MessageEvent]:
        delta = piece.delta
        yield from self.content.push(delta)
        if delta.finish_reason is not None:
            is_stopped = delta.finish_reason == "stop"
            if is_stopped and isinstance(delta.stop_reason, str):
                self.answer.stop_sequence = delta.stop_reason
            self.answer.stop_reason = self._stop_reason(is_stopped=is_stopped)

    async def whole(self) -> MessageAnswer:
        deque(self.ends(), maxlen=0)
        return self.answer

    def failed_stream(self, error: GenerationError) -> bytes:
        return event_frame("error", self.failed(error).body("anthropic"))

    def _stop_reason(self, *, is_stopped: bool) -> StopReason:
        if not is_stopped:
            most = self.asked.params.max_tokens
            is_full = most is None or self.generation.num_completion_tokens < most
            return "model_context_window_exceeded" if is_full else "max_tokens"
        if self.answer.stop_sequence is not None:
            return "stop_sequence"
        return "tool_use" if self.content.has_calls else "end_turn"

    def ends(self) -> Iterator[MessageEvent]:
        yield from self.content.finish()
        answer, generation = self.answer, self.generation
        answer.content = self.content.items
        answer.usage = MessageUsage(
            input_tokens=generation.num_prompt_tokens - generation.num_cached_tokens,
            output_tokens=generation.num_completion_tokens,
            cache_read_input_tokens=generation.num_cached_tokens,
            output_tokens_details=OutputTokensDetails(generation.num_reasoning_tokens),
        )
        assert answer.stop_reason is not None
        yield MessageDelta(StopDelta(answer.stop_reason, answer.stop_sequence), answer.usage)
        yield MessageStop()


def _prepare(service: Service, body: Body) -> RunningMessage:
    asked, ignored = decode_body(body, MessagesRequest, service.config), body.exchange.ignored
    conversation = Conversation(asked, ignored)
    answer_id = f"msg_{uuid4().hex}"
    with in_own_names({**RENAMED, **NAMES_OF_TOOLS, **conversation.names()}):
        chat = prepare_chat(service, body.exchange, chat_request(service, asked, conversation, ignored), answer_id)
    ignored += [own_name(name, conversation.names()) for name in chat.left_out]
    usage = MessageUsage(input_tokens=chat.generation.num_prompt_tokens, output_tokens=0)
    return RunningMessage(
        asked=chat,
        names={**RENAMED, **NAMES_OF_TOOLS},
        answer=MessageAnswer(id=answer_id, model=service.model_name, usage=usage),
        content=MessageContent(omits_thinking=asked.thinking is not None and asked.thinking.display == "omitted"),
    )


def _count(service: Service, body: Body) -> TokensCount:
    """The number of tokens of the request, without a limit."""
    asked, ignored = decode_body(body, CountTokensRequest, service.config), body.exchange.ignored
    service.check_model(asked.model)
    conversation = Conversation(asked, ignored)
    with in_own_names({**RENAMED, **conversation.names()}):
        chat = chat_request(service, asked, conversation, ignored)
        return TokensCount(len(whole_conversation(service, body.exchange.tenant, chat).token_ids))


create_message, count_tokens = answered(_prepare), answered(_count)
