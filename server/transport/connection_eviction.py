"""Chooses the connection to close when there are more than the server holds.

Every connection that the server waits for is in one of five queues, longest wait first. When there is one too many, one
of them is closed: the first of the first queue whose patience is over; else the longest waiting one without a complete
head or a turn. A connection that is being answered is in none."""

from __future__ import annotations

import time
from collections import OrderedDict
from enum import IntEnum
from typing import Protocol


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
