"""Admits requests and connections where there are more than the server holds at once.

Requests with incomplete bodies start a few at a time (`Turns`). A request costs half a millisecond before it waits for
the rest of its body. When thousands of them arrive at once, complete ones must not queue after all of them, and those
that have not started can still give way.

When there are too many connections, one is closed (`Crowd`). Every connection that the server waits for is in one of
five queues, longest wait first. When there is one too many, one of them is closed: the first of the first queue whose
patience is over; else the longest waiting one without a complete head or a turn. A connection that is being answered is
in none."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from enum import IntEnum
from typing import Generic, Protocol, TypeVar

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


class Wait(IntEnum):
    """The awaited events, in the order in which connections give way."""

    SILENT = 0  # the first byte of its first request
    IDLE = 1  # its next request
    HEAD = 2  # the rest of a request's line and headers, or its turn to begin (`turns`)
    BODY = 3  # the rest of a body
    READER = 4  # the client's reading


PATIENCE_S = {Wait.SILENT: 1.0, Wait.IDLE: 0.0, Wait.HEAD: 1.0, Wait.BODY: 1.0, Wait.READER: 1.0}
"""How long each may wait before it gives way: a new connection is silent until its first bytes arrive."""


class Waiting(Protocol):
    def give_way(self) -> None:
        """Closes the connection at once."""


class Crowd:
    """The queues of one server. Belongs to its event loop."""

    def __init__(self) -> None:
        self._queues: dict[Wait, OrderedDict[Waiting, float]] = {wait: OrderedDict() for wait in Wait}
        self._places: dict[Waiting, Wait] = {}

    def put(self, one: Waiting, wait: Wait | None) -> None:
        """Moves the connection to the end of that queue; None if it is being answered or has ended."""
        place = self._places.pop(one, None)
        if place is not None:
            del self._queues[place][one]
        if wait is not None:
            self._places[one] = wait
            self._queues[wait][one] = time.monotonic()

    def wait_of(self, one: Waiting) -> Wait | None:
        return self._places.get(one)

    def num_of(self, wait: Wait) -> int:
        return len(self._queues[wait])

    def evict(self) -> Waiting | None:
        """Closes the connection that has to give way, and returns it; None if there is none."""
        now = time.monotonic()
        firsts = [(wait, *next(iter(queue.items()))) for wait, queue in self._queues.items() if queue]
        due = [one for wait, one, since in firsts if now - since >= PATIENCE_S[wait]]
        due += [one for wait, one, _ in sorted(firsts, key=lambda first: first[2]) if wait in (Wait.SILENT, Wait.HEAD)]
        if not due:
            return None
        self.put(due[0], None)
        due[0].give_way()
        return due[0]
