"""The names that the server answers to, and the pages of other sites that may use it.

A browser lets any page send requests, and hides the answers unless the server's CORS headers allow it; errors have
these, so that pages can read them. Two attacks remain: a page of another site that posts without reading the answer,
and a name of another site that resolves to this machine (DNS rebinding), so that the page has the same origin. The
first is refused by the Origin header, the second by the Host header."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from server.config import ANY_PORT, origins_pattern
from server.errors import ApiError

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")

LOCAL_ORIGINS = tuple(f"{scheme}://{name}{ANY_PORT}" for scheme in ("http", "https") for name in LOOPBACK_NAMES)
"""Pages that this machine itself serves."""

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class OriginRules:
    """The rules for Host and Origin.

    allowed_hosts    names and addresses without port, "*" for any; None for no rule
    allowed_origins  origins besides the server's own, "*" for any; "http://localhost:*" for any port
    """

    def __init__(self, allowed_hosts: Sequence[str] | None, allowed_origins: Sequence[str]) -> None:
        is_open = allowed_hosts is None or "*" in allowed_hosts
        self._hosts = None if is_open else frozenset(host.lower().encode() for host in allowed_hosts or ())
        self._origins = re.compile(origins_pattern(allowed_origins).encode())

    def check(self, method: str, scheme: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raises `ApiError` 403 for a foreign name, and for a page of another site that does more than read; 400 for
        two names."""
        host: bytes | None = None
        origin = fetch_site = b""
        for name, value in headers:
            if name == b"host":
                if host is not None:
                    raise ApiError(400, "The request has more than one Host header.", code="invalid_http")
                host = value.lower()
            elif name == b"origin":
                origin = value.lower()
            elif name == b"sec-fetch-site":
                fetch_site = value.lower()
        host = host or b""
        if self._hosts is not None and _without_port(host) not in self._hosts:
            raise ApiError(
                403,
                f"This server does not answer to the name {host[:100].decode('latin-1')!r} in the Host header; "
                "--allowed-host names those it does.",
                code="host_not_allowed",
            )
        if not origin or method in SAFE_METHODS or self._origins.fullmatch(origin):
            return
        if fetch_site != b"same-origin" and origin != b"%b://%b" % (scheme.encode(), host):
            raise foreign_origin(origin.decode("latin-1"))


def foreign_origin(origin: str) -> ApiError:
    """403: a page of another site."""
    message = f"Pages of {origin[:100]!r} may not use this server; --allowed-origin names those that may."
    return ApiError(403, message, code="origin_not_allowed")


def _without_port(host: bytes) -> bytes:
    if host.startswith(b"["):
        return host.partition(b"]")[0] + b"]"
    return host.partition(b":")[0]


def hosts_for(host: str, further: Sequence[str]) -> tuple[str, ...] | None:
    """The accepted names of a server that listens on `host`: if that is this machine only, its names and `further`;
    else `further`, or all if there are none."""
    if host == "localhost" or _is_loopback(host):
        shown = f"[{host}]" if ":" in host else host
        return (*dict.fromkeys((*LOOPBACK_NAMES, shown, *further)),)
    return tuple(further) or None


def origins_for(host: str, further: Sequence[str]) -> tuple[str, ...]:
    """The accepted origins of a server that listens on `host`; if that is this machine only, also its own."""
    is_local = host == "localhost" or _is_loopback(host)
    return (*dict.fromkeys((*further, *(LOCAL_ORIGINS if is_local else ()))),)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


METHODS = ("GET", "POST", "DELETE")
_EXPOSED = (
    "X-Request-Id", "Request-Id", "Retry-After", "X-Xserv-Ignored", "X-Xserv-Closed-Schemas", "X-Xserv-Normalized",
    "X-Xserv-Replayed-Calls",
)  # fmt: skip


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
