"""Decode steps as recorded graphs: all kernels of a step, sampling included, in one launch.

There is a graph for a number of places, for sequences up to a length (attention splits long ones), with and without
penalties, with and without chains of samplers, with and without the logits kept for log probabilities. It is recorded
after the first step that needs it, which runs eagerly. All share memory, and read and write `DecodeArrays`. Unsupported
steps run eagerly: those with prompts, logit bias, allowed ids, or tokens that ``min_tokens`` forbids.

A step may start while the previous one runs, if a graph runs that, too: it reads the tokens where they are sampled.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime import ops
from runtime.communicator import RankCommunicator, ends_here
from runtime.device.errors import CaptureError
from runtime.dtype import DType, float32
from runtime.engine.limits import EngineLimits
from runtime.engine.steps.decode_arrays import TAIL_WORDS, DecodeArrays, Placement
from runtime.engine.steps.executor import Model, logits_to_sample
from runtime.engine.steps.forwards import ForwardRecordings
from runtime.engine.steps.inputs import sampled_of
from runtime.engine.steps.layout import StepLayout, largest
from runtime.engine.steps.persistent_batch import PersistentBatch
from runtime.engine.steps.recorder import (
    Computed,
    Forward,
    Recorder,
    Recording,
    Recordings,
    StepBuffers,
    alone,
    open_recorder,
)
from runtime.engine.steps.step_input import StepInput
from runtime.kv.cache import KVCache
from runtime.sampling_arrays import SampledTokens, SamplingArrays
from runtime.tensor.tensor import Tensor

MOST_LISTED = TAIL_WORDS // 2
"""Tokens of penalties and words of chains that one step may have together; with more it runs eagerly."""

_CANNOT = "the model's operations cannot be recorded, each is done at once from now on"


class GraphKey(msgspec.Struct, frozen=True, gc=False):
    """The properties of a step that determine its graph."""

    num_batch_slots: int
    max_seq_len: int
    has_penalties: bool
    has_chains: bool
    keeps_logits: bool
    has_adapters: bool = False


class DecodeRun:
    """A step that a graph runs."""

    def __init__(
        self,
        graphs: DecodeGraphs,
        placement: Placement,
        buffers: StepBuffers,
        result: Computed,
        *,
        number: int,
        keeps_outputs: bool,
        has_chains: bool,
    ) -> None:
        self.batch_slots = placement.batch_slots
        self.logits = result.logits
        """``[num_batch_slots, vocab_size]``, if they are kept: until the next graph is launched."""
        self.kept = result.kept
        """Hidden states after the kept layers, a row a place: until the next graph is launched."""
        self.number = number
        self.keeps_outputs = keeps_outputs
        self._has_chains = has_chains
        self._graphs = graphs
        self._num_batch_slots = placement.num_batch_slots
        self._buffers = buffers

    def wait(self) -> SampledTokens:
        """The sample of each row; none if a later stage samples. Raises LaunchError if the device failed,
        InvalidArgumentError if a token was outside the vocabulary."""
        try:
            self._buffers.wait()
        finally:
            self._graphs.ended(self)
        count, results = self._num_batch_slots, self._buffers.results
        if not self._graphs.samples:
            return SampledTokens(results[:0], results[:0] == 0)
        if self._graphs.device.kind != "cpu" and results[2 * count]:  # the CPU's kernels check ids themselves
            ops.check_ids(self._graphs.device)
        return sampled_of(results, count, self.batch_slots, has_chains=self._has_chains)


@dataclass(frozen=True, slots=True)
class _Members:
    """The rows of a step, reused while the next steps have the same ones.

    version   the rows', when this was made
    is_plain  none of them has penalties, a chain or anything that may forbid ids
    keeps_outputs  one of them has parameters that depend on its output
    has_adapters  one of them has an adapter
    waits     one of them has a chain that depends on its last sample
    """

    rows: NDArray[np.int64]
    version: int
    num_batch_slots: int
    keeps_logits: bool
    is_plain: bool
    keeps_outputs: bool
    has_adapters: bool
    waits: bool


class DecodeGraphs:
    """The graphs of one model and KV cache. Belongs to the engine's loop.

    num_steps   steps run from graphs
    recordings  the graphs; a failed recording is tried once more, then no more are made
    forwards    recordings of steps that decode graphs do not cover
    samples     whether the model ends here; a stage before the last one does not sample
    """

    def __init__(
        self, model: Model, kv_cache: KVCache, limits: EngineLimits, rows: PersistentBatch, recorder: Recorder,
        communicator: RankCommunicator | None = None,
    ) -> None:  # fmt: skip
        self._communicator = communicator
        self._agree = alone if communicator is None else communicator.agree
        self.device = model.device
        self.samples = ends_here(communicator)
        self.num_steps = 0
        self._model = model
        self._kv_cache = kv_cache
        self._limits = limits
        self._rows = rows
        self._recorder = recorder
        self.forwards = ForwardRecordings(open_recorder(model.device), limits, kv_cache, self._agree)
        self._sizes = recorder.batch_sizes(limits.max_num_seqs)
        self._lengths = recorder.sequence_lengths(limits.max_model_len, exact=limits.exact)
        self.recordings: Recordings[GraphKey, Recording] = Recordings()
        self._auxiliary_layers: tuple[int, ...] = ()
        self._rooms: list[Tensor | None] = []  # of their hidden states
        self._wanted: GraphKey | None = None
        self._arrays: DecodeArrays | None = None  # with the first graph
        self._sampled_at = np.full(
            limits.max_num_seqs, -1, np.intp
        )  # by row: the place in the step that sampled it last
        self._sampled_by = np.full(limits.max_num_seqs, -1, np.int64)  # by row: that step
        self._running: DecodeRun | None = None
        self._members: _Members | None = None  # of the step that came last

    @property
    def reserved_bytes(self) -> int:
        """Bytes on the device, for all recordings and their arrays."""
        arrays = 0 if self._arrays is None else self._arrays.size_bytes
        return self._recorder.size_bytes + self.forwards.size_bytes + arrays

    def keep(self, layers: tuple[int, ...], width: int, dtype: DType) -> None:
        """From now on keep each step's hidden states ``[num_batch_slots, width]`` after these layers."""
        assert not self.recordings.kept, "graphs were recorded without"
        shape = self._limits.max_num_seqs, width
        self._rooms = [self._recorder.room(f"layer {layer}", shape, dtype) for layer in layers]
        self._auxiliary_layers = layers

    def apply(self, step: StepInput) -> None:
        """Forget the step's changes of rows; to be called before they are written."""
        for load in step.loads:
            self._sampled_by[load.row] = -1
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
        num_ids = num_words = None
        if not members.is_plain:
            positions = step.starts + 1 - sampling.num_prompt_tokens[rows]
            if sampling.masks(rows, positions):
                return None
            num_ids, num_words = sampling.num_listed(rows, positions)
            if (num_ids or 0) + (num_words or 0) > MOST_LISTED:
                return None
        return GraphKey(
            num_batch_slots=members.num_batch_slots,
            max_seq_len=self._lengths[bisect_left(self._lengths, largest(step.starts) + 1)],
            has_penalties=num_ids is not None,
            has_chains=num_words is not None,
            keeps_logits=members.keeps_logits,
            has_adapters=members.has_adapters,
        )

    def has(self, key: GraphKey) -> bool:
        return key in self.recordings.kept

    def want(self, key: GraphKey) -> None:
        """Record this graph after the step."""
        self._wanted = None if self.recordings.has_given_up else key

    def run_forward(
        self,
        layout: StepLayout,
        forward: Forward,
        samples: SamplingArrays | None = None,
        *,
        may_record: bool,
        passed: Callable[[int], None] | None = None,
    ) -> Computed | None:
        """See `ForwardRecordings.run`. None means that it has to run eagerly, without a recording."""
        if self.recordings.cannot_record:
            return None
        try:
            return self.forwards.run(layout, forward, samples, may_record=may_record, passed=passed)
        except CaptureError as error:
            self.recordings.cannot_record = True
            self.recordings.give_up(_CANNOT, error)
            return None

    def can_overlap(self, key: GraphKey) -> bool:
        """Whether a step may be started while the latest one runs: its missing inputs are on the device, and it does
        not overwrite those that the latest one still needs."""
        running = self._running
        return (
            self._recorder.queues
            and running is not None
            and running.logits is None
            and not key.has_penalties
            and not (key.has_chains and self._members is not None and self._members.waits)
            and key in self.recordings.kept
        )

    @property
    def overlaps(self) -> bool:
        """Whether steps are queued, so that the next may follow them; else they run when they are waited for."""
        return self._recorder.queues

    @property
    def may_be_led(self) -> bool:
        """Whether a graph runs after which another may be queued."""
        return self._recorder.queues and self._running is not None

    def start(self, step: StepInput, key: GraphKey) -> DecodeRun:
        """Queue the step: one upload, one launch, one download."""
        assert self._arrays is not None
        assert self._running is None or self.can_overlap(key), "the step before has to be waited for"
        self._kv_cache.wait_for_arrivals()
        rows, running, sources = step.rows, self._running, None
        lists: dict[str, Sequence[NDArray[np.int32]]] | None = None
        if running is not None:
            sources = np.where(self._sampled_by[rows] == running.number, self._sampled_at[rows], -1)
        if key.has_penalties or key.has_chains:
            sampling = self._rows.sampling
            positions = step.starts + 1 - sampling.num_prompt_tokens[rows]
            lists = {}
            if key.has_penalties:
                lists["prompt"], lists["output"] = zip(*sampling.penalty_lists(rows, positions))
            if key.has_chains:
                lists["chain"] = sampling.chain_words(rows, positions)
        graph = self.recordings.kept[key]
        token_ids = self._rows.tokens_of(step.token_ids, rows)
        placement = self._arrays.place(rows, step.starts, key.num_batch_slots, step.numbers)
        buffers = self._arrays.send(placement, token_ids, sources, lists)
        self._arrays.launch(graph, placement, buffers, has_chains=key.has_chains)
        if self._recorder.queues:
            self._sampled_at[rows], self._sampled_by[rows] = placement.batch_slots, step.number
        assert self._members is not None
        self._running = DecodeRun(
            self, placement, buffers, graph.result, number=step.number, keeps_outputs=self._members.keeps_outputs,
            has_chains=key.has_chains,
        )  # fmt: skip
        self.num_steps += 1
        return self._running

    def recorded(self) -> list[Recording]:
        """The recorded graphs."""
        return list(self.recordings.kept.values())

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
        self._wanted, graph = None, None
        no_memory = (
            f"no more decode graphs: the bytes for one of {key.num_batch_slots} sequences are not to be had, "
            f"{len(self.recordings.kept)} graphs hold {self.reserved_bytes:,}"
        )
        for is_last in (False, True) if self._communicator is None else (True,):
            work = partial(self._recorded, key)
            graph = self.recordings.tried(work, no_memory, is_last=is_last, cannot=_CANNOT)
            if graph is not None:
                self.recordings.add(key, graph)
            if graph is not None or self.recordings.has_given_up:
                break
        if self._communicator is not None and not self._agree(graph is not None):
            self.give_up()

    @property
    def lacks_one(self) -> bool:
        """Whether `record` would record."""
        return self._wanted is not None and self._running is None

    def give_up(self) -> None:
        """Run no more decodes as graphs."""
        self.recordings.has_given_up, self._wanted = True, None
        self.recordings.clear()

    def forget(self) -> None:
        """Drop all recordings; steps are recorded anew. None runs."""
        self._wanted = None
        self.recordings.clear()
        self.forwards.recordings.clear()

    def release(self) -> None:
        """Free the memory; no step is started any more."""
        self.give_up()
        self._recorder.release()
        self.forwards.release()
        self._arrays = self._running = None

    def _members_of(self, rows: NDArray[np.int64]) -> _Members:
        sampling = self._rows.sampling
        return _Members(
            rows,
            self._rows.version,
            num_batch_slots=self._sizes[bisect_left(self._sizes, len(rows))],
            keeps_logits=bool((sampling.num_alternatives[rows] >= 0).any()),
            is_plain=sampling.are_plain(rows),
            keeps_outputs=bool(sampling.keeps_outputs[rows].any()),
            has_adapters=bool((self._rows.numbers["adapters"][rows] >= 0).any()),
            waits=bool(sampling.chains.waits[rows].any()),
        )

    def _recorded(self, key: GraphKey) -> Recording:
        if self._arrays is None:
            self._arrays = DecodeArrays(self._recorder, self._limits, self._rows)
        self._kv_cache.wait_for_arrivals()
        self._arrays.clear()
        room = None
        if key.keeps_logits and self.samples:  # one serves the graphs of similar sizes
            batch_slots = 1 << (key.num_batch_slots - 1).bit_length()
            room = self._recorder.room("logits", (batch_slots, self._rows.sampling.vocab_size), float32)
        return self._recorder.record(partial(self._run, key, room))

    def _run(self, key: GraphKey, room: Tensor | None) -> Computed:
        """The recorded work. ``room`` is for the logits, if they are kept."""
        arrays, recorder = self._arrays, self._recorder
        assert arrays is not None
        if self._communicator is not None:
            self._communicator.begin_pass()
        arrays.take_inputs(key.num_batch_slots)
        batch = arrays.batch(key.num_batch_slots, key.max_seq_len, has_adapters=key.has_adapters)
        batch.auxiliary_layers = self._auxiliary_layers
        hidden = self._model.forward(batch, self._kv_cache)
        if not self.samples:
            recorder.outlive(hidden)
            return Computed(None, None)
        logits = logits_to_sample(self._model, hidden, batch.logits_adapters)
        arrays.sample(logits, has_penalties=key.has_penalties, has_chains=key.has_chains)
        kept = tuple(recorder.outlive(batch.kept[layer], at) for layer, at in zip(self._auxiliary_layers, self._rooms))
        found = recorder.outlive(logits, room)  # raises an error for an array that no kernel has made
        return Computed(None, found if key.keeps_logits else None, kept=kept)
