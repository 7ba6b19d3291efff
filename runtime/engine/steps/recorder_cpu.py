"""Recordings on the CPU: launches in shared memory, replayed by one compiled call.

A step runs when its result is waited for: on the executor's own thread if the loop is overlapped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_kernels.cpu.attention.kernel import SEGMENT_TOKENS
from numba_kernels.cpu.running.arena import Arena
from numba_kernels.cpu.running.recording import NotRecordableError, mark, record
from numba_kernels.cpu.running.recording import Recording as Launches
from runtime.device.device import CPU
from runtime.device.errors import CaptureError
from runtime.dtype import DType
from runtime.errors import OutOfMemoryError
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


class CpuRecording:
    """See `Recording`."""

    def __init__(self, recorder: CpuRecorder, launches: Launches, result: Any) -> None:
        self._recorder = recorder
        self._size_bytes = launches.size_bytes
        self.replay = launches.replay
        self.result = result

    def release(self) -> None:
        self._recorder.recorded_bytes -= self._size_bytes
        self.result = None


class CpuRecorder:
    """See `Recorder`. A recording is about 100 KB."""

    device = CPU
    queues = False
    most_kept = 64

    def __init__(self) -> None:
        self._arena = Arena()
        self.recorded_bytes = 0

    @property
    def size_bytes(self) -> int:
        return self._arena.size_bytes + self.recorded_bytes

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

    pass_lengths = sequence_lengths

    def new_buffers(self, upload_bytes: int, num_results: int) -> HostBuffers:
        return HostBuffers(upload_bytes, num_results)

    def upload(self, target: Tensor, buffers: Any, size_bytes: int) -> None:
        target.array[:size_bytes] = buffers.upload[:size_bytes]

    def write(self, target: Tensor, values: NDArray[Any]) -> None:
        if target.array.ctypes.data != values.ctypes.data:
            target.array[: len(values)] = values

    def room(self, name: str, shape: tuple[int, int], dtype: DType) -> None:
        """Whatever follows a result in a replay does not overwrite it."""

    def outlive(self, tensor: Tensor, room: Tensor | None = None) -> Tensor:
        """A view that keeps the arena alive, and not the array's place in it."""
        try:
            return Tensor.over(self._arena.borrowed(tensor.array), tensor.dtype)
        except ValueError as error:
            raise NotRecordableError("a result is an array that no recorded kernel has made") from error

    def record(self, work: Callable[[], Any]) -> CpuRecording:
        try:
            with record(self._arena) as launches:
                result = work()
        except NotRecordableError as error:
            raise CaptureError(f"cpu: {error}") from error
        except MemoryError as error:
            raise OutOfMemoryError("cpu: no memory for a recorded step") from error
        self.recorded_bytes += launches.size_bytes
        return CpuRecording(self, launches, result)

    @property
    def mark(self) -> Callable[[int], None]:
        return mark

    def replay(self, recording: Any, passed: Callable[[int], None] | None) -> None:
        recording.replay(passed)

    def launch(self, recording: Any, results: Tensor, num_results: int, buffers: Any) -> None:
        def run() -> None:
            recording.replay()
            buffers.results[:num_results] = results.array[:num_results]

        buffers.pending = run

    def stopwatch(self) -> None:
        """Recording a pass takes no longer than launching it."""

    def finish(self, most_s: float | None = None) -> None:
        """Nothing is queued."""

    def release(self) -> None:
        self._arena = Arena()
        self.recorded_bytes = 0
