"""CORS: headers that tell browsers which pages may use the server. Errors have them, so that pages can read these."""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import ApiError
from server.transport.allowed_origins import origins_pattern
from server.transport.origins import foreign_origin

METHODS = ("GET", "POST", "DELETE")
_EXPOSED = ("X-Request-Id", "Request-Id", "Retry-After", "X-Xserv-Ignored", "X-Xserv-Closed-Schemas")


class Cors(CORSMiddleware):
    """CORS for pages of these origins (see `origins_pattern`). They may access a private network from a public address,
    too (`Access-Control-Request-Private-Network`). The preflight of any other page is a 403."""

    def __init__(self, app: ASGIApp, allowed_origins: tuple[str, ...]) -> None:
        super().__init__(
            app,
            allow_origins=("*",) if "*" in allowed_origins else (),
            allow_origin_regex=origins_pattern(allowed_origins),
            allow_methods=METHODS,
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=_EXPOSED,
        )

    def answer_headers(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """The headers of an answer given before the application has the request, from its headers so far."""
        if (origin := headers.get("origin")) is None:
            return []
        answered = MutableHeaders(self.simple_headers)
        if not self.allow_all_origins and self.is_allowed_origin(origin):
            self.allow_explicit_origin(answered, origin)
        return answered.raw

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = None
        headers = Headers(raw=scope.get("headers", []))
        origin, method = headers.get("origin"), headers.get("access-control-request-method")
        if scope.get("method") == "OPTIONS" and origin is not None and method is not None:
            if not self.is_allowed_origin(origin):
                error = foreign_origin(origin)
            elif method not in self.allow_methods:
                message = f"Pages of other sites may ask by {', '.join(METHODS)}, not by {method[:20]!r}."
                error = ApiError(405, message, code="method_not_allowed")
        await (super().__call__ if error is None else error.response(scope))(scope, receive, send)
