"""Responses kept for retrieval and continuation: in memory a bounded number of bytes and entries, each for a limited
time; with a folder (`folder.py`) longer, and after the process."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from server.openai_api.schema import Message
from server.requests.generation import Generation
from server.responses_api.folder import ResponseFolder
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


class _Content(msgspec.Struct, array_like=True):
    """A file's content."""

    response: Response
    input_items: list[dict[str, Any]]
    conversation: list[Message]


class ResponseStore:
    """The latest responses. Belongs to the event loop's thread.

    max_entries, max_bytes  beyond them the oldest are evicted; a response larger than `max_bytes` is not kept
    ttl_s                   how long a response is kept
    folder                  where they are kept longer, or None
    clock                   seconds
    """

    def __init__(
        self, max_entries: int, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic,
        folder: ResponseFolder | None = None,
    ) -> None:  # fmt: skip
        self.max_entries = max_entries
        self.max_bytes = max_bytes
        self.ttl_s = ttl_s
        self.size_bytes = 0
        self.folder = folder
        self._clock = clock
        self._stored: OrderedDict[Key, StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stored)

    def put(
        self, tenant: str | None, response: Response, input_items: list[dict[str, Any]], conversation: list[Message]
    ) -> None:
        """Stores a response, or its new state."""
        self._forget(tenant, response.id)
        data = msgspec.json.encode(_Content(response, input_items, conversation))
        if self.folder is not None:
            self.folder.put(tenant, response.id, data)
        size = len(data)
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
        known = self._stored.get((tenant, response_id))
        if self.folder is None:
            return known
        if known is not None and self.folder.has(tenant, response_id):
            return known
        data = self.folder.get(tenant, response_id)
        if data is None:  # a full disk leaves the one in memory
            return known if known is not None and self.folder.num_failed else None
        try:
            found = _DECODER.decode(data)
        except msgspec.DecodeError:  # of another release
            return None
        if found.response.id != response_id:
            return None
        return StoredResponse(found.response, found.input_items, found.conversation, len(data), now)

    async def delete(self, tenant: str | None, response_id: str) -> bool:
        """Deletes a response, from the folder, too; returns whether there was one."""
        if self.get(tenant, response_id) is None:
            return False
        self._forget(tenant, response_id)
        if self.folder is not None:
            await asyncio.wrap_future(self.folder.delete(tenant, response_id))
        return True

    def close(self) -> None:
        """Wait for what is being written."""
        if self.folder is not None:
            self.folder.close()

    def _forget(self, tenant: str | None, response_id: str) -> None:
        if (tenant, response_id) in self._stored:
            self._drop((tenant, response_id))

    def _drop(self, key: Key) -> None:
        self.size_bytes -= self._stored.pop(key).size_bytes


_DECODER = msgspec.json.Decoder(_Content)
