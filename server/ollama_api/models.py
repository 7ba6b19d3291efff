"""`/api/tags`, `/api/ps`, `/api/show` and `/api/version`: the model by its names, in Ollama's shapes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from runtime.version import release
from server.errors import invalid
from server.names import tagged
from server.ollama_api.endpoints import time_text
from server.ollama_api.schema import OllamaShowRequest
from server.requests.answering import answered
from server.service import Service
from server.transport.body import Body, decode_body
from server.transport.json_answer import JsonAnswer

API_VERSION = "0.12.11"
"""The release of Ollama whose API this is, log probabilities included. Some clients want at least a certain one."""

Capability = Literal["completion", "embedding", "tools", "thinking"]


class ModelDetails(msgspec.Struct, kw_only=True):
    """parameter_size: not known."""

    parent_model: str = ""
    format: Literal["safetensors", "gguf"]
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
    """expires_at: never, if the model stays loaded."""

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
    capabilities: list[Capability]
    modified_at: str


class OllamaVersion(msgspec.Struct):
    """version: of Ollama's API, which clients compare; xserv: this server's."""

    version: str
    xserv: str


def listed(service: Service) -> list[ListedModel]:
    """The model under each of its names."""
    return [
        ListedModel(
            name=name,
            model=name,
            modified_at=_modified_at(service),
            size=service.client.info.weight_bytes,
            digest=_digest(service),
            details=_details(service),
        )
        for name in map(tagged, service.all_names)
    ]


def listed_by_files(
    names: Sequence[str], size: int, family: str, file_format: Literal["safetensors", "gguf"], created: float
) -> list[ListedModel]:
    """The same for a model that was not loaded yet, by what its files tell."""
    details = ModelDetails(
        format=file_format, family=family, families=[family] if family else [], quantization_level=""
    )
    digest = hashlib.sha256(names[0].encode()).hexdigest()
    modified_at = time_text(datetime.fromtimestamp(created, UTC))
    return [
        ListedModel(name=name, model=name, modified_at=modified_at, size=size, digest=digest, details=details)
        for name in map(tagged, names)
    ]


def loaded(service: Service, expires_at: float | None = None) -> LoadedModel:
    """The model with its memory; `expires_at`: seconds since the epoch, or None."""
    info, name = service.client.info, tagged(service.model_name)
    model = LoadedModel(
        name=name,
        model=name,
        size=info.weight_bytes + info.kv_cache_bytes,
        digest=_digest(service),
        details=_details(service),
        size_vram=0 if info.device == "cpu" else info.weight_bytes + info.kv_cache_bytes,
        context_length=info.max_model_len,
    )
    if expires_at is not None:
        model.expires_at = time_text(datetime.fromtimestamp(expires_at, UTC))
    return model


async def list_tags(request: Request) -> Response:
    return JsonAnswer(ListedModels(listed(request.app.state.service)))


async def list_loaded(request: Request) -> Response:
    return JsonAnswer(LoadedModels([loaded(request.app.state.service)]))


async def get_api_version(request: Request) -> Response:
    return JsonAnswer(OllamaVersion(API_VERSION, release()))


def _shown(service: Service, body: Body) -> ShownModel:
    asked = decode_body(body, OllamaShowRequest, service.config)
    name = asked.model if asked.model is not None else asked.name
    if name is None:
        raise invalid("model", "Missing required parameter: model.", "missing_required_parameter")
    service.adapter_of(name)
    return shown(service)


def shown(service: Service) -> ShownModel:
    """The model's template, sampling defaults and abilities."""
    info, tokenizer, form = service.client.info, service.tokenizer, service.answer_format
    abilities: list[Capability] = ["completion" if info.pooling.generates else "embedding"]
    if info.pooling.generates and form.tools is not None:
        abilities.append("tools")
    if info.pooling.generates and form.reasoning:
        abilities.append("thinking")
    return ShownModel(
        parameters="\n".join(f"{name:<30} {value}" for name, value in service.default_sampling.items()),
        template=tokenizer.chat_template() if tokenizer is not None and tokenizer.has_chat_template else "",
        details=_details(service),
        model_info={
            "general.architecture": info.architecture,
            f"{info.architecture}.context_length": info.max_model_len,
            f"{info.architecture}.vocab_size": info.vocab_size,
        },
        capabilities=abilities,
        modified_at=_modified_at(service),
    )


show = answered(_shown)


def _details(service: Service) -> ModelDetails:
    info = service.client.info
    return ModelDetails(
        format="gguf" if Path(info.model_path).is_file() else "safetensors",
        family=info.architecture,
        families=[info.architecture],
        quantization_level=info.dtype if info.quantization == "none" else info.quantization,
    )


def _digest(service: Service) -> str:
    """A digest of the model's name and fingerprint; the weights themselves are not read."""
    return hashlib.sha256(f"{service.model_name}\0{service.system_fingerprint}".encode()).hexdigest()


def _modified_at(service: Service) -> str:
    """The time when the server began to serve it."""
    return time_text(datetime.fromtimestamp(service.created, UTC))
