"""Views of steps for observers; none are made without observers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from runtime.engine.messages import RankSpan, StepView

if TYPE_CHECKING:
    from runtime.engine.scheduling.block_pool import BlockPool
    from runtime.engine.steps.executor import Executor
    from runtime.engine.timeline import StepRecord, Timeline

logger = logging.getLogger("xserv.engine")

BLOCK_MAP_INTERVAL_S = 0.25
"""Least seconds between two maps of the blocks, whose time is proportional to the number of blocks."""

ViewSink = Callable[[StepView], None]
"""Receives the view of each step, on any thread; it must not block. One that raises is logged and removed."""


class Watchers:
    """The sinks of step views. ``add`` is thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sinks: tuple[ViewSink, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._sinks)

    def add(self, sink: ViewSink) -> Callable[[], None]:
        """Returns an idempotent function that removes it."""

        def watch(view: StepView) -> None:  # a new function, so that one sink may be added twice
            sink(view)

        with self._lock:
            self._sinks = (*self._sinks, watch)
        return lambda: self._remove(watch)

    def show(self, view: StepView) -> None:
        """Give the view to every sink."""
        for sink in self._sinks:
            try:
                sink(view)
            except Exception:
                logger.exception("a sink that watches the steps failed; it is removed")
                self._remove(sink)

    def _remove(self, removed: ViewSink) -> None:
        with self._lock:
            self._sinks = tuple(sink for sink in self._sinks if sink is not removed)


class StepViews:
    """Views of an engine's steps, made on its thread."""

    def __init__(self, timeline: Timeline, pool: BlockPool, executor: Executor) -> None:
        self._timeline = timeline
        self._pool = pool
        self._executor = executor
        self._known_spans = [0] * len(executor.tallies())
        self._last_number = -1
        self._next_map_s = 0.0

    def skip(self) -> None:
        """Skip the steps until now, which are not observed."""
        if self._timeline:
            self._last_number = self._timeline[-1].number
        self._known_spans = [tally.num_steps for tally in self._executor.tallies()]

    def take(self) -> list[StepView]:
        """Those of the steps since the last call or ``skip``, oldest first."""
        records: list[StepRecord] = []
        for record in reversed(self._timeline):
            if record.number <= self._last_number:
                break
            records.append(record)
        spans = self._take_spans() if records else []
        if records:
            self._last_number = records[0].number
        views = [self._view(record) for record in reversed(records)]
        if spans:
            views[-1] = msgspec.structs.replace(views[-1], ranks=spans)
        return views

    def _take_spans(self) -> list[RankSpan]:
        """The steps of each of several ranks since the last call."""
        found, shift_s = [], time.monotonic() - time.perf_counter()
        for rank, num_known in enumerate(self._known_spans):
            self._known_spans[rank], spans = self._executor.spans(rank, num_known)
            for span in spans:
                start_s, duration_s = span.begun_ns / 1e9 + shift_s, (span.ended_ns - span.begun_ns) / 1e9
                found.append(RankSpan(rank, start_s, duration_s, span.waited_ns / 1e9))
        return found

    def _view(self, record: StepRecord) -> StepView:
        now, block_map = time.monotonic(), None
        if now >= self._next_map_s:
            self._next_map_s = now + BLOCK_MAP_INTERVAL_S
            block_map = self._pool.run_lengths()
        return StepView(
            step=record.number,
            start_s=record.start_s,
            duration_s=record.end_s - record.start_s,
            chunks=record.chunk_views,
            num_running=record.num_running,
            num_waiting=record.num_waiting,
            num_blocks=self._pool.num_blocks,
            num_free_blocks=self._pool.num_free,
            num_cached_blocks=self._pool.num_cached,
            preempted=[request_id for request_id, _, _ in record.preempted],
            block_map=block_map,
        )
