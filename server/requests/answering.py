"""The way of every request with a body, whichever API it comes by: it is read, prepared and answered. One that
generates is checked and admitted, and answered at once with a stream, or in full at the end. An API has an `Answer` for
its shapes."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from server.errors import ApiError
from server.openai_api.answers import Cancelled
from server.requests.generation import Generation, GenerationError, Piece
from server.requests.structured import RequestSchemas
from server.service import AppState, Service
from server.transport.body import Body, read_body
from server.transport.exchange import Exchange
from server.transport.json_answer import JsonAnswer
from server.transport.sse import (
    EventStreamResponse,
    StreamedResponse,
    frame,
    named_frame,
    watch_disconnect,
    while_connected,
)


class Pending(ABC):
    """A prepared request whose answer needs the engine."""

    @abstractmethod
    async def respond(self, request: Request) -> Response:
        """The engine's answer. Raises `ApiError`."""


Prepare = Callable[[Service, Body], Any]
"""Reads and checks a request's body, on a thread if it is large. Returns a `Pending`, or the answer itself. Raises
`ApiError`."""


def answered(prepare: Prepare) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """The endpoint for requests that are prepared like this."""

    async def answer(request: Request) -> Response:
        service: Service = request.app.state.service
        body = await read_body(request, service.config)
        prepared = await service.prepare_body(body, partial(prepare, service, body))
        if not isinstance(prepared, Pending):
            return JsonAnswer(prepared)
        return await respond_awake(service, prepared, request)

    return answer


async def respond_awake(service: Service, prepared: Pending, request: Request) -> Response:
    """The engine's answer, after it has woken up if it sleeps. Raises `ApiError`, and `ClientDisconnect`."""
    if not service.awake.is_set():
        await while_connected(service.until_awake(), request.receive)
    return await prepared.respond(request)


@dataclass(slots=True, kw_only=True)
class Prepared:
    """A request that has passed every check.

    schemas  of its grammar, and the chat's field that defines it
    """

    service: Service
    generation: Generation
    schemas: RequestSchemas
    is_streamed: bool

    @property
    def model_name(self) -> str:
        """The model or the adapter that answers."""
        adapter = self.generation.scheduling.adapter
        return self.service.model_name if adapter is None else adapter.name


@dataclass(slots=True, kw_only=True)
class Answer(Pending):
    """The answer to a prepared request as it grows: `push` for a stream, else `take`. Both read the same events, which
    an API makes (`begins`, `events`, `ends`) and writes (`spelled`).

    names  a chat's names of fields to the request's
    gives_aborted  see `Generation`
    """

    asked: Prepared
    names: Mapping[str, str] = field(default_factory=dict)
    stream_type: ClassVar[type[StreamedResponse]] = EventStreamResponse
    gives_aborted: ClassVar[bool] = False

    @property
    def service(self) -> Service:
        return self.asked.service

    @property
    def generation(self) -> Generation:
        return self.asked.generation

    def admitted(self) -> None:
        """Called when the engine has taken the request."""

    def begins(self) -> Iterable[Any]:
        """The first events."""
        return ()

    def events(self, piece: Piece) -> Iterable[Any]:
        """Adds a piece; returns its events, each of which must be written before the next is made."""
        raise NotImplementedError

    def ends(self) -> Iterable[Any]:
        """Ends the answer; returns the last events."""
        raise NotImplementedError

    def spelled(self, events: Iterable[Any]) -> bytes:
        """The events in a stream."""
        return b"".join(map(named_frame, events))

    def opening(self) -> bytes:
        """The first part of a stream."""
        return self.spelled(self.begins())

    def push(self, piece: Piece) -> bytes:
        """A piece's part of a stream."""
        return self.spelled(self.events(piece))

    def frames(self, pieces: list[Piece]) -> Iterable[bytes]:
        """The pieces' part of a stream; between two of it, other requests have their turn."""
        return (b"".join(map(self.push, pieces)),)

    def closing(self) -> bytes:
        """The last part of a stream."""
        return self.spelled(self.ends())

    def take(self, piece: Piece) -> Awaitable[None] | None:
        """Adds a piece to a whole answer."""
        deque(self.events(piece), maxlen=0)
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

    async def respond(self, request: Request) -> Response:
        """Admits the request and answers it."""
        generation, names, schemas = self.generation, self.names, self.asked.schemas
        await self.service.check_grammar(request, generation, schemas, names)
        own = {"prompt": names.get("messages", "messages"), "logprobs": "top_logprobs", **names}
        grammar = "grammar" if schemas.field is None else names.get(schemas.field, schemas.field)
        generation.restarts = bool(self.service.config.admin_key_files) and not self.asked.is_streamed
        generation.gives_aborted = self.gives_aborted
        self.service.admit(request, generation, own | {"grammar": grammar})
        self.admitted()
        headers = {"X-Request-Id": generation.request_id}
        if self.asked.is_streamed:
            if generation.scheduling.source is not None:
                try:
                    await generation.wait_for_first()
                except GenerationError as error:
                    raise self.failed(error) from None
            return self.stream_type(self._stream(), generation, headers)
        try:
            with closing(generation):
                async with watch_disconnect(request.receive, generation.leave):
                    async for pieces in generation:
                        for piece in pieces:
                            if (taken := self.take(piece)) is not None:
                                await taken
        except GenerationError as error:
            raise self.failed(error) from None
        if generation.has_left:
            raise ClientDisconnect
        return JsonAnswer(await self.whole(), headers)

    async def _stream(self) -> AsyncGenerator[bytes, None]:
        if opening := self.opening():
            yield opening
        try:
            async for pieces in self.generation:
                for number, data in enumerate(self.frames(pieces)):
                    if number:
                        await asyncio.sleep(0)
                    if data:
                        yield data
        except GenerationError as error:
            yield self.failed_stream(error)
            return
        if not self.generation.has_left:
            yield self.closing()


async def cancel_request(request: Request) -> Response:
    """Ends everything that runs under this name for this tenant; 404 if nothing does."""
    name = request.path_params["request_id"]
    num_cancelled = AppState.of(request).shared.running.cancel(Exchange.of(request).tenant, name)
    if not num_cancelled:
        raise ApiError(404, f"No request {name[:128]!r} is running.", param="request_id", code="request_not_found")
    return JsonAnswer(Cancelled(name, num_cancelled))
