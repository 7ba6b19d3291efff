"""One HTTP request and its answer, as logs, metrics and traces know it: who asks, when, and what became of it.

The outermost layer (`server.transport.gate`) makes an `Exchange` for every request and finishes it; what lies between
adds what it learns. It goes along in the ASGI scope: `Exchange.of(request)`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from uuid import uuid4

from starlette.requests import Request
from starlette.types import Scope, Send

if TYPE_CHECKING:
    from server.observing.meter import RequestMeter
    from server.requests.generation import Generation

KEY = "xserv.exchange"
"""Where the exchange lies in the scope."""

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@,-]{1,128}")


@dataclass(slots=True, kw_only=True)
class Exchange:
    """All times are seconds of `time.monotonic()`.

    given_id      the client's own X-Request-Id, where it sent a sound one: the answer has it too
    answered_id   the X-Request-Id of the answer
    tenant        whose key was shown; None where no keys are set
    status        of the answer; 0: none was begun
    send          the server's own `send`: what lies between looks only at how an answer begins, so a stream may send
                  its body past it
    ignored       fields of the request that have no effect
    sent          fields that came under another server's name: the name here, and that one
    closed        places of its schemas in which objects were closed
    generation, meter  what it asked the engine for, and what came
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
    """The request's X-Request-Id, if it is one: at most 128 of the characters that ids are made of, so that it can go
    into headers and log lines as it is."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            return value.decode("ascii") if _REQUEST_ID.fullmatch(value) else None
    return None


def new_request_id() -> str:
    return f"req-{uuid4().hex}"
