"""Decode steps as recorded graphs: all kernels of a step, sampling included, in one launch.

There is a graph for a number of places, for sequences up to a length (attention splits long ones), with and without
penalties, with and without the logits kept for log probabilities. It is recorded after the first step that needs it,
which runs eagerly. All share one pool, and read and write `DecodeArrays`. Unsupported steps run
eagerly: those with prompts, logit bias, allowed ids, or tokens that ``min_tokens`` forbids.
`decode_gpu` and `decode_cpu` implement graphs for their devices.

A step may start while the previous one runs, if a graph runs that, too: it reads the tokens where they are sampled.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime import ops
from runtime.communicator import RankCommunicator, ends_here
from runtime.device.device import Device
from runtime.device.errors import CaptureError, LaunchError
from runtime.dtype import DType
from runtime.engine.limits import EngineLimits
from runtime.engine.steps.decode_arrays import TAIL_WORDS, DecodeArrays, Placement
from runtime.engine.steps.decode_device import Agree, DecodeDevice, Forward, StepBuffers, StepGraph, alone
from runtime.engine.steps.draw_inputs import Computed
from runtime.engine.steps.executor import Model
from runtime.engine.steps.ragged import Layout, largest
from runtime.engine.steps.rows import Rows
from runtime.engine.steps.step_input import StepInput
from runtime.errors import DeviceError, OutOfMemoryError
from runtime.kv.cache import KVCache
from runtime.sampling_arrays import SamplingArrays
from runtime.tensor.tensor import Tensor

logger = logging.getLogger("xserv.engine")

MOST_LISTED = TAIL_WORDS // 2
"""Tokens that the penalties of one step may count; with more it runs eagerly."""


def open_decode_device(
    device: Device, limits: EngineLimits, vocab_size: int, kv_cache: KVCache, agree: Agree = alone
) -> DecodeDevice:
    """The device interface for graphs over ``vocab_size`` ids and this KV cache; ``agree`` is among ranks."""
    if device.kind == "cpu":
        from runtime.engine.steps.decode_cpu import CpuDecodes

        return CpuDecodes(limits, len(kv_cache.spec.group_kinds))
    from runtime.engine.steps.decode_gpu import GpuDecodes  # imports the driver, which the CPU does not need

    return GpuDecodes(device, limits, vocab_size, kv_cache, agree)


class GraphKey(msgspec.Struct, frozen=True, gc=False):
    """The properties of a step that determine its graph."""

    num_places: int
    max_seq_len: int
    has_penalties: bool
    keeps_logits: bool


class DecodeRun:
    """A step that a graph runs."""

    def __init__(
        self,
        graphs: DecodeGraphs,
        placement: Placement,
        buffers: StepBuffers,
        logits: Tensor | None,
        kept: list[Tensor],
        *,
        number: int,
        keeps_outputs: bool,
    ) -> None:
        self.places = placement.places
        self.logits = logits
        """``[num_places, vocab_size]``, if they are kept: until the next graph is launched."""
        self.kept = kept
        """Hidden states after the kept layers, a row a place: until the next graph is launched."""
        self.number = number
        self.keeps_outputs = keeps_outputs
        self._graphs = graphs
        self._num_places = placement.num_places
        self._buffers = buffers

    def wait(self) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """The sampled id of each row, and whether it is valid; empty if a later stage samples. Raises LaunchError if
        the device failed, InvalidArgumentError if a token was outside the vocabulary."""
        try:
            self._buffers.wait()
        finally:
            self._graphs.ended(self)
        count, results = self._num_places, self._buffers.results
        if not self._graphs.draws:
            return results[:0], results[:0] == 0
        if self._graphs.device.kind != "cpu" and results[2 * count]:  # the CPU's kernels check ids themselves
            ops.check_ids(self._graphs.device)
        return results[self.places], results[count:][self.places] == 0


@dataclass(frozen=True, slots=True)
class _Members:
    """The rows of a step, reused while the next steps have the same ones.

    version   the rows', when this was made
    is_plain  none of them has penalties or anything that may forbid ids
    keeps_outputs  one of them has parameters that depend on its output
    """

    rows: NDArray[np.int64]
    version: int
    num_places: int
    keeps_logits: bool
    is_plain: bool
    keeps_outputs: bool


class DecodeGraphs:
    """The graphs of one model and KV cache. Belongs to the engine's loop.

    num_steps   steps run from graphs
    num_failed  failed recordings: each is tried once more, then no more graphs are made
    forwards    recordings of steps that decode graphs do not cover
    draws       whether the model ends here; a stage before the last one does not sample
    """

    def __init__(
        self, model: Model, kv_cache: KVCache, limits: EngineLimits, rows: Rows,
        communicator: RankCommunicator | None = None,
    ) -> None:  # fmt: skip
        self._communicator = communicator
        self._agree = alone if communicator is None else communicator.agree
        self.device = model.device
        self.draws = ends_here(communicator)
        self.num_steps = self.num_failed = 0
        self._model = model
        self._kv_cache = kv_cache
        self._limits = limits
        self._rows = rows
        self._runs_on = runs_on = open_decode_device(
            model.device, limits, rows.sampling.vocab_size, kv_cache, self._agree
        )
        self.forwards = runs_on.forwards
        self._sizes = runs_on.batch_sizes(limits.max_num_seqs)
        self._lengths = runs_on.sequence_lengths(limits.max_model_len, exact=limits.exact)
        self._graphs: dict[GraphKey, StepGraph] = {}
        self._kept_layers: tuple[int, ...] = ()
        self._kept: dict[GraphKey, list[Tensor]] = {}  # each graph's copies of them
        self._wanted: GraphKey | None = None
        self._has_given_up = False  # of graphs of decodes
        self._cannot_record = False  # anything
        self._arrays: DecodeArrays | None = None  # with the first graph
        self._drawn_at = np.full(limits.max_num_seqs, -1, np.intp)  # by row: the place in the step that sampled it last
        self._drawn_by = np.full(limits.max_num_seqs, -1, np.int64)  # by row: that step
        self._running: DecodeRun | None = None
        self._members: _Members | None = None  # of the step that came last

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    @property
    def reserved_bytes(self) -> int:
        """Bytes on the device, for all recordings and their arrays."""
        return self._runs_on.graph_bytes + (0 if self._arrays is None else self._arrays.size_bytes)

    def keep(self, layers: tuple[int, ...], width: int, dtype: DType) -> None:
        """From now on keep each step's hidden states ``[num_places, width]`` after these layers."""
        assert not self._graphs, "graphs were recorded without"
        self._runs_on.make_room(len(layers), (self._limits.max_num_seqs, width), dtype)
        self._kept_layers = layers

    def apply(self, step: StepInput) -> None:
        """Forget the step's changes of rows; to be called before they are written."""
        for load in step.loads:
            self._drawn_by[load.row] = -1
            if self._arrays is not None:
                self._arrays.forget(load.row)
        if self._arrays is not None:
            for addition in step.additions:
                self._arrays.add(addition.group, addition.row, addition.first, addition.block_ids)

    def key_of(self, step: StepInput) -> GraphKey | None:
        """The graph that a step of decodes needs, whose rows are loaded; None if it cannot run as one."""
        rows, sampling, members = step.rows, self._rows.sampling, self._members
        if members is None or members.rows is not rows or members.version != self._rows.version:
            members = self._members = self._members_of(rows)
        num_listed = None
        if not members.is_plain:
            positions = step.starts + 1 - sampling.num_prompt_tokens[rows]
            if sampling.masks(rows, positions):
                return None
            num_listed = sampling.num_penalty_ids(rows, positions)
            if num_listed is not None and num_listed > MOST_LISTED:
                return None
        return GraphKey(
            num_places=members.num_places,
            max_seq_len=self._lengths[bisect_left(self._lengths, largest(step.starts) + 1)],
            has_penalties=num_listed is not None,
            keeps_logits=members.keeps_logits,
        )

    def has(self, key: GraphKey) -> bool:
        return key in self._graphs

    def want(self, key: GraphKey) -> None:
        """Record this graph after the step."""
        self._wanted = None if self._has_given_up else key

    def run_forward(
        self, layout: Layout, forward: Forward, draws: SamplingArrays | None = None, *, may_record: bool
    ) -> Computed | None:
        """See `DecodeDevice.run_forward`. None means that it has to run eagerly, without a recording."""
        if self._cannot_record:
            return None
        try:
            return self._runs_on.run_forward(layout, forward, draws, may_record=may_record)
        except CaptureError as error:
            self._say_what_cannot_be_recorded(error)
            return None

    def can_lead(self, key: GraphKey) -> bool:
        """Whether a step may be started while the latest one runs: its missing inputs are on the device, and it does
        not overwrite those that the latest one still needs."""
        running = self._running
        return (
            self._runs_on.can_lead
            and running is not None
            and running.logits is None
            and not key.has_penalties
            and key in self._graphs
        )

    @property
    def leads(self) -> bool:
        """Whether steps are queued, so that the next may follow them; else they run when they are waited for."""
        return self._runs_on.can_lead

    @property
    def may_be_led(self) -> bool:
        """Whether a graph runs after which another may be queued."""
        return self._runs_on.can_lead and self._running is not None

    def start(self, step: StepInput, key: GraphKey) -> DecodeRun:
        """Queue the step: one upload, one launch, one download."""
        assert self._arrays is not None
        assert self._running is None or self.can_lead(key), "the step before has to be waited for"
        self._kv_cache.wait_for_arrivals()
        rows, running, sources, lists = step.rows, self._running, None, None
        if running is not None:
            sources = np.where(self._drawn_by[rows] == running.number, self._drawn_at[rows], -1)
        if key.has_penalties:
            sampling = self._rows.sampling
            lists = sampling.penalty_lists(rows, step.starts + 1 - sampling.num_prompt_tokens[rows])
        graph = self._graphs[key]
        token_ids = self._rows.tokens_of(step.token_ids, rows)
        placement = self._arrays.place(rows, step.starts, key.num_places)
        buffers = self._arrays.send(placement, token_ids, sources, lists)
        self._arrays.launch(graph, placement, buffers)
        if self._runs_on.can_lead:
            self._drawn_at[rows], self._drawn_by[rows] = placement.places, step.number
        assert self._members is not None
        self._running = DecodeRun(
            self, placement, buffers, graph.result, self._kept.get(key, []), number=step.number,
            keeps_outputs=self._members.keeps_outputs,
        )  # fmt: skip
        self.num_steps += 1
        return self._running

    def recorded(self) -> list[StepGraph]:
        """The recorded graphs."""
        return list(self._graphs.values())

    def ended(self, run: DecodeRun) -> None:
        """Called by a run that was waited for."""
        if self._running is run:
            self._running = None

    def record(self) -> None:
        """Record the graph that was missing last, if there is one and none runs. Waits for the device.

        Without memory for it, or after a second failure (the model does something that cannot be recorded), steps
        without a graph stay eager. Several ranks record at the same time; if one of them fails, none records any more.
        """
        key = self._wanted
        if key is None or self._running is not None:
            return
        self._wanted = None
        if self._communicator is not None:
            if (graph := self._record_once(key, is_last=True)) is not None:
                self._graphs[key] = graph
            if not self._agree(graph is not None):
                self.give_up()
            return
        for is_last in (False, True):
            graph = self._record_once(key, is_last=is_last)
            if graph is not None:
                self._graphs[key] = graph
            if graph is not None or self._has_given_up:
                return

    def _record_once(self, key: GraphKey, *, is_last: bool) -> StepGraph | None:
        """Returns None if it fails; after the last try, never tries again."""
        try:
            return self._recorded(key)
        except OutOfMemoryError as error:
            self._has_given_up = True
            logger.warning(
                "no more decode graphs: the bytes for one of %d sequences are not to be had, %d graphs hold %s: %s",
                key.num_places, len(self._graphs), f"{self.reserved_bytes:,}", error,
            )  # fmt: skip
        except LaunchError:  # the device is lost
            raise
        except DeviceError as error:  # such as work that cannot be recorded, or that another thread interrupted
            self.num_failed += 1
            if is_last:
                self._say_what_cannot_be_recorded(error)
        return None

    @property
    def lacks_one(self) -> bool:
        """Whether `record` would record."""
        return self._wanted is not None and self._running is None

    def give_up(self) -> None:
        """Run no more decodes as graphs."""
        self._has_given_up, self._wanted = True, None
        for graph in self._graphs.values():
            graph.release()
        self._graphs.clear()
        self._kept.clear()

    def release(self) -> None:
        """Free the memory; no step is started any more."""
        self.give_up()
        self._runs_on.release()
        self._arrays = self._running = None

    def _say_what_cannot_be_recorded(self, error: DeviceError) -> None:
        """Log it once, and record nothing any more."""
        self._has_given_up = self._cannot_record = True
        logger.warning("the model's operations cannot be recorded, each is done at once from now on: %s", error)

    def _members_of(self, rows: NDArray[np.int64]) -> _Members:
        sampling = self._rows.sampling
        return _Members(
            rows,
            self._rows.version,
            num_places=self._sizes[bisect_left(self._sizes, len(rows))],
            keeps_logits=bool((sampling.num_alternatives[rows] >= 0).any()),
            is_plain=sampling.are_plain(rows),
            keeps_outputs=bool(sampling.keeps_outputs[rows].any()),
        )

    def _recorded(self, key: GraphKey) -> StepGraph:
        if self._arrays is None:
            self._arrays = DecodeArrays(self.device, self._runs_on, self._limits, self._rows)
        self._kv_cache.wait_for_arrivals()
        self._arrays.clear()
        keeps_logits = key.keeps_logits and self.draws
        return self._runs_on.capture(partial(self._run, key), num_rows=key.num_places, keeps_logits=keeps_logits)

    def _run(self, key: GraphKey) -> Tensor:
        """The recorded work. Its result is the logits, or the output of a stage."""
        arrays = self._arrays
        assert arrays is not None
        if self._communicator is not None:
            self._communicator.begin_pass()
        arrays.take_inputs(key.num_places)
        batch = arrays.batch(key.num_places, key.max_seq_len)
        batch.kept_layers = self._kept_layers
        if not self.draws:
            return self._model.forward(batch, self._kv_cache)
        logits = self._model.compute_logits(self._model.forward(batch, self._kv_cache))
        arrays.draw(logits, has_penalties=key.has_penalties)
        if self._kept_layers:
            self._kept[key] = self._runs_on.hold([batch.kept[layer] for layer in self._kept_layers])
        return logits
