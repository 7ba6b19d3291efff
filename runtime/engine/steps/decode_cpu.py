"""Decode graphs on the CPU: recorded launches in shared memory, replayed by one compiled call.

A step runs when its result is waited for: on the executor's own thread if the loop is overlapped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from numba_kernels.cpu.attention.kernel import SEGMENT_TOKENS
from numba_kernels.cpu.running.arena import Arena
from numba_kernels.cpu.running.recording import NotRecordableError, Recording, record
from runtime.device.errors import CaptureError
from runtime.dtype import DType, float32
from runtime.engine.limits import EngineLimits
from runtime.engine.steps.decode_device import Forward, StepBuffers, StepGraph
from runtime.engine.steps.draw_inputs import Computed
from runtime.engine.steps.ragged import Layout
from runtime.engine.steps.recorded_forwards import RecordedForwards
from runtime.errors import OutOfMemoryError
from runtime.sampling_arrays import SamplingArrays
from runtime.tensor.tensor import Tensor

SHORT_SEQUENCES = 128
"""Attention over sequences up to this length is planned separately: alone it is not worth waking a thread."""


class HostBuffers:
    """See `StepBuffers`."""

    def __init__(self, upload_bytes: int, num_results: int) -> None:
        self.upload: NDArray[np.uint8] = np.empty(upload_bytes, np.uint8)
        self.results: NDArray[np.int32] = np.empty(num_results, np.int32)
        self.pending: Callable[[], None] | None = None

    def wait(self) -> None:
        """Runs the step."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending()


class CpuGraph:
    """See `StepGraph`."""

    def __init__(self, recording: Recording, result: Tensor | None) -> None:
        self.recording = recording
        self.result = result

    def release(self) -> None:
        self.result = None


class CpuDecodes:
    """See `DecodeDevice`."""

    can_lead = False

    def __init__(self, limits: EngineLimits, num_groups: int) -> None:
        self._arena = Arena()
        lengths = self.sequence_lengths(limits.max_model_len, exact=limits.exact)
        # On another thread than captures, if loops overlap.
        self.forwards = RecordedForwards(limits, lengths, num_groups)
        self._recorded_bytes = 0

    @property
    def graph_bytes(self) -> int:
        return self._arena.size_bytes + self._recorded_bytes + self.forwards.size_bytes

    @staticmethod
    def batch_sizes(max_num_seqs: int) -> list[int]:
        """Every number up to 32, then in steps of an eighth: padding costs as much as a sequence."""
        sizes, size = [], 1
        while size < max_num_seqs:
            sizes.append(size)
            size += 1 if size < 32 else (1 << (size.bit_length() - 1)) // 8
        return [*sizes, max_num_seqs]

    @staticmethod
    def sequence_lengths(max_model_len: int, *, exact: bool) -> list[int]:
        """A short one, and the segments of attention doubled again and again; results are the same for all."""
        lengths, length = [], SHORT_SEQUENCES
        while length < max_model_len:
            lengths.append(length)
            length = SEGMENT_TOKENS if length < SEGMENT_TOKENS else 2 * length
        return [*lengths, max_model_len]

    def new_buffers(self, upload_bytes: int, num_results: int) -> HostBuffers:
        return HostBuffers(upload_bytes, num_results)

    def upload(self, target: Tensor, buffers: StepBuffers, size_bytes: int) -> None:
        target.array[:size_bytes] = buffers.upload[:size_bytes]

    def write(self, target: Tensor, values: NDArray[Any]) -> None:
        target.array[: len(values)] = values

    def capture(self, work: Callable[[], Tensor], *, num_rows: int, keeps_logits: bool) -> CpuGraph:
        try:
            with record(self._arena) as recording:
                logits = work()
                if not self._arena.holds(logits.address):
                    raise NotRecordableError("the logits are an array that no recorded kernel has made")
        except NotRecordableError as error:
            raise CaptureError(f"cpu: {error}") from error
        except MemoryError as error:
            raise OutOfMemoryError(f"cpu: no memory for a step of {num_rows} sequences") from error
        self._recorded_bytes += recording.size_bytes
        # Whatever follows the logits in a run does not overwrite them, so they need no memory of their own.
        kept = Tensor.over(self._arena.borrowed(logits.array), float32) if keeps_logits else None
        return CpuGraph(recording, kept)

    def launch(self, graph: StepGraph, results: Tensor, num_results: int, buffers: StepBuffers) -> None:
        def run() -> None:
            cast(CpuGraph, graph).recording.replay()
            buffers.results[:num_results] = results.array[:num_results]

        cast(HostBuffers, buffers).pending = run

    def make_room(self, count: int, shape: tuple[int, int], dtype: DType) -> None:
        """Nothing to do: the tensors stay in place."""

    def hold(self, kept: list[Tensor]) -> list[Tensor]:
        """Views that keep the arena alive, and not the arrays' places in it."""
        return [Tensor.over(self._arena.borrowed(each.array), float32) for each in kept]

    def run_forward(
        self, layout: Layout, forward: Forward, draws: SamplingArrays | None = None, *, may_record: bool
    ) -> Computed | None:
        try:
            return self.forwards.run(layout, forward, draws, may_record=may_record)
        except NotRecordableError as error:
            raise CaptureError(f"cpu: {error}") from error

    def release(self) -> None:
        self._arena = Arena()
        self.forwards.clear()
        self._recorded_bytes = 0
