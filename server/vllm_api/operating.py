"""`GET /load`, `/server_info`, `/tokenizer_info` and `/engines`, `POST /reset_prefix_cache` and `/restart_engines`:
engines finish their requests and restart one after the other, while the others serve. And `GET /health`, `/ping`,
`/ready` and `/metrics`, which answer as soon as the port is open."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import asdict
from typing import Any

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from runtime.engine.errors import EngineDeadError, RequestError
from runtime.engine.messages import EngineInfo, EngineState
from runtime.engine.process.client import EngineClient
from runtime.errors import XservError
from runtime.parallel.fleet import Fleet
from runtime.version import release
from server.config import ServerConfig
from server.errors import ApiError, engine_errors, engine_unavailable, from_engine, invalid
from server.service import AppState, Service
from server.transport.json_answer import JsonAnswer

logger = logging.getLogger("xserv.server")

_NOT_TOLD = frozenset(
    {
        "api_keys", "api_key_files", "ssl_certfile", "ssl_keyfile", "log_file", "otlp_endpoint", "responses_dir",
        "lora_modules", "lora_root", "models_config", "admin_key_files", "weights_root",
    }
)  # fmt: skip
"""Settings that are secrets, or lead to them, or tell about the machine."""


class ServerLoad(msgspec.Struct):
    """server_load: open requests, without this one."""

    server_load: int


class ServerInfo(msgspec.Struct):
    """engine: its fields of `GET /live`; server: `ServerConfig` without keys and files.

    vllm_config  what TRL's client reads of vLLM's: the float type by torch's name; no weights come by NCCL
    """

    version: str
    models: list[str]
    engine: dict[str, Any]
    server: dict[str, Any]
    vllm_config: dict[str, Any]


class CacheReset(msgspec.Struct):
    """num_dropped_blocks: removed from the cache; num_held_blocks: in use by running requests."""

    num_dropped_blocks: int
    num_held_blocks: int


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """The tokenizer's settings that lm-eval and others need to reproduce it."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None


class ListedEngine(msgspec.Struct, kw_only=True):
    """num_routed: requests routed to it, with several engines. num_continued: those of others that it continued, with
    roles. The numbers after it are null while it does not answer."""

    engine: int
    state: EngineState
    num_routed: int | None
    num_continued: int | None
    num_running: int | None
    num_waiting: int | None
    kv_cache_usage: float | None


class EngineList(msgspec.Struct, kw_only=True):
    """routing_policy: of several engines."""

    engines: list[ListedEngine]
    routing_policy: str | None
    is_restarting: bool


async def get_load(request: Request) -> Response:
    service: Service = request.app.state.service
    return JsonAnswer(ServerLoad(service.lifecycle.num_open - 1))


async def get_server_info(request: Request) -> Response:
    """Limits and settings, without paths of files."""
    service: Service = request.app.state.service
    info = told_info(service.client.info)
    models = list(service.model_names)
    told = {"model": models[0], "dtype": f"torch.{info['dtype']}", "max_model_len": info["max_model_len"]}
    vllm_config = {"model_config": told, "weight_transfer_config": None}
    return JsonAnswer(ServerInfo(release(), models, info, told_config(service.config), vllm_config))


def told_info(info: EngineInfo) -> dict[str, Any]:
    """The engine's facts, without paths."""
    engine: dict[str, Any] = msgspec.to_builtins(info)
    for name in ("model_path", "type"):
        engine.pop(name, None)
    for told, group in zip(engine["cache_groups"], info.cache_groups, strict=True):
        told["window"] = group.window
    return engine


def told_config(config: ServerConfig) -> dict[str, Any]:
    """The server's settings that clients may know."""
    return {name: value for name, value in asdict(config).items() if name not in _NOT_TOLD}


async def get_tokenizer_info(request: Request) -> Response:
    service: Service = request.app.state.service
    tokenizer = service.tokenizer
    if tokenizer is None:
        raise invalid(None, "This model has no tokenizer.", "unsupported_parameter")
    named = tokenizer.special_tokens_map
    return JsonAnswer(
        TokenizerInfo(
            tokenizer_class="PreTrainedTokenizerFast",
            vocab_size=tokenizer.vocab_size,
            model_max_length=service.client.info.max_model_len,
            bos_token=named.get("bos_token"),
            eos_token=named.get("eos_token"),
            pad_token=named.get("pad_token"),
            unk_token=named.get("unk_token"),
            chat_template=tokenizer.chat_template() if tokenizer.has_chat_template else None,
        )
    )


async def reset_prefix_cache(request: Request) -> Response:
    """Drops cached prefixes that no running request uses, also those in host memory."""
    service: Service = request.app.state.service
    with engine_errors():
        future = service.client.reset_prefix_cache()
        dropped, held = (int(count) for count in await asyncio.wrap_future(future))
    return JsonAnswer(CacheReset(dropped, held))


async def list_engines(request: Request) -> Response:
    service: Service = request.app.state.service
    return JsonAnswer(_listed(service.client))


async def restart_engines(request: Request) -> Response:
    """Starts the restarts, and answers at once; `GET /engines` has the progress, and the log the errors."""
    service: Service = request.app.state.service
    fleet = service.client
    if not isinstance(fleet, Fleet) or len(fleet.engines) == 1:
        message = "There is one engine, and none to take its requests while it is started again: restart the server."
        raise ApiError(409, message, code="one_engine")
    try:
        fleet.begin_restart()
    except RequestError as error:
        raise ApiError(409, str(error), code="restarting") from None
    except EngineDeadError as error:
        raise from_engine(error, {}) from None
    threading.Thread(
        target=_restart, args=(fleet, service.config.drain_timeout_s), name="xserv-restart", daemon=True
    ).start()
    return JsonAnswer(_listed(fleet))


def _restart(fleet: Fleet, drain_timeout_s: float) -> None:
    try:
        fleet.finish_restart(drain_timeout_s)
    except XservError as error:
        logger.error("the engines' restart has ended early: %s", error)
    else:
        logger.info("all engines were restarted")


def _listed(client: EngineClient) -> EngineList:
    routing, listed = client.routing, []
    for number, engine in enumerate(client.engines):
        try:
            stats = engine.stats()
        except EngineDeadError:
            stats = None
        listed.append(
            ListedEngine(
                engine=number,
                state=engine.state,
                num_routed=None if routing is None else routing.num_requests[number],
                num_continued=None if routing is None else routing.num_continued[number],
                num_running=None if stats is None else stats.num_running,
                num_waiting=None if stats is None else stats.num_waiting,
                kv_cache_usage=None if stats is None else stats.kv_cache_usage,
            )
        )
    return EngineList(
        engines=listed,
        routing_policy=None if routing is None else routing.policy,
        is_restarting=isinstance(client, Fleet) and client.is_restarting,
    )


async def health(request: Request) -> Response:
    """200 while the server and its engine are alive or starting; 503 if only a new server helps. One of several engines
    is enough, and `engines` has the state of each. Never waits for a step."""
    service = AppState.of(request).found_service
    answer: dict[str, str | list[str]] = {"status": "ok"}
    if service is not None:
        if len(service.client.engines) > 1:
            answer["engines"] = [engine.state for engine in service.client.engines]
        try:
            service.client.stats()
        except EngineDeadError as error:
            if error.retry_after_s is None:
                raise engine_unavailable() from None
    return JsonAnswer(answer)


async def ping(request: Request) -> Response:
    """`/health` under SageMaker's name. SageMaker sends requests after the first 200, so it is 503 while the model
    loads."""
    assert AppState.of(request).service is not None  # raises the 503
    return await health(request)


async def ready(request: Request) -> Response:
    """200 while requests are accepted; else 503 with the reason in `state`: "starting" (the model loads, or the engine
    restarts), "down", "closing" (the engine's), or "draining"."""
    app = AppState.of(request)
    service = app.found_service
    state = "draining" if app.lifecycle.is_draining else "starting" if service is None else service.client.state
    is_ready = state == "ready"
    headers = {"Cache-Control": "no-store"} | ({} if is_ready else {"Retry-After": "1"})
    return JsonAnswer({"ready": is_ready, "state": state}, headers, 200 if is_ready else 503)


async def metrics(request: Request) -> Response:
    """Prometheus' text format, whatever the Accept header: other formats would drop the colons of vLLM's names."""
    registry = AppState.of(request).registry
    return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})
