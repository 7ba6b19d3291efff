"""One HTTP request and its answer, for logs, metrics and traces: tenant, times and result.

The outermost layer (`server.transport.gate`) makes an `Exchange` for every request and finishes it; inner layers fill
it in. It is kept in the ASGI scope: `Exchange.of(request)`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from uuid import uuid4

from starlette.requests import Request
from starlette.types import Scope, Send

from server.observing.meter import RequestMeter
from server.requests.generation import Generation

KEY = "xserv.exchange"
"""The exchange's key in the scope."""

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@,-]{1,128}")


@dataclass(slots=True, kw_only=True)
class Exchange:
    """All times are seconds of `time.monotonic()`.

    given_id      the client's X-Request-Id, if valid: the answer has it, too
    answered_id   the X-Request-Id of the answer
    tenant        of the request's key; None if no keys are set
    status        of the answer; 0 if none was started
    send          the server's own `send`: the layers look only at an answer's start, so a stream may bypass them
    ignored       fields of the request that have no effect
    sent          fields sent under another server's name: the name here, and the sent one
    closed        places of its schemas in which objects were closed
    generation, meter  its generation in the engine, and the measurements
    """

    arrival_s: float
    send: Send
    given_id: str | None = None
    answered_id: str = ""
    tenant: str | None = None
    status: int = 0
    ignored: list[str] = field(default_factory=list)
    sent: dict[str, str] = field(default_factory=dict)
    closed: list[str] = field(default_factory=list)
    generation: Generation | None = None
    meter: RequestMeter | None = None

    @staticmethod
    def of(request: Request) -> Exchange:
        exchange = request.scope[KEY]
        assert isinstance(exchange, Exchange)
        return exchange


def request_id_of(scope: Scope) -> str | None:
    """The request's X-Request-Id, if it is one: at most 128 characters of ids, which are safe in headers and log
    lines."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            return value.decode("ascii") if _REQUEST_ID.fullmatch(value) else None
    return None


def new_request_id() -> str:
    return f"req-{uuid4().hex}"
