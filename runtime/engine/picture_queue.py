"""Encodes images of requests between steps, piece by piece, and caches the results for later requests.

A request is queued once all of its images are encoded, and holds them until it ends, since a preempted sequence
computes its prompt again. Unheld images stay cached, least recently used first out, within a number of tokens. Requests
are served in order; each waits until all of its images fit, so that no two wait for each other.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from numba_kernels.cpu.running.pool import most_threads
from runtime.engine.messages import ImageSupport
from runtime.engine.scheduling.pictures import Picture, PictureKeys
from runtime.engine.scheduling.sequence import Request
from runtime.engine.steps.embedder import Embedding
from runtime.engine.steps.executor import Executor

logger = logging.getLogger("xserv.engine")

Holder = Request | Embedding
"""A request or embedding whose prompt has images."""

Key = tuple[str | None, bytes, bytes]
"""A tenant, an image, and the digest of the adapter that changes its embeddings, or b"": nothing is shared across
tenants."""


@dataclass(slots=True)
class _Entry:
    """An image in a slot. ``holders`` are the open requests that have it."""

    slot: int
    num_tokens: int
    is_made: bool = False
    holders: set[Holder] = field(default_factory=set)


class PictureQueue:
    """Belongs to the engine's loop.

    budget  how much is encoded between two steps
    changes_tower  whether a request's adapter, which is read, changes what images become
    """

    def __init__(self, executor: Executor, support: ImageSupport, budget: EncodingBudget) -> None:
        self._executor = executor
        self._support = support
        self.budget = budget
        self.keys = PictureKeys()
        self.changes_tower: Callable[[Request], bool] = lambda request: False
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()  # most recently released last
        self._waiting: deque[Holder] = deque()
        self._num_tokens = 0
        self._next_slot = 0
        self._current: Key | None = None

    def __len__(self) -> int:
        """Waiting requests."""
        return len(self._waiting)

    @property
    def num_kept_tokens(self) -> int:
        return self._num_tokens

    def add(self, request: Holder) -> None:
        """Enqueue a request that needs its images; one with an adapter has its slot."""
        assert request.pictures is not None
        if request in self._waiting:
            return
        self._waiting.append(request)
        if isinstance(request, Request):
            request.prefix_keys = self.keys.prompt_keys(request.prompt_ids, request.pictures)

    def release(self, request: Holder) -> None:
        """Release the images of a request that has ended."""
        for key in list(self._entries):
            entry = self._entries[key]
            if request in entry.holders:
                entry.holders.discard(request)
                self._entries.move_to_end(key)
        self._waiting = deque(each for each in self._waiting if each is not request)

    def forget(self, *, keeps_held: bool = False) -> None:
        """Drop all images; those that are waited for will be encoded again. ``keeps_held``: but for complete ones of
        open requests."""
        for key, entry in list(self._entries.items()):
            if not (keeps_held and entry.is_made and entry.holders):
                self._drop(key)

    def advance(self, start: Callable[[Holder], None], fail: Callable[[Holder], None], *, is_idle: bool) -> None:
        """Encode within the budget. ``start`` is called with each request whose images are ready, ``fail`` with each
        whose images could not be encoded. ``is_idle`` means that there is no other work."""
        self.budget.begin(is_idle=is_idle)
        while self.budget.next_rows():
            request = next((each for each in self._waiting if self._adapter_slot(each) is not None), None)
            if request is None:
                return
            if isinstance(request, Embedding) and request.future.cancelled():
                self.release(request)
                continue
            if not self._hold(request):
                return  # until others have ended
            try:
                self._encode_some(request)
            except Exception:
                logger.exception("the pictures of request %s could not be encoded", request.request_id)
                fail(request)  # which ends it, and so releases it
                self._forget_unmade()
                continue
            assert request.pictures is not None
            entries = [self._entries[self._key(request, item)] for item in request.pictures.items]
            if all(entry.is_made for entry in entries):
                self._waiting.remove(request)
                request.pictures.slots[:] = [entry.slot for entry in entries]
                request.pictures.patches.clear()
                start(request)

    def _key(self, request: Holder, item: Picture) -> Key:
        adapter = b""
        if isinstance(request, Request) and request.adapter is not None and self.changes_tower(request):
            adapter = request.adapter_digest
        return request.cache_salt, item.digest, adapter

    def _adapter_slot(self, request: Holder) -> int | None:
        """The slot of the adapter that a request's images are encoded with, -1 for none; None while it has lost it."""
        if isinstance(request, Embedding) or request.adapter is None or not self.changes_tower(request):
            return -1
        return request.adapter_slot if request.adapter_slot >= 0 else None

    def _hold(self, request: Holder) -> bool:
        """Make room for all images of a request, and hold them; False if there is none yet."""
        assert request.pictures is not None
        wanted = {self._key(request, item): item for item in request.pictures.items}
        lacking = sum(item.num_tokens for key, item in wanted.items() if key not in self._entries)
        kept = [key for key, entry in self._entries.items() if not entry.holders and key not in wanted]
        free = self._support.max_tokens - self._num_tokens
        if lacking > free + sum(self._entries[key].num_tokens for key in kept):
            return False
        for key in kept:
            if lacking <= self._support.max_tokens - self._num_tokens:
                break
            self._drop(key)
        for key, item in wanted.items():
            if key not in self._entries:
                self._entries[key] = _Entry(self._next_slot, item.num_tokens)
                self._next_slot += 1
                self._num_tokens += item.num_tokens
            self._entries[key].holders.add(request)
        return True

    def _encode_some(self, request: Holder) -> None:
        """Encode one piece of an image, or several."""
        pictures = request.pictures
        assert pictures is not None
        for item, patches, grid in zip(pictures.items, pictures.patches, pictures.grids, strict=True):
            key = self._key(request, item)
            entry = self._entries[key]
            if entry.is_made:
                continue
            if self._current != key:
                self._current = key
                self._executor.drop_encoded(entry.slot)  # begun for a request that has ended since
                adapter = self._adapter_slot(request)
                assert adapter is not None, "it would wait"
                self._executor.start_encoding(entry.slot, patches, grid, adapter)
            done = self._executor.encode(entry.slot, self.budget.next_rows())
            self.budget.spend(done.num_rows, done.seconds)
            entry.is_made = done.is_made
            if entry.is_made:
                self._current = None
            return

    def _forget_unmade(self) -> None:
        """Drop unfinished images: they belong to the first waiting request, which has ended."""
        for key in [key for key, entry in self._entries.items() if not entry.is_made]:
            self._drop(key)

    def _drop(self, key: Key) -> None:
        entry = self._entries.pop(key)
        self._num_tokens -= entry.num_tokens
        if self._current == key:
            self._current = None
        self._executor.drop_encoded(entry.slot)


SHARE = 0.5
"""Fraction of the usual time of a decode step."""

FIRST_S, IDLE_S, MOST_S = 0.02, 0.05, 0.1
"""Seconds: before a decode step was seen; while idle, until arrivals and cancellations are polled again; the upper
limit."""

PIECE_ROWS, IDLE_PIECE_ROWS = 32, 96
"""Rows of a piece on the CPU, for each thread (at least two are counted); and of one while the engine is idle."""

_STEPS = 15
"""Decode steps of which the median is taken."""


class EncodingBudget:
    """Belongs to the engine's loop.

    rows  between two steps, where a row counts twice in each layer; None means that time is counted
    """

    def __init__(self, rows: int | None) -> None:
        self._rows = rows
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._left_s = self._last_s = 0.0
        self._left_rows = 0
        self._is_first, self._is_idle = True, False

    def observe(self, step_s: float) -> None:
        """Record the duration of a decode step."""
        self._steps.append(step_s)

    def begin(self, *, is_idle: bool) -> None:
        """Start the budget after a step. `is_idle` means that there is no other work."""
        self._is_first, self._is_idle = True, is_idle
        if is_idle:
            self._left_s = IDLE_S
        else:
            self._left_s = min(SHARE * median(self._steps), MOST_S) if self._steps else FIRST_S
        self._left_rows = self._rows or 0

    def next_rows(self) -> int:
        """Rows that may be encoded next; 0 when the budget is spent. The first piece is always allowed; further ones if
        they fit by the time of the last."""
        if self._rows is not None:
            return max(0, self._left_rows)
        if not self._is_first and self._last_s > self._left_s:
            return 0
        return (IDLE_PIECE_ROWS if self._is_idle else PIECE_ROWS) * max(2, most_threads())

    def spend(self, rows: int, seconds: float) -> None:
        self._is_first = False
        self._left_rows -= rows
        self._left_s -= seconds
        self._last_s = seconds
