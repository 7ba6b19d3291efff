"""`POST /api/chat` and `/api/generate`: Ollama's chat API. Streams are lines of JSON."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.errors import ApiError, renamed
from server.ollama_api.answer import Line, OllamaAnswer
from server.ollama_api.objects import AnsweredMessage, ChatLine, GenerateLine
from server.ollama_api.request import (
    NAMES_OF_PROMPT,
    RENAMED,
    chat_of_messages,
    chat_of_prompt,
    completion_of_prompt,
    names_of_images,
    names_of_prompt,
)
from server.ollama_api.schema import OllamaChatRequest, OllamaGenerateRequest
from server.openai_api.chat import chat_grammar, prepare_chat
from server.openai_api.completions import prepare_completion
from server.openai_api.schema import ChatCompletionRequest
from server.requests.collect import take_whole
from server.requests.generation import GenerationError
from server.requests.sampling import chat_params
from server.requests.structured import RequestSchemas
from server.requests.tool_choice import callable_tools
from server.service import Service, new_id
from server.transport.body import Body, decode_body, read_body
from server.transport.exchange import Exchange
from server.transport.json_answer import JsonAnswer
from server.transport.sse import StreamedResponse

_encode = msgspec.json.Encoder().encode

Prepare = Callable[[Service, str | None, Body, float], OllamaAnswer | Line]


class LinesResponse(StreamedResponse):
    media_type = "application/x-ndjson"


async def chat(request: Request) -> Response:
    return await _answer(request, _prepare_chat, RENAMED)


async def generate(request: Request) -> Response:
    return await _answer(request, _prepare_generate, NAMES_OF_PROMPT)


async def _answer(request: Request, prepare: Prepare, names: Mapping[str, str]) -> Response:
    """Checks and admits the request, then answers at once with a stream, or in full at the end."""
    service: Service = request.app.state.service
    arrival_time_s = time.monotonic()
    body = await read_body(request, service.config)
    work = partial(prepare, service, Exchange.of(request).tenant, body, arrival_time_s)
    answer = await service.prepare_conversation(body, work)
    if not isinstance(answer, OllamaAnswer):
        return JsonAnswer(answer)
    generation = answer.generation
    renamed_fields = {"prompt": names.get("messages", "messages"), "logprobs": "top_logprobs", **names}
    renamed_fields["grammar"] = names.get(answer.schemas.field or "", "format")
    await service.check_grammar(request, generation, answer.schemas, names)
    service.admit(request, generation, renamed_fields)
    headers = {"X-Request-Id": generation.request_id}
    if answer.is_streamed:
        return LinesResponse(_lines(service, answer), generation, headers)
    try:
        await take_whole(request, generation, lambda piece: answer.push(piece.delta))
    except GenerationError as error:
        raise service.failure(generation.request_id, error) from None
    return JsonAnswer(answer.whole(), headers)


def _prepare_chat(service: Service, tenant: str | None, body: Body, arrival_time_s: float) -> OllamaAnswer | Line:
    asked = decode_body(body, OllamaChatRequest, service.config)
    if not asked.messages:
        _check(service, chat_of_messages(service, asked, body.ignored), RENAMED)
        return ChatLine(model=asked.model, message=AnsweredMessage(), done=True, done_reason="load")
    try:
        messages = chat_of_messages(service, asked, body.ignored)
        prepared = prepare_chat(service, tenant, messages, new_id("chat"), arrival_time_s)
        body.ignored += prepared.left_out
    except ApiError as error:
        raise renamed(error, {**RENAMED, **names_of_images(asked)}) from None
    return OllamaAnswer(
        model=asked.model,
        is_chat=True,
        is_streamed=asked.stream is not False,
        generation=prepared.generation,
        tokenizer=service.tokenizer,
        schemas=prepared.schemas,
    )


def _prepare_generate(service: Service, tenant: str | None, body: Body, arrival_time_s: float) -> OllamaAnswer | Line:
    asked = decode_body(body, OllamaGenerateRequest, service.config)
    if not asked.prompt:
        _check(service, chat_of_prompt(service, asked, body.ignored), NAMES_OF_PROMPT)
        return GenerateLine(model=asked.model, response="", done=True, done_reason="load")
    request_id = new_id("gen")
    tokenizer = service.tokenizer
    is_plain = tokenizer is not None and not tokenizer.has_chat_template and not asked.system
    try:
        if asked.raw or is_plain:  # without a template, the prompt is the whole input
            completion = prepare_completion(
                service, completion_of_prompt(service, asked, body.ignored), request_id, arrival_time_s
            )
            generation, schemas = completion.generation, completion.schemas
        else:
            prompt = chat_of_prompt(service, asked, body.ignored)
            prepared = prepare_chat(service, tenant, prompt, request_id, arrival_time_s)
            generation, schemas = prepared.generation, prepared.schemas
    except ApiError as error:
        raise renamed(error, names_of_prompt(asked)) from None
    return OllamaAnswer(
        model=asked.model,
        is_chat=False,
        is_streamed=asked.stream is not False,
        generation=generation,
        tokenizer=service.tokenizer,
        schemas=schemas,
    )


def _check(service: Service, asked: ChatCompletionRequest, names: Mapping[str, str]) -> None:
    """Checks an empty request as if it had a prompt. Raises `ApiError`."""
    try:
        service.check_model(asked.model)
        schemas = RequestSchemas(closes=service.config.close_schemas)
        grammar = chat_grammar(service, asked, callable_tools(asked), schemas)
        chat_params(asked, service.default_sampling, service.tokenizer, grammar=grammar)
    except ApiError as error:
        raise renamed(error, names) from None


async def _lines(service: Service, answer: OllamaAnswer) -> AsyncGenerator[bytes, None]:
    generation = answer.generation
    try:
        async for pieces in generation:
            lines = [_encode(line) + b"\n" for piece in pieces for line in answer.push(piece.delta)]
            if lines:
                yield b"".join(lines)
    except GenerationError as error:
        yield _encode(service.failure(generation.request_id, error).body("ollama")) + b"\n"
        return
    if not generation.has_left:
        yield _encode(answer.finish()) + b"\n"
