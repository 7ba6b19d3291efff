"""Decode graphs on a GPU: CUDA graphs with a shared memory pool, and copies through pinned memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from numba_kernels.cuda.attention.parts import MIN_PART_KEYS
from runtime.device.device import Device
from runtime.device.gpu import Gpu
from runtime.device.graph import Graph, GraphPool
from runtime.dtype import DType, float32
from runtime.engine.limits import EngineLimits
from runtime.engine.steps.decode_device import Agree, Forward, StepBuffers, StepGraph, alone
from runtime.engine.steps.draw_inputs import Computed
from runtime.engine.steps.forward_graphs import ForwardGraphs
from runtime.engine.steps.ragged import Layout
from runtime.kv.cache import KVCache
from runtime.sampling_arrays import SamplingArrays
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


class GpuDecodes:
    """See `DecodeDevice`."""

    can_lead = True

    def __init__(
        self, device: Device, limits: EngineLimits, vocab_size: int, kv_cache: KVCache, agree: Agree = alone
    ) -> None:
        self._device = device
        self._gpu = Gpu.of(device)
        sizes = self.batch_sizes(limits.max_num_seqs)
        self.forwards = ForwardGraphs(self._gpu, limits, kv_cache, sizes, agree)
        self._vocab_size = vocab_size
        self._pool: GraphPool | None = None  # with the first graph
        self._kept_logits: dict[int, Tensor] = {}  # by the number of rows, a power of two
        self._held: list[Tensor] = []

    @property
    def graph_bytes(self) -> int:
        kept = sum(tensor.size_bytes for tensor in (*self._kept_logits.values(), *self._held))
        return kept + self.forwards.size_bytes + (0 if self._pool is None else self._pool.reserved_bytes)

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

    def new_buffers(self, upload_bytes: int, num_results: int) -> PinnedBuffers:
        return PinnedBuffers(self._gpu, upload_bytes, num_results)

    def upload(self, target: Tensor, buffers: StepBuffers, size_bytes: int) -> None:
        self._gpu.upload(target.address, cast(PinnedBuffers, buffers).pinned_upload, size_bytes)

    def write(self, target: Tensor, values: NDArray[Any]) -> None:
        self._gpu.write(target.address, values)

    def capture(self, work: Callable[[], Tensor], *, num_rows: int, keeps_logits: bool) -> Graph:
        gpu = self._gpu
        if self._pool is None:
            self._pool = GraphPool(gpu)
        kept = self._kept(num_rows) if keeps_logits else None

        def run() -> Tensor | None:
            logits = work()
            if kept is not None:
                gpu.copy(kept.address, logits.address, kept.size_bytes)
            return kept

        return Graph.capture(gpu, run, pool=self._pool, is_chained=True)

    def launch(self, graph: StepGraph, results: Tensor, num_results: int, buffers: StepBuffers) -> None:
        cast(Graph, graph).replay()
        pinned = cast(PinnedBuffers, buffers)
        self._gpu.download(pinned.pinned_results, results.address, 4 * num_results)
        pinned.event.record(self._gpu.stream)
        pinned.is_under_way = True

    def make_room(self, count: int, shape: tuple[int, int], dtype: DType) -> None:
        self._held = [Tensor.empty(shape, dtype, self._device) for _ in range(count)]

    def hold(self, kept: list[Tensor]) -> list[Tensor]:
        """Copies them: another graph's intermediate results may use the same memory."""
        held = []
        for number, each in enumerate(kept):
            place = self._held[number][: each.shape[0]]
            self._gpu.copy(place.address, each.address, place.size_bytes)
            held.append(place)
        return held

    def run_forward(
        self, layout: Layout, forward: Forward, draws: SamplingArrays | None = None, *, may_record: bool
    ) -> Computed | None:
        return self.forwards.run(layout, forward, draws, may_record=may_record)

    def release(self) -> None:
        self.forwards.release()
        self._kept_logits.clear()
        self._held = []
        self._pool = None

    def _kept(self, num_rows: int) -> Tensor:
        """A tensor for logits that outlive their graph; it serves the graphs of similar sizes."""
        rows = 1 << (num_rows - 1).bit_length()
        if rows not in self._kept_logits:
            self._kept_logits[rows] = Tensor.empty((rows, self._vocab_size), float32, self._device)
        return self._kept_logits[rows][:num_rows]
