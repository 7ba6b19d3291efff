"""Runs steps on one device of this process: step → arrays → model → sampled ids.

Everything is ragged: all tokens of all chunks in one row, no padding, a decode is a chunk of length one. The contents
of a row (block tables, sampling parameters) are written when they change, so that a decode step costs a few vectorised
numpy calls, whatever the context's length. Steps of decodes alone run as graphs (`decode_graphs`), which have their own
arrays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Never, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from runtime import ops
from runtime.batch import Batch
from runtime.communicator import RankCommunicator, begins_here, ends_here
from runtime.device.gpu import Gpu
from runtime.dtype import DType, float32
from runtime.engine.limits import EngineLimits
from runtime.engine.logits.settings import PLAIN, LogitsSettings
from runtime.engine.steps.decode_graphs import DecodeGraphs, DecodeRun, GraphKey
from runtime.engine.steps.encoder_passes import EncoderPasses
from runtime.engine.steps.executor import (
    AuxiliaryHiddenStates,
    BidirectionalModel,
    DrawMasks,
    Encoded,
    ExpandingModel,
    GraphStats,
    Model,
    SidePass,
    UnsupportedStepError,
    WeightLoader,
    logits_to_sample,
)
from runtime.engine.steps.layout import StepLayout
from runtime.engine.steps.persistent_batch import LaidOut, PersistentBatch
from runtime.engine.steps.pictures import PictureModel, PictureStore
from runtime.engine.steps.pooling_pass import PagedSidePass, slices
from runtime.engine.steps.recorder import Computed, open_recorder
from runtime.engine.steps.sampling_results import SamplingResults
from runtime.engine.steps.step_input import Sampled, StepInput
from runtime.engine.steps.tower_recordings import TowerRecordings
from runtime.engine.weights.commands import WeightSource
from runtime.kv.cache import HostPages, KVCache
from runtime.kv.layer_copies import LayerCopies
from runtime.kv.transfer import KVTransfer
from runtime.linear.adapter_pairs import Change
from runtime.linear.low_rank import LowRankMaps
from runtime.pooling import PoolingTask
from runtime.rank_notices import Span, Tally
from runtime.sampling_arrays import SamplingArrays
from runtime.tensor.tensor import Tensor

_OF_PICTURES = ("rotary_positions", "features")
"""Fields of a step that models support only if they read images."""

BESIDE_STEPS = -1
"""The step number of a pass outside the steps."""


T = TypeVar("T")


class _Run:
    """See `Computation`; the second half of the computation runs when its result is read."""

    def __init__(self, compute: Callable[[], Sampled]) -> None:
        self.started_s = time.monotonic()
        self.result = compute


class LocalExecutor:
    """See `Executor`. Runs steps of a model, or of a rank's part of it, against one KV cache. With a communicator it
    meets the other ranks at the end of each step. With several stages the last one samples; the others get its tokens
    (`note_sampled`), and have no results themselves.

    If it overlaps, a step runs on the CPU in a thread of the executor, on a GPU in its stream.

    Raises ``OutOfMemoryError`` if the host has no room for the swap space.
    """

    depth = 1

    def __init__(
        self, model: Model, kv_cache: KVCache, limits: EngineLimits, vocab_size: int,
        communicator: RankCommunicator | None = None, loader: WeightLoader | None = None,
        processing: LogitsSettings = PLAIN,
    ) -> None:  # fmt: skip
        """``loader`` reads other weights; with None there are no others."""
        self._processing = processing
        self.communicator = communicator
        self.is_first, self.samples = begins_here(communicator), ends_here(communicator)
        self._is_staged = communicator is not None and communicator.num_stages > 1
        self._versions: dict[int, int] = {}  # of the rows at the start of steps whose samples are not known here
        self.kv_cache = kv_cache
        self.limits = limits
        self.vocab_size = vocab_size
        self._host_pages = HostPages(kv_cache.spec, limits.host_pool_sizes) if limits.num_host_blocks else None
        self.transfer = KVTransfer(kv_cache, self._host_pages)
        max_blocks = limits.table_width(limits.max_model_len)
        self.num_groups = len(kv_cache.spec.group_kinds)
        self.rows = PersistentBatch(
            limits.max_num_seqs, max_blocks, self.num_groups, limits.block_size, vocab_size,
            has_offsets=limits.longrope_threshold is not None or isinstance(model, PictureModel),
            processing=processing,
        )  # fmt: skip
        is_cpu = model.device.kind == "cpu"
        self.takes_any_thread = is_cpu and communicator is None
        self.overlaps = limits.overlap == "on" or (limits.overlap == "auto" and not is_cpu)
        self._worker: ThreadPoolExecutor | None = None
        if self.overlaps and is_cpu:
            self._worker = ThreadPoolExecutor(1, "xserv-step")
        self._kept_layers: tuple[tuple[int, ...], int, DType, bool] | None = None
        self._loader = loader
        self._read: Model | None = None  # weights that were loaded and are not used yet
        self.pictures: PictureStore | None = None
        self.layer_copies: LayerCopies | None = None
        self._use(model)

    def _use(self, model: Model, *, keeps_images: bool = False) -> None:
        """Run steps of this model from now on, without any recording of another. No step runs."""
        is_cpu = model.device.kind == "cpu"
        adapters = getattr(model, "addends", None)
        self.model, self.adapters = model, adapters if isinstance(adapters, LowRankMaps) else None
        self._recorder = open_recorder(model.device)
        records = self.limits.decode_graphs != "off"
        towers = TowerRecordings(self._recorder) if records and self.is_first and not is_cpu else None
        if isinstance(model, PictureModel) and self.pictures is not None and keeps_images:
            self.pictures.use(model, towers)
        else:
            self.pictures = None
            if isinstance(model, PictureModel):
                self.pictures = PictureStore(model, towers, has_tower=self.is_first)
        self._expands = isinstance(model, ExpandingModel) and not is_cpu and not self.limits.exact
        self._results = SamplingResults(model, self.rows, self.vocab_size, self._processing)
        self._gives_last_rows = model.gives_last_rows
        self._auxiliary_layers: tuple[int, ...] = ()
        self.auxiliary_hidden_states: AuxiliaryHiddenStates | None = None
        self.graphs: DecodeGraphs | None = None
        if records:
            self.graphs = DecodeGraphs(model, self.kv_cache, self.limits, self.rows, self._recorder, self.communicator)
        self._encoder_passes: EncoderPasses | None = None
        if self.graphs is not None and is_cpu and self.communicator is None and isinstance(model, BidirectionalModel):
            self._encoder_passes = EncoderPasses(model, self.limits, self._recorder)

    def load_weights(self, source: WeightSource) -> None:
        loader = self._weight_loader()
        self._read = None
        self._read = self._beside_steps(lambda: loader.load(source))

    def drop_loaded(self) -> None:
        self._read = None

    def use_weights(self) -> None:
        assert self._read is not None, "weights were loaded"
        self._replace(self._read)
        self._read = None
        self._weight_loader().take_over()

    def free_memory(self, *, weights: bool) -> None:
        if weights:
            self._replace(self._weight_loader().declared(), keeps_images=True)
        else:
            self._free_pages()
        if self.model.device.kind != "cpu":
            Gpu.of(self.model.device).allocator.trim()  # to the driver, for other processes

    def _free_pages(self) -> None:
        self._replace(self.model, keeps_images=True)  # recordings hold the pages' addresses
        if self._kept_layers is not None:
            layers, width, dtype, of_last = self._kept_layers
            self.keep_layers(layers, width, dtype, of_last=of_last)
        self.kv_cache.free()
        self.transfer = KVTransfer(self.kv_cache, self._host_pages)

    def keep_weights(self) -> None:
        self._weight_loader().keep()

    def forget_kept_weights(self) -> None:
        self._weight_loader().forget()

    def reload_weights(self) -> None:
        loader = self._weight_loader()
        self._replace(self._beside_steps(loader.reload), keeps_images=True)

    def allocate_pages(self) -> None:
        self.kv_cache.allocate()
        self.transfer = KVTransfer(self.kv_cache, self._host_pages)

    def _weight_loader(self) -> WeightLoader:
        if self._loader is None:
            raise UnsupportedStepError("the executor has no loader of weights")
        return self._loader

    def _replace(self, model: Model, *, keeps_images: bool = False) -> None:
        """Another model, or the same one without its recordings; drafters have to name layers again."""
        self.synchronize()
        self.finish_queued()
        if self.graphs is not None:
            self.graphs.release()
        if self.pictures is not None:
            self.pictures.release()
        self._use(model, keeps_images=keeps_images)

    def start(
        self, step: StepInput, masks: DrawMasks | None = None,
        proposed: Sequence[NDArray[np.float32] | None] | None = None,
    ) -> _Run:  # fmt: skip
        """See `Executor`. The previous step is over, unless this one `can_overlap`. Raises UnsupportedStepError."""
        if step.loads or step.features or step.bidirectional_spans or step.rotary_positions is not None:
            self._check(step)
        if step.has_transfers:
            self.transfer.run(step.swap_out, step.swap_in, step.copies)
        if not step.num_seqs:
            return _Run(Sampled)
        try:
            return self._start(step, masks, proposed)
        except Exception as error:  # as if it had been raised a moment later
            return _Run(partial(_raise, error))

    def write_adapter(self, slot: int, pairs: Mapping[str, Change]) -> None:
        adapters = self.adapters
        assert adapters is not None, "the engine takes none"

        def write() -> None:
            if adapters.write(slot, pairs) and self.graphs is not None:
                self.graphs.forget()
            self.finish_queued()  # a kernel may read weights before the one that it follows has ended

        self._beside_steps(write)

    def can_overlap(self, step: StepInput) -> bool:
        if self.graphs is None or step.mode == "eager" or not step.are_decodes or step.has_transfers or step.loads:
            return False
        if step.has_pictures or self._is_staged:
            return False
        key = self.graphs.key_of(step)
        return key is not None and self.graphs.can_overlap(key)

    @property
    def may_be_led(self) -> bool:
        """Whether a graph runs after which another step may be queued."""
        return not self._is_staged and self.graphs is not None and self.graphs.may_be_led

    def keep_layers(self, layers: tuple[int, ...], width: int, dtype: DType, *, of_last: bool) -> None:
        assert layers, "a drafter gets hidden states of the layers that it names, and no others"
        self._kept_layers = layers, width, dtype, of_last
        self._gives_last_rows = self._gives_last_rows and of_last
        if self.graphs is not None:
            self.graphs.keep(layers, width, dtype)
        self._auxiliary_layers = layers

    def record(self) -> None:
        if self.graphs is not None:
            self.graphs.record()

    def expect(self, seq_len: int) -> None:
        if self.graphs is not None:
            self.synchronize()
            self.graphs.forwards.expect(seq_len)

    @property
    def lacks_recording(self) -> bool:
        """Whether `record` has something to do."""
        return self.graphs is not None and self.graphs.lacks_one

    def record_together(self) -> None:
        """`record`, on all ranks at once; if one of them can no longer record, none does."""
        assert self.graphs is not None, "a recording is lacked"
        self.synchronize()
        self.graphs.record()

    def synchronize(self) -> None:
        """Wait until no step runs, if they run in a thread."""
        if self._worker is not None:
            self._worker.submit(int).result()

    def finish_queued(self) -> None:
        """Wait until the device has done all queued work."""
        self._recorder.finish()

    def wait_for_queued(self, seconds: float) -> None:
        """The same with a timeout, ignoring errors."""
        self._recorder.finish(seconds)

    def note_sampled(
        self, number: int, rows: NDArray[np.int64], positions: NDArray[np.int64], token_ids: NDArray[np.int32]
    ) -> None:
        """Record the tokens that the last stage has sampled in a step, at these positions of the rows' outputs. A row
        that was loaded since the step began belongs to another sequence."""
        version = self._versions.pop(number)
        is_same = self.rows.versions[rows] <= version
        rows, positions, token_ids = rows[is_same], positions[is_same], token_ids[is_same]
        self.rows.note(rows, token_ids)
        if np.count_nonzero(self.rows.sampling.keeps_outputs[rows]):
            self.rows.note_outputs(rows, positions, token_ids, version)

    def start_encoding(self, slot: int, patches: NDArray[np.uint8], grid: tuple[int, int], adapter: int = -1) -> None:
        pictures = self._picture_store()
        if not self.is_first:
            return
        self._beside_steps(lambda: pictures.start(slot, patches, grid, adapter))

    def encode(self, slot: int, num_rows: int) -> Encoded:
        pictures = self._picture_store()
        if not self.is_first:
            return Encoded(True, num_rows, 0.0)

        def encode() -> Encoded:
            begin = time.monotonic()
            is_made, computed = pictures.advance(slot, num_rows)
            return Encoded(is_made, computed, time.monotonic() - begin)

        return self._beside_steps(encode)

    def drop_encoded(self, slot: int) -> None:
        pictures = self._picture_store()
        if self.is_first:
            self._beside_steps(lambda: pictures.drop(slot))

    def _picture_store(self) -> PictureStore:
        if self.pictures is None:
            raise UnsupportedStepError(f"{type(self.model).__name__} reads no pictures")
        return self.pictures

    def _beside_steps(self, work: Callable[[], T]) -> T:
        """Run after the running step, on the thread that runs steps."""
        return work() if self._worker is None else self._worker.submit(work).result()

    def head(self, task: PoolingTask, pooled: NDArray[np.float32]) -> NDArray[np.float32]:
        return self.model.head(task, pooled)

    def pooled(
        self, token_ids: Sequence[NDArray[np.int32]], types: Sequence[NDArray[np.int32] | None], pooling: str
    ) -> NDArray[np.float32] | None:
        if self._encoder_passes is None:
            return None
        self.synchronize()
        lengths = tuple(map(len, token_ids))
        found = self._encoder_passes.run_again(lengths, token_ids, types, pooling)
        if found is None:
            if not self._encoder_passes.takes(lengths):
                return None
            side = PagedSidePass(self.model, self.limits, lengths, self.synchronize, passes=self._encoder_passes)
            found = side.run(token_ids, [0] * len(lengths), None, types, pooling)
        return found.array.copy()

    def pooling_pass(self, lengths: Sequence[int]) -> SidePass:
        def bring_back(hidden: Tensor) -> Tensor:
            found = self.brought_back(lambda: hidden, hidden.shape, hidden.dtype)
            self.finish_queued()
            return hidden if found is None else found

        back = bring_back if self._is_staged else None
        return PagedSidePass(
            self.model, self.limits, lengths, self._before_pass, self.pictures, back, self._encoder_passes
        )

    def _before_pass(self) -> None:
        self.synchronize()
        if self.communicator is not None:
            self.communicator.begin_step(BESIDE_STEPS)
            self.communicator.begin_pass()

    def brought_back(self, made: Callable[[], Tensor], shape: tuple[int, ...], dtype: DType) -> Tensor | None:
        """The last stage's result, sent to the first stage; None elsewhere."""
        communicator = self.communicator
        if communicator is None or communicator.num_stages == 1:
            return made()
        if self.samples:
            communicator.send(made())
        return communicator.receive(shape, dtype) if self.is_first else None

    def logits(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """See `Executor`; computed values only on the first stage."""
        most = self.limits.max_num_batched_tokens
        pooling_pass = PagedSidePass(self.model, self.limits, [len(token_ids)], self._before_pass)
        result = np.empty((len(token_ids) if self.is_first else 0, self.vocab_size), np.float32)
        for start in range(0, len(token_ids), most):
            ids = token_ids[start : start + most]
            hidden = pooling_pass.run([ids], [start])
            for first, end in slices(self.vocab_size, 0, len(ids)):
                made = partial(self.model.compute_logits, hidden[first:end])
                logits = self.brought_back(made, (end - first, self.vocab_size), float32)
                if logits is not None:
                    result[start + first : start + end] = logits.to("cpu").array
            self.finish_queued()
        return result

    def take_timed(self) -> tuple[int, float]:
        return self.transfer.take_timed()

    def graph_stats(self) -> GraphStats:
        if self.graphs is None:
            return GraphStats()
        graphs, forwards = self.graphs, self.graphs.forwards
        return GraphStats(
            len(graphs.recordings.kept), graphs.reserved_bytes, graphs.num_steps,
            graphs.recordings.num_failed + forwards.recordings.num_failed,
            len(forwards.recordings.kept), forwards.num_steps,
        )  # fmt: skip

    def tallies(self) -> list[Tally]:
        return []

    def spans(self, rank: int, num_known: int) -> tuple[int, list[Span]]:
        raise AssertionError(f"there is no rank {rank}")

    def close(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
        if self.graphs is not None:
            self.graphs.release()
        if self.pictures is not None:
            self.pictures.release()

    def _check(self, step: StepInput) -> None:
        for name in _OF_PICTURES if self.pictures is None else ():
            value = getattr(step, name)
            if value is not None and len(value):
                raise UnsupportedStepError(f"{name}: {type(self.model).__name__} takes none, got {len(value)}")
        for load in step.loads:
            if self.pictures is None and load.rotary_offset not in (0, self.limits.longrope_threshold):
                raise UnsupportedStepError(f"rotary_offset: {type(self.model).__name__} has no {load.rotary_offset}")
        if step.bidirectional_spans:
            if self.pictures is not None and not self.pictures.are_whole:
                raise UnsupportedStepError(f"bidirectional_spans: {type(self.model).__name__} takes none")
            ends = np.cumsum(step.counts)
            for span in step.bidirectional_spans:
                last = span.first_token + span.count - 1
                chunks = np.searchsorted(ends, [span.first_token, last], side="right")
                if chunks[0] != chunks[1] or last >= step.num_tokens:
                    raise UnsupportedStepError(
                        f"bidirectional_spans: the {span.count} tokens from {span.first_token} on are not of one chunk"
                    )

    def _start(
        self, step: StepInput, masks: DrawMasks | None, proposed: Sequence[NDArray[np.float32] | None] | None
    ) -> _Run:
        graphs, rows = self.graphs, self.rows
        if graphs is not None:
            graphs.apply(step)
        rows.apply(step)
        if graphs is not None and step.mode != "eager" and step.are_decodes and not step.has_pictures:
            key = graphs.key_of(step)
            if key is not None and graphs.has(key):
                return self._start_graph(graphs, step, key)
            if key is not None and step.mode == "record":
                graphs.want(key)
        laid_out = rows.lay_out(step)
        if self._gives_last_rows and step.num_tokens > step.num_seqs and _wants_last(step):
            laid_out.layout.want_last()
        if self._expands and step.num_tokens > step.num_seqs:
            model = cast(ExpandingModel, self.model)
            laid_out.layout.long_chunks = model.long_chunks(step.starts.tolist(), step.counts.tolist())
        if not self.samples and len(laid_out.samples.rows):
            self._versions[step.number] = laid_out.samples.version
        compute = partial(self._draw, step, laid_out, masks, proposed)
        is_sampled = (  # with the forward pass, if recorded
            masks is None
            and laid_out.sampling.allowed_mask is None
            and not self.rows.sampling.are_processed(laid_out.samples.rows)
        )
        forward = partial(self._forward, laid_out.layout, step, laid_out.sampling if is_sampled else None)
        run = partial(self._ended, step, lambda: compute(forward()))
        if self._worker is not None:
            return _Run(self._worker.submit(run).result)
        if not self.overlaps:
            return _Run(run)
        computed = forward()
        return _Run(partial(self._ended, step, lambda: compute(computed)))

    def _ended(self, step: StepInput, compute: Callable[[], Sampled]) -> Sampled:
        if self.communicator is not None:
            self.communicator.begin_step(step.number)
        sampled = compute()
        if self.communicator is not None:
            self.communicator.end_step(step.number)
        return sampled

    def _start_graph(self, graphs: DecodeGraphs, step: StepInput, key: GraphKey) -> _Run:
        if not self.samples:
            self._versions[step.number] = self.rows.version
        sample = partial(self._sampled_by_graph, step, graphs.start(step, key), self.rows.version)
        if not graphs.overlaps:  # it runs when it is waited for
            sample = partial(self._ended, step, sample)
        elif self.communicator is not None:
            self.communicator.end_step(step.number)  # before anything is queued after it
        return _Run(sample if self._worker is None else self._worker.submit(sample).result)

    def _forward(self, layout: StepLayout, step: StepInput, samples: SamplingArrays | None) -> Computed:
        """The model's result for the step; on a GPU it may still be running."""
        passed = None if self.layer_copies is None else self.layer_copies.follower
        if self.graphs is not None and step.mode != "eager" and not step.has_pictures:
            may_record = step.mode == "record"
            found = self.graphs.run_forward(layout, self._run_model, samples, may_record=may_record, passed=passed)
            if found is not None:
                return found
        batch = layout.batch(self.model.device, exact=self.limits.exact)
        if step.has_pictures:
            assert self.pictures is not None, "the step was checked"
            self.pictures.complete(batch, step)
        with self.kv_cache.followed_by(passed):
            return self._run_model(batch)

    def _run_model(self, batch: Batch) -> Computed:
        if self.communicator is not None:
            self.communicator.begin_pass()
        batch.auxiliary_layers = self._auxiliary_layers
        hidden, logits = self.model.forward(batch, self.kv_cache), None
        if self.samples and batch.logits_indices.shape[0]:
            is_short = hidden.shape[0] != batch.num_tokens  # the rows of chunks, not of tokens
            rows = batch.logits_chunks if is_short else batch.logits_indices
            assert rows is not None, "a step has them"
            logits = logits_to_sample(self.model, ops.gather_rows(hidden, rows), batch.logits_adapters)
        kept = tuple(batch.kept[layer] for layer in self._auxiliary_layers)
        return Computed(hidden if self.samples else None, logits, kept=kept)

    def _draw(
        self,
        step: StepInput,
        laid_out: LaidOut,
        masks: DrawMasks | None,
        proposed: Sequence[NDArray[np.float32] | None] | None,
        computed: Computed,
    ) -> Sampled:
        if not self.samples:
            self.finish_queued()
            return Sampled()
        if computed.kept:
            last = np.arange(step.num_seqs) if laid_out.layout.is_last_wanted else np.cumsum(step.counts) - 1
            self.auxiliary_hidden_states = AuxiliaryHiddenStates(step.number, computed.kept, last)
        return self._results.sample(step.prompt_logprobs, laid_out, masks, proposed, computed)

    def _sampled_by_graph(self, step: StepInput, run: DecodeRun, version: int) -> Sampled:
        tokens = run.wait()
        if not self.samples:
            return Sampled()
        if run.kept:
            self.auxiliary_hidden_states = AuxiliaryHiddenStates(step.number, run.kept, run.batch_slots)
        return self._results.of_graph(step, run, tokens, version)


def _wants_last(step: StepInput) -> bool:
    """Whether no chunk needs more than its last token's hidden state."""
    return not step.prompt_logprobs and bool(step.num_samples.max() <= 1)


def _raise(error: Exception) -> Never:
    raise error
