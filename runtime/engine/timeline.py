"""A record of every step, cheap enough for production, in a ring buffer.

A record keeps the step's own arrays; its ``chunks`` are made on access.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from runtime.engine.messages import ChunkView
from runtime.engine.scheduling.step import PreemptionWay

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
    """A chunk's request and choice, the end of its prompt, and when its request came in."""

    request_id: str
    index: int
    num_prompt_tokens: int
    arrival_s: float


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
            ChunkView(key.request_id, key.index, start, count, key.num_prompt_tokens, key.arrival_s)
            for key, start, count in zip(self._keys, self._starts.tolist(), self._counts.tolist())
        ]


Timeline = deque[StepRecord]
"""The latest records, oldest first; ``list(timeline)`` is a snapshot, from any thread."""

_NO_TOKENS: NDArray[np.int64] = np.empty(0, np.int64)
