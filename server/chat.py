"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

import msgspec
from msgspec import UNSET
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from runtime.engine.messages import FinishReason
from runtime.engine.sampling_params import SamplingParams
from runtime.text.pipeline import TextDelta
from server.body import decode_body, read_body
from server.errors import invalid
from server.generation import Generation, GenerationError, Piece, Scheduling
from server.logprobs import chat_logprobs, prompt_logprobs
from server.prompt import conversation_prompt
from server.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatTokenLogprob,
    Usage,
)
from server.sampling import chat_params, stream_flags
from server.schema import ChatCompletionRequest
from server.service import Service, new_id
from server.sse import DONE, EventStreamResponse, frame, watch_disconnect


@dataclass(frozen=True, slots=True)
class Chat:
    """A request that has passed every check, and its generation."""

    service: Service
    request_id: str
    created: int
    generation: Generation
    params: SamplingParams
    prompt_token_ids: list[int]
    echo: str
    is_streamed: bool
    has_usage: bool
    has_running_usage: bool
    has_token_ids: bool

    def logprobs(self, tokens: list[ChatTokenLogprob]) -> ChatLogprobs | None:
        """null unless the request asked for them."""
        return ChatLogprobs(tokens) if self.params.logprobs is not None else None

    def token_logprobs(self, delta: TextDelta) -> list[ChatTokenLogprob]:
        """As OpenAI has it, the token that ended the answer has no entry, unless its text is shown."""
        entries = chat_logprobs(delta, self.service.tokenizer)
        is_ended_by_token = delta.finish_reason == "stop" and not isinstance(delta.stop_reason, str)
        if is_ended_by_token and not self.params.include_stop_str_in_output:
            return entries[:-1]
        return entries

    def chunk(self, choices: list[ChatChunkChoice], *, has_usage: bool = False) -> bytes:
        return frame(
            ChatChunk(
                id=self.request_id,
                created=self.created,
                model=self.service.model_name,
                system_fingerprint=self.service.system_fingerprint,
                choices=choices,
                usage=self.usage() if has_usage or self.has_running_usage else UNSET,
            )
        )

    def usage(self) -> Usage:
        generation = self.generation
        return Usage.of(
            generation.num_prompt_tokens, generation.num_completion_tokens, generation.num_cached_tokens
        )


@dataclass(slots=True)
class _Answer:
    """A choice of an answer that is not streamed, as it grows."""

    texts: list[str]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[ChatTokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason = "stop"
    stop_reason: int | str | None = None


async def create_chat_completion(request: Request) -> Response:
    """Checks everything, admits the request, then answers at once with a stream or at the end with the
    whole."""
    service: Service = request.app.state.service
    arrival_time_s = time.monotonic()
    body = await read_body(request, service.config)
    chat = await service.prepare(len(body), partial(_prepare, service, body, arrival_time_s))
    service.admit(request, chat.generation, {"prompt": "messages", "logprobs": "top_logprobs"})
    headers = {"X-Request-Id": chat.request_id}
    if chat.is_streamed:
        return EventStreamResponse(_events(chat), chat.generation, headers)
    answer = await _whole_answer(request, chat)
    return Response(msgspec.json.encode(answer), media_type="application/json", headers=headers)


def _prepare(service: Service, body: bytes, arrival_time_s: float) -> Chat:
    """All that a request costs before the engine has it. Raises `ApiError`."""
    asked = decode_body(body, ChatCompletionRequest, service.config)
    return prepare_chat(service, asked, new_id("chatcmpl"), arrival_time_s)


def prepare_chat(service: Service, asked: ChatCompletionRequest, request_id: str, arrival_time_s: float) -> Chat:
    """A decoded request's generation, admitted nowhere yet. Raises `ApiError`."""
    service.check_model(asked.model)
    has_usage, has_running_usage = stream_flags(asked)
    params = chat_params(asked, service.default_sampling, service.tokenizer)
    if asked.stream and params.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "prompt_logprobs are not sent in a stream.")
    token_ids, echo = conversation_prompt(asked, service.tokenizer, service.client.info)
    generation = Generation(
        client=service.client,
        bridge=service.bridge,
        tokenizer=service.tokenizer,
        request_id=request_id,
        prompts=[token_ids],
        params=params,
        arrival_time_s=arrival_time_s,
        scheduling=Scheduling.of(asked),
    )
    return Chat(
        service=service,
        request_id=request_id,
        created=int(time.time()),
        generation=generation,
        params=params,
        prompt_token_ids=token_ids,
        echo=echo,
        is_streamed=bool(asked.stream),
        has_usage=has_usage,
        has_running_usage=has_running_usage,
        has_token_ids=bool(asked.return_token_ids),
    )


async def _whole_answer(request: Request, chat: Chat) -> ChatCompletion:
    generation = chat.generation
    answers = [_Answer([chat.echo]) for _ in range(chat.params.n)]
    with closing(generation):
        async with watch_disconnect(request.receive, generation.leave):
            try:
                async for pieces in generation:
                    for piece in pieces:
                        answer, delta = answers[piece.choice], piece.delta
                        answer.texts.append(delta.text)
                        answer.token_ids += delta.token_ids
                        answer.logprobs += chat.token_logprobs(delta)
                        if delta.finish_reason is not None:
                            answer.finish_reason = delta.finish_reason
                            answer.stop_reason = delta.stop_reason
            except GenerationError as error:
                raise chat.service.failure(chat.request_id, error) from None
    if generation.has_left:
        raise ClientDisconnect
    return ChatCompletion(
        id=chat.request_id,
        created=chat.created,
        model=chat.service.model_name,
        system_fingerprint=chat.service.system_fingerprint,
        choices=[
            ChatChoice(
                index=index,
                message=ChatMessage("".join(answer.texts)),
                logprobs=chat.logprobs(answer.logprobs),
                finish_reason=answer.finish_reason,
                stop_reason=answer.stop_reason,
                token_ids=answer.token_ids if chat.has_token_ids else UNSET,
            )
            for index, answer in enumerate(answers)
        ],
        usage=chat.usage(),
        prompt_token_ids=chat.prompt_token_ids if chat.has_token_ids else UNSET,
        prompt_logprobs=(
            UNSET
            if chat.params.prompt_logprobs is None
            else prompt_logprobs(generation.prompt_logprobs(0), chat.service.tokenizer)
        ),
    )


async def _events(chat: Chat) -> AsyncGenerator[bytes, None]:
    """OpenAI's order: each choice's role, its text, its end without text; the usage; `[DONE]`."""
    generation = chat.generation
    yield b"".join(
        chat.chunk([ChatChunkChoice(index, ChatDelta("assistant", content=chat.echo, refusal=None))])
        for index in range(chat.params.n)
    )
    try:
        async for pieces in generation:
            yield b"".join(data for piece in pieces for data in _piece_events(chat, piece))
    except GenerationError as error:
        yield frame(chat.service.failure(chat.request_id, error).body())
        return
    if generation.has_left:
        return
    if chat.has_usage:
        yield chat.chunk([], has_usage=True)
    yield DONE


def _piece_events(chat: Chat, piece: Piece) -> Iterator[bytes]:
    delta = piece.delta
    logprobs = chat.token_logprobs(delta)
    if delta.text or logprobs or (chat.has_token_ids and delta.token_ids):
        choice = ChatChunkChoice(piece.choice, ChatDelta(content=delta.text), chat.logprobs(logprobs))
        if chat.has_token_ids:
            choice.token_ids = delta.token_ids
        yield chat.chunk([choice])
    if delta.finish_reason is not None:
        choice = ChatChunkChoice(piece.choice, ChatDelta(), finish_reason=delta.finish_reason)
        if delta.stop_reason is not None:
            choice.stop_reason = delta.stop_reason
        yield chat.chunk([choice])
