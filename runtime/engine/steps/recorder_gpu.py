"""Recordings on a GPU: CUDA graphs with a shared memory pool, and copies through pinned memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_kernels.cuda.attention.parts import MIN_PART_KEYS
from runtime.device.device import Device
from runtime.device.errors import LaunchError
from runtime.device.gpu import Gpu
from runtime.device.graph import Graph, GraphPool
from runtime.dtype import DType
from runtime.tensor.tensor import Tensor


class PinnedBuffers:
    """See `StepBuffers`."""

    def __init__(self, gpu: Gpu, upload_bytes: int, num_results: int) -> None:
        self.pinned_upload = gpu.pinned.allocate(upload_bytes)
        self.pinned_results = gpu.pinned.allocate(4 * num_results)
        self.upload: NDArray[np.uint8] = self.pinned_upload.array
        self.results: NDArray[np.int32] = self.pinned_results.array.view(np.int32)
        self.event = gpu.new_event()
        self.is_under_way = False

    def wait(self) -> None:
        """Wait until the device has passed the step's last copy. Raises LaunchError if earlier work failed."""
        if self.is_under_way:
            self.is_under_way = False
            self.event.synchronize()


class EventStopwatch:
    """See `Stopwatch`."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._start = gpu.new_event(is_timed=True).record(gpu.stream)
        self._begun = time.perf_counter()

    def stop(self) -> None:
        self._end = self._gpu.new_event(is_timed=True).record(self._gpu.stream)
        self._launch_s = time.perf_counter() - self._begun

    @property
    def is_over(self) -> bool:
        return self._end.is_done()

    def waited(self, factor: float) -> bool:
        return self.is_over and self._end.elapsed_ms(self._start) <= factor * 1e3 * self._launch_s


class GpuRecorder:
    """See `Recorder`."""

    queues = True
    most_kept = 32
    mark = None

    def __init__(self, device: Device) -> None:
        self.device = device
        self._gpu = Gpu.of(device)
        self._pool: GraphPool | None = None  # with the first graph
        self._rooms: dict[tuple[str, tuple[int, int]], Tensor] = {}

    @property
    def size_bytes(self) -> int:
        rooms = sum(room.size_bytes for room in list(self._rooms.values()))
        return rooms + (0 if self._pool is None else self._pool.reserved_bytes)

    @staticmethod
    def batch_sizes(max_num_seqs: int) -> list[int]:
        """1, 2, 4, 8, 16, 24, 32 ... and the highest."""
        return [size for size in (1, 2, 4, *range(8, max_num_seqs, 8)) if size < max_num_seqs] + [max_num_seqs]

    @staticmethod
    def sequence_lengths(max_model_len: int, *, exact: bool) -> list[int]:
        """The longest that is never split, and the longest possible. In exact mode none is split."""
        if exact or max_model_len <= MIN_PART_KEYS:
            return [max_model_len]
        return [MIN_PART_KEYS, max_model_len]

    @staticmethod
    def pass_lengths(max_model_len: int, *, exact: bool) -> list[int]:
        """Powers of two: plans of attention, and so the bits, are those of the eager pass."""
        lengths = [MIN_PART_KEYS]
        while lengths[-1] < max_model_len:
            lengths.append(2 * lengths[-1])
        return [*lengths[:-1], max_model_len]

    def new_buffers(self, upload_bytes: int, num_results: int) -> PinnedBuffers:
        return PinnedBuffers(self._gpu, upload_bytes, num_results)

    def upload(self, target: Tensor, buffers: Any, size_bytes: int) -> None:
        self._gpu.upload(target.address, buffers.pinned_upload, size_bytes)

    def write(self, target: Tensor, values: NDArray[Any]) -> None:
        self._gpu.write(target.address, values)

    def room(self, name: str, shape: tuple[int, int], dtype: DType) -> Tensor:
        key = name, shape
        if key not in self._rooms:
            self._rooms[key] = Tensor.empty(shape, dtype, self.device)
        return self._rooms[key]

    def outlive(self, tensor: Tensor, room: Tensor | None = None) -> Tensor:
        """With a room it is copied: another graph's intermediate results may use the same memory."""
        if room is None:
            return tensor
        target = room[: tensor.shape[0]]
        self._gpu.copy(target.address, tensor.address, target.size_bytes)
        return target

    def record(self, work: Callable[[], Any]) -> Graph:
        if self._pool is None:
            self._pool = GraphPool(self._gpu)
        return Graph.capture(self._gpu, work, pool=self._pool, is_chained=True)

    def replay(self, recording: Any, passed: Callable[[int], None] | None) -> None:
        recording.replay()

    def launch(self, recording: Any, results: Tensor, num_results: int, buffers: Any) -> None:
        recording.replay()
        self._gpu.download(buffers.pinned_results, results.address, 4 * num_results)
        buffers.event.record(self._gpu.stream)
        buffers.is_under_way = True

    def stopwatch(self) -> EventStopwatch:
        return EventStopwatch(self._gpu)

    def finish(self, most_s: float | None = None) -> None:
        if most_s is None:
            self._gpu.synchronize()
            return
        stream, until = self._gpu.stream, time.monotonic() + most_s
        with suppress(LaunchError):
            while not stream.is_done() and time.monotonic() < until:
                time.sleep(0.001)

    def release(self) -> None:
        self._rooms.clear()
        self._pool = None
