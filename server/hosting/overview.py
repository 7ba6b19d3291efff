"""The routes of a server of several models that tell of all of them, and those that load and unload one, in
llama-server's shapes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from models.checkpoints.hub import local_model
from models.configuration.generation_config import recommended_sampling
from runtime.text.load import load_tokenizer
from runtime.version import release
from server.errors import dialect_of, invalid, starting
from server.hosting.durations import FOR_EVER
from server.hosting.host import Host
from server.hosting.hosted import HostedModel
from server.ollama_api.models import (
    Capability,
    ListedModel,
    ListedModels,
    LoadedModels,
    ShownModel,
    listed,
    listed_by_files,
    loaded,
    shown,
)
from server.ollama_api.schema import OllamaShowRequest
from server.openai_api.models import ModelState, ModelStatus, listed_model, model_list
from server.service import AppState
from server.transport.body import decode_body, read_body
from server.transport.json_answer import JsonAnswer
from server.vllm_api.operating import ServerLoad, told_config, told_info


class ModelRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /models/load` and `/models/unload`."""

    model: str


class Done(msgspec.Struct):
    success: bool = True


class HostedInfo(msgspec.Struct, kw_only=True):
    """keep_alive_s: null, for ever; expires_in_s: null, not as long as it is used, or at all. engine: fields of
    `GET /live`, null before it was first loaded; options: of the engine, as far as they were given."""

    names: list[str]
    status: ModelStatus
    failed: bool
    device: str
    memory_bytes: int
    priority: int
    keep_alive_s: float | None
    expires_in_s: float | None
    open_requests: int
    engine: dict[str, Any] | None


class HostInfo(msgspec.Struct, kw_only=True):
    """memory_bytes: by device, that models may take; server: `ServerConfig` without keys and files."""

    version: str
    models: list[HostedInfo]
    memory_bytes: dict[str, int]
    server: dict[str, Any]


async def list_models(request: Request) -> Response:
    """Every name of every model and adapter, with its status."""
    host, dialect = Host.of(request.scope), dialect_of(request.scope)
    return model_list([_listed(host, model, name, dialect) for model in host.models for name in model.all_names])


async def get_model(request: Request) -> Response:
    """404 for a name that no model or adapter has."""
    host, name = Host.of(request.scope), request.path_params["model_id"]
    return JsonAnswer(_listed(host, host.named(name), name, dialect_of(request.scope)))


def _listed(host: Host, model: HostedModel, name: str, dialect: Any) -> Any:
    status = ModelState(model.shown_status, model.has_failed)
    adapter = model.adapter(name)
    return listed_model(name, host.created, model.max_model_len, adapter, model.name, dialect, status)


async def list_tags(request: Request) -> Response:
    """Ollama's list: all models, loaded or not."""
    host = Host.of(request.scope)
    return JsonAnswer(
        ListedModels(
            [
                each
                for model in host.models
                for each in (
                    _by_files(model, model.all_names, host) if model.service is None else listed(model.service)
                )
            ]
        )
    )


def _by_files(model: HostedModel, names: Sequence[str], host: Host) -> list[ListedModel]:
    facts = model.facts
    return listed_by_files(names, facts.stored_bytes, facts.architecture, facts.format, host.created)


async def list_loaded(request: Request) -> Response:
    """Ollama's list of the loaded models, with the time when each goes."""
    now_s, now = time.monotonic(), time.time()
    return JsonAnswer(
        LoadedModels(
            [
                loaded(model.service, None if (end_s := model.expires_s) is None else now + end_s - now_s)
                for model in Host.of(request.scope).models
                if model.status == "loaded" and model.service is not None
            ]
        )
    )


async def show(request: Request) -> Response:
    """Ollama's facts of a model, which is not loaded for them."""
    host, config = Host.of(request.scope), request.app.config
    asked = decode_body(await read_body(request, config), OllamaShowRequest, config)
    name = asked.model if asked.model is not None else asked.name
    if name is None:
        raise invalid("model", "Missing required parameter: model.", "missing_required_parameter")
    model = host.named(name)
    if model.service is not None:
        return JsonAnswer(shown(model.service))
    path = local_model(model.settings.model)
    tokenizer = None if path is None else load_tokenizer(path, model.settings.chat_template)
    sampling = {} if path is None else recommended_sampling(path)
    capabilities: list[Capability] = ["completion" if model.purpose == "generate" else "embedding"]
    by_files, family = _by_files(model, [name], host)[0], model.facts.architecture
    known: dict[str, str | int] = {"general.architecture": family} if family else {}
    if model.max_model_len is not None:
        known[f"{family}.context_length"] = model.max_model_len
    return JsonAnswer(
        ShownModel(
            parameters="\n".join(f"{key:<30} {value}" for key, value in sampling.items()),
            template=tokenizer.chat_template() if tokenizer is not None and tokenizer.has_chat_template else "",
            details=by_files.details,
            model_info=known,
            capabilities=capabilities,
            modified_at=by_files.modified_at,
        )
    )


async def get_load(request: Request) -> Response:
    return JsonAnswer(ServerLoad(AppState.of(request).lifecycle.num_open - 1))


async def get_server_info(request: Request) -> Response:
    """The models' limits and states, without paths of files."""
    host = Host.of(request.scope)
    return JsonAnswer(
        HostInfo(
            version=release(),
            models=[_info(model) for model in host.models],
            memory_bytes=dict(host.pool.budgets),
            server=told_config(request.app.config),
        )
    )


def _info(model: HostedModel) -> HostedInfo:
    end_s = model.expires_s
    return HostedInfo(
        names=model.all_names,
        status=model.shown_status,
        failed=model.has_failed,
        device=model.place,
        memory_bytes=model.held_bytes,
        priority=model.settings.priority,
        keep_alive_s=None if model.keep_alive_s == FOR_EVER else model.keep_alive_s,
        expires_in_s=None if end_s is None else max(0.0, end_s - time.monotonic()),
        open_requests=model.num_open,
        engine=None if model.info is None else told_info(model.info),
    )


async def health(request: Request) -> Response:
    """200 while the server lives, with the models' states."""
    return JsonAnswer({"status": "ok", "models": _states(request)})


async def ping(request: Request) -> Response:
    """`/health` under SageMaker's name: 503 until the models of the start are loaded."""
    if not Host.of(request.scope).started.is_set():
        raise starting()
    return await health(request)


async def ready(request: Request) -> Response:
    """200 once the models of the start are loaded, or have failed, until the server drains; but 503 while the engines
    of all loaded models are dead."""
    host, is_draining = Host.of(request.scope), AppState.of(request).lifecycle.is_draining
    state = "draining" if is_draining else host.state if host.started.is_set() else "starting"
    headers = {"Cache-Control": "no-store"} | ({} if state == "ready" else {"Retry-After": "1"})
    return JsonAnswer({"ready": state == "ready", "state": state}, headers, 200 if state == "ready" else 503)


def _states(request: Request) -> dict[str, ModelStatus]:
    return {model.name: model.shown_status for model in Host.of(request.scope).models}


async def load_model(request: Request) -> Response:
    """Answers when the model is loaded."""
    host, model = await _asked_for(request)
    await host.pool.load(model)
    return JsonAnswer(Done())


async def unload_model(request: Request) -> Response:
    """Answers when the model is unloaded; its open requests may end before."""
    host, model = await _asked_for(request)
    await host.pool.unload(model)
    return JsonAnswer(Done())


async def _asked_for(request: Request) -> tuple[Host, HostedModel]:
    host, config = Host.of(request.scope), request.app.config
    asked = decode_body(await read_body(request, config), ModelRequest, config)
    return host, host.named(asked.model)
