"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's chat API. A request is converted to a chat's
request, and handled as one."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from server.anthropic_api.conversation import Conversation
from server.anthropic_api.objects import (
    MessageAnswer,
    MessageDelta,
    MessageEvent,
    MessageStart,
    MessageStop,
    MessageUsage,
    OutputTokensDetails,
    Ping,
    StopDelta,
    StopReason,
    TokensCount,
)
from server.anthropic_api.output import MessageContent
from server.anthropic_api.request import NAMES_OF_TOOLS, RENAMED, chat_request
from server.anthropic_api.schema import CountTokensRequest, MessagesRequest
from server.errors import ApiError, own_name, renamed
from server.openai_api.admitted_chat import Chat
from server.openai_api.chat import prepare_chat
from server.requests.collect import take_whole
from server.requests.generation import GenerationError, Piece
from server.requests.prompt import whole_conversation
from server.service import Service
from server.transport.body import Body, decode_body, read_body
from server.transport.exchange import Exchange
from server.transport.json_answer import JsonAnswer
from server.transport.sse import EventStreamResponse, event_frame, named_frame


@dataclass(slots=True, kw_only=True)
class RunningMessage:
    """A message while it is generated."""

    chat: Chat
    answer: MessageAnswer
    content: MessageContent

    def push(self, piece: Piece) -> Iterator[MessageEvent]:
        delta = piece.delta
        yield from self.content.push(delta)
        if delta.finish_reason is not None:
            is_stopped = delta.finish_reason == "stop"
            if is_stopped and isinstance(delta.stop_reason, str):
                self.answer.stop_sequence = delta.stop_reason
            self.answer.stop_reason = self._stop_reason(is_stopped=is_stopped)

    def _stop_reason(self, *, is_stopped: bool) -> StopReason:
        if not is_stopped:
            most = self.chat.params.max_tokens
            is_full = most is None or self.chat.generation.num_completion_tokens < most
            return "model_context_window_exceeded" if is_full else "max_tokens"
        if self.answer.stop_sequence is not None:
            return "stop_sequence"
        return "tool_use" if self.content.has_calls else "end_turn"

    def finish(self) -> Iterator[MessageEvent]:
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
    """Checks and admits the request, then answers at once with a stream, or in full at the end."""
    service: Service = request.app.state.service
    arrival_time_s = time.monotonic()
    body = await read_body(request, service.config)
    work = partial(_prepare, service, Exchange.of(request).tenant, body, arrival_time_s)
    running = await service.prepare_conversation(body, work)
    generation = running.chat.generation
    schemas = running.chat.schemas
    await service.check_grammar(request, generation, schemas, {**RENAMED, **NAMES_OF_TOOLS})
    names = {"prompt": "messages", "grammar": RENAMED.get(schemas.field or "", "tool_choice"), **RENAMED}
    service.admit(request, generation, names)
    headers = {"X-Request-Id": running.answer.id}
    if running.chat.is_streamed:
        return _MessageStream(_events(running), generation, headers)
    try:
        await take_whole(request, generation, lambda piece: list(running.push(piece)))
    except GenerationError as error:
        raise service.failure(running.answer.id, error) from None
    for _ in running.finish():
        pass
    return JsonAnswer(running.answer, headers)


def _prepare(service: Service, tenant: str | None, body: Body, arrival_time_s: float) -> RunningMessage:
    """Prepares the request for the engine. Raises `ApiError`."""
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
        chat=chat,
        answer=MessageAnswer(id=answer_id, model=service.model_name, usage=usage),
        content=MessageContent(omits_thinking=asked.thinking is not None and asked.thinking.display == "omitted"),
    )


class _MessageStream(EventStreamResponse):
    ping = named_frame(Ping())


async def _events(running: RunningMessage) -> AsyncGenerator[bytes, None]:
    """Anthropic's order: the message's start, each block with its deltas, the message's delta and stop."""
    chat = running.chat

    def framed(events: Iterable[MessageEvent]) -> bytes:
        return b"".join(map(named_frame, events))

    yield framed((MessageStart(running.answer), Ping()))
    try:
        async for pieces in chat.generation:
            if data := b"".join([framed(running.push(piece)) for piece in pieces]):
                yield data
    except GenerationError as error:
        yield event_frame("error", chat.service.failure(chat.request_id, error).body("anthropic"))
        return
    if not chat.generation.has_left:
        yield framed(running.finish())


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
