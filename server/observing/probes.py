"""`GET /ready` and `GET /metrics`. (`/health` is with the models: it says that the server lives, to anybody.)"""

from __future__ import annotations

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from server.service import Service


async def ready(request: Request) -> Response:
    """200 while requests are taken; else 503, and `state` says why: "starting", "down", "closing" (the engine's), or
    "draining"."""
    service: Service = request.app.state.service
    state = "draining" if service.lifecycle.is_draining else service.client.state
    is_ready = state == "ready"
    return Response(
        msgspec.json.encode({"ready": is_ready, "state": state}),
        status_code=200 if is_ready else 503,
        media_type="application/json",
        headers={"Cache-Control": "no-store"} | ({} if is_ready else {"Retry-After": "1"}),
    )


async def metrics(request: Request) -> Response:
    """Prometheus' text format, whatever is asked for: others would write vLLM's names without their colons."""
    service: Service = request.app.state.service
    return Response(generate_latest(service.metrics.registry), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})
