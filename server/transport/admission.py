"""Starts requests with incomplete bodies a few at a time.

A request costs half a millisecond before it waits for the rest of its body. When thousands of them arrive at once,
complete ones must not queue after all of them, and those that have not started can still give way (`crowd`)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

PER_TICK = 4
TICK_S = 0.002


class Turns(Generic[T]):
    """A server's queue of requests that wait for their turn. Belongs to its event loop.

    may_begin  whether the first may start now; polled at every tick"""

    def __init__(self, may_begin: Callable[[T], bool] = lambda one: True) -> None:
        self._may_begin = may_begin
        self._waiting: dict[T, asyncio.Future[None]] = {}
        self._order: deque[T] = deque()
        self._is_ticking = False

    async def wait(self, one: T) -> None:
        """Waits for the request's turn, or until it need not wait."""
        loop = asyncio.get_running_loop()
        turn = self._waiting[one] = loop.create_future()
        self._order.append(one)
        if not self._is_ticking:
            self._tick(loop)
        try:
            await turn
        finally:
            self._waiting.pop(one, None)

    def release(self, one: T) -> None:
        """The request need not wait: its body is whole, or its client has gone."""
        turn = self._waiting.pop(one, None)
        if turn is not None and not turn.done():
            turn.set_result(None)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        num_left = PER_TICK
        while self._order and num_left and self._may_begin(self._order[0]):
            one = self._order.popleft()
            if one in self._waiting:
                self.release(one)
                num_left -= 1
        self._is_ticking = bool(self._order) or num_left < PER_TICK
        if self._is_ticking:
            loop.call_later(TICK_S, self._tick, loop)
