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
