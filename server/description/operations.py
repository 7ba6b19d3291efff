"""The table of the server's routes: every path and method, its endpoint, and the types of its requests, answers and
errors, of which `/openapi.json` is made."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from runtime.engine.messages import EngineState
from server import code_colours, static_page
from server.anthropic_api import endpoints as anthropic
from server.anthropic_api import objects as messages
from server.anthropic_api.schema import CountTokensRequest, MessagesRequest
from server.description.docs_page import get_description, get_docs
from server.errors import Dialect, dialect_of
from server.observing import live
from server.ollama_api import endpoints as ollama
from server.ollama_api import models as ollama_models
from server.ollama_api import schema as of_ollama
from server.openai_api import answers, chat_answer, chat_batch, completions, decisions, embeddings, infill, models
from server.openai_api import schema as of_openai
from server.openai_api.models import ModelStatus
from server.requests.answering import cancel_request
from server.responses_api import endpoints as responses
from server.responses_api import objects
from server.responses_api.schema import ResponsesRequest
from server.tei_api import endpoints as tei
from server.vllm_api import adapters, generate, operating, scoring, weights
from server.vllm_api import scoring_schema as of_scoring

Json = dict[str, Any]
Endpoint = Callable[[Request], Awaitable[Response]] | ASGIApp


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


ERRORS: dict[Dialect, type] = {"openai": ErrorAnswer, "anthropic": AnthropicErrorAnswer, "ollama": OllamaErrorAnswer}


class Health(msgspec.Struct, omit_defaults=True):
    """engines: the states of several; models: of several models, by name."""

    status: Literal["ok"]
    engines: list[EngineState] = []
    models: dict[str, ModelStatus] = {}


class Readiness(msgspec.Struct):
    ready: bool
    state: Literal["ready", "starting", "down", "closing", "draining"]


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path, in Starlette's notation.

    request, answer  the bodies' types, or None
    stream           the type of each event's data, if the answer can be a stream; of each line in Ollama's API
    media_type       of an answer that is not JSON
    errors           statuses beside those that every route can have
    anthropic_answer  the answer's type with the header `anthropic-version`
    """

    method: str
    path: str
    endpoint: Endpoint
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
_EMBEDS = (*_READS, 429, 503)
_CHANGES = (400, 403, 503)


def _get(path: str, endpoint: Endpoint, summary: str, answer: Any = None, **more: Any) -> Operation:
    return Operation("get", path, endpoint, summary, answer=answer, **more)


_post = partial(Operation, "post")

OPERATIONS = (
    _post("/v1/chat/completions", chat_answer.create_chat_completion, "The answer to a conversation",
          of_openai.ChatCompletionRequest, answers.ChatCompletion, answers.ChatChunk, errors=_GENERATES),
    _post("/v1/chat/completions/batch", chat_batch.create_chat_batch, "The answers to several conversations",
          chat_batch.BatchChatRequest, answers.ChatCompletion, errors=_GENERATES),
    _post("/v1/completions", completions.create_completion, "The continuation of prompts", of_openai.CompletionRequest,
          answers.Completion, answers.Completion, errors=_GENERATES),
    _post("/inference/v1/generate", generate.create_generation, "The continuation of token ids, in token ids",
          generate.GenerateRequest, generate.GenerateAnswer, generate.GenerateAnswer, errors=_GENERATES),
    _post("/infill", infill.create_infill, "The text between two others, in llama.cpp's shapes", infill.InfillRequest,
          infill.InfillAnswer, infill.InfillAnswer, errors=_GENERATES),
    _post("/v1/responses", responses.create_response, "The answer to a conversation, stored", ResponsesRequest,
          objects.Response, objects.Event, errors=_GENERATES),
    _post("/v1/messages", anthropic.create_message, "The answer to a conversation, in Anthropic's shapes",
          MessagesRequest, messages.MessageAnswer, messages.MessageEvent, errors=_GENERATES),
    _post("/v1/messages/count_tokens", anthropic.count_tokens, "How many tokens a conversation comes to",
          CountTokensRequest, messages.TokensCount, errors=_READS),
    _post("/api/chat", ollama.chat, "The answer to a conversation, in Ollama's shapes", of_ollama.OllamaChatRequest,
          ollama.ChatLine, ollama.ChatLine, errors=_GENERATES),
    _post("/api/generate", ollama.generate, "The answer to a prompt, in Ollama's shapes",
          of_ollama.OllamaGenerateRequest, ollama.GenerateLine, ollama.GenerateLine, errors=_GENERATES),
    _post("/api/embed", ollama.create_embed, "Vectors of texts, in Ollama's shapes", of_ollama.OllamaEmbedRequest,
          ollama.EmbedAnswer, errors=_EMBEDS),
    _post("/api/embeddings", ollama.create_embeddings, "The vector of a text, in Ollama's older shape",
          of_ollama.OllamaEmbeddingsRequest, ollama.EmbeddingsAnswer, errors=_EMBEDS),
    _get("/api/tags", ollama_models.list_tags, "The served model, in Ollama's shapes", ollama_models.ListedModels),
    _get("/api/ps", ollama_models.list_loaded, "The served model and its memory", ollama_models.LoadedModels),
    _post("/api/show", ollama_models.show, "The served model's template and abilities", of_ollama.OllamaShowRequest,
          ollama_models.ShownModel, errors=_READS),
    _get("/api/version", ollama_models.get_api_version, "The release of Ollama whose API this is",
         ollama_models.OllamaVersion),
    _get("/v1/responses/{response_id}", responses.get_response, "A stored response", objects.Response,
         errors=(400, 404)),
    Operation("delete", "/v1/responses/{response_id}", responses.delete_response, "Forget a response",
              answer=objects.ResponseDeleted, errors=(404,)),
    _post("/v1/responses/{response_id}/cancel", responses.cancel_response, "End a response", answer=objects.Response,
          errors=(404,)),
    _get("/v1/responses/{response_id}/input_items", responses.list_input_items, "What a response was asked",
         objects.ResponseInputItems, errors=(404,)),
    _post("/v1/embeddings", embeddings.create_embeddings, "Vectors of inputs", of_openai.EmbeddingRequest,
          answers.EmbeddingList, errors=_EMBEDS),
    _post("/v1/decisions", decisions.create_decision, "The probabilities of answers to questions about an input",
          decisions.DecisionRequest, decisions.Decision, errors=_GENERATES),
    _post("/v1/requests/{request_id:path}/cancel", cancel_request, "End whatever runs under this name",
          answer=answers.Cancelled, errors=(404,)),
    _get("/v1/models", models.list_models, "The served model", models.ModelList,
         anthropic_answer=models.MessagesModelList),
    _get("/v1/models/{model_id:path}", models.get_model, "The served model", models.Model,
         anthropic_answer=models.MessagesModel, errors=(404,)),
    _post("/pooling", scoring.create_pooling, "Vectors of inputs, in vLLM's shape", of_scoring.PoolingRequest,
          of_scoring.PoolingAnswer, errors=_EMBEDS),
    *(
        _post(path, scoring.create_scores, "The relevance of texts", of_scoring.ScoreRequest,
              of_scoring.ScoreAnswer, errors=_EMBEDS)
        for path in ("/score", "/v1/score")
    ),
    *(
        _post(path, scoring.create_ranking, "Documents by relevance", of_scoring.RerankRequest,
              of_scoring.RerankAnswer | list[of_scoring.TeiRanked], errors=_EMBEDS)
        for path in ("/rerank", "/v1/rerank")
    ),
    _post("/v2/rerank", scoring.create_cohere_ranking, "Documents by relevance, in Cohere's shapes",
          of_scoring.CohereRerankRequest, of_scoring.CohereRerankAnswer, errors=_EMBEDS),
    _post("/classify", scoring.create_classes, "The labels of texts", of_scoring.ClassifyRequest,
          of_scoring.ClassifyAnswer, errors=_EMBEDS),
    _post("/similarity", scoring.create_similarities, "How near texts are", of_scoring.SimilarityRequest,
          of_scoring.ScoreAnswer | list[float], errors=_EMBEDS),
    _post("/embed", tei.create_embed, "Vectors of texts, in text-embeddings-inference's shapes", tei.TeiEmbedRequest,
          list[list[float] | str], errors=_EMBEDS),
    _post("/predict", tei.create_prediction, "The labels of texts, in text-embeddings-inference's shapes",
          tei.TeiPredictRequest, list[tei.TeiLabel | list[tei.TeiLabel]], errors=_EMBEDS),
    _post("/", tei.create_any, "Vectors or labels of texts, whichever the model is for", tei.TeiRequest,
          list[list[tei.TeiLabel | float] | str], errors=_EMBEDS),
    _get("/tokenizer_info", operating.get_tokenizer_info, "Special tokens and the chat template",
         operating.TokenizerInfo, errors=(400,)),
    _get("/load", operating.get_load, "How many requests are open", operating.ServerLoad),
    _get("/server_info", operating.get_server_info, "The model, its limits and the server's", operating.ServerInfo),
    _get("/engines", operating.list_engines, "The engines that share the requests", operating.EngineList),
    _post("/restart_engines", operating.restart_engines, "Start engines again, one by one", answer=operating.EngineList,
          errors=(409,)),
    _post("/reset_prefix_cache", operating.reset_prefix_cache, "Forget cached prefixes", answer=operating.CacheReset,
          errors=(429,)),
    _post("/v1/load_lora_adapter", adapters.load_adapter, "An adapter becomes a model's name",
          adapters.LoadAdapterRequest, media_type="text/plain", errors=(*_READS, 429, 503)),
    _post("/v1/unload_lora_adapter", adapters.unload_adapter, "An adapter's name is forgotten",
          adapters.UnloadAdapterRequest, media_type="text/plain", errors=_READS),
    _post("/pause", weights.pause, "Compute nothing until /resume", answer=weights.Changed, errors=_CHANGES),
    _post("/resume", weights.resume, "End a pause", answer=weights.Changed, errors=_CHANGES),
    _get("/is_paused", weights.is_paused, "Whether it is paused", weights.Paused, errors=_CHANGES),
    _post("/sleep", weights.sleep, "Free memory until /wake_up", answer=weights.Changed, errors=_CHANGES),
    _post("/wake_up", weights.wake_up, "Take memory again", answer=weights.Changed, errors=_CHANGES),
    _get("/is_sleeping", weights.is_sleeping, "Whether it sleeps", weights.Sleeping, errors=_CHANGES),
    _post("/update_weights", weights.update_weights, "Serve other weights of the same model",
          weights.UpdateWeightsRequest, weights.Changed, errors=(*_READS, 403, 503)),
    _get("/weight_info", weights.weight_info, "The version of the weights", weights.WeightInfo, errors=_CHANGES),
    _get("/get_world_size", weights.get_world_size, "How many ranks there are", weights.WorldSize, errors=_CHANGES),
    _post("/abort_requests", weights.abort_requests, "End requests, whoever's", weights.AbortRequest, weights.Aborted,
          errors=(*_READS, 403, 503)),
    _post("/tokenize", models.tokenize, "A prompt's or a conversation's ids", of_openai.TokenizeRequest,
          models.Tokenized, errors=_READS),
    _post("/detokenize", models.detokenize, "The text of ids", of_openai.DetokenizeRequest, models.Detokenized,
          errors=_READS),
    _get("/health", operating.health, "Whether the server lives", Health, errors=(503,), is_open=True),
    _get("/ready", operating.ready, "Whether requests are taken", Readiness, is_open=True),
    _get("/version", models.get_version, "The release", models.Version),
    _get("/metrics", operating.metrics, "Prometheus' metrics", media_type="text/plain"),
    _get("/live", live.watch_engine, "What the engine does", stream=live.LiveMessage),
    _get("/ping", operating.ping, "Whether the server lives", Health, errors=(503,), is_open=True),
    _post("/ping", operating.ping, "Whether the server lives", answer=Health, errors=(503,), is_open=True),
    _get("/docs", get_docs, "This description to read", media_type="text/html"),
    _get("/openapi.json", get_description, "This description", Json),
    _get("/", static_page.get_page, "The page", media_type="text/html"),
    _get("/page/about", static_page.get_about, "The model behind the page", static_page.About),
    _post("/page/render", code_colours.render, "Colours of an answer's code, for the page", code_colours.RenderRequest,
          code_colours.Rendered, errors=(*_READS, 429)),
    _get("/page/{name:path}", static_page.get_page, "The page's files", media_type="*/*", errors=(404,)),
)  # fmt: skip


def routes(operations: Iterable[Operation] = OPERATIONS) -> list[BaseRoute]:
    """A route for each path and endpoint."""
    methods: dict[tuple[str, Any], list[str]] = {}
    for operation in operations:
        methods.setdefault((operation.path, operation.endpoint), []).append(operation.method.upper())
    return [Route(path, endpoint, methods=names) for (path, endpoint), names in methods.items()]
