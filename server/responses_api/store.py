"""Responses kept in memory for retrieval and continuation: a bounded number of bytes and entries, each for a limited
time. The store ends with the process."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from server.openai_api.schema import Message
from server.requests.generation import Generation
from server.responses_api.objects import Response, ResponseOutput

Key = tuple[str | None, str]
"""Tenant and id: a tenant does not find another's responses."""


class Running(Protocol):
    """A response while it is generated."""

    @property
    def generation(self) -> Generation: ...

    response: Response
    output: ResponseOutput


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A finished response.

    input_items   of its request
    conversation  all messages up to and including its output, without instructions
    size_bytes    of all these, as JSON
    """

    response: Response
    input_items: list[dict[str, Any]]
    conversation: list[Message]
    size_bytes: int
    expires_s: float


class ResponseStore:
    """The latest responses. Belongs to the event loop's thread.

    max_entries, max_bytes  beyond them the oldest are evicted; a response larger than `max_bytes` is not kept
    ttl_s                   how long a response is kept
    clock                   seconds
    """

    def __init__(
        self, max_entries: int, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_entries = max_entries
        self.max_bytes = max_bytes
        self.ttl_s = ttl_s
        self.size_bytes = 0
        self._clock = clock
        self._stored: OrderedDict[Key, StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stored)

    def put(
        self, tenant: str | None, response: Response, input_items: list[dict[str, Any]], conversation: list[Message]
    ) -> None:
        """Stores a response, or its new state."""
        self.delete(tenant, response.id)
        size = sum(len(msgspec.json.encode(part)) for part in (response, input_items, conversation))
        if size > self.max_bytes:
            return
        self._stored[tenant, response.id] = StoredResponse(
            response, input_items, conversation, size, self._clock() + self.ttl_s
        )
        self.size_bytes += size
        while len(self._stored) > self.max_entries or self.size_bytes > self.max_bytes:
            self._drop(next(iter(self._stored)))

    def get(self, tenant: str | None, response_id: str) -> StoredResponse | None:
        """The response, or None if it was never stored, was deleted or evicted, or has expired."""
        now = self._clock()
        while self._stored and next(iter(self._stored.values())).expires_s <= now:  # the oldest are first
            self._drop(next(iter(self._stored)))
        return self._stored.get((tenant, response_id))

    def delete(self, tenant: str | None, response_id: str) -> bool:
        """Deletes a response; returns whether there was one."""
        if self.get(tenant, response_id) is None:
            return False
        self._drop((tenant, response_id))
        return True

    def _drop(self, key: Key) -> None:
        self.size_bytes -= self._stored.pop(key).size_bytes
