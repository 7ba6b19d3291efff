"""Server-sent events as OpenAI frames them: `data: {json}` and an empty line, at last `data: [DONE]`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.generation import Generation

DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


def frame(value: object) -> bytes:
    """One event. JSON holds no raw newline, so that one `data:` line is enough."""
    return b"data: " + _encoder.encode(value) + b"\n\n"


@asynccontextmanager
async def watch_disconnect(receive: Receive, on_disconnect: Callable[[], None]) -> AsyncIterator[None]:
    """Calls `on_disconnect` as soon as the client goes away while the block runs. The request's body must
    have been read: from then on, ASGI's `receive` has only that to tell."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        on_disconnect()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()


class EventStreamResponse(Response):
    """Sends what `events` yields, each item at once, for as long as the client is there.

    In every end (the last event, a client that has left, a server that stops) `events` and the generation
    behind it are closed. (Starlette's own streaming response leaves that to the garbage collector on
    servers of ASGI 2.4.)"""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], generation: Generation, headers: Mapping[str, str]) -> None:
        self.events = events
        self.generation = generation
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with watch_disconnect(receive, self.generation.leave):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async for data in self.events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:  # how servers of ASGI 2.4 say that the client has gone
            pass
        finally:
            self.generation.close()
            await self.events.aclose()
