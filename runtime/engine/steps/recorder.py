"""Recorders: what records the work of a step on a device, replays it, and copies its inputs and results.

`recorder_cpu` and `recorder_gpu` implement it. Decode graphs, forward passes with their samples, and drafters each have
a recorder, whose recordings share memory; a key finds a recording (`Recordings`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from runtime.batch import Batch
from runtime.device.device import Device
from runtime.device.errors import LaunchError
from runtime.dtype import DType
from runtime.engine.steps.recorder_cpu import CpuRecorder
from runtime.errors import DeviceError, OutOfMemoryError
from runtime.later import later
from runtime.tensor.tensor import Tensor

_gpu = later("runtime.engine.steps.recorder_gpu")  # imports numba-cuda, which the CPU does not need

logger = logging.getLogger("xserv.engine")

T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)
Kept = TypeVar("Kept", bound="Releasable")


class Computed(NamedTuple):
    """The results of a model's forward pass, and the samples of a recorded step.

    hidden  [num_tokens, hidden_size]; None on a stage that another one follows, since later passes overwrite what it
            has sent
    logits  [num_samples, vocab_size], or None if not needed
    sampled int32, as `ops.sample_into` writes it, n at least the step's samples; None if nothing was sampled
    kept    [num_tokens, hidden_size] after each kept layer
    """

    hidden: Tensor | None
    logits: Tensor | None
    sampled: Tensor | None = None
    kept: tuple[Tensor, ...] = ()


Forward: TypeAlias = Callable[[Batch], Computed]
"""A model's forward pass."""

Agree: TypeAlias = Callable[[bool], bool]
"""Whether a condition holds on all ranks, given this one's."""


def alone(is_so: bool) -> bool:
    """`Agree` of one rank."""
    return is_so


class Releasable(Protocol):
    """A recording, perhaps with what belongs to it."""

    def release(self) -> None:
        """Free its memory; it is not run any more."""
        ...


class Recording(Releasable, Protocol):
    """Recorded work. ``result`` is what it returned; each replay overwrites it."""

    @property
    def result(self) -> Any: ...

    def replay(self) -> None:
        """Run it, or queue it."""
        ...


class StepBuffers(Protocol):
    """Host memory for one step's upload and download; the next step has another.

    upload   bytes, to be written before `Recorder.upload`
    results  int32, valid once `wait` has returned
    """

    @property
    def upload(self) -> NDArray[np.uint8]: ...

    @property
    def results(self) -> NDArray[np.int32]: ...

    def wait(self) -> None:
        """Wait until the step has run. Raises its kernels' errors, and LaunchError if the device failed."""
        ...


class Stopwatch(Protocol):
    """The time of a pass on the device beside that of its launches."""

    def stop(self) -> None:
        """All of the pass is launched."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether the device has finished the pass."""
        ...

    def waited(self, factor: float) -> bool:
        """Whether the pass is over and took at most ``factor`` times as long as its launches."""
        ...


class Recorder(Protocol):
    """Records work on a device and runs it, one recording after another.

    queues      whether a replay returns at once, so that more may be queued; else it runs when it is waited for
    most_kept   recordings of forward passes; the least recently used one is dropped first
    size_bytes  device memory held by all recordings and `room`s
    """

    device: Device

    @property
    def queues(self) -> bool: ...

    @property
    def most_kept(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...

    def batch_sizes(self, max_num_seqs: int) -> list[int]:
        """Numbers of places that get decode graphs, ascending, up to ``max_num_seqs``."""
        ...

    def sequence_lengths(self, max_model_len: int, *, exact: bool) -> list[int]:
        """Sequence lengths that attention is planned for in decode graphs, ascending, up to ``max_model_len``."""
        ...

    def pass_lengths(self, max_model_len: int, *, exact: bool) -> list[int]:
        """The same for forward passes with several tokens of a sequence."""
        ...

    def new_buffers(self, upload_bytes: int, num_results: int) -> StepBuffers: ...

    def upload(self, target: Tensor, buffers: StepBuffers, size_bytes: int) -> None:
        """Queue the copy of the first bytes of ``buffers.upload`` to the start of ``target``, bytes."""
        ...

    def write(self, target: Tensor, values: NDArray[Any]) -> None:
        """Queue the copy of values, which the caller may then change, to the start of ``target``, of their type."""
        ...

    def room(self, name: str, shape: tuple[int, int], dtype: DType) -> Tensor | None:
        """Memory for `outlive`, one for each name and shape; None if results outlive a replay anyway. Not during a
        recording. Raises OutOfMemoryError."""
        ...

    def outlive(self, tensor: Tensor, room: Tensor | None = None) -> Tensor:
        """Called inside the recorded work, with a result that is referenced until its end. Returns the tensor that has
        it after each replay: until the next replay with a ``room``, which has its shape, else until any other's."""
        ...

    def record(self, work: Callable[[], Any]) -> Recording:
        """Record ``work``, which may run once for that.

        Raises OutOfMemoryError, LaunchError if the device is lost, DeviceError for work that cannot be recorded.
        """
        ...

    def replay(self, recording: Recording, passed: Callable[[int], None] | None) -> None:
        """Run it, or queue it. ``passed`` is called with the number of each mark that it reaches, if any."""
        ...

    def launch(self, recording: Recording, results: Tensor, num_results: int, buffers: StepBuffers) -> None:
        """Queue a replay, and the copy of the first of ``results`` to ``buffers.results``."""
        ...

    @property
    def mark(self) -> Callable[[int], None] | None:
        """A function that leaves a mark with a number in the work that is being recorded. None for a device whose
        replay is one launch, which has no marks."""
        ...

    def stopwatch(self) -> Stopwatch | None:
        """Times a pass that begins now. None if every pass is worth recording when its shape first comes."""
        ...

    def finish(self, most_s: float | None = None) -> None:
        """Wait until the device has done all queued work; an emulated one does nothing before it is waited for. With a
        timeout errors are ignored."""
        ...

    def release(self) -> None:
        """Free the memory that recordings share; none is run any more."""
        ...


def open_recorder(device: Device) -> Recorder:
    """A recorder with memory of its own."""
    if device.kind == "cpu":
        return CpuRecorder()
    recorder: Recorder = _gpu.GpuRecorder(device)
    return recorder


class Recordings(Generic[Key, Kept]):
    """Recordings of one kind of work by key, at most ``most``. Belongs to the engine's loop.

    num_failed     failed recordings
    has_given_up   none is made any more
    cannot_record  since the work cannot be recorded
    """

    def __init__(self, most: int | None = None) -> None:
        self.kept: dict[Key, Kept] = {}  # most recently used last
        self.num_failed = 0
        self.has_given_up = self.cannot_record = False
        self._most = most

    def take(self, key: Key) -> Kept | None:
        """The recording, which becomes the most recently used."""
        found = self.kept.pop(key, None)
        if found is not None:
            self.kept[key] = found
        return found

    def add(self, key: Key, recording: Kept) -> None:
        """The least recently used one is dropped if there are too many."""
        self.kept[key] = recording
        if self._most is not None and len(self.kept) > self._most:
            self.kept.pop(next(iter(self.kept))).release()

    def tried(self, work: Callable[[], T], no_memory: str, *, is_last: bool, cannot: str) -> T | None:
        """The result of ``work``, which is part of a recording, or None if it fails for a reason other than a lost
        device. Without memory (``no_memory``) or after the last try (``cannot``) it gives up and logs these words."""
        try:
            return work()
        except OutOfMemoryError as error:
            self.give_up(no_memory, error)
        except LaunchError:  # the device is lost
            raise
        except DeviceError as error:  # such as work that cannot be recorded, or that another thread interrupted
            self.num_failed += 1
            if is_last:
                self.cannot_record = True
                self.give_up(cannot, error)
        return None

    def give_up(self, why: str, error: Exception) -> None:
        """Make none any more, and log the reason."""
        self.has_given_up = True
        logger.warning("%s: %s", why, error)

    def clear(self) -> None:
        """Free them all."""
        for recording in self.kept.values():
            recording.release()
        self.kept.clear()
