"""The outermost layer, around every request and its answer.

It sets the request's id, refuses foreign hosts and requests during a drain, and reports the finished answer to log,
metrics and traces. The answer passes through unchanged, but for the X-Request-Id header."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import ApiError, dialect_of, draining, overloaded
from server.transport.auth import OPEN_PATHS
from server.transport.exchange import KEY, PROBES, WATCHERS, Exchange, Lifecycle, new_request_id, request_id_of
from server.transport.origins import OriginRules

REFUSAL = "xserv.refusal"
"""In the scope of a request that the gate refuses: the error."""

SURPLUS = "xserv.is_surplus"
"""In the scope of a request on a connection beyond the limit."""

Observer = Callable[[Exchange, Scope, str, float], None]
"""Is told the exchange, its scope, its route and its duration in seconds, when the answer is over."""


class Refusals:
    """Answers requests that the gate refuses, in place of the application: inside CORS, so that pages can read it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal: ApiError | None = scope.get(REFUSAL)
        await (self.app if refusal is None else refusal.response(scope))(scope, receive, send)


class Gate:
    """An ASGI application around another, which contains `Refusals`.

    routes     the endpoints' paths, the names of routes; others are "none"
    observers  are called for every answer; they must not raise
    """

    def __init__(
        self,
        app: ASGIApp,
        lifecycle: Lifecycle,
        rules: OriginRules,
        routes: Mapping[Any, str],
        observers: tuple[Observer, ...],
    ) -> None:
        self.app = app
        self.lifecycle = lifecycle
        self.rules = rules
        self.routes = routes
        self.observers = observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            else:  # websockets are not supported
                await send({"type": "websocket.close", "code": 1008})
            return
        if scope["path"].endswith("/"):  # some clients request "/v1/models/": the same route
            scope["path"] = scope["path"][:-1] or "/"
        exchange = Exchange(arrival_s=time.monotonic(), send=send, given_id=request_id_of(scope))
        scope[KEY] = exchange

        def send_on(message: Message) -> Awaitable[None]:  # not a coroutine of its own: streams send a lot
            if message["type"] == "http.response.start":
                _begin(exchange, message, scope)
            return send(message)

        path: str = scope["path"]
        is_awaited = path not in WATCHERS
        if is_awaited:
            self.lifecycle.enter()
        try:
            scope[REFUSAL] = self._refusal(scope, path)
            await self.app(scope, receive, send_on)
        finally:
            if is_awaited:
                self.lifecycle.leave()
            duration_s = time.monotonic() - exchange.arrival_s
            # After the loop has written the answer's end, which it has only queued: no client waits for a log.
            asyncio.get_running_loop().call_soon(self._observe, exchange, scope, duration_s)

    def _observe(self, exchange: Exchange, scope: Scope, duration_s: float) -> None:
        route = self.routes.get(scope.get("endpoint"), "none")
        for observer in self.observers:
            observer(exchange, scope, route, duration_s)

    def _refusal(self, scope: Scope, path: str) -> ApiError | None:
        if path in OPEN_PATHS:
            return None
        try:
            self.rules.check(scope["method"], scope.get("scheme", "http"), scope["headers"])
        except ApiError as error:
            return error
        if path in PROBES:
            return None
        if self.lifecycle.is_draining:
            return draining()
        return overloaded() if SURPLUS in scope else None


def _begin(exchange: Exchange, message: Message, scope: Scope) -> None:
    """Note the status, and put the id into the headers: the client's own, else the endpoint's, else a new one.
    Anthropic's clients use another header."""
    exchange.status = message["status"]
    headers = []
    for name, value in message["headers"]:
        if name == b"x-request-id":
            exchange.answered_id = value.decode("latin-1")
        else:
            headers.append((name, value))
    exchange.answered_id = exchange.given_id or exchange.answered_id or new_request_id()
    headers.append((b"x-request-id", exchange.answered_id.encode("latin-1")))
    dialect = dialect_of(scope)
    if dialect == "anthropic":
        headers.append((b"request-id", exchange.answered_id.encode("latin-1")))
    if exchange.holder is not None:
        for limit, number in exchange.holder.headers(dialect).items():
            headers.append((limit.encode("ascii"), number.encode("ascii")))
    if ignored := [name for name in exchange.ignored if name not in exchange.heeded]:
        headers.append((b"x-xserv-ignored", _header_text(ignored)))
    if exchange.closed:
        headers.append((b"x-xserv-closed-schemas", _header_text(exchange.closed)))
    if exchange.normalized:
        headers.append((b"x-xserv-normalized", _header_text(exchange.normalized)))
    if exchange.num_replayed:
        headers.append((b"x-xserv-replayed-calls", str(exchange.num_replayed).encode("ascii")))
    message["headers"] = headers


MAX_LISTED_LENGTH = 1024
"""Characters of the names that an answer's header lists."""

_NO_NAME = re.compile(r"[^A-Za-z0-9_.\[\]$=-]")


def _header_text(names: list[str]) -> bytes:
    """The names joined by commas, as many as fit; of a client's own names only letters and digits."""
    listed, length = [], 0
    for name in dict.fromkeys(_NO_NAME.sub("?", name[:200]) for name in names[:1000]):
        length += len(name) + 2
        if length > MAX_LISTED_LENGTH:
            listed.append("...")
            break
        listed.append(name)
    return ", ".join(listed).encode("ascii")
