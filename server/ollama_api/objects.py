"""The answers of Ollama's `/api`, as typed objects; a field that is UNSET is not sent. Durations are in nanoseconds."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from server.openai_api.answers import ChatTokenLogprob


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
    created_at: str = msgspec.field(default_factory=lambda: now())
    done: bool
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET
    done_reason: Literal["stop", "length", "load"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class ChatLine(_Line, kw_only=True):
    message: AnsweredMessage


class GenerateLine(_Line, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET


class EmbedAnswer(msgspec.Struct, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


class EmbeddingsAnswer(msgspec.Struct):
    embedding: list[float]


class ModelDetails(msgspec.Struct, kw_only=True):
    """parameter_size: not known."""

    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str = ""
    quantization_level: str


class ListedModel(msgspec.Struct, kw_only=True):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


class ListedModels(msgspec.Struct):
    models: list[ListedModel]


class LoadedModel(msgspec.Struct, kw_only=True):
    """expires_at: never; the model stays loaded."""

    name: str
    model: str
    size: int
    digest: str
    details: ModelDetails
    expires_at: str = "9999-12-31T23:59:59Z"
    size_vram: int
    context_length: int


class LoadedModels(msgspec.Struct):
    models: list[LoadedModel]


class ShownModel(msgspec.Struct, kw_only=True):
    modelfile: str = ""
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, str | int]
    capabilities: list[Literal["completion", "tools", "thinking"]]
    modified_at: str


class OllamaVersion(msgspec.Struct):
    """version: of Ollama's API, which clients compare; xserv: this server's."""

    version: str
    xserv: str


def now() -> str:
    return time_text(datetime.now(UTC))


def time_text(when: datetime) -> str:
    return when.isoformat().replace("+00:00", "Z")
