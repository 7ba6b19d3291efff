"""Running generations by the names under which they can be cancelled, and `POST /v1/requests/{id}/cancel`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.errors import ApiError
from server.openai_api.answers import Cancelled
from server.requests.generation import Generation
from server.transport.exchange import Exchange

Key = tuple[str | None, str]


class RunningGenerations:
    """Generations by tenant and name. A name is the answer's id, the request's `request_id` or its `X-Request-Id`;
    several generations may share one of the last two. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._by_key: dict[Key, list[Generation]] = {}

    def add(self, generation: Generation, tenant: str | None, names: Iterable[str]) -> None:
        """Registers it under these names until it is closed."""
        keys = {(tenant, name) for name in names}
        for key in keys:
            self._by_key.setdefault(key, []).append(generation)
        generation.on_close.append(partial(self._remove, generation, keys))

    def cancel(self, tenant: str | None, name: str) -> int:
        """Cancels the generations of this name for this tenant; returns how many."""
        found = list(self._by_key.get((tenant, name), ()))
        for generation in found:
            generation.cancel()
        return len(found)

    def __len__(self) -> int:
        return len(self._by_key)

    def _remove(self, generation: Generation, keys: Iterable[Key]) -> None:
        for key in keys:
            left = [other for other in self._by_key[key] if other is not generation]
            if left:
                self._by_key[key] = left
            else:
                del self._by_key[key]


async def cancel_request(request: Request) -> Response:
    """Ends everything that runs under this name for this tenant; 404 if nothing does."""
    name = request.path_params["request_id"]
    num_cancelled = request.app.state.service.running.cancel(Exchange.of(request).tenant, name)
    if not num_cancelled:
        raise ApiError(404, f"No request {name[:128]!r} is running.", param="request_id", code="request_not_found")
    return Response(msgspec.json.encode(Cancelled(name, num_cancelled)), media_type="application/json")
