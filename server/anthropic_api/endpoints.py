"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's chat API. A request is converted to a chat's
request, and handled as one.

An answer's deltas become blocks and their events, one block after the other: start, deltas, stop. A block is open until
a delta of another kind, or of another call, comes. A whole answer holds the final blocks, so both agree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from runtime.text.pipeline import TextDelta as Delta
from server.anthropic_api.conversation import NAMES_OF_TOOLS, RENAMED, Conversation, chat_request
from server.anthropic_api.objects import (
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    InputJsonDelta,
    MessageAnswer,
    MessageDelta,
    MessageEvent,
    MessageStart,
    MessageStop,
    MessageUsage,
    OutputTokensDetails,
    Ping,
    SignatureDelta,
    StopDelta,
    StopReason,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    TokensCount,
    ToolUseBlock,
)
from server.anthropic_api.schema import CountTokensRequest, MessagesRequest
from server.errors import ApiError, own_name, renamed
from server.openai_api.chat import Chat, prepare_chat
from server.requests.answering import Answer, answer
from server.requests.generation import GenerationError, Piece
from server.requests.prompt import whole_conversation
from server.requests.tool_choice import tool_input
from server.service import Service
from server.transport.body import Body, decode_body, read_body
from server.transport.exchange import Exchange
from server.transport.json_answer import JsonAnswer
from server.transport.sse import EventStreamResponse, event_frame, named_frame

SIGNATURE = "unsigned"


class MessageContent:
    """The blocks so far. The events of `push` and `finish` must be encoded at once: they hold the blocks themselves,
    which still change. `omits_thinking`: blocks of thinking stay empty."""

    def __init__(self, *, omits_thinking: bool = False) -> None:
        self.blocks: list[Block] = []
        self.has_calls = False
        self._omits_thinking = omits_thinking
        self._open: Block | None = None
        self._open_call = -1
        self._arguments: list[str] = []

    def push(self, delta: Delta) -> Iterator[MessageEvent]:
        """Adds a delta; returns its events."""
        if delta.reasoning:
            yield from self._add_thinking("" if self._omits_thinking else delta.reasoning)
        if delta.text:
            yield from self._add_text(delta.text)
        for call in delta.tool_calls:
            if call.index != self._open_call or not isinstance(self._open, ToolUseBlock):
                yield from self._begin(ToolUseBlock(id=call.id or "", name=call.name or ""))
                self._open_call, self._arguments, self.has_calls = call.index, [], True
            if call.arguments:
                self._arguments.append(call.arguments)
                yield BlockDelta(self._index, InputJsonDelta(call.arguments))

    def finish(self) -> Iterator[MessageEvent]:
        """Ends the last block."""
        block, self._open = self._open, None
        if block is None:
            return
        if isinstance(block, ThinkingBlock):
            block.signature = SIGNATURE
            yield BlockDelta(self._index, SignatureDelta(SIGNATURE))
        elif isinstance(block, ToolUseBlock):
            block.input = tool_input("".join(self._arguments))
        yield BlockStop(self._index)

    @property
    def _index(self) -> int:
        return len(self.blocks) - 1

    def _add_thinking(self, text: str) -> Iterator[MessageEvent]:
        if not isinstance(self._open, ThinkingBlock):
            yield from self._begin(ThinkingBlock())
        assert isinstance(self._open, ThinkingBlock)
        if text:
            self._open.thinking += text
            yield BlockDelta(self._index, ThinkingDelta(text))

    def _add_text(self, text: str) -> Iterator[MessageEvent]:
        if not isinstance(self._open, TextBlock):
            yield from self._begin(TextBlock())
        assert isinstance(self._open, TextBlock)
        self._open.text += text
        yield BlockDelta(self._index, TextDelta(text))

    def _begin(self, block: Block) -> Iterator[MessageEvent]:
        yield from self.finish()
        self.blocks.append(block)
        self._open = block
        yield BlockStart(self._index, block)


class _MessageStream(EventStreamResponse):
    ping = named_frame(Ping())


def _framed(events: Iterable[MessageEvent]) -> bytes:
    return b"".join(map(named_frame, events))


@dataclass(slots=True, kw_only=True)
class RunningMessage(Answer):
    """A message while it is generated, in Anthropic's order: the message's start, each block with its deltas, the
    message's delta and stop."""

    stream_type = _MessageStream
    chat: Chat
    answer: MessageAnswer
    content: MessageContent

    def opening(self) -> bytes:
        return _framed((MessageStart(self.answer), Ping()))

    def push(self, piece: Piece) -> bytes:
        return _framed(self._events(piece.delta))

    def take(self, piece: Piece) -> None:
        for _ in self._events(piece.delta):
            pass

    def _events(self, delta: Delta) -> Iterator[MessageEvent]:
        yield from self.content.push(delta)
        if delta.finish_reason is not None:
            is_stopped = delta.finish_reason == "stop"
            if is_stopped and isinstance(delta.stop_reason, str):
                self.answer.stop_sequence = delta.stop_reason
            self.answer.stop_reason = self._stop_reason(is_stopped=is_stopped)

    def closing(self) -> bytes:
        return _framed(self._finish())

    async def whole(self) -> MessageAnswer:
        for _ in self._finish():
            pass
        return self.answer

    def failed_stream(self, error: GenerationError) -> bytes:
        return event_frame("error", self.failed(error).body("anthropic"))

    def _stop_reason(self, *, is_stopped: bool) -> StopReason:
        if not is_stopped:
            most = self.chat.params.max_tokens
            is_full = most is None or self.chat.generation.num_completion_tokens < most
            return "model_context_window_exceeded" if is_full else "max_tokens"
        if self.answer.stop_sequence is not None:
            return "stop_sequence"
        return "tool_use" if self.content.has_calls else "end_turn"

    def _finish(self) -> Iterator[MessageEvent]:
        """Records the end of the message."""
        yield from self.content.finish()
        answer, generation = self.answer, self.chat.generation
        answer.content = self.content.blocks
        answer.usage = MessageUsage(
            input_tokens=generation.num_prompt_tokens - generation.num_cached_tokens,
            output_tokens=generation.num_completion_tokens,
            cache_read_input_tokens=generation.num_cached_tokens,
            output_tokens_details=OutputTokensDetails(generation.num_reasoning_tokens),
        )
        assert answer.stop_reason is not None
        yield MessageDelta(StopDelta(answer.stop_reason, answer.stop_sequence), answer.usage)
        yield MessageStop()


async def create_message(request: Request) -> Response:
    return await answer(request, _prepare)


def _prepare(service: Service, tenant: str | None, body: Body, arrival_time_s: float) -> RunningMessage:
    asked = decode_body(body, MessagesRequest, service.config)
    conversation = Conversation(asked, body.ignored)
    answer_id = f"msg_{uuid4().hex}"
    try:
        request = chat_request(asked, conversation, service.tokenizer, service.answer_format, body.ignored)
        chat = prepare_chat(service, tenant, request, answer_id, arrival_time_s)
    except ApiError as error:
        raise renamed(error, {**RENAMED, **NAMES_OF_TOOLS, **conversation.names()}) from None
    body.ignored += [own_name(name, conversation.names()) for name in chat.left_out]
    usage = MessageUsage(input_tokens=chat.generation.num_prompt_tokens, output_tokens=0)
    return RunningMessage(
        service=service,
        generation=chat.generation,
        schemas=chat.schemas,
        names={**RENAMED, **NAMES_OF_TOOLS},
        is_streamed=chat.is_streamed,
        chat=chat,
        answer=MessageAnswer(id=answer_id, model=service.model_name, usage=usage),
        content=MessageContent(omits_thinking=asked.thinking is not None and asked.thinking.display == "omitted"),
    )


async def count_tokens(request: Request) -> Response:
    """The number of tokens of the request, without a limit."""
    service: Service = request.app.state.service
    body = await read_body(request, service.config)
    work = partial(_count, service, Exchange.of(request).tenant, body)
    answer = await service.prepare_conversation(body, work)
    return JsonAnswer(answer)


def _count(service: Service, tenant: str | None, body: Body) -> TokensCount:
    asked = decode_body(body, CountTokensRequest, service.config)
    service.check_model(asked.model)
    conversation = Conversation(asked, body.ignored)
    try:
        chat = chat_request(asked, conversation, service.tokenizer, service.answer_format, body.ignored)
        prompt = whole_conversation(
            chat, service.tokenizer, service.config, service.answer_format, service.pictures, tenant
        )
        return TokensCount(len(prompt.token_ids))
    except ApiError as error:
        raise renamed(error, {**RENAMED, **conversation.names()}) from None
