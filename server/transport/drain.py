"""The state of a drain: whether the server accepts requests, and how many are open."""

from __future__ import annotations

import asyncio

PROBES = frozenset({"/health", "/ping", "/ready", "/metrics"})
"""Paths that are answered while the server drains or is full: those who watch it must go on seeing it."""

WATCHERS = PROBES | {"/live"}
"""Paths whose requests do not delay the server's stop: they end when all others have."""


class Lifecycle:
    """Belongs to the event loop's thread.

    is_draining  no new requests; open ones may finish
    closing      set when the last of them is over: streams of watchers end now
    """

    def __init__(self) -> None:
        self.is_draining = False
        self.closing = asyncio.Event()
        self._num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_open(self) -> int:
        """Open requests, from their headers to the end of their answers."""
        return self._num_open

    def begin_drain(self) -> None:
        self.is_draining = True

    def enter(self) -> None:
        self._num_open += 1
        self._idle.clear()

    def leave(self) -> None:
        self._num_open -= 1
        if self._num_open == 0:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Returns when no request is open."""
        await self._idle.wait()
