"""Decode steps as recorded graphs: all kernels of a step, the draw among them, in one launch.

There is a graph for a number of places, for sequences up to a length (attention cuts long ones), with and without
penalties, with and without the logits kept for log probabilities. It is recorded when it was missing for the first
time: the step that missed it runs without. All share one pool, and read and write `DecodeArrays`. What they hold no
place for runs without them: prompts, logit bias, allowed ids, and tokens that ``min_tokens`` forbids. What a graph is
on which device stands in `decode_gpu` and `decode_cpu`.

A step may be started while the one before it runs, if a graph runs that, too: it takes its tokens where they are drawn.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from runtime import ops
from runtime.device.device import Device
from runtime.device.errors import CaptureError, LaunchError
from runtime.engine.config import EngineLimits
from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.steps.decode_arrays import TAIL_WORDS, DecodeArrays, Placement
from runtime.engine.steps.decode_device import DecodeDevice, Forward, StepBuffers, StepGraph
from runtime.engine.steps.ragged import Layout
from runtime.engine.steps.sampler import Sampler
from runtime.errors import DeviceError, OutOfMemoryError
from runtime.kv.cache import KVCache
from runtime.tensor.tensor import Tensor

if TYPE_CHECKING:
    from runtime.engine.steps.runner import Model

logger = logging.getLogger("xserv.engine")

MOST_LISTED = TAIL_WORDS // 2
"""Tokens that the penalties of one step may count; with more it runs without a graph."""


def open_decode_device(device: Device, limits: EngineLimits, vocab_size: int) -> DecodeDevice:
    """What graphs over ``vocab_size`` ids need of this device."""
    if device.kind == "cpu":
        from runtime.engine.steps.decode_cpu import CpuDecodes

        return CpuDecodes(limits)
    from runtime.engine.steps.decode_gpu import GpuDecodes  # brings the driver, which the cpu does without

    return GpuDecodes(device, limits, vocab_size)


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What a graph is for."""

    num_places: int
    max_seq_len: int
    has_penalties: bool
    keeps_logits: bool


@dataclass(slots=True)
class DecodeStep:
    """A step that a graph will run."""

    key: GraphKey
    rows: NDArray[np.intp]
    starts: NDArray[np.int64]
    placement: Placement


class DecodeRun:
    """A step that a graph runs."""

    def __init__(self, graphs: DecodeGraphs, step: DecodeStep, buffers: StepBuffers, logits: Tensor | None) -> None:
        self.places = step.placement.places
        self.logits = logits
        """``[num_places, vocab_size]``, where they are kept: until the next graph is launched."""
        self._graphs = graphs
        self._num_places = step.key.num_places
        self._buffers = buffers

    def wait(self) -> tuple[list[int], list[bool]]:
        """Of each sequence the drawn id, and whether there is one. Raises LaunchError where the device failed,
        InvalidArgumentError where a token was outside the vocabulary."""
        try:
            self._buffers.wait()
        finally:
            self._graphs.ended(self)
        count = self._num_places
        results: list[int] = self._buffers.results[: 2 * count + 1].tolist()
        if self._graphs.device.kind != "cpu" and results[2 * count]:  # the cpu's kernels check ids where they are
            ops.check_ids(self._graphs.device)
        places: list[int] = self.places.tolist()
        return [results[place] for place in places], [results[count + place] == 0 for place in places]


@dataclass(frozen=True, slots=True)
class _Members:
    """The sequences of a step, as far as it stays the same from step to step.

    is_plain  none of them has penalties or anything that may forbid ids
    """

    rows: list[int]
    row_array: NDArray[np.intp]
    num_places: int
    keeps_logits: bool
    is_plain: bool


class DecodeGraphs:
    """The graphs of one model and KV cache. Belongs to the engine's loop.

    num_steps  that graphs have run
    """

    def __init__(self, model: Model, kv_cache: KVCache, limits: EngineLimits, sampler: Sampler) -> None:
        self.device = model.device
        self.num_steps = 0
        self._model = model
        self._kv_cache = kv_cache
        self._limits = limits
        self._sampler = sampler
        self._runs_on = runs_on = open_decode_device(model.device, limits, sampler.vocab_size)
        self._sizes = runs_on.batch_sizes(limits.max_num_seqs)
        self._lengths = runs_on.sequence_lengths(limits.max_model_len, exact=limits.exact)
        self._graphs: dict[GraphKey, StepGraph] = {}
        self._wanted: GraphKey | None = None
        self._has_given_up = False  # of graphs of decodes
        self._cannot_record = False  # anything
        self._arrays: DecodeArrays | None = None  # with the first graph
        self._wants_logprobs = np.zeros(limits.max_num_seqs, np.bool_)  # by row
        self._drawn_at = np.full(limits.max_num_seqs, -1, np.intp)  # by row: the place in the latest step
        self._running: DecodeRun | None = None
        self._members: _Members | None = None  # of the step prepared last, while its rows are its sequences'

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    @property
    def reserved_bytes(self) -> int:
        """Of the device's memory, for all that is recorded and its arrays."""
        return self._runs_on.graph_bytes + (0 if self._arrays is None else self._arrays.size_bytes)

    def load(self, row: int, sequence: Sequence) -> None:
        """The sequence was given the row."""
        self._wants_logprobs[row] = sequence.request.params.logprobs is not None
        self._members = None
        if self._arrays is not None:
            self._arrays.forget(row)

    def prepare(self, sequences: list[Sequence], rows: list[int], starts: NDArray[np.int64]) -> DecodeStep | None:
        """Lay out the step that computes the token at ``starts [n]`` of each sequence; None: it has to run without a
        graph."""
        members = self._members
        if members is None or members.rows != rows:
            members = self._members = self._members_of(rows)
        row_array = members.row_array
        num_listed = None
        if not members.is_plain:
            if self._sampler.masks(sequences, row_array, starts + 1 - self._sampler.num_prompt_tokens[row_array]):
                return None
            num_listed = self._sampler.num_penalty_ids(sequences, row_array)
            if num_listed is not None and num_listed > MOST_LISTED:
                return None
        key = GraphKey(
            num_places=members.num_places,
            max_seq_len=self._lengths[bisect_left(self._lengths, int(starts.max()) + 1)],
            has_penalties=num_listed is not None,
            keeps_logits=members.keeps_logits,
        )
        if key not in self._graphs:
            self._wanted = None if self._has_given_up else key
            return None
        assert self._arrays is not None
        return DecodeStep(key, row_array, starts, self._arrays.place(sequences, rows, starts, key.num_places))

    def run_forward(self, layout: Layout, forward: Forward) -> tuple[Tensor, Tensor | None] | None:
        """See `DecodeDevice.run_forward`. None: it has to be run at once, since it cannot be recorded."""
        if self._cannot_record:
            return None
        try:
            return self._runs_on.run_forward(layout, forward)
        except CaptureError as error:
            self._say_what_cannot_be_recorded(error)
            return None

    def can_lead(self, step: DecodeStep) -> bool:
        """Whether the step may be started while the latest one runs: what it lacks is on the device, and what that one
        still needs there it leaves alone."""
        running = self._running
        return (
            self._runs_on.can_lead
            and running is not None
            and running.logits is None
            and not step.key.has_penalties
        )

    def start(self, step: DecodeStep, sequences: list[Sequence]) -> DecodeRun:
        """Queue the step: one copy, one launch, one copy."""
        assert self._arrays is not None
        assert self._running is None or self.can_lead(step), "the step before has to be waited for"
        self._kv_cache.wait_for_arrivals()
        sources = lists = None
        if self._running is not None:
            is_known = np.array([sequence.num_tokens for sequence in sequences]) > step.starts
            sources = np.where(is_known, -1, self._drawn_at[step.rows])
        if step.key.has_penalties:
            lists = self._sampler.penalty_lists(sequences, step.rows)
        graph = self._graphs[step.key]
        token_ids = [sequence.last_token_id for sequence in sequences]
        buffers = self._arrays.send(step.placement, token_ids, sources, lists)
        self._arrays.launch(graph, step.placement, buffers)
        self._drawn_at[step.rows] = step.placement.places
        self._running = DecodeRun(self, step, buffers, graph.result)
        self.num_steps += 1
        return self._running

    def ended(self, run: DecodeRun) -> None:
        """Called by a run that was waited for."""
        if self._running is run:
            self._running = None

    def record(self) -> None:
        """Record the graph that was missing last, if there is one and none runs. Waits for the device.

        Where its memory is not to be had, or the model does what cannot be recorded, all steps without a graph stay so.
        """
        key = self._wanted
        if key is None or self._running is not None:
            return
        self._wanted = None
        try:
            self._graphs[key] = self._recorded(key)
        except OutOfMemoryError as error:
            self._has_given_up = True
            logger.warning(
                "no more decode graphs: the bytes for one of %d sequences are not to be had, %d graphs hold %s: %s",
                key.num_places, len(self._graphs), f"{self.reserved_bytes:,}", error,
            )  # fmt: skip
        except LaunchError:  # the device is lost
            raise
        except DeviceError as error:  # as of work that cannot be recorded
            self._say_what_cannot_be_recorded(error)

    def release(self) -> None:
        """Give the memory back; no step is started any more."""
        self._has_given_up = True
        for graph in self._graphs.values():
            graph.release()
        self._graphs.clear()
        self._runs_on.release()
        self._arrays = self._running = self._wanted = None

    def _say_what_cannot_be_recorded(self, error: DeviceError) -> None:
        """Once: nothing is recorded any more."""
        self._has_given_up = self._cannot_record = True
        logger.warning("the model's operations cannot be recorded, each is done at once from now on: %s", error)

    def _members_of(self, rows: list[int]) -> _Members:
        row_array = np.array(rows, np.intp)
        return _Members(
            rows,
            row_array,
            num_places=self._sizes[bisect_left(self._sizes, len(rows))],
            keeps_logits=bool(self._wants_logprobs[row_array].any()),
            is_plain=self._sampler.are_plain(row_array),
        )

    def _recorded(self, key: GraphKey) -> StepGraph:
        if self._arrays is None:
            self._arrays = DecodeArrays(self.device, self._runs_on, self._limits, self._sampler)
        self._kv_cache.wait_for_arrivals()
        self._arrays.clear()
        return self._runs_on.capture(partial(self._run, key), num_rows=key.num_places, keeps_logits=key.keeps_logits)

    def _run(self, key: GraphKey) -> Tensor:
        """What is recorded. Its result is the logits."""
        arrays = self._arrays
        assert arrays is not None
        arrays.take_inputs(key.num_places)
        hidden = self._model.forward(arrays.batch(key.num_places, key.max_seq_len), self._kv_cache)
        logits = self._model.compute_logits(hidden)
        arrays.draw(logits, has_penalties=key.has_penalties)
        return logits
