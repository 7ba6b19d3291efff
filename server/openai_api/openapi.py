"""`GET /openapi.json`: the API described by the very types that requests are decoded into and answers encoded from.

Ranges that `SamplingParams` checks, and the fields of `server.openai_api.fields`, are added to the requests' schemas:
what the description allows is taken, or refused for a reason that no schema can say (a token id beyond the
vocabulary)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from runtime.engine.messages import EngineState
from runtime.engine.sampling_params import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_N, MAX_STOP_LENGTH
from runtime.sampling_table import COLUMNS, json_schema
from runtime.version import release
from server.anthropic_api import description as messages_description
from server.anthropic_api.objects import (
    MessageAnswer,
    MessageEvent,
    MessagesModel,
    MessagesModelList,
    TokensCount,
)
from server.anthropic_api.schema import CountTokensRequest, MessagesRequest
from server.dialect import Dialect, dialect_of
from server.observing.live import LiveMessage
from server.ollama_api import description as ollama_description
from server.ollama_api.objects import (
    ChatLine,
    EmbedAnswer,
    EmbeddingsAnswer,
    GenerateLine,
    ListedModels,
    LoadedModels,
    OllamaVersion,
    ShownModel,
)
from server.ollama_api.schema import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaOptions,
    OllamaShowRequest,
)
from server.openai_api.answers import (
    Cancelled,
    ChatChunk,
    ChatCompletion,
    Completion,
    Detokenized,
    EmbeddingList,
    Model,
    ModelList,
    Tokenized,
    Version,
)
from server.openai_api.fields import tables_of
from server.openai_api.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
    Tool,
)
from server.pictures.kept import MAX_UUID_LENGTH
from server.pictures.reader import DETAILS
from server.rendering.endpoint import Rendered, RenderRequest
from server.responses_api.objects import Event, Response, ResponseDeleted, ResponseInputItems
from server.responses_api.schema import (
    InputFunctionCall,
    InputFunctionCallOutput,
    InputMessage,
    InputReasoning,
    ResponsesRequest,
)
from server.service import Service
from server.static_page import About
from server.vllm_api.schema import (
    CacheReset,
    EngineList,
    PoolingAnswer,
    PoolingRequest,
    RerankAnswer,
    RerankRequest,
    ScoreAnswer,
    ScoreRequest,
    ServerInfo,
    ServerLoad,
    TokenizerInfo,
)

Json = dict[str, Any]


class ErrorObject(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    """Every answer that is not 200, and the last event of a stream that broke off."""

    error: ErrorObject


class AnthropicErrorDetails(msgspec.Struct):
    error_code: str | None
    param: str | None


class AnthropicErrorObject(msgspec.Struct):
    type: str
    message: str
    details: AnthropicErrorDetails


class AnthropicErrorAnswer(msgspec.Struct, tag_field="type", tag="error"):
    """The same on the routes of Anthropic's API."""

    error: AnthropicErrorObject


class OllamaErrorAnswer(msgspec.Struct):
    """The same on the routes of Ollama's API."""

    error: str


_ERRORS: dict[Dialect, type] = {
    "openai": ErrorAnswer,
    "anthropic": AnthropicErrorAnswer,
    "ollama": OllamaErrorAnswer,
}


class Health(msgspec.Struct, omit_defaults=True):
    """engines: the states of several."""

    status: Literal["ok"]
    engines: list[EngineState] = []


class Readiness(msgspec.Struct):
    ready: bool
    state: Literal["ready", "starting", "down", "closing", "draining"]


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    request, answer  the bodies' types; None: there is none
    stream           of each event's data, where the answer can be a stream; of each line in Ollama's API
    media_type       of an answer that is no JSON
    errors           statuses beside those that every route can have
    anthropic_answer  the answer's type for who sends the header `anthropic-version`
    """

    method: str
    path: str
    summary: str
    request: Any = None
    answer: Any = None
    stream: Any = None
    media_type: str = "application/json"
    errors: tuple[int, ...] = ()
    is_open: bool = False
    anthropic_answer: Any = None

    @property
    def dialect(self) -> Dialect:
        return dialect_of({"path": self.path, "headers": []})

    @property
    def error(self) -> type:
        """What it answers where it is not 200."""
        return _ERRORS[self.dialect]


_GENERATES = (400, 404, 408, 409, 413, 415, 429, 503)
_READS = (400, 404, 408, 413, 415)

OPERATIONS = (
    Operation(
        "post", "/v1/chat/completions", "The answer to a conversation", ChatCompletionRequest, ChatCompletion,
        ChatChunk, errors=_GENERATES,
    ),
    Operation(
        "post", "/v1/completions", "The continuation of prompts", CompletionRequest, Completion, Completion,
        errors=_GENERATES,
    ),
    Operation(
        "post", "/v1/responses", "The answer to a conversation, stored", ResponsesRequest, Response, Event,
        errors=_GENERATES,
    ),
    Operation(
        "post", "/v1/messages", "The answer to a conversation, in Anthropic's shapes", MessagesRequest, MessageAnswer,
        MessageEvent, errors=_GENERATES,
    ),
    Operation(
        "post", "/v1/messages/count_tokens", "How many tokens a conversation comes to", CountTokensRequest, TokensCount,
        errors=_READS,
    ),
    Operation(
        "post", "/api/chat", "The answer to a conversation, in Ollama's shapes", OllamaChatRequest, ChatLine, ChatLine,
        errors=_GENERATES,
    ),
    Operation(
        "post", "/api/generate", "The answer to a prompt, in Ollama's shapes", OllamaGenerateRequest, GenerateLine,
        GenerateLine, errors=_GENERATES,
    ),
    Operation(
        "post", "/api/embed", "Vectors of texts, in Ollama's shapes", OllamaEmbedRequest, EmbedAnswer,
        errors=(*_READS, 429, 503),
    ),
    Operation(
        "post", "/api/embeddings", "The vector of a text, in Ollama's older shape", OllamaEmbeddingsRequest,
        EmbeddingsAnswer, errors=(*_READS, 429, 503),
    ),
    Operation("get", "/api/tags", "The served model, in Ollama's shapes", answer=ListedModels),
    Operation("get", "/api/ps", "The served model and its memory", answer=LoadedModels),
    Operation("post", "/api/show", "The served model's template and abilities", OllamaShowRequest, ShownModel,
              errors=_READS),
    Operation("get", "/api/version", "The release of Ollama whose API this is", answer=OllamaVersion),
    Operation("get", "/v1/responses/{response_id}", "A stored response", answer=Response, errors=(400, 404)),
    Operation("delete", "/v1/responses/{response_id}", "Forget a response", answer=ResponseDeleted, errors=(404,)),
    Operation("post", "/v1/responses/{response_id}/cancel", "End a response", answer=Response, errors=(404,)),
    Operation(
        "get", "/v1/responses/{response_id}/input_items", "What a response was asked", answer=ResponseInputItems,
        errors=(404,),
    ),
    Operation(
        "post", "/v1/embeddings", "Vectors of inputs", EmbeddingRequest, EmbeddingList, errors=(*_READS, 429, 503)
    ),
    Operation(
        "post", "/v1/requests/{request_id}/cancel", "End whatever runs under this name", answer=Cancelled, errors=(404,)
    ),
    Operation("get", "/v1/models", "The served model", answer=ModelList, anthropic_answer=MessagesModelList),
    Operation(
        "get", "/v1/models/{model_id}", "The served model", answer=Model, anthropic_answer=MessagesModel, errors=(404,)
    ),
    Operation(
        "post", "/pooling", "Vectors of inputs, in vLLM's shape", PoolingRequest, PoolingAnswer,
        errors=(*_READS, 429, 503),
    ),
    *(
        Operation("post", path, "How near texts are", ScoreRequest, ScoreAnswer, errors=(*_READS, 429, 503))
        for path in ("/score", "/v1/score")
    ),
    *(
        Operation("post", path, "Documents by nearness", RerankRequest, RerankAnswer, errors=(*_READS, 429, 503))
        for path in ("/rerank", "/v1/rerank")
    ),
    Operation("get", "/tokenizer_info", "Special tokens and the chat template", answer=TokenizerInfo, errors=(400,)),
    Operation("get", "/load", "How many requests are open", answer=ServerLoad),
    Operation("get", "/server_info", "The model, its limits and the server's", answer=ServerInfo),
    Operation("get", "/engines", "The engines that share the requests", answer=EngineList),
    Operation("post", "/restart_engines", "Start engines again, one by one", answer=EngineList, errors=(409,)),
    Operation(
        "post", "/reset_prefix_cache", "Forget cached prefixes", answer=CacheReset, errors=(429,)
    ),
    Operation("post", "/tokenize", "A prompt's or a conversation's ids", TokenizeRequest, Tokenized, errors=_READS),
    Operation("post", "/detokenize", "The text of ids", DetokenizeRequest, Detokenized, errors=_READS),
    Operation("get", "/health", "Whether the server lives", answer=Health, errors=(503,), is_open=True),
    Operation("get", "/ready", "Whether requests are taken", answer=Readiness, is_open=True),
    Operation("get", "/version", "The release", answer=Version),
    Operation("get", "/metrics", "Prometheus' metrics", media_type="text/plain"),
    Operation("get", "/live", "What the engine does", stream=LiveMessage),
    Operation("get", "/ping", "Whether the server lives", answer=Health, errors=(503,), is_open=True),
    Operation("post", "/ping", "Whether the server lives", answer=Health, errors=(503,), is_open=True),
    Operation("get", "/docs", "This description to read", media_type="text/html"),
    Operation("get", "/openapi.json", "This description", answer=Json),
    Operation("get", "/", "The page", media_type="text/html"),
    Operation("get", "/page/about", "The model behind the page", answer=About),
    Operation(
        "post", "/page/render", "Formulas and code of an answer, for the page", RenderRequest, Rendered,
        errors=(*_READS, 429),
    ),
    Operation("get", "/page/{name}", "The page's files", media_type="*/*", errors=(404,)),
)  # fmt: skip

_EVERYWHERE = (401, 403, 405, 431, 500, 503)
"""Statuses of the layers around the routes: no key, a foreign Host or Origin, headers too large, draining."""

_NULL = {"type": "null"}
_RANGES: dict[str, Json] = {
    "n": {"type": "integer", "minimum": 1, "maximum": MAX_N},
    **{name: json_schema(name) for name in COLUMNS},
    "max_tokens": {"type": "integer", "minimum": 1, "maximum": 2**31 - 1},
    "max_completion_tokens": {"type": "integer", "minimum": 1, "maximum": 2**31 - 1},
    "max_output_tokens": {"type": "integer", "minimum": 1, "maximum": 2**31 - 1},
    "min_tokens": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
    "top_logprobs": {"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS},
    "prompt_logprobs": {"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS},
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": "number", "minimum": -MAX_LOGIT_BIAS, "maximum": MAX_LOGIT_BIAS},
    },
}
"""What `SamplingParams` asks of a field beside its type. null is allowed everywhere."""

_TOKEN_IDS: dict[str, Json] = {
    "stop_token_ids": {"maxItems": 1024},
    "allowed_token_ids": {"minItems": 1, "maxItems": 2**18},
}
_INPUT_ITEMS = ("InputMessage", "InputFunctionCall", "InputFunctionCallOutput", "InputReasoning")

_STOP: Json = {
    "anyOf": [
        {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH},
        {
            "type": "array",
            "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH},
            "maxItems": 64,
        },
        _NULL,
    ],
    "default": None,
}


@functools.cache
def description(model_names: tuple[str, ...], vocab_size: int, *, reads_images: bool) -> Json:
    """The whole document, OpenAPI 3.1, of a server that has this model."""
    types = {operation.request for operation in OPERATIONS if operation.request is not None}
    answers = [operation.answer for operation in OPERATIONS if operation.answer not in (None, Json)]
    answers += [operation.anthropic_answer for operation in OPERATIONS if operation.anthropic_answer is not None]
    streams = [operation.stream for operation in OPERATIONS if operation.stream is not None]
    items = (InputMessage, InputFunctionCall, InputFunctionCallOutput, InputReasoning)
    parts = (Tool, *items, *messages_description.PARTS, *ollama_description.PARTS)
    ordered = [*sorted(types, key=lambda each: each.__name__), *answers, *streams, *_ERRORS.values(), *parts]
    references, components = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    named = dict(zip(map(repr, ordered), references, strict=True))
    for request in (*types, OllamaOptions):
        _complete(components[request.__name__], request, model_names, vocab_size)
    components["Message"]["properties"]["content"] = _content("text", images=_IMAGES_OF_CHATS if reads_images else ())
    pixels: Json = {"type": "integer", "minimum": 1}
    kwargs: Json = {
        "type": "object",
        "properties": {"min_pixels": pixels, "max_pixels": pixels} if reads_images else {},
        "additionalProperties": False,
    }
    for name in ("ChatCompletionRequest", "EmbeddingRequest"):
        components[name]["properties"]["mm_processor_kwargs"] = {"anyOf": [kwargs, _NULL], "default": None}
    for item in items:
        for name in {"content", "output"}.intersection(components[item.__name__]["properties"]):
            if item is not InputReasoning:
                images = _IMAGES_OF_RESPONSES if reads_images and item is InputMessage else ()
                content = _content("input_text", "output_text", images=images)
                components[item.__name__]["properties"][name] = content
    messages_description.complete(components, reads_images=reads_images)
    ollama_description.complete(components, model_names, reads_images=reads_images)
    paths: Json = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, named)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "xserv",
            "version": release(),
            "description": "OpenAI's API with vLLM's extensions, Anthropic's messages and Ollama's API, for one model.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _object(*required: str, **properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


_URL: Json = {"type": "string", "minLength": 1}
_DETAIL: Json = {"enum": [*DETAILS, None]}
_UUID: Json = {"type": "string", "minLength": 1, "maxLength": MAX_UUID_LENGTH}
_NO_DATA: Json = {"anyOf": [{"type": "null"}, _object(url={"type": "null"}, detail=_DETAIL)]}
"""Instead of a URL, where a uuid says which image it is."""
_IMAGES_OF_RESPONSES = (
    _object("type", "image_url", type={"const": "input_image"}, image_url=_URL, detail=_DETAIL, uuid=_UUID),
    _object("type", "uuid", type={"const": "input_image"}, image_url={"type": "null"}, detail=_DETAIL, uuid=_UUID),
)
_IMAGES_OF_CHATS = (
    _object(
        "type", "image_url", type={"const": "image_url"}, uuid=_UUID,
        image_url={"anyOf": [_URL, _object("url", url=_URL, detail=_DETAIL)]},
    ),
    _object("type", "uuid", type={"const": "image_url"}, image_url=_NO_DATA, uuid=_UUID),
    *_IMAGES_OF_RESPONSES,
)  # fmt: skip


def _content(*kinds: str, images: tuple[Json, ...]) -> Json:
    """A text, or parts that are texts or images; null where a chat's assistant has only called tools."""
    part: Json = {
        "type": "object",
        "properties": {"type": {"enum": kinds}, "text": {"type": "string"}},
        "required": ["type", "text"],
        "additionalProperties": False,
    }
    if images:
        part = {"anyOf": [part, *images]}
    content: Json = {"anyOf": [{"type": "string"}, {"type": "array", "items": part}]}
    if kinds == ("text",):
        content["anyOf"].append(_NULL)
    return content


def _complete(schema: Json, request: type[msgspec.Struct], model_names: tuple[str, ...], vocab_size: int) -> None:
    """Add what the type alone does not say: the model's name and ids, ranges, items, and the tables' fields."""
    fields = schema["properties"]
    required = schema.get("required", ())
    if "model" in fields:
        fields["model"] = {"enum": [*model_names] if "model" in required else [*model_names, None]}
    for name, limits in _RANGES.items():
        if name in required:
            fields[name] = limits
        elif name in fields:
            fields[name] = {"anyOf": [limits, _NULL], "default": None}
    ids = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}}
    for name, limits in _TOKEN_IDS.items():
        if name in fields:
            fields[name] = {"anyOf": [{**ids, **limits}, _NULL], "default": None}
    if request is DetokenizeRequest:
        fields["tokens"] = ids
    has_prompts = request in (CompletionRequest, EmbeddingRequest, PoolingRequest)
    for name in {"prompt", "input"}.intersection(fields) if has_prompts else ():
        texts = {"type": "array", "items": {"type": "string"}, "minItems": 1}
        one = {**ids, "minItems": 1}
        fields[name] = {"anyOf": [{"type": "string"}, texts, one, {"type": "array", "items": one, "minItems": 1}]}
    if request in (EmbeddingRequest, PoolingRequest):
        of_messages = dict.fromkeys(("messages", "mm_processor_kwargs"), _NULL)
        of_input = dict.fromkeys(("input", "add_special_tokens", "truncate_prompt_tokens"), _NULL)
        schema["oneOf"] = [
            {"required": ["input"], "properties": of_messages},
            {"required": ["messages"], "properties": {"messages": {"type": "array"}, **of_input}},
        ]
    if request is ScoreRequest:
        schema["oneOf"] = [{"required": ["text_1", "text_2"]}, {"required": ["queries", "documents"]}]
    if request is ResponsesRequest:
        items = [{"$ref": f"#/components/schemas/{item}"} for item in _INPUT_ITEMS]
        fields["input"] = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": items}, "minItems": 1}]}
    elif "tools" in fields:
        tools = {"type": "array", "items": {"$ref": "#/components/schemas/Tool"}, "maxItems": 128}
        fields["tools"] = {"anyOf": [tools, _NULL], "default": None}
    for name in {"stop", "stop_sequences"}.intersection(fields):
        fields[name] = _STOP if name == "stop" else {**_STOP, "anyOf": _STOP["anyOf"][1:]}
    if request is CompletionRequest:  # 0: only the prompt is wanted; alternatives are a number here
        fields["max_tokens"] = {"anyOf": [{**_RANGES["max_tokens"], "minimum": 0}, _NULL], "default": None}
        fields["logprobs"] = {"anyOf": [_RANGES["top_logprobs"], _NULL], "default": None}
    accepted, refused = tables_of(request)
    for name, entry in accepted.items():
        fields[name] = {"anyOf": [msgspec.json.schema(entry.type), _NULL], "description": f"No effect: {entry.reason}."}
    for name, missing in refused.items():
        fields.setdefault(name, {"enum": [*missing.harmless, None], "description": f"Not built: {missing.reason}."})


def _operation(operation: Operation, named: dict[str, Json]) -> Json:
    content: Json = {}
    if operation.answer is Json:
        content["application/json"] = {"schema": {"type": "object"}}
    elif operation.answer is not None:
        kinds = [named[repr(kind)] for kind in (operation.answer, operation.anthropic_answer) if kind is not None]
        content["application/json"] = {"schema": kinds[0] if len(kinds) == 1 else {"anyOf": kinds}}
    elif operation.stream is None:
        content[operation.media_type] = {"schema": {"type": "string"}}
    if operation.stream is not None:
        is_lines = operation.dialect == "ollama"
        told = "Lines of JSON, each by" if is_lines else "Server-sent events; each one's `data` by"
        content["application/x-ndjson" if is_lines else "text/event-stream"] = {
            "schema": {"type": "string", "description": f"{told} `x-event-data`."},
            "x-event-data": {"anyOf": [named[repr(operation.stream)], named[repr(operation.error)]]},
        }
    answers: Json = {"200": {"description": operation.summary, "content": content}}
    error = {"application/json": {"schema": named[repr(operation.error)]}}
    for status in sorted({*operation.errors, *_EVERYWHERE}):
        answers[str(status)] = {"description": _MEANINGS[status], "content": error}
    if operation.answer is Readiness:
        answers["503"]["content"] = {"application/json": {"schema": named[repr(Readiness)]}}
    result: Json = {
        "operationId": f"{operation.method} {operation.path}",
        "summary": operation.summary,
        "responses": answers,
        "security": [{}] if operation.is_open else [{"key": []}, {}],
    }
    if parameters := [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]:
        result["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in parameters
        ]
    if operation.request is not None:
        result["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": named[repr(operation.request)]}},
        }
    return result


_MEANINGS = {
    400: "The request cannot be honoured; `param` names the field",
    401: "No key, or a wrong one, where keys are set",
    403: "A Host or an Origin that is not allowed",
    404: "There is no such thing",
    405: "Another method is meant",
    408: "The body did not arrive in time",
    409: "The request was cancelled by its name",
    413: "The body is too large",
    415: "The body is not application/json",
    429: "The queue is full; Retry-After says when to come again",
    431: "The headers are too large",
    500: "A fault of the server's; its log has the cause",
    503: "The engine, or the server, takes no requests now",
}


def description_of(service: Service) -> Json:
    """The document of this server."""
    info = service.client.info
    return description(service.model_names, info.vocab_size, reads_images=info.images is not None)


async def get_description(request: Request) -> HttpResponse:
    return HttpResponse(msgspec.json.encode(description_of(request.app.state.service)), media_type="application/json")
