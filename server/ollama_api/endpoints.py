"""Ollama's API: `POST /api/chat` and `/api/generate`; `/api/embed` and the older `/api/embeddings`, with the vectors of
`/v1/embeddings`. Each delta of a stream is a line of JSON, and the last line has the usage. Ollama's tool calls are
whole: a call waits until the next one, or the answer's end. Durations are in nanoseconds; a field that is UNSET is not
sent."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from runtime.engine.messages import MissReason
from runtime.text.pooled_texts import num_unpooled, prompted
from server.errors import in_own_names, invalid
from server.ollama_api.request import (
    NAMES_OF_PROMPT,
    RENAMED,
    chat_of_messages,
    chat_of_prompt,
    completion_of_prompt,
)
from server.ollama_api.schema import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
)
from server.openai_api.answers import ChatTokenLogprob
from server.openai_api.chat import chat_grammar, prepare_chat
from server.openai_api.completions import prepare_completion
from server.openai_api.embeddings import AskedEmbeddings, Vector, prepare_embeddings
from server.openai_api.logprobs import chat_logprobs
from server.openai_api.schema import ChatCompletionRequest, EmbeddingRequest
from server.requests.answering import Answer, Prepared, answered
from server.requests.generation import GenerationError, Piece
from server.requests.sampling import chat_params
from server.requests.structured import RequestSchemas, callable_tools, tool_input
from server.service import Service, new_id
from server.transport.body import Body, decode_body
from server.transport.sse import StreamedResponse


class AnsweredFunction(msgspec.Struct):
    index: int
    name: str
    arguments: dict[str, Any]


class AnsweredToolCall(msgspec.Struct):
    id: str
    function: AnsweredFunction


class AnsweredMessage(msgspec.Struct):
    content: str = ""
    role: Literal["assistant"] = "assistant"
    thinking: str | UnsetType = UNSET
    tool_calls: list[AnsweredToolCall] | UnsetType = UNSET


class _Line(msgspec.Struct, kw_only=True):
    """One line of a stream, or the whole answer; the last has the fields from `done_reason` on."""

    model: str
    created_at: str = msgspec.field(default_factory=lambda: time_text(datetime.now(UTC)))
    done: bool
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET
    done_reason: Literal["stop", "length", "load", "unload"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    prompt_eval_cached: int | UnsetType = UNSET
    prompt_eval_miss_reason: MissReason | UnsetType = UNSET
    prompt_eval_first_difference: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    weight_version: str | UnsetType = UNSET


class ChatLine(_Line, kw_only=True):
    message: AnsweredMessage


class GenerateLine(_Line, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET


Line = ChatLine | GenerateLine

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class _OpenCall:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


class LinesResponse(StreamedResponse):
    media_type = "application/x-ndjson"


@dataclass(slots=True, kw_only=True)
class OllamaAnswer(Answer):
    """The lines of a stream, or their sum.

    model    as in the request
    is_chat  lines have a message, else a response
    """

    stream_type = LinesResponse
    model: str
    is_chat: bool
    _call: _OpenCall | None = None
    _num_calls: int = 0
    _is_cut: bool = False
    _texts: list[str] = field(default_factory=list)
    _thoughts: list[str] = field(default_factory=list)
    _calls: list[AnsweredToolCall] = field(default_factory=list)
    _logprobs: list[ChatTokenLogprob] = field(default_factory=list)

    def spelled(self, events: Iterable[Any]) -> bytes:
        return b"".join(_encode(line) + b"\n" for line in events)

    def ends(self) -> Iterable[Line]:
        return (self._end(self._line("", "", [], [])),)

    async def whole(self) -> Line:
        return self._end(self._line("".join(self._texts), "".join(self._thoughts), self._calls, self._logprobs))

    def failed_stream(self, error: GenerationError) -> bytes:
        return self.spelled((self.failed(error).body("ollama"),))

    def events(self, piece: Piece) -> list[Line]:
        delta = piece.delta
        calls: list[AnsweredToolCall] = []
        for call in delta.tool_calls:
            if call.id is not None:
                calls += self._close_call()
                self._call = _OpenCall(call.id, call.name or "")
            if self._call is not None:
                self._call.arguments.append(call.arguments)
        if delta.finish_reason is not None:
            self._is_cut = delta.finish_reason == "length"
            calls += self._close_call()
        logprobs = chat_logprobs(delta, self.service.tokenizer)
        self._texts.append(delta.text)
        self._thoughts.append(delta.reasoning)
        self._calls += calls
        self._logprobs += logprobs
        if not (delta.text or delta.reasoning or calls or logprobs):
            return []
        return [self._line(delta.text, delta.reasoning, calls, logprobs)]

    def _close_call(self) -> list[AnsweredToolCall]:
        call, self._call = self._call, None
        if call is None:
            return []
        function = AnsweredFunction(self._num_calls, call.name, tool_input("".join(call.arguments)))
        self._num_calls += 1
        return [AnsweredToolCall(call.id, function)]

    def _line(self, text: str, thinking: str, calls: list[AnsweredToolCall], logprobs: list[ChatTokenLogprob]) -> Line:
        shown = logprobs or UNSET
        if self.is_chat:
            message = AnsweredMessage(text, thinking=thinking or UNSET, tool_calls=calls or UNSET)
            return ChatLine(model=self.model, message=message, done=False, logprobs=shown)
        return GenerateLine(model=self.model, response=text, thinking=thinking or UNSET, done=False, logprobs=shown)

    def _end(self, line: Line) -> Line:
        now, meter, generation = time.monotonic(), self.generation.meter, self.generation
        begun = generation.arrival_time_s
        first = now if meter is None or meter.first_token_s is None else meter.first_token_s
        line.done = True
        line.done_reason = "length" if self._is_cut else "stop"
        line.total_duration = _nanoseconds(now - begun)
        line.load_duration = 0
        line.prompt_eval_count = generation.num_prompt_tokens
        line.prompt_eval_duration = _nanoseconds(first - begun)
        line.prompt_eval_cached = generation.num_cached_tokens
        if generation.missed:
            line.prompt_eval_miss_reason, line.prompt_eval_first_difference = generation.missed
        line.eval_count = generation.num_completion_tokens
        line.eval_duration = _nanoseconds(now - first)
        line.weight_version = generation.weight_version
        return line


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _prepare_chat(service: Service, body: Body) -> OllamaAnswer | Line:
    exchange = body.exchange
    asked = decode_body(body, OllamaChatRequest, service.config)
    names = dict(RENAMED)
    if not asked.messages:
        _check(service, chat_of_messages(service, asked, exchange.ignored, names), names)
        return ChatLine(model=asked.model, message=AnsweredMessage(), done=True, done_reason="load")
    with in_own_names(names):
        messages = chat_of_messages(service, asked, exchange.ignored, names)
        prepared = prepare_chat(service, exchange, messages, new_id("chat"))
        exchange.ignored += prepared.left_out
    return OllamaAnswer(asked=prepared, names=RENAMED, model=asked.model, is_chat=True)


def _prepare_generate(service: Service, body: Body) -> OllamaAnswer | Line:
    exchange = body.exchange
    asked = decode_body(body, OllamaGenerateRequest, service.config)
    names = dict(NAMES_OF_PROMPT)
    if not asked.prompt:
        _check(service, chat_of_prompt(service, asked, exchange.ignored, names), names)
        return GenerateLine(model=asked.model, response="", done=True, done_reason="load")
    request_id = new_id("gen")
    tokenizer = service.tokenizer
    prepared: Prepared
    is_plain = tokenizer is not None and not tokenizer.has_chat_template and not asked.system
    with in_own_names(names):
        if asked.raw or is_plain:  # without a template, the prompt is the whole input
            raw = completion_of_prompt(service, asked, exchange.ignored)
            prepared = prepare_completion(service, exchange, raw, request_id).asked
        else:
            prompt = chat_of_prompt(service, asked, exchange.ignored, names)
            prepared = prepare_chat(service, exchange, prompt, request_id)
    return OllamaAnswer(asked=prepared, names=NAMES_OF_PROMPT, model=asked.model, is_chat=False)


chat, generate = answered(_prepare_chat), answered(_prepare_generate)


def _check(service: Service, asked: ChatCompletionRequest, names: Mapping[str, str]) -> None:
    """Checks an empty request as if it had a prompt. Raises `ApiError`."""
    with in_own_names(names):
        service.adapter_of(asked.model)
        schemas = RequestSchemas(closes=service.config.close_schemas)
        grammar = chat_grammar(service, asked, callable_tools(asked), schemas)
        chat_params(asked, service.default_sampling, service.tokenizer, grammar=grammar)


def time_text(when: datetime) -> str:
    return when.isoformat().replace("+00:00", "Z")


class EmbedAnswer(msgspec.Struct, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


class EmbeddingsAnswer(msgspec.Struct):
    embedding: list[float]


def _prepare_embed(service: Service, body: Body) -> AskedEmbeddings | EmbedAnswer:
    """Truncates inputs at their end; OpenAI's and vLLM's API keeps the end."""
    asked = decode_body(body, OllamaEmbedRequest, service.config)
    service.check_model(asked.model)

    def answer(prepared: AskedEmbeddings | None, vectors: list[Vector]) -> EmbedAnswer:
        shaped: list[Any] = [prepared.shaped(vector) for vector in vectors] if prepared else []
        return EmbedAnswer(
            model=asked.model,
            embeddings=shaped,
            total_duration=round((time.monotonic() - body.exchange.arrival_s) * 1e9),
            prompt_eval_count=prepared.num_tokens if prepared else 0,
        )

    inputs = [asked.input] if isinstance(asked.input, str) else asked.input
    if not inputs or inputs == [""]:  # how Ollama's clients request that the model be loaded
        return answer(None, [])
    if service.tokenizer is None:
        raise invalid("input", "This model has no tokenizer: it has no vectors of texts.")
    ids: list[Any] = list(inputs)
    if asked.truncate is not False:
        most = service.client.info.max_model_len
        info = service.client.info
        texts = [prompted(text, info.pooling) for text in inputs]
        ids = [service.tokenizer.encode_first(text, most) for text in texts]
    request = EmbeddingRequest(model=service.model_name, input=ids, dimensions=asked.dimensions)
    prepared = prepare_embeddings(service, request, answer, body.exchange.tenant)
    if asked.truncate is not False:
        prepared.num_unpooled = num_unpooled(service.tokenizer, service.client.info.pooling)
    return prepared


def _prepare_one(service: Service, body: Body) -> AskedEmbeddings:
    asked = decode_body(body, OllamaEmbeddingsRequest, service.config)
    request = EmbeddingRequest(model=asked.model, input=asked.prompt, normalize=False)
    return prepare_embeddings(service, request, _answer_one, body.exchange.tenant, "prompt")


def _answer_one(asked: AskedEmbeddings, vectors: list[Vector]) -> EmbeddingsAnswer:
    vector: Any = asked.shaped(vectors[0])
    return EmbeddingsAnswer(vector)


create_embed, create_embeddings = answered(_prepare_embed), answered(_prepare_one)
