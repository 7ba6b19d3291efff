"""Server-sent events as OpenAI frames them: `data: {json}` and an empty line, finally `data: [DONE]`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.transport.exchange import KEY

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
"""A comment, which every client passes over."""

_encoder = msgspec.json.Encoder()


def frame(value: object) -> bytes:
    """One event. JSON holds no raw newline, so that one `data:` line is enough."""
    return b"data: " + _encoder.encode(value) + b"\n\n"


def named_frame(event: msgspec.Struct) -> bytes:
    """One event whose `event:` line names its type, which is its tag."""
    return event_frame(str(event.__struct_config__.tag), event)


def event_frame(name: str, value: object) -> bytes:
    """One event with its name."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encoder.encode(value))


@asynccontextmanager
async def watch_disconnect(receive: Receive, on_disconnect: Callable[[], None]) -> AsyncIterator[None]:
    """Calls `on_disconnect` as soon as the client goes away while the block runs. The request's body must have been
    read: after that, ASGI's `receive` returns only the disconnect."""

    async def watch() -> None:
        await _disconnected(receive)
        on_disconnect()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()


async def while_connected(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Waits for the work; cancels it and raises `ClientDisconnect` if the client leaves before it is done."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        working.result()
    finally:
        leaving.cancel()
        working.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Pinger:
    """Sends `ping` into a stream that has been silent for `interval_s`, up to one and a half times that, to keep
    proxies from closing it; clients do not see it. It sends only while `is_idle`, when no other task does. Without a
    `ping` it sends nothing."""

    def __init__(self, send: Send, interval_s: float, ping: bytes | None) -> None:
        self.is_idle = False
        self._ping = ping
        self._send = send
        self._half_s = interval_s / 2
        self._loop = asyncio.get_running_loop()
        self._num_silent = 0  # half intervals
        self._task: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(self._half_s, self._tick)

    def rest(self) -> None:
        """Marks the stream idle after an event: pings are allowed until `is_idle` is cleared."""
        self.is_idle = True
        self._num_silent = 0

    def close(self) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._half_s, self._tick)
        self._num_silent += 1
        is_due = self.is_idle and self._num_silent > 2 and (self._task is None or self._task.done())
        if is_due and self._ping is not None:
            self._num_silent = 1
            self._task = self._loop.create_task(self._send_ping(self._ping))

    async def _send_ping(self, ping: bytes) -> None:
        with suppress(OSError):  # the client has gone; the stream's own end handles that
            await self._send({"type": "http.response.body", "body": ping, "more_body": True})


class EventSource(Protocol):
    """The source of a stream of events: a generation, or a view of the engine."""

    def leave(self) -> None:
        """Handles the client's disconnect."""
        ...

    def close(self) -> None:
        """Ends the source; may be called again."""
        ...


class StreamedResponse(Response):
    """Sends each item of `events` at once, as long as the client is connected.

    At every end (the last event, a disconnect, a stopping server) `events` and its source are closed. (Starlette's own
    streaming response leaves that to the garbage collector on servers of ASGI 2.4.)"""

    ping: bytes | None = None
    """The comment that keeps a silent stream open."""

    def __init__(self, events: AsyncGenerator[bytes, None], source: EventSource, headers: Mapping[str, str]) -> None:
        self.events = events
        self.source = source
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send_body = scope[KEY].send
        pinger = Pinger(send_body, scope["app"].config.ping_interval_s, self.ping)
        try:
            async with watch_disconnect(receive, self.source.leave):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                pinger.rest()
                async for data in self.events:
                    pinger.is_idle = False
                    await send_body({"type": "http.response.body", "body": data, "more_body": True})
                    pinger.rest()
                pinger.close()
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:  # how servers of ASGI 2.4 report that the client has gone
            pass
        finally:
            pinger.close()
            self.source.close()
            await self.events.aclose()


class EventStreamResponse(StreamedResponse):
    """Server-sent events; a silent stream gets a comment."""

    media_type = "text/event-stream"
    ping = PING
