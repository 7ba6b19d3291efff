"""From the engine's thread to the event loop: the one place where the two meet.

The engine calls a sink for each output, hundreds of times a step when many requests run. A call puts the
output into an inbox; only the first into an empty one wakes the loop, which then hands out all that has
gathered."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from runtime.engine.messages import EngineOutput

Receiver = Callable[[EngineOutput], None]


class LoopBridge:
    """Delivers outputs to receivers on the event loop's thread, in the order in which they were put in.

    `sink(receiver)` is what the engine is given. After `close` outputs are dropped: nobody is left to read
    them."""

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
            # The loop clears the flag before it empties the inbox. So whoever finds it set has put its
            # output in before the emptying, and whoever finds it clear wakes the loop (twice, at worst).
            if not self._is_woken:
                self._is_woken = True
                try:
                    self._loop.call_soon_threadsafe(self._hand_out)
                except RuntimeError:
                    if not self._loop.is_closed():  # closed: the server has ended in between
                        raise

        return put

    def close(self) -> None:
        """To be called on the loop's thread, while the loop still runs."""
        self._is_closed = True
        self._inbox.clear()

    def _hand_out(self) -> None:
        self._is_woken = False
        for _ in range(len(self._inbox)):  # what arrives meanwhile has woken the loop again
            receiver, output = self._inbox.popleft()
            receiver(output)


class Signal:
    """What `asyncio.Event` is, for one who waits: every event of every stream waits once. Belongs to one event loop."""

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
        """Returns when it is set, or was since the last time; it is clear then."""
        if not self._is_set:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_set = False
