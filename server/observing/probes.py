"""`GET /health`, `/ping`, `/ready` and `/metrics`: they answer from the moment that the port is open."""

from __future__ import annotations

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from runtime.engine.errors import EngineDeadError
from server.errors import engine_unavailable
from server.service import AppState


async def health(request: Request) -> Response:
    """200 while the server lives, and its engine, or that is being started; 503 when only a new server helps. Of
    several engines one is enough, and `engines` says how each is. Never waits for a step."""
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
    """`/health` under the name that SageMaker asks for, who sends requests from the first 200 on: 503 while the model
    loads."""
    assert AppState.of(request).service is not None  # raises the 503
    return await health(request)


async def ready(request: Request) -> Response:
    """200 while requests are taken; else 503, and `state` says why: "starting" (the model loads, or the engine is
    started again), "down", "closing" (the engine's), or "draining"."""
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
    """Prometheus' text format, whatever is asked for: others would write vLLM's names without their colons."""
    registry = AppState.of(request).metrics.registry
    return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})
