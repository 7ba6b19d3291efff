"""`GET /health`, `/ping`, `/ready` and `/metrics`: they answer as soon as the port is open."""

from __future__ import annotations

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from runtime.engine.errors import EngineDeadError
from server.errors import engine_unavailable
from server.service import AppState


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
    return Response(msgspec.json.encode(answer), media_type="application/json")


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
    return Response(
        msgspec.json.encode({"ready": is_ready, "state": state}),
        status_code=200 if is_ready else 503,
        media_type="application/json",
        headers={"Cache-Control": "no-store"} | ({} if is_ready else {"Retry-After": "1"}),
    )


async def metrics(request: Request) -> Response:
    """Prometheus' text format, whatever the Accept header: other formats would drop the colons of vLLM's names."""
    registry = AppState.of(request).metrics.registry
    return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})
