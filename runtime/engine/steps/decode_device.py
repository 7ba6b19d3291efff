"""The device interface of decode graphs, implemented by `decode_gpu` and `decode_cpu`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from runtime.batch import Batch
from runtime.dtype import DType
from runtime.engine.steps.draw_inputs import Computed
from runtime.engine.steps.ragged import Layout
from runtime.sampling_arrays import SamplingArrays
from runtime.tensor.tensor import Tensor

Forward: TypeAlias = Callable[[Batch], Computed]
"""A model's forward pass."""

Agree: TypeAlias = Callable[[bool], bool]
"""Whether a condition holds on all ranks, given this one's."""


def alone(is_so: bool) -> bool:
    """`Agree` of one rank."""
    return is_so


class StepGraph(Protocol):
    """A recorded step. ``result`` has the logits of each run, if they are kept."""

    @property
    def result(self) -> Tensor | None: ...

    def release(self) -> None:
        """Free its memory; it is not run any more."""
        ...


class StepBuffers(Protocol):
    """Host memory for one step's upload and download; the next step has another.

    upload   bytes, to be written before `DecodeDevice.upload`
    results  int32, valid once `wait` has returned
    """

    @property
    def upload(self) -> NDArray[np.uint8]: ...

    @property
    def results(self) -> NDArray[np.int32]: ...

    def wait(self) -> None:
        """Wait until the step has run. Raises its kernels' errors, and LaunchError if the device failed."""
        ...


class RecordedPasses(Protocol):
    """Recordings of forward passes that decode graphs do not cover.

    num_recorded  recordings
    num_steps     steps run from them
    num_failed    failed recordings
    """

    @property
    def num_recorded(self) -> int: ...

    @property
    def num_steps(self) -> int: ...

    @property
    def num_failed(self) -> int: ...


class DecodeDevice(Protocol):
    """Records steps and runs them, one after another.

    can_lead     whether a step may be launched before the previous one was waited for
    graph_bytes  device memory held by the recordings
    forwards     see `run_forward`
    """

    @property
    def forwards(self) -> RecordedPasses: ...

    @property
    def can_lead(self) -> bool: ...

    @property
    def graph_bytes(self) -> int: ...

    def batch_sizes(self, max_num_seqs: int) -> list[int]:
        """Numbers of places that get graphs, ascending, up to ``max_num_seqs``."""
        ...

    def sequence_lengths(self, max_model_len: int, *, exact: bool) -> list[int]:
        """Sequence lengths that attention is planned for, ascending, up to ``max_model_len``."""
        ...

    def new_buffers(self, upload_bytes: int, num_results: int) -> StepBuffers: ...

    def upload(self, target: Tensor, buffers: StepBuffers, size_bytes: int) -> None:
        """Queue the copy of the first bytes of ``buffers.upload`` to the start of ``target``, bytes."""
        ...

    def write(self, target: Tensor, values: NDArray[Any]) -> None:
        """Queue the copy of values, which the caller may then change, to the start of ``target``, of their type."""
        ...

    def capture(self, work: Callable[[], Tensor], *, num_rows: int, keeps_logits: bool) -> StepGraph:
        """Record ``work``, which may run once for that. With ``keeps_logits`` the ``num_rows`` logits that it returns
        outlive each run, until the next graph's.

        Raises OutOfMemoryError, LaunchError if the device is lost, DeviceError for work that cannot be recorded.
        """
        ...

    def launch(self, graph: StepGraph, results: Tensor, num_results: int, buffers: StepBuffers) -> None:
        """Queue a run of the graph, and the copy of the first of ``results`` to ``buffers.results``."""
        ...

    def make_room(self, count: int, shape: tuple[int, int], dtype: DType) -> None:
        """Prepare for `hold` with so many tensors, at most of this shape. Raises OutOfMemoryError."""
        ...

    def hold(self, kept: list[Tensor]) -> list[Tensor]:
        """Called inside a capture, with results of a row a place that are referenced until its end. Returns the tensors
        that have them after each run, until the next graph's."""
        ...

    def run_forward(
        self, layout: Layout, forward: Forward, draws: SamplingArrays | None = None, *, may_record: bool
    ) -> Computed | None:
        """The result of ``forward`` for a step without a graph, and samples from its logits by ``draws``, which have no
        mask; possibly computed only when read, and valid until the next one. A device may replay a recording of the
        same shape and, with ``may_record``, make one on the way. Returns None, before any work, if the device would
        have to record it. If a recording lacks room for the draws, they are not sampled.

        Raises CaptureError, before any work, if it cannot be done this way."""
        ...

    def release(self) -> None:
        """Free the memory that graphs share; none is run any more."""
        ...
