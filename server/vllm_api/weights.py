"""`POST /pause`, `/resume`, `/sleep`, `/wake_up`, `/update_weights` and `/abort_requests`, `GET /is_paused`,
`/is_sleeping`, `/weight_info` and `/get_world_size`: vLLM's routes for reinforcement learning. Off unless the operator
sets an admin key, which their callers must send."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from models.checkpoints.given_weights import shared_path
from models.errors import ModelLoadError
from runtime.engine.errors import RequestError
from runtime.engine.weights.commands import (
    Command,
    EngineCondition,
    FolderWeights,
    PauseAll,
    ResumeAll,
    SentWeights,
    SharedWeights,
    Sleep,
    TellState,
    UpdateMode,
    WakeUp,
    check_version,
)
from runtime.errors import InvalidArgumentError, OutOfMemoryError
from server.errors import ApiError, engine_errors, invalid
from server.service import AppState, Service
from server.transport.auth import key_of
from server.transport.body import decode_body, read_body
from server.transport.json_answer import JsonAnswer


class UpdateInfo(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """path           a folder or GGUF file in the server's root for weights: relative to that, or absolute
    shared_memory  instead: the name of shared memory on the server's machine, of the server's user alone
    """

    path: str | None = None
    shared_memory: str | None = None


class UpdateWeightsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /update_weights`: serve other weights of the same model; answered when they serve.

    update_info     where they are
    weight_version  the version that answers tell; default: the current number plus 1
    mode            what becomes of requests that have computed tokens: "wait" until they are finished on the old
                    weights; end them ("abort"); or begin them anew ("restart"), but for streams, which end
    """

    update_info: UpdateInfo
    weight_version: str | None = None
    mode: UpdateMode = "wait"


class AbortRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /abort_requests`: ends the requests of these names, or all."""

    request_ids: list[str] = []


class Paused(msgspec.Struct):
    is_paused: bool


class Sleeping(msgspec.Struct):
    is_sleeping: bool


class WorldSize(msgspec.Struct):
    """world_size: the ranks of all engines, or of one with `include_dp=false`."""

    world_size: int


class WeightInfo(msgspec.Struct):
    weight_version: str


class Changed(msgspec.Struct):
    """num_ended, num_restarted: requests that it ended, and that begin anew."""

    status: str
    weight_version: str
    num_ended: int
    num_restarted: int


class Aborted(msgspec.Struct):
    status: str
    aborted: int


async def pause(request: Request) -> Response:
    """Query parameters `mode` (abort, wait, keep) and `clear_cache`."""
    _admitted(request, "mode", "clear_cache")
    mode: Any = _parameter(request, "mode", "abort")
    return await _changed(request, "paused", PauseAll(mode, _flag(request, "clear_cache")))


async def resume(request: Request) -> Response:
    _admitted(request)
    return await _changed(request, "resumed", ResumeAll())


async def sleep(request: Request) -> Response:
    """Query parameters `level` (0, 1, 2) and `mode` (abort, wait, keep)."""
    _admitted(request, "level", "mode")
    level, mode = _parameter(request, "level", "1"), _parameter(request, "mode", "abort")
    if level not in ("0", "1", "2"):
        raise invalid("level", f"level must be 0, 1 or 2, got {level[:80]!r}.")
    return await _changed(request, "sleeping", Sleep(int(level), mode))  # type: ignore[arg-type]


async def wake_up(request: Request) -> Response:
    """Query parameter `tags`, perhaps several times: weights, kv_cache, scheduling."""
    _admitted(request, "tags")
    tags: Any = tuple(request.query_params.getlist("tags"))
    return await _changed(request, "awake", WakeUp(tags))


async def is_paused(request: Request) -> Response:
    _admitted(request)
    return JsonAnswer(Paused((await _ordered(request, TellState())).is_paused))


async def is_sleeping(request: Request) -> Response:
    _admitted(request)
    return JsonAnswer(Sleeping((await _ordered(request, TellState())).is_sleeping))


async def weight_info(request: Request) -> Response:
    return JsonAnswer(WeightInfo(_admitted(request).client.weight_version))


async def get_world_size(request: Request) -> Response:
    service = _admitted(request, "include_dp")
    ranks = max(1, len(service.client.info.ranks))
    return JsonAnswer(WorldSize(ranks * (len(service.client.engines) if _flag(request, "include_dp") else 1)))


async def update_weights(request: Request) -> Response:
    service = _admitted(request)
    asked = decode_body(await read_body(request, service.config), UpdateWeightsRequest, service.config)
    with engine_errors({"weights": "update_info"}):
        if (version := asked.weight_version) is not None:
            check_version(version)
        source = _source(asked.update_info, service.config.weights_root)
        try:
            found = await asyncio.to_thread(service.client.update_weights, source, version, asked.mode)
        except (ModelLoadError, OutOfMemoryError) as error:
            raise ApiError(400, str(error), param="update_info", code="weights_refused") from None
    return JsonAnswer(_told(service, "updated", found))


async def abort_requests(request: Request) -> Response:
    service = _admitted(request)
    asked = decode_body(await read_body(request, service.config), AbortRequest, service.config)
    return JsonAnswer(Aborted("aborted", AppState.of(request).shared.running.cancel_any(asked.request_ids)))


def _source(info: UpdateInfo, root: str | None) -> SentWeights:
    """Raises ``RequestError`` and ``ApiError``."""
    if (info.path is None) == (info.shared_memory is None):
        raise RequestError("update_info must have path or shared_memory, one of them", param="update_info")
    if info.shared_memory is not None:
        try:
            return SharedWeights(str(shared_path(info.shared_memory)))
        except InvalidArgumentError as error:
            raise RequestError(str(error), param="update_info") from None
    if root is None:
        message = "Folders of weights are not read by requests: start the server with --weights-root DIR."
        raise ApiError(403, message, code="weight_folders_off")
    assert info.path is not None
    inside = Path(root).expanduser().resolve()
    try:
        path = (inside / info.path).resolve()
    except (OSError, ValueError, RuntimeError):  # a loop of links, a NUL
        path = inside.parent
    if not path.is_relative_to(inside) or path == inside:
        raise RequestError(
            f"path must be a folder or a GGUF file in the server's --weights-root, got {info.path!r:.200}",
            param="update_info",
        )
    return FolderWeights(str(path))


async def _changed(request: Request, status: str, command: Command) -> Response:
    return JsonAnswer(_told(AppState.of(request).service, status, await _ordered(request, command)))


async def _ordered(request: Request, command: Command) -> EngineCondition:
    """The engine's condition after a command. Call it after `_admitted`."""
    service = AppState.of(request).service
    with engine_errors():
        found = EngineCondition.of(await asyncio.wrap_future(service.client.order(command)))
    service.note_sleep(is_asleep=found.is_sleeping)
    return found


def _told(service: Service, status: str, found: EngineCondition) -> Changed:
    version = found.weight_version or service.client.weight_version
    return Changed(status, version, found.num_ended, found.num_restarted)


def _parameter(request: Request, name: str, default: str) -> str:
    """A query parameter, given once. Raises `ApiError`."""
    given = request.query_params.getlist(name)
    if len(given) > 1:
        raise invalid(name, f"{name} is given {len(given)} times.")
    return given[0] if given else default


def _flag(request: Request, name: str) -> bool:
    """A query parameter that is true unless it says otherwise. Raises `ApiError`."""
    given = _parameter(request, name, "true").lower()
    if given not in ("true", "false", "1", "0"):
        raise invalid(name, f"{name} must be true or false, got {given[:80]!r}.")
    return given in ("true", "1")


def _admitted(request: Request, *parameters: str) -> Service:
    """The service, for a caller with the admin key who sends no other query parameters. Raises `ApiError`."""
    keys = AppState.of(request).admin_keys
    if not keys.is_required:
        message = "Pausing, sleeping and new weights are off: start the server with --admin-key-file FILE."
        raise ApiError(403, message, code="weight_changes_off")
    key = key_of(request.headers.raw)
    if key is None or keys.holder_of(key) is None:
        raise ApiError(403, "This route needs the admin key: send Authorization: Bearer KEY.", code="admin_only")
    service = AppState.of(request).service
    known = (*parameters, "model")  # which of several models
    if service.config.unknown_fields == "refuse":
        for name in request.query_params:
            if name not in known:
                meant = ", ".join(parameters) or "none"
                raise invalid(
                    name[:80], f"Unknown query parameter: {name[:80]!r}; known are: {meant}.", "unknown_parameter"
                )
    return service
