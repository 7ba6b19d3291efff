"""`GET /engines`, and `POST /restart_engines`: engines finish their requests and restart one after the other, while the
others serve."""

from __future__ import annotations

import logging
import threading

from starlette.requests import Request
from starlette.responses import Response

from runtime.engine.errors import EngineDeadError, RequestError
from runtime.engine.process.client import EngineClient
from runtime.errors import XservError
from runtime.parallel.fleet import Fleet
from server.errors import ApiError, from_engine
from server.service import Service
from server.transport.json_answer import JsonAnswer
from server.vllm_api.schema import EngineList, ListedEngine

logger = logging.getLogger("xserv.server")


async def list_engines(request: Request) -> Response:
    service: Service = request.app.state.service
    return JsonAnswer(_listed(service.client))


async def restart_engines(request: Request) -> Response:
    """Starts the restarts, and answers at once; `GET /engines` has the progress, and the log the errors."""
    service: Service = request.app.state.service
    fleet = service.client
    if not isinstance(fleet, Fleet) or len(fleet.engines) == 1:
        raise ApiError(
            409,
            "There is one engine, and none to take its requests while it is started again: restart the server.",
            type="invalid_request_error",
            code="one_engine",
        )
    try:
        fleet.begin_restart()
    except RequestError as error:
        raise ApiError(409, str(error), type="invalid_request_error", code="restarting") from None
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
