"""`GET /live`: the engine's steps, as server-sent events.

    data: {"now_s": …, "state": "ready", "info": {…}, "stats": {…}, "steps": [StepView, …], "num_missed": 0}

One watch of the engine serves all watchers; it ends with the last of them, and nothing is recorded then. Steps are
batched for a tenth of a second; without steps, a message a second gives the engine's state. A run of quick decode steps
is merged into one (`merge`), so that a message's size depends on the number of sequences, not of steps. Every buffer is
bounded: steps without room are counted in `num_missed` and not shown."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable
from contextlib import suppress
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from runtime.engine.errors import EngineDeadError
from runtime.engine.messages import ChunkView, EngineState, StepView
from runtime.engine.process.client import EngineClient
from server.errors import ApiError
from server.service import Service
from server.transport.sse import EventStreamResponse, frame

MESSAGE_INTERVAL_S = 0.1
IDLE_INTERVAL_S = 1.0
MERGED_S = 0.03
"""A run of decode steps is one as long as it takes no longer than this."""

MAX_GATHERED_STEPS = 1024
"""Steps of one interval; beyond it the oldest are not shown."""

MAX_CHUNKS = 2048
"""Chunks of all steps of one message; beyond it the oldest steps are not shown."""

MAX_RANK_SPANS = 1024
"""Steps of ranks in one message; beyond it the oldest are not shown."""

MAX_PENDING_MESSAGES = 8
"""Messages that a watcher has not read yet; then it misses the oldest."""

MAX_WATCHERS = 16


class LiveInfo(msgspec.Struct, frozen=True):
    """The constants: the model, and the engine's sizes. A block belongs to one cache group; its window is None for full
    attention. With several ranks, the stage of each."""

    model: str
    device: str
    dtype: str
    quantization: str
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    group_windows: tuple[int | None, ...]
    rank_stages: tuple[int, ...]


class LiveStats(msgspec.Struct, frozen=True):
    """The engine's current state, and its counters since its start."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_preemptions: int
    prompt_tokens: int
    generation_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_draft_tokens: int
    num_accepted_tokens: int


class LiveEngine(msgspec.Struct, frozen=True):
    """One of several engines; `stats` is null while it is down."""

    state: EngineState
    stats: LiveStats | None


class LiveMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """now_s       the server's `time.monotonic()`, the clock of all steps
    stats       null while the engine is down; the sums of several
    engines     by their numbers, if there are several
    num_missed  steps since the message before that are not shown
    """

    now_s: float
    state: EngineState
    info: LiveInfo
    stats: LiveStats | None
    steps: list[StepView]
    num_missed: int
    engines: list[LiveEngine] = []


def merge(steps: Iterable[StepView]) -> list[StepView]:
    """Merges an engine's runs of decode steps, up to `MERGED_S` each: the chunks hold the tokens of all of them, and
    queue and blocks are the latest. A step with a prefill chunk or a preemption is kept as it is."""
    merged: list[StepView] = []
    runs: dict[int, list[StepView]] = {}
    for step in steps:
        run = runs.setdefault(step.engine, [])
        is_quiet = not step.preempted and all(chunk.start >= chunk.num_prompt_tokens for chunk in step.chunks)
        if run and not (is_quiet and step.start_s + step.duration_s - run[0].start_s <= MERGED_S):
            merged.append(_joined(run))
            run.clear()
        if is_quiet:
            run.append(step)
        else:
            merged.append(step)
    merged += [_joined(run) for run in runs.values() if run]
    return sorted(merged, key=lambda step: step.start_s) if len(runs) > 1 else merged


def _joined(run: list[StepView]) -> StepView:
    if len(run) == 1:
        return run[0]
    chunks: dict[tuple[str, int], ChunkView] = {}
    for step in run:
        for chunk in step.chunks:
            key = chunk.request_id, chunk.index
            before = chunks.get(key)
            if before is not None:
                chunk = msgspec.structs.replace(chunk, start=before.start, count=before.count + chunk.count)
            chunks[key] = chunk
    last = run[-1]
    return msgspec.structs.replace(
        last,
        start_s=run[0].start_s,
        duration_s=last.start_s + last.duration_s - run[0].start_s,
        chunks=list(chunks.values()),
        ranks=[span for step in run for span in step.ranks],
        block_map=next((step.block_map for step in reversed(run) if step.block_map is not None), None),
    )


def _with_some_spans(steps: list[StepView]) -> list[StepView]:
    """The steps with at most the latest `MAX_RANK_SPANS` of their ranks' steps."""
    room, kept = MAX_RANK_SPANS, list[StepView]()
    for step in reversed(steps):
        ranks = step.ranks[max(0, len(step.ranks) - room) :]
        room -= len(ranks)
        kept.append(step if len(ranks) == len(step.ranks) else msgspec.structs.replace(step, ranks=ranks))
    return kept[::-1]


class Watcher:
    """One client of the live view: its unread messages."""

    def __init__(self, feed: LiveFeed) -> None:
        self._feed = feed
        self._pending: deque[bytes] = deque(maxlen=MAX_PENDING_MESSAGES)
        self._has_news = asyncio.Event()
        self._has_ended = False

    def put(self, data: bytes) -> None:
        self._pending.append(data)
        self._has_news.set()

    def close(self) -> None:
        """Ends the messages when the watcher leaves or the server stops. May be called again."""
        self._has_ended = True
        self._has_news.set()
        self._feed.leave(self)

    leave = close

    async def messages(self) -> AsyncGenerator[bytes, None]:
        """Framed messages until `close`."""
        while not self._has_ended:
            await self._has_news.wait()
            self._has_news.clear()
            while self._pending and not self._has_ended:
                yield self._pending.popleft()


class LiveFeed:
    """Turns the engine's steps into messages for all watchers, until `closing` is set. All methods but `_see` run on
    the event loop."""

    def __init__(self, client: EngineClient, closing: asyncio.Event) -> None:
        self._client = client
        self._closing = closing
        self._watchers: set[Watcher] = set()
        self._gathered: deque[StepView] = deque(maxlen=MAX_GATHERED_STEPS)
        self._lock = threading.Lock()
        self._num_dropped = 0  # for lack of room
        self._num_reported = 0  # of these, in messages
        self._task: asyncio.Task[None] | None = None

    def join(self) -> Watcher:
        """A new watcher, whose first message comes at once. Raises `ApiError` 429."""
        if len(self._watchers) >= MAX_WATCHERS:
            message = f"{MAX_WATCHERS} watchers are looking on, which is the most."
            raise ApiError(429, message, code="too_many_watchers", retry_after_s=10)
        watcher = Watcher(self)
        watcher.put(frame(self._message([], 0)))
        self._watchers.add(watcher)
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """Removes a watcher; after the last one the engine is not watched any more."""
        self._watchers.discard(watcher)
        if not self._watchers and self._task is not None:
            self._task.cancel()
            self._task = None

    def _see(self, step: StepView) -> None:
        """The engines' sink, on each one's thread: only stores the step."""
        with self._lock:
            self._num_dropped += len(self._gathered) == MAX_GATHERED_STEPS  # the oldest one is dropped
            self._gathered.append(step)

    async def _run(self) -> None:
        unwatch = self._client.watch(self._see)
        last_s = time.monotonic()
        try:
            while not self._closing.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), MESSAGE_INTERVAL_S)
                now = time.monotonic()
                if self._gathered or now - last_s >= IDLE_INTERVAL_S:
                    last_s = now
                    data = frame(self._news())
                    for watcher in self._watchers:
                        watcher.put(data)
        finally:
            unwatch()
            self._gathered.clear()
        for watcher in list(self._watchers):
            watcher.close()

    def _news(self) -> LiveMessage:
        taken = [self._gathered.popleft() for _ in range(len(self._gathered))]
        steps = merge(taken)
        num_chunks, num_steps = 0, 0
        for step in reversed(steps):
            num_chunks += len(step.chunks)
            if num_steps and num_chunks > MAX_CHUNKS:
                break
            num_steps += 1
        num_dropped = self._num_dropped
        num_missed = num_dropped - self._num_reported + len(steps) - num_steps
        self._num_reported = num_dropped
        return self._message(_with_some_spans(steps[len(steps) - num_steps :]), num_missed)

    def _message(self, steps: list[StepView], num_missed: int) -> LiveMessage:
        client, engines = self._client, self._client.engines
        each = [LiveEngine(engine.state, _stats(engine)) for engine in engines] if len(engines) > 1 else []
        return LiveMessage(time.monotonic(), client.state, self._info(), _stats(client), steps, num_missed, each)

    def _info(self) -> LiveInfo:
        info = self._client.info
        own: dict[str, Any] = {
            "model": info.model_name,
            "group_windows": tuple(group.window for group in info.cache_groups),
            "rank_stages": tuple(rank.stage for rank in info.ranks),
        }
        return LiveInfo(**own, **{name: getattr(info, name) for name in LiveInfo.__struct_fields__ if name not in own})


def _stats(client: EngineClient) -> LiveStats | None:
    try:
        stats = client.stats()
    except EngineDeadError:
        return None
    return LiveStats(**{name: getattr(stats, name) for name in LiveStats.__struct_fields__})


async def watch_engine(request: Request) -> Response:
    """The stream, until the client leaves or the server stops."""
    service: Service = request.app.state.service
    feed: LiveFeed | None = getattr(request.app.state, "live_feed", None)
    if feed is None:
        feed = request.app.state.live_feed = LiveFeed(service.client, service.lifecycle.closing)
    watcher = feed.join()
    return EventStreamResponse(watcher.messages(), watcher, {})
