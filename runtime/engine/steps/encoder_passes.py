"""Recordings of an encoder's passes on the CPU, by shape: launched from Python, a short text takes twice as long.

Pages, inputs and results lie at fixed addresses. Passes with more tokens than a step has are not recorded: their
results would hold memory, and they do not wait for Python.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime import ops
from runtime.batch import Batch
from runtime.device.errors import CaptureError
from runtime.engine.limits import EngineLimits
from runtime.engine.steps.executor import BidirectionalModel, Model
from runtime.engine.steps.layout import StepLayout
from runtime.engine.steps.recorder import Recorder, Recording, Recordings
from runtime.kv.cache import KVCache, KVCacheSpec, LayerCache
from runtime.tensor.tensor import Tensor


class EncoderInputs(NamedTuple):
    """An encoder's batch has these besides its layout, each number a token's (int32).

    until  where the tokens end that it sees, by window
    types  0, or 1 in the second of two texts
    """

    until: dict[int | None, NDArray[np.int32]]
    types: NDArray[np.int32]

    def give(self, batch: Batch) -> None:
        """Set the batch's fields, over these arrays on the CPU."""
        device = batch.token_ids.device
        batch.until_by_window = {window: Tensor.from_numpy(each).to(device) for window, each in self.until.items()}
        batch.token_types = Tensor.from_numpy(self.types).to(device)


class _Shape(NamedTuple):
    """`length`: of the longest text, rounded up. `pooling`: of the result's rows; "" for those of all tokens."""

    num_tokens: int
    num_seqs: int
    length: int
    pooling: str


@dataclass(slots=True, eq=False)
class _Recorded:
    """A recording with its inputs, which are those of texts of these `lengths`."""

    recording: Recording
    layout: StepLayout
    inputs: EncoderInputs
    lengths: tuple[int, ...]

    def release(self) -> None:
        self.recording.release()

    def replay(self) -> Tensor:
        self.recording.replay()
        result: Tensor = self.recording.result
        return result


def pages_of(model: Model, spec: KVCacheSpec, num_blocks: Sequence[int]) -> KVCache:
    """Pages with so many blocks in each pool, or one if the model never writes to them."""
    dtypes = {layer.dtype or spec.dtype for layer in spec.layers if isinstance(layer, LayerCache)}
    if isinstance(model, BidirectionalModel) and not any(map(model.needs_pages, dtypes)):
        num_blocks = [1] * len(num_blocks)
    return KVCache(spec, num_blocks)


class EncoderPasses:
    """The recorded passes of one model. Belongs to the thread that runs passes.

    spec  of the model's pages
    """

    def __init__(self, model: Model, limits: EngineLimits, recorder: Recorder) -> None:
        self._model, self._limits, self._recorder = model, limits, recorder
        self.spec = model.kv_cache_spec(limits.block_size)
        self._lengths = recorder.pass_lengths(limits.max_model_len, exact=limits.exact)
        self._recordings: Recordings[_Shape, _Recorded] = Recordings(recorder.most_kept)
        self._pages: KVCache | None = None

    @property
    def num_recorded(self) -> int:
        """Recordings that are kept."""
        return len(self._recordings.kept)

    def takes(self, lengths: Sequence[int]) -> bool:
        """Whether a pass over texts of these lengths is recorded."""
        fits = sum(lengths) <= self._limits.max_num_batched_tokens and len(lengths) <= self._limits.max_num_seqs
        return fits and not self._recordings.has_given_up

    @property
    def pages(self) -> KVCache:
        """Room for every pass that is recorded."""
        if self._pages is None:
            size, spec = self._limits.block_size, self.spec
            most = self._limits.max_num_batched_tokens // size + self._limits.max_num_seqs
            counts = [most * spec.group_pools.count(pool) for pool in range(len(spec.block_bytes))]
            self._pages = pages_of(self._model, spec, counts)
        return self._pages

    def _shape(self, lengths: tuple[int, ...], pooling: str) -> _Shape:
        longest = self._lengths[bisect_left(self._lengths, max(lengths))]
        return _Shape(sum(lengths), len(lengths), longest, pooling)

    def run_again(
        self, lengths: tuple[int, ...], token_ids: Sequence[NDArray[np.int32]],
        types: Sequence[NDArray[np.int32] | None], pooling: str,
    ) -> Tensor | None:  # fmt: skip
        """`run` without a layout, if the recording of this shape was last run for texts of the same lengths; else
        None."""
        found = self._recordings.take(self._shape(lengths, pooling))
        if found is None or found.lengths != lengths:
            return None
        at, all_ids, all_types = 0, found.layout.arrays["token_ids"], found.inputs.types
        for length, ids, given in zip(lengths, token_ids, types, strict=True):
            all_ids[at : at + length] = ids
            all_types[at : at + length] = 0 if given is None else given
            at += length
        return found.replay()

    def run(self, lengths: tuple[int, ...], layout: StepLayout, inputs: EncoderInputs, pooling: str) -> Tensor:
        """The hidden states, or a row of each text by this ``pooling``, valid until the next run. Raises what the
        model's forward pass raises."""
        shape = self._shape(lengths, pooling)
        found = self._recordings.take(shape)
        if found is None:
            found = self._record(shape, lengths, layout, inputs)
            if found is None:
                batch = layout.batch(self._model.device, exact=self._limits.exact)
                inputs.give(batch)
                return self._forward(batch, self.pages, pooling)
        else:
            found.lengths = ()  # an interrupt may leave arrays of both
            for name, target in found.layout.arrays.items():
                _write(target, layout.arrays[name])
            for window, target in found.inputs.until.items():
                target[:] = inputs.until[window]
            found.inputs.types[:] = inputs.types
            found.lengths = lengths
        return found.replay()

    def _forward(self, batch: Batch, pages: KVCache, pooling: str) -> Tensor:
        hidden = self._model.forward(batch, pages)
        return ops.pooled_texts(hidden, batch.query_start, pooling) if pooling else hidden

    def _record(
        self, shape: _Shape, lengths: tuple[int, ...], layout: StepLayout, inputs: EncoderInputs
    ) -> _Recorded | None:  # fmt: skip
        """Returns None, now and later, if the model cannot be recorded."""
        if self._recordings.has_given_up:
            return None
        arrays = {name: np.array(array) for name, array in layout.arrays.items()}
        tables = layout.arrays["block_tables"]
        arrays["block_tables"] = np.zeros((*tables.shape[:2], self._limits.table_width(shape.length)), tables.dtype)
        _write(arrays["block_tables"], tables)
        longest = shape.num_tokens - shape.num_seqs + 1
        own = StepLayout(arrays, min(longest, shape.length), shape.length)
        kept = EncoderInputs({window: each.copy() for window, each in inputs.until.items()}, inputs.types.copy())
        batch = own.batch(self._model.device, exact=self._limits.exact)
        kept.give(batch)
        pages = self.pages

        def work() -> Tensor:
            return self._recorder.outlive(self._forward(batch, pages, shape.pooling))

        try:
            recording = self._recorder.record(work)
        except CaptureError as error:
            self._recordings.give_up("this model's passes are not recorded", error)
            return None
        found = _Recorded(recording, own, kept, lengths)
        self._recordings.add(shape, found)
        return found


def _write(target: NDArray[Any], given: NDArray[Any]) -> None:
    """Copies a step's array to a recording's, which may have wider rows."""
    if target.shape == given.shape:
        target[...] = given
    else:
        width = min(given.shape[-1], target.shape[-1])
        target[..., :width] = given[..., :width]
        target[..., width:] = 0
