"""One HTTP request and its answer, for logs, metrics and traces; and a drain: whether the server accepts requests, and
how many are open.

The outermost layer (`server.transport.gate`) makes an `Exchange` for every request and finishes it; inner layers fill
it in. It is kept in the ASGI scope: `Exchange.of(request)`."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from uuid import uuid4

from starlette.requests import Request
from starlette.types import Scope, Send

from server.observing.meter import RequestMeter
from server.requests.generation import Generation
from server.transport.key_holders import KeyHolder, Use

KEY = "xserv.exchange"
"""The exchange's key in the scope."""

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@,-]{1,128}")


@dataclass(slots=True, kw_only=True)
class Exchange:
    """All times are seconds of `time.monotonic()`.

    given_id      the client's X-Request-Id, if valid: the answer has it, too
    answered_id   the X-Request-Id of the answer
    holder        of the request's key; None if no keys are set
    model         the first name of the model that answers, in a server of several; else ""
    status        of the answer; 0 if none was started
    send          the server's own `send`: the layers look only at an answer's start, so a stream may bypass them
    ignored       fields of the request that have no effect
    heeded        fields among them that had one after all, in a server of several models
    sent          fields sent under another server's name: the name here, and the sent one
    closed        places of its schemas in which objects were closed
    num_replayed  past calls in its prompts that are spelled as the model wrote them
    normalized    lines of the client that its prompt was rendered without
    generation, meter  its generation in the engine, and the measurements
    """

    arrival_s: float
    send: Send
    given_id: str | None = None
    answered_id: str = ""
    holder: KeyHolder | None = None
    model: str = ""
    status: int = 0
    ignored: list[str] = field(default_factory=list)
    heeded: frozenset[str] = frozenset()
    sent: dict[str, str] = field(default_factory=dict)
    closed: list[str] = field(default_factory=list)
    normalized: list[str] = field(default_factory=list)
    num_replayed: int = 0
    generation: Generation | None = None
    meter: RequestMeter | None = None

    @property
    def tenant(self) -> str | None:
        """The tenant of the request's key."""
        return None if self.holder is None else self.holder.tenant

    def use(self, num_prompt_tokens: int) -> Use | None:
        """Begins work for the request, as its holder's. None without one. Raises `KeyLimitError`."""
        return None if self.holder is None else self.holder.begin(num_prompt_tokens)

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


PROBES = frozenset({"/health", "/ping", "/ready", "/metrics"})
"""Paths that are answered while the server drains or is full: monitors must go on seeing it."""

WATCHERS = PROBES | {"/live"}
"""Paths whose requests do not delay the server's stop: they end when all others have."""


class Lifecycle:
    """Belongs to the event loop's thread.

    is_draining  no new requests; open ones may finish
    closing      set when the last of them is over: streams of watchers end now
    """

    def __init__(self) -> None:
        self.is_draining = False
        self.closing = asyncio.Event()
        self._num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_open(self) -> int:
        """Open requests, from their headers to the end of their answers."""
        return self._num_open

    def begin_drain(self) -> None:
        self.is_draining = True

    def enter(self) -> None:
        self._num_open += 1
        self._idle.clear()

    def leave(self) -> None:
        self._num_open -= 1
        if self._num_open == 0:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Returns when no request is open."""
        await self._idle.wait()
