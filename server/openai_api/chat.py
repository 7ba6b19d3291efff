"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from runtime.engine.errors import RequestError
from runtime.engine.grammar.grammar import Grammar
from runtime.engine.sampling_params import SamplingParams
from runtime.text.formats import end_ids
from runtime.text.harmony.grammar import after_analysis, in_final_channel
from runtime.text.harmony.message import SpecialIds, special_ids
from runtime.text.pipeline import TextDelta
from runtime.text.reasoning import reasoning_start
from runtime.text.reasoning_grammar import after_reasoning, or_calls
from runtime.text.tools.notation import ToolReading
from server.errors import invalid
from server.openai_api.admitted_chat import Chat
from server.openai_api.answers import (
    ChatChoice,
    ChatCompletion,
    ChatFinishReason,
    ChatFunction,
    ChatMessage,
    ChatTokenLogprob,
    ChatToolCall,
)
from server.openai_api.chat_chunks import ChatChunks
from server.openai_api.logprobs import prompt_logprobs
from server.openai_api.schema import AllowedToolsChoice, ChatCompletionRequest
from server.requests.collect import take_whole
from server.requests.generation import Generation, GenerationError, Scheduling
from server.requests.prompt import conversation_prompt
from server.requests.sampling import chat_params, stream_flags
from server.requests.structured import RequestSchemas, answer_grammar, contradiction, refused
from server.requests.thinking import settle_thinking
from server.requests.tool_choice import callable_tools, forced_calls, forces_call, free_calls_text
from server.service import Service, new_id
from server.transport.body import Body, decode_body, read_body
from server.transport.exchange import Exchange
from server.transport.json_answer import EncodedList, JsonAnswer
from server.transport.sse import DONE, EventStreamResponse, frame
from tokenizer import Tokenizer


@dataclass(slots=True)
class _Answer:
    """A choice of an answer that is not streamed, as it grows."""

    texts: list[str]
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[ChatToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: EncodedList[ChatTokenLogprob] = field(default_factory=EncodedList)
    finish_reason: ChatFinishReason = "stop"
    stop_reason: int | str | None = None

    def add(self, chat: Chat, delta: TextDelta) -> None:
        self.texts.append(delta.text)
        self.reasoning.append(delta.reasoning)
        for call in delta.tool_calls:
            if call.id is not None and call.name is not None:
                self.tool_calls.append(ChatToolCall(call.id, ChatFunction(call.name, "")))
            self.tool_calls[call.index].function.arguments += call.arguments
        self.token_ids += delta.token_ids
        self.logprobs.extend(chat.token_logprobs(delta))
        if delta.finish_reason is not None:
            self.finish_reason = chat.finish_reason(delta, has_calls=bool(self.tool_calls))
            self.stop_reason = delta.stop_reason

    def message(self) -> ChatMessage:
        content = "".join(self.texts)
        return ChatMessage(
            content if content or not self.tool_calls else None,
            reasoning_content="".join(self.reasoning) or UNSET,
            tool_calls=self.tool_calls or UNSET,
        )


async def create_chat_completion(request: Request) -> Response:
    """Checks and admits the request, then answers at once with a stream, or in full at the end."""
    service: Service = request.app.state.service
    arrival_time_s = time.monotonic()
    body = await read_body(request, service.config)
    work = partial(_prepare, service, Exchange.of(request).tenant, body, arrival_time_s)
    chat = await service.prepare_conversation(body, work)
    await service.check_grammar(request, chat.generation, chat.schemas, {})
    renamed = {"prompt": "messages", "logprobs": "top_logprobs", "grammar": chat.schemas.field or "grammar"}
    service.admit(request, chat.generation, renamed)
    headers = {"X-Request-Id": chat.request_id}
    if chat.is_streamed:
        return EventStreamResponse(_events(chat), chat.generation, headers)
    answer = await _whole_answer(request, chat)
    return JsonAnswer(answer, headers)


def _prepare(service: Service, tenant: str | None, body: Body, arrival_time_s: float) -> Chat:
    """Prepares the request for the engine. Raises `ApiError`."""
    asked = decode_body(body, ChatCompletionRequest, service.config)
    settle_thinking(asked, service.tokenizer, service.answer_format, body.ignored, body.sent)
    chat = prepare_chat(service, tenant, asked, new_id("chatcmpl"), arrival_time_s)
    body.ignored += chat.left_out
    return chat


def prepare_chat(
    service: Service, tenant: str | None, asked: ChatCompletionRequest, request_id: str, arrival_time_s: float
) -> Chat:
    """A decoded request's generation, not admitted yet. Raises `ApiError`."""
    service.check_model(asked.model)
    has_usage, has_running_usage = stream_flags(asked)
    tools = callable_tools(asked)
    schemas = RequestSchemas(closes=service.config.close_schemas)
    grammar = chat_grammar(service, asked, tools, schemas)
    params = chat_params(asked, service.default_sampling, service.tokenizer, grammar=grammar)
    if asked.stream and params.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "prompt_logprobs are not sent in a stream.")
    prompt = conversation_prompt(
        asked, service.tokenizer, service.config, service.answer_format, service.client.info, service.pictures, tenant
    )
    token_ids = prompt.token_ids
    answer_format = service.answer_format
    harmony = answer_format.harmony and not _is_of_whole_answer(asked)
    reasoning = answer_format.reasoning and not answer_format.harmony and not _is_of_whole_answer(asked)
    if reasoning and grammar is not None:
        params = _with_reasoning(params, service.tokenizer, token_ids, schemas.field)
    generation = Generation(
        client=service.client,
        bridge=service.bridge,
        tokenizer=service.tokenizer,
        request_id=request_id,
        prompts=[token_ids],
        images=prompt.images,
        params=params,
        arrival_time_s=arrival_time_s,
        scheduling=replace(Scheduling.of(asked), prediction=_prediction(asked, service.tokenizer)),
        reasoning=reasoning,
        tools=_tool_reading(service, asked, tools),
        harmony=harmony,
        eos_token_ids=end_ids(answer_format, service.tokenizer, service.client.info.eos_token_ids),
    )
    return Chat(
        service=service,
        request_id=request_id,
        created=int(time.time()),
        generation=generation,
        params=params,
        schemas=schemas,
        prompt_token_ids=token_ids,
        echo=prompt.echo,
        left_out=prompt.left_out,
        is_streamed=bool(asked.stream),
        has_usage=has_usage,
        has_running_usage=has_running_usage,
        has_token_ids=bool(asked.return_token_ids),
    )


def _prediction(asked: ChatCompletionRequest, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The tokens that the answer may repeat."""
    if asked.prediction is None or tokenizer is None:
        return ()
    return tuple(tokenizer.encode_ordinary(asked.prediction.text))


def chat_grammar(
    service: Service, asked: ChatCompletionRequest, tools: list[dict[str, Any]] | None, schemas: RequestSchemas
) -> Grammar | None:
    """The grammar of the answer; `schemas` gets its schemas. A forced call is the whole answer; if calls are optional,
    the answer is in the format, or calls. Raises `ApiError` 400."""
    harmony = _harmony_ids(service, asked)
    if forces_call(asked):
        if asked.structured_outputs is not None:
            raise contradiction("structured_outputs", "tool_choice")
        forced = forced_calls(asked, tools, service.answer_format, service.tokenizer, schemas)
        return _with_channels(forced, harmony, schemas.field)
    grammar = answer_grammar(asked, schemas)
    if grammar is None:
        return None
    notation = service.answer_format.tools
    try:
        if harmony is not None:
            grammar = in_final_channel(grammar, harmony)
        if schemas.field == "response_format" and tools is not None and notation is not None:
            grammar = or_calls(grammar, free_calls_text(asked, tools, notation, service.tokenizer))
    except RequestError as error:
        raise refused(error, schemas.field) from None
    return _with_channels(grammar, harmony, schemas.field)


def _harmony_ids(service: Service, asked: ChatCompletionRequest) -> SpecialIds | None:
    """Token ids of harmony's messages if the grammar must include them; a continued message is already inside one."""
    if not service.answer_format.harmony or _is_of_whole_answer(asked) or asked.continue_final_message:
        return None
    assert service.tokenizer is not None
    return special_ids(service.tokenizer)


def _with_channels(grammar: Grammar, harmony: SpecialIds | None, field: str | None) -> Grammar:
    """The grammar's message after harmony's analysis messages. Raises `ApiError` 400 if it is then too long."""
    try:
        return grammar if harmony is None else after_analysis(grammar, harmony)
    except RequestError as error:
        raise refused(error, field) from None


def _is_of_whole_answer(asked: ChatCompletionRequest) -> bool:
    """Whether the client's grammar covers all of the model's output."""
    return asked.structured_outputs is not None and asked.structured_outputs.grammar is not None


def _tool_reading(
    service: Service, asked: ChatCompletionRequest, tools: list[dict[str, Any]] | None
) -> ToolReading | None:
    """How the answer's calls are parsed, or None if it has none."""
    answer_format = service.answer_format
    notation = answer_format.forced_tools if forces_call(asked) else answer_format.tools
    if tools is None or notation is None:
        return None
    service.note_tools()
    return ToolReading.of(
        notation,
        tools,
        is_closed=isinstance(asked.tool_choice, AllowedToolsChoice),
        parallel=asked.parallel_tool_calls is not False,
    )


def _with_reasoning(
    params: SamplingParams, tokenizer: Tokenizer | None, prompt_token_ids: list[int], forced_by: str | None
) -> SamplingParams:
    """Starts the grammar at the end of the reasoning. Raises `ApiError` 400 if it is then too long."""
    assert tokenizer is not None
    assert params.grammar is not None
    try:
        grammar = after_reasoning(params.grammar, reasoning_start(tokenizer, prompt_token_ids))
    except RequestError as error:
        raise refused(error, forced_by) from None
    return msgspec.structs.replace(params, grammar=grammar)


async def _whole_answer(request: Request, chat: Chat) -> ChatCompletion:
    generation = chat.generation
    answers = [_Answer([chat.echo]) for _ in range(chat.params.n)]
    try:
        await take_whole(request, generation, lambda piece: answers[piece.choice].add(chat, piece.delta))
    except GenerationError as error:
        raise chat.service.failure(chat.request_id, error) from None
    return ChatCompletion(
        id=chat.request_id,
        created=chat.created,
        model=chat.service.model_name,
        system_fingerprint=chat.service.system_fingerprint,
        choices=[
            ChatChoice(
                index=index,
                message=answer.message(),
                logprobs=chat.logprobs(answer.logprobs.as_list()),
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
            else await prompt_logprobs(generation.prompt_logprobs(0), chat.service.tokenizer)
        ),
    )


async def _events(chat: Chat) -> AsyncGenerator[bytes, None]:
    generation, chunks = chat.generation, ChatChunks(chat)
    if opening := chunks.opening():
        yield opening
    try:
        async for pieces in generation:
            if data := b"".join(map(chunks.of, pieces)):
                yield data
    except GenerationError as error:
        yield frame(chat.service.failure(chat.request_id, error).body())
        return
    if generation.has_left:
        return
    if chat.has_usage:
        yield chunks.usage()
    yield DONE
