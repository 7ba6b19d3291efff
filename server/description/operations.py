"""The server's operations: every path and method, and the types of its requests, answers and errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from runtime.engine.messages import EngineState
from server.anthropic_api.objects import (
    MessageAnswer,
    MessageEvent,
    MessagesModel,
    MessagesModelList,
    TokensCount,
)
from server.anthropic_api.schema import CountTokensRequest, MessagesRequest
from server.code_colours import Rendered, RenderRequest
from server.errors import Dialect, dialect_of
from server.observing.live import LiveMessage
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
from server.openai_api.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from server.responses_api.objects import Event, Response, ResponseDeleted, ResponseInputItems
from server.responses_api.schema import (
    ResponsesRequest,
)
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
    """Every answer that is not 200, and the last event of an aborted stream."""

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


ERRORS: dict[Dialect, type] = {
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

    request, answer  the bodies' types, or None
    stream           the type of each event's data, if the answer can be a stream; of each line in Ollama's API
    media_type       of an answer that is not JSON
    errors           statuses beside those that every route can have
    anthropic_answer  the answer's type with the header `anthropic-version`
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
        """The error's type for a status other than 200."""
        return ERRORS[self.dialect]


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
        "post", "/page/render", "Colours of an answer's code, for the page", RenderRequest, Rendered,
        errors=(*_READS, 429),
    ),
    Operation("get", "/page/{name}", "The page's files", media_type="*/*", errors=(404,)),
)  # fmt: skip
