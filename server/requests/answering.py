"""The way of every request that generates, whichever API it comes by: it is read, prepared, checked and admitted, and
answered at once with a stream, or in full at the end. An API has an `Answer` for its shapes."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from server.errors import ApiError
from server.requests.generation import Generation, GenerationError, Piece
from server.requests.structured import RequestSchemas
from server.service import Service
from server.transport.body import Body, read_body
from server.transport.exchange import Exchange
from server.transport.json_answer import JsonAnswer
from server.transport.sse import EventStreamResponse, StreamedResponse, frame, watch_disconnect

T = TypeVar("T")

Prepare = Callable[[Service, str | None, Body, float], T]
"""Prepares a request of a service, a tenant, a body and an arrival time for the engine. Raises `ApiError`."""


@dataclass(slots=True, kw_only=True)
class Answer(ABC):
    """A request that has passed every check, and its answer as it grows: `push` for a stream, else `take`.

    schemas  of its grammar, and the chat's field that defines it
    names    a chat's names of fields to the request's
    """

    service: Service
    generation: Generation
    schemas: RequestSchemas
    names: Mapping[str, str]
    is_streamed: bool
    stream_type: ClassVar[type[StreamedResponse]] = EventStreamResponse

    def admitted(self) -> None:  # noqa: B027
        """Called when the engine has taken the request."""

    def opening(self) -> bytes:
        """The first part of a stream."""
        return b""

    @abstractmethod
    def push(self, piece: Piece) -> bytes:
        """A piece's part of a stream."""

    def frames(self, pieces: list[Piece]) -> Iterable[bytes]:
        """The pieces' part of a stream; between two of it, other requests have their turn."""
        return (b"".join(map(self.push, pieces)),)

    @abstractmethod
    def closing(self) -> bytes:
        """The last part of a stream."""

    def take(self, piece: Piece) -> Awaitable[None] | None:
        """Adds a piece to a whole answer."""
        self.push(piece)
        return None

    @abstractmethod
    async def whole(self) -> Any:
        """The whole answer, after its last piece."""

    def failed(self, error: GenerationError) -> ApiError:
        """Ends an answer that broke off or was cancelled. Returns the client's error."""
        return self.service.failure(self.generation.request_id, error)

    def failed_stream(self, error: GenerationError) -> bytes:
        """The same for a stream that has begun."""
        return frame(self.failed(error).body())


async def answer(request: Request, prepare: Prepare[Any]) -> Response:
    """Answers the request. A value of `prepare` that is no `Answer` is sent as it is."""
    service: Service = request.app.state.service
    arrival_time_s = time.monotonic()
    body = await read_body(request, service.config)
    work = partial(prepare, service, Exchange.of(request).tenant, body, arrival_time_s)
    prepared = await service.prepare_conversation(body, work)
    if not isinstance(prepared, Answer):
        return JsonAnswer(prepared)
    return await admit(request, prepared)


async def admit(request: Request, prepared: Answer) -> Response:
    """Admits a prepared request and answers it."""
    service, generation, names, field = prepared.service, prepared.generation, prepared.names, prepared.schemas.field
    await service.check_grammar(request, generation, prepared.schemas, names)
    own = {"prompt": names.get("messages", "messages"), "logprobs": "top_logprobs", **names}
    service.admit(request, generation, own | {"grammar": names.get(field, field) if field else "grammar"})
    prepared.admitted()
    headers = {"X-Request-Id": generation.request_id}
    if prepared.is_streamed:
        return prepared.stream_type(_stream(prepared), generation, headers)
    try:
        with closing(generation):
            async with watch_disconnect(request.receive, generation.leave):
                async for pieces in generation:
                    for piece in pieces:
                        if (taken := prepared.take(piece)) is not None:
                            await taken
    except GenerationError as error:
        raise prepared.failed(error) from None
    if generation.has_left:
        raise ClientDisconnect
    return JsonAnswer(await prepared.whole(), headers)


async def _stream(prepared: Answer) -> AsyncGenerator[bytes, None]:
    if opening := prepared.opening():
        yield opening
    try:
        async for pieces in prepared.generation:
            for number, data in enumerate(prepared.frames(pieces)):
                if number:
                    await asyncio.sleep(0)
                if data:
                    yield data
    except GenerationError as error:
        yield prepared.failed_stream(error)
        return
    if not prepared.generation.has_left:
        yield prepared.closing()
