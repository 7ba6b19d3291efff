"""A record of every step, cheap enough for production, in a ring buffer.

A record keeps the step's own arrays; its ``chunks`` are made on access. `StepViews` are made for observers alone.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.engine.messages import ChunkView, PrefixMiss, RankSpan, StepView
from runtime.engine.scheduling.block_pool import BlockPool
from runtime.engine.scheduling.step import PreemptionWay
from runtime.engine.steps.executor import Executor

TIMELINE_STEPS = 8192
"""Records kept: at 256 sequences a step these are about 20 MB."""


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """Tokens ``start : start + num_tokens`` of a choice; ``kind`` is "decode" for one token after the prompt."""

    request_id: str
    index: int
    start: int
    num_tokens: int
    kind: Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class ChunkKey:
    """A chunk's request and choice, the end of its prompt, when its request came in, and why it missed the prefix
    cache when it started."""

    request_id: str
    index: int
    num_prompt_tokens: int
    arrival_s: float
    miss: PrefixMiss | None = None


class StepRecord:
    """One step. Times are seconds, moments those of ``time.monotonic()``.

    start_s, end_s      plain loop: from the beginning of its planning until its tokens were committed. Overlapped loop:
                        from the beginning of its computation (it was planned while the previous step ran), or, if
                        that was queued earlier, from the end of the previous step. So the steps' times do not overlap.
    schedule_s          choosing chunks and reserving blocks, late arrivals included
    prepare_s           laying out its arrays
    run_s               from the beginning of its computation until its result was there
    commit_s            appending its tokens and making the outputs
    has_failed          the model raised, and the chunks' requests have ended with an error
    num_running, num_waiting, num_free_blocks  when it was planned
    swapped_out, swapped_in, copied  blocks moved for it
    preempted           (request_id, index, way) of those that gave up their blocks for it
    """

    __slots__ = (
        "_counts",
        "_keys",
        "_starts",
        "commit_s",
        "copied",
        "end_s",
        "has_failed",
        "num_free_blocks",
        "num_running",
        "num_waiting",
        "number",
        "preempted",
        "prepare_s",
        "run_s",
        "schedule_s",
        "start_s",
        "swapped_in",
        "swapped_out",
    )

    def __init__(self, number: int, start_s: float) -> None:
        self.number = number
        self.start_s = start_s
        self.end_s = start_s
        self.schedule_s = self.prepare_s = self.run_s = self.commit_s = 0.0
        self.has_failed = False
        self.num_running = self.num_waiting = self.num_free_blocks = 0
        self.swapped_out = self.swapped_in = self.copied = 0
        self.preempted: list[tuple[str, int, PreemptionWay]] = []
        self._keys: list[ChunkKey] = []
        self._starts = self._counts = _NO_TOKENS

    def set_chunks(self, keys: list[ChunkKey], starts: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """Set the keys, starts and token counts of the step's chunks; the arguments are kept, and read only."""
        self._keys, self._starts, self._counts = keys, starts, counts

    @property
    def num_tokens(self) -> int:
        """Tokens of all chunks."""
        return int(self._counts.sum())

    @property
    def host_s(self) -> float:
        """The host's seconds outside the computation."""
        return self.schedule_s + self.prepare_s + self.commit_s

    @property
    def chunks(self) -> list[ChunkRecord]:
        """The chunks by row."""
        return [
            ChunkRecord(
                key.request_id,
                key.index,
                start,
                count,
                "decode" if count == 1 and start >= key.num_prompt_tokens else "prefill",
            )
            for key, start, count in zip(self._keys, self._starts.tolist(), self._counts.tolist())
        ]

    @property
    def chunk_views(self) -> list[ChunkView]:
        """The chunks in the form for observers."""
        return [
            ChunkView(
                key.request_id,
                key.index,
                start,
                count,
                key.num_prompt_tokens,
                key.arrival_s,
                key.miss if key.miss is not None and start == key.miss.checkpoint else None,
            )
            for key, start, count in zip(self._keys, self._starts.tolist(), self._counts.tolist())
        ]


Timeline = deque[StepRecord]
"""The latest records, oldest first; ``list(timeline)`` is a snapshot, from any thread."""

_NO_TOKENS: NDArray[np.int64] = np.empty(0, np.int64)

BLOCK_MAP_INTERVAL_S = 0.25
"""Least seconds between two maps of the blocks, whose time is proportional to the number of blocks."""


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
