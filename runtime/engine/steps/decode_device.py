"""What decode graphs need of the device that they run on; `decode_gpu` and `decode_cpu` have it."""

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
"""Whether what is so here is so on all ranks."""


def alone(is_so: bool) -> bool:
    """`Agree` of one rank."""
    return is_so


class StepGraph(Protocol):
    """A recorded step. ``result``: the logits that each run leaves behind, where they are kept."""

    @property
    def result(self) -> Tensor | None: ...

    def release(self) -> None:
        """Give its memory back; it is not run any more."""
        ...


class StepBuffers(Protocol):
    """Host memory for one step's way up and down; the next step has another.

    upload   bytes, to be written before `DecodeDevice.upload`
    results  int32, once `wait` has returned
    """

    @property
    def upload(self) -> NDArray[np.uint8]: ...

    @property
    def results(self) -> NDArray[np.int32]: ...

    def wait(self) -> None:
        """Until the step has run. Raises what its kernels found wrong, LaunchError where the device failed."""
        ...


class RecordedPasses(Protocol):
    """Recordings of forward passes that no graph is for.

    num_recorded  that there are
    num_steps     that they have run
    num_failed    that could not be made
    """

    @property
    def num_recorded(self) -> int: ...

    @property
    def num_steps(self) -> int: ...

    @property
    def num_failed(self) -> int: ...


class DecodeDevice(Protocol):
    """Records steps and runs them, one after another.

    can_lead     whether a step may be launched before the one before it was waited for
    graph_bytes  that the recordings hold of the device's memory
    forwards     see `run_forward`
    """

    @property
    def forwards(self) -> RecordedPasses: ...

    @property
    def can_lead(self) -> bool: ...

    @property
    def graph_bytes(self) -> int: ...

    def batch_sizes(self, max_num_seqs: int) -> list[int]:
        """Numbers of places for which there are graphs, ascending, the last being ``max_num_seqs``."""
        ...

    def sequence_lengths(self, max_model_len: int, *, exact: bool) -> list[int]:
        """Longest sequences for which attention is planned, ascending, the last being ``max_model_len``."""
        ...

    def new_buffers(self, upload_bytes: int, num_results: int) -> StepBuffers: ...

    def upload(self, target: Tensor, buffers: StepBuffers, size_bytes: int) -> None:
        """Queue the copy of the first bytes of ``buffers.upload`` to where ``target``, bytes, begins."""
        ...

    def write(self, target: Tensor, values: NDArray[Any]) -> None:
        """Queue the copy of values, which the caller may change, to where ``target``, of their type, begins."""
        ...

    def capture(self, work: Callable[[], Tensor], *, num_rows: int, keeps_logits: bool) -> StepGraph:
        """Record what ``work`` does, which may run once for that. With ``keeps_logits`` the ``num_rows`` logits that it
        returns outlive each run, until the next graph's.

        Raises OutOfMemoryError, LaunchError where the device is lost, DeviceError for what cannot be recorded.
        """
        ...

    def launch(self, graph: StepGraph, results: Tensor, num_results: int, buffers: StepBuffers) -> None:
        """Queue a run of the graph, and the copy of the first of ``results`` to ``buffers.results``."""
        ...

    def make_room(self, count: int, shape: tuple[int, int], dtype: DType) -> None:
        """`hold` will be given so many tensors, at most of this shape. Raises OutOfMemoryError."""
        ...

    def hold(self, kept: list[Tensor]) -> list[Tensor]:
        """Called in what is captured, with results of a row a place, which are referred to until that is over: where
        they are behind each run, until the next graph's."""
        ...

    def run_forward(
        self, layout: Layout, forward: Forward, draws: SamplingArrays | None = None, *, may_record: bool
    ) -> Computed | None:
        """What ``forward`` makes of a step that no graph is for, and what is drawn from its logits by ``draws``, which
        have no mask; at the latest where it is looked at, and valid until the next one. A device may replay a recording
        of the same shape and, with ``may_record``, make one on the way. None, before anything was done: the device
        would have to record it. Draws of more than a recording has room for are not drawn.

        Raises CaptureError, before anything was done, for what cannot be done this way."""
        ...

    def release(self) -> None:
        """Give back what graphs share; none is run any more."""
        ...
