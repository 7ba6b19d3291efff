"""Copies pages to the host while a step computes them: those of its first layers while later ones are computed.

    copies.begin([copy])      before the step; the executor tells which layers are launched, or have run (`passed`)
    copies.finish()           after it: the planes below ``copy.num_planes`` were taken; the others have to be copied

On a GPU a second stream copies, after an event that follows the layers whose pages it reads. A pass that is replayed as
one graph is copied after it: only passes that are shorter than their launches are recorded. On a CPU another thread
copies, if the kernels leave a processor of this process free: on one that computes, a copy takes as long before the
step's end as after it.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from numba_kernels.cpu.running.pool import most_threads
from runtime.device.context import Stream
from runtime.device.gpu import Gpu
from runtime.kv.cache import KVCache
from runtime.kv.page_bytes import PageBytes, QueuedCopy

logger = logging.getLogger("xserv.engine")

PART_BYTES = 4 << 20
"""Planes go together until they have so many bytes: as many as are copied in about the time of a message."""

Take = Callable[[int, list[NDArray[np.uint8]]], bool]
"""Takes planes from this number on, in their order; False if no more are wanted. Called on another thread."""


@dataclass(slots=True, eq=False)
class PassCopy:
    """Pages of a pool that the next step completes.

    bounds      the numbers of planes at which they are cut; what follows the last cut is not copied here
    num_planes  those that were taken
    """

    pool: int
    block_ids: list[int]
    bounds: list[int]
    take: Take
    num_planes: int = 0
    num_queued: int = field(default=0, init=False)
    is_over: bool = field(default=False, init=False)  # no more are wanted, or a copy has failed


class LayerCopies:
    """See the module. Belongs to the thread that runs steps, but for `passed` and the copying."""

    def __init__(self, kv_cache: KVCache, pages: PageBytes) -> None:
        self._pages = pages
        self._gpu = None if kv_cache.device.kind == "cpu" else Gpu.of(kv_cache.device)
        self._stream: Stream | None = None
        self._jobs: list[PassCopy] = []
        self._queue: queue.Queue[tuple[PassCopy, int, int, QueuedCopy | None]] = queue.Queue()
        self._thread: threading.Thread | None = None
        spec = kv_cache.spec
        self._last_layers: list[list[int]] = [[] for _ in kv_cache.pool_sizes]  # by pool and plane: that writes it
        firsts = {pool: spec.pool_of_storage.index(pool) for pool in spec.pool_of_storage}
        for storage, (pool, planes) in enumerate(zip(spec.pool_of_storage, spec.planes, strict=True)):
            own = storage - firsts[pool]
            layers = [each.layers[own] for each in spec.groups if each.pool == pool and own < len(each.layers)]
            self._last_layers[pool] += [max(layers, default=-1)] * len(planes)

    @property
    def helps(self) -> bool:
        """Whether copies take nothing from the computation."""
        return self._gpu is not None or has_free_core()

    @property
    def follower(self) -> Callable[[int], None] | None:
        """`passed`, if there is something to be copied."""
        return self.passed if self._jobs else None

    def bounds(self, pool: int, num_pages: int) -> list[int]:
        """Cuts planes of so many pages into parts of `PART_BYTES`, and the rest: the first plane of each."""
        cuts, num_bytes, layers = [0], 0, self._last_layers[pool]
        for plane, size in enumerate(self._pages.page_bytes[pool]):
            if num_bytes >= PART_BYTES and layers[plane] > layers[plane - 1]:
                cuts.append(plane)
                num_bytes = 0
            num_bytes += size * num_pages
        return cuts

    def begin(self, jobs: Sequence[PassCopy]) -> None:
        """The next step computes these."""
        assert not self._jobs, "a step is copied already"
        self._jobs = list(jobs)

    def passed(self, layer: int) -> None:
        """The layers before this one have run; on a GPU they are launched."""
        for job in self._jobs:
            while job.num_queued + 1 < len(job.bounds):
                first, end = job.bounds[job.num_queued : job.num_queued + 2]
                if self._last_layers[job.pool][end - 1] >= layer:
                    break
                self._enqueue(job, first, end)
                job.num_queued += 1

    def _enqueue(self, job: PassCopy, first: int, end: int) -> None:
        queued: QueuedCopy | None = None
        if self._gpu is not None:
            if self._stream is None:
                self._stream = self._gpu.new_stream()
            self._stream.wait(self._gpu.stream.record())
            self._gpu.break_chain()
            queued = self._pages.queue_copy(job.pool, job.block_ids, first, end, self._stream)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="xserv-layer-copies", daemon=True)
            self._thread.start()
        self._queue.put((job, first, end, queued))

    def finish(self) -> None:
        """Wait for the copies that were begun; nothing is copied any more."""
        if self._jobs:
            self._queue.join()
            self._jobs = []

    def _run(self) -> None:
        while True:
            job, first, end, queued = self._queue.get()
            try:
                if not job.is_over:
                    planes = (
                        self._pages.copy_out(job.pool, job.block_ids, first, end) if queued is None else queued.take()
                    )
                    job.is_over = not job.take(first, planes)
                    job.num_planes = end
            except Exception:  # the step will fail, too
                logger.exception("pages could not be copied while their step runs")
                job.is_over = True
            finally:
                self._queue.task_done()


def has_free_core() -> bool:
    """Whether the kernels leave a processor of this process to other threads."""
    return hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) > most_threads()
