"""Delivers outputs from the engine's thread to the event loop; nothing else crosses between the two.

The engine calls a sink for each output, hundreds of times a step when many requests run. A call puts the output into an
inbox; only the first into an empty one wakes the loop, which then delivers all of them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import TypeVar

from runtime.engine.messages import EngineOutput

T = TypeVar("T")

Receiver = Callable[[EngineOutput], None]


class LoopBridge:
    """Delivers outputs to receivers on the event loop's thread, in order.

    The engine gets `sink(receiver)`. After `close` outputs are dropped."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._inbox: deque[tuple[Receiver, EngineOutput]] = deque()
        self._is_woken = False
        self._is_closed = False

    def sink(self, receiver: Receiver) -> Callable[[EngineOutput], None]:
        """A sink whose outputs reach `receiver` on the loop's thread; callable from any thread, never
        blocks."""

        def put(output: EngineOutput) -> None:
            if self._is_closed:
                return
            self._inbox.append((receiver, output))
            # The loop clears the flag before it empties the inbox. So a sink that finds it set has added its output
            # before the emptying, and one that finds it clear wakes the loop (twice, at worst).
            if not self._is_woken:
                self._is_woken = True
                try:
                    self._loop.call_soon_threadsafe(self._hand_out)
                except RuntimeError:
                    if not self._loop.is_closed():  # closed if the server has ended meanwhile
                        raise

        return put

    def close(self) -> None:
        """Call it on the loop's thread, while the loop still runs."""
        self._is_closed = True
        self._inbox.clear()

    def _hand_out(self) -> None:
        self._is_woken = False
        for _ in range(len(self._inbox)):  # what arrives meanwhile has woken the loop again
            receiver, output = self._inbox.popleft()
            receiver(output)


async def result_of(future: Future[T]) -> T:
    """The result of a future that another thread sets; raises its error, and `asyncio.CancelledError` if it was
    cancelled. Unlike `asyncio.wrap_future` it does not cancel the future with its task, and wakes the task directly."""
    if not future.done():
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def wake(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(_set, waiter)

        future.add_done_callback(wake)
        await waiter
    try:
        return future.result()
    except CancelledError:
        raise asyncio.CancelledError from None


def _set(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class Signal:
    """An `asyncio.Event` for a single waiter, cheaper per wait. Belongs to one event loop."""

    __slots__ = ("_is_set", "_waiter")

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._is_set = True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def wait(self) -> None:
        """Waits until it is set, and clears it."""
        if not self._is_set:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_set = False
