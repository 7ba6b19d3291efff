"""Collects an answer that is not streamed, as long as its client is connected."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import closing

from starlette.requests import ClientDisconnect, Request

from server.requests.generation import Generation, Piece
from server.transport.sse import watch_disconnect


async def take_whole(
    request: Request, generation: Generation, take: Callable[[Piece], Awaitable[None] | object]
) -> None:
    """Calls `take`, which may be a coroutine function, with every piece, in order. Raises `GenerationError`, and
    `ClientDisconnect` when the client has left; closes the generation in every case."""
    with closing(generation):
        async with watch_disconnect(request.receive, generation.leave):
            async for pieces in generation:
                for piece in pieces:
                    taken = take(piece)
                    if isinstance(taken, Awaitable):
                        await taken
    if generation.has_left:
        raise ClientDisconnect
