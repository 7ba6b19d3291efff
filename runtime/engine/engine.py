"""The engine's loop: schedule → run → commit, one step after another or the next one planned while one runs.

The plain loop is the oracle of the overlapped one. Both give the same outputs: what depends on the tokens of the step
before (the last token ids, penalties, who has ended) is filled in when that step is over, between its commit and the
next one's start; everything else of the next step was done while it ran. Where decode graphs run both (`_lead`), the
next step starts before the one before it is over.

It works in token ids alone; text, stop strings and parsers are the client's side (``runtime.text``). One thread owns
an ``Engine``; others reach it through ``runtime.engine.process.client``. From anywhere they may call ``prepare`` and
``stats``, and read ``timeline``.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from runtime.engine.admission import as_token_ids, prepare
from runtime.engine.config import EngineLimits
from runtime.engine.encoding_budget import EncodingBudget
from runtime.engine.errors import ContextLengthExceededError, RequestError
from runtime.engine.grammar.compile_queue import GrammarQueue
from runtime.engine.grammar.grammar import grammar_error
from runtime.engine.grammar.matcher import MaskComputer
from runtime.engine.grammar.vocabulary import LazyVocabulary
from runtime.engine.messages import ITERATION_TOKEN_BOUNDS, EngineInfo, EngineOutput, EngineRequest, EngineStats
from runtime.engine.open_requests import OpenRequests
from runtime.engine.picture_queue import PictureQueue
from runtime.engine.scheduling.block_events import BlockChanges, BlockEvents, SharedDigest
from runtime.engine.scheduling.block_pool import BlockPool
from runtime.engine.scheduling.host_pool import HostPool
from runtime.engine.scheduling.scheduler import Scheduler
from runtime.engine.scheduling.sequence import Request, Sequence
from runtime.engine.scheduling.step import Step
from runtime.engine.speculation.drafter import LeftChunk
from runtime.engine.speculation.speculator import SpeculationCounters, Speculator
from runtime.engine.steps.assemble import Assembled, Assembler
from runtime.engine.steps.embedder import Embedder, Embedding
from runtime.engine.steps.executor import Computation, Drawn, Executor, ExecutorLostError, KeptRows
from runtime.engine.steps.step_input import Mode, RowLoad
from runtime.engine.timeline import TIMELINE_STEPS, ChunkKey, StepRecord, Timeline

logger = logging.getLogger("xserv.engine")

GPU_ROWS_PER_TOKEN = 16
"""Rows of pictures that a GPU encodes between two steps, for each token that a step may have: an eighth of a picture of
1,024 tokens by Qwen3-VL-8B's tower, where steps may have 2,048."""

GRAMMAR_WAIT_S = 1e-3
"""How long a step without work waits for a grammar, before it returns so that others are heard."""

Poll = Callable[[], list[EngineOutput]]
"""Asks for what has come in (``admit``, ``cancel``); the outputs of cancelled requests."""


@dataclass(slots=True)
class _Counters:
    steps: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    step_tokens: int = 0
    steps_by_tokens: list[int] = field(default_factory=lambda: [0] * (len(ITERATION_TOKEN_BOUNDS) + 1))

    def count_tokens(self, num_tokens: int) -> None:
        self.steps_by_tokens[bisect_left(ITERATION_TOKEN_BOUNDS, num_tokens)] += 1
        self.step_tokens += num_tokens


@dataclass(slots=True)
class _OpenStep:
    """A planned step. ``assembled`` is None and nothing is to be started where it has no work; ``computation`` is there
    once it runs, unless it only moves blocks."""

    step: Step
    assembled: Assembled | None
    record: StepRecord
    started_s: float = 0.0
    computation: Computation | None = None


class Engine:
    """A model, its KV cache, its scheduler.

    info      what clients are told
    executor  runs the steps
    limits    as ``runtime.engine.config.resolve`` gives them
    seed      of the generator that draws seeds for requests without one; None: from the OS
    timeline  a record of each of the latest steps
    embedder  what computes embeddings, a forward pass at a time between two steps
    vocabulary  the text of the model's ids, for grammars; None: requests with a grammar are refused
    speculator  proposes tokens for decodes to try; None: nobody does
    """

    def __init__(
        self,
        executor: Executor,
        limits: EngineLimits,
        info: EngineInfo,
        seed: int | None = None,
        vocabulary: LazyVocabulary | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        self.info = info
        self.limits = limits
        num_slots = limits.num_host_blocks
        self.host_pool = HostPool(num_slots) if num_slots else None
        self.pool = BlockPool(
            limits.num_blocks,
            limits.block_size,
            windows=limits.group_windows,
            enable_prefix_caching=limits.enable_prefix_caching,
            host_pool=self.host_pool,
        )
        self.scheduler = Scheduler(limits, self.pool, depth=executor.depth)
        self.executor = executor
        self.overlaps = executor.overlaps
        mode: Mode = "eager" if limits.decode_graphs == "off" else "record"
        self.assembler = Assembler(limits.max_num_seqs, executor.num_groups, limits.block_size, mode)
        self.embedder = Embedder(executor, limits, info.vocab_size, info.images)
        self.speculator: Speculator | None = None
        self.opened = OpenRequests(self.scheduler, seed)
        if speculator is not None:
            self.use(speculator)
        self.vocabulary = vocabulary
        self.grammars = GrammarQueue()
        self.pictures: PictureQueue | None = None
        if info.images is not None:
            rows = None if info.device == "cpu" else GPU_ROWS_PER_TOKEN * limits.max_num_batched_tokens
            self.pictures = PictureQueue(executor, info.images, EncodingBudget(rows))
            self.opened.on_request_end = self.embedder.on_end = self.pictures.release
        self.timeline: Timeline = deque(maxlen=TIMELINE_STEPS)
        self._block_events: BlockEvents | None = None
        self._masks = MaskComputer()
        self._open: deque[_OpenStep] = deque()  # started, in order
        self._keys: list[ChunkKey] = [ChunkKey("", 0, 0, 0.0)] * limits.max_num_seqs  # by row
        self._chunk_keys: list[ChunkKey] = []  # of the step assembled last, and the rows that it has
        self._chunk_rows: NDArray[np.int64] | None = None
        self._counters = _Counters()
        self._last_step_s = time.monotonic()

    def use(self, speculator: Speculator | None) -> None:
        """Let it propose tokens from the next step on; None: nobody does. Raises ``RequestError`` where several steps
        are open at once."""
        self.scheduler.drafts = {}
        if speculator is None:
            self.speculator = self.opened.on_end = None
            return
        if self.executor.depth > 1:
            raise RequestError("speculation needs steps that follow one another", param="speculation")
        if speculator.wanted is not None:
            self.executor.keep_layers(*speculator.wanted)
        self.speculator = speculator
        self.opened.on_end = speculator.end
        for request in self.requests.values():
            speculator.expect(request)

    def publish_blocks(self, secret: bytes) -> None:
        """From now on ``take_block_changes`` tells which contents its blocks hold, by digests that this secret keys
        (``SharedDigest``). To be called before the first request."""
        picture_of = None if self.pictures is None else self.pictures.keys.digest_of
        self._block_events = self.pool.publish(SharedDigest(secret, picture_of))

    def take_block_changes(self) -> BlockChanges | None:
        """Those since the last call; None: there are none, or nobody wants to know."""
        return None if self._block_events is None else self._block_events.take()

    @property
    def has_work(self) -> bool:
        has_pictures = self.pictures is not None and len(self.pictures) > 0
        return bool(self._open) or self.scheduler.has_work or len(self.grammars) > 0 or has_pictures

    @property
    def requests(self) -> dict[str, Request]:
        """The open ones, by id."""
        return self.opened.by_id

    @property
    def num_unscheduled(self) -> int:
        """Requests of which nothing was scheduled yet: those that count against ``max_waiting``."""
        return self.opened.num_unscheduled

    @property
    def num_unscheduled_tokens(self) -> int:
        """Prompt tokens of those requests."""
        return self.opened.num_unscheduled_tokens

    def prepare(self, request: EngineRequest) -> Request:
        """See ``runtime.engine.admission.prepare``. Thread-safe."""
        prepared = prepare(request, self.info)
        if prepared.awaits_grammar and self.vocabulary is None:
            raise grammar_error("this engine knows no text, so that it follows no grammar")
        return prepared

    def add(self, request: EngineRequest) -> None:
        """Check a request and put it in the waiting queue. Raises as ``prepare`` does."""
        self.admit(self.prepare(request))

    def admit(self, request: Request) -> None:
        """Put a prepared request in the waiting queue, with a grammar as soon as that is compiled. Raises
        ``RequestError`` when its id is in use."""
        self.opened.admit(request)
        if self.speculator is not None:
            self.speculator.expect(request)
        if request.awaits_grammar:
            assert self.vocabulary is not None
            self.grammars.add(request, self.vocabulary)
        if request.awaits_pictures:
            assert self.pictures is not None, "prepared for another engine"
            self.pictures.add(request)

    def embed(self, embedding: Embedding) -> None:
        """Begin with a prepared embedding: with its pictures first, if it has any."""
        if embedding.pictures is None:
            self.embedder.add(embedding)
        else:
            assert self.pictures is not None, "prepared for another engine"
            self.pictures.add(embedding)

    def cancel(self, request_id: str, index: int | None = None) -> list[EngineOutput]:
        """End a request (or one choice of it) now and free its blocks.

        Returns one output with "abort" for each choice that it ended; none for unknown ids.
        """
        return self.opened.cancel(request_id, index)

    def pause(self, request_id: str) -> None:
        """See ``EngineClient.pause``."""
        self.opened.pause(request_id)

    def resume(self, request_id: str) -> None:
        """See ``EngineClient.resume``."""
        self.opened.resume(request_id)

    def cancel_all(self) -> list[EngineOutput]:
        """End every request."""
        return [output for request_id in list(self.requests) for output in self.cancel(request_id)]

    def step(self, poll: Poll = list) -> list[EngineOutput]:
        """Run one step to its end and return its outputs; nothing when there is no work.

        In the overlapped loop the next step runs already on return. ``poll`` is called before it begins.

        When the model fails, the requests of this step end with "error" and all others go on. What raises here (the
        scheduler's bookkeeping, a transfer of blocks) leaves pages in doubt: the engine must not go on.
        """
        outputs: list[EngineOutput] = []
        if self.pictures is not None and len(self.pictures) > 0:
            self._encode(self.pictures, outputs)
            if not (self._open or self.scheduler.has_work or len(self.grammars) > 0):
                return outputs
        if len(self.grammars) > 0 and not self._start_compiled(outputs):
            return outputs
        self.executor.record()
        if self.executor.depth > 1:
            opened = self._fill(poll, outputs)
        else:
            opened = self._open[0] if self._open else self._start(self._plan(outputs))
        if self.overlaps and self.executor.depth == 1:
            speculator = self.speculator
            holds = speculator is not None and speculator.is_asked and speculator.wants_tokens()
            following = self._plan(outputs) if opened.computation is not None and not holds else None
            leads = following is not None and self._lead(following, poll, outputs)
            self._finish(opened, outputs)
            if following is not None and not leads:
                outputs += poll()
                self._start(self._revise(following, outputs))
        else:
            self._finish(opened, outputs)
        self._counters.steps += 1
        self._last_step_s = time.monotonic()
        return outputs

    def rest(self) -> None:
        """Do what can wait until there is no work: record the decode graph that the last step was without."""
        if not self.has_work:
            self.executor.record()

    def close(self) -> None:
        """Wait for the step that runs, and let it go; no more are run."""
        self.grammars.close()
        self.executor.close()
        self._masks.close()
        for opened in self._open:
            self.scheduler.abandon(opened.step)
        self._open.clear()

    def logits(self, token_ids: Sequences[int]) -> NDArray[np.float32]:
        """The raw logits after each of 1 … ``max_model_len`` tokens, ``[num_tokens, vocab_size]`` float32.

        Raises ``RequestError``, ``ContextLengthExceededError``.
        """
        ids = as_token_ids("token_ids", token_ids, self.info.vocab_size)
        if len(ids) > self.limits.max_model_len:
            raise ContextLengthExceededError(len(ids), self.limits.max_model_len)
        return self.executor.logits(ids)

    def reset_prefix_cache(self) -> NDArray[np.float32]:
        """See ``EngineClient.reset_prefix_cache``."""
        return np.array(self.pool.drop_prefixes(), np.float32)

    def stats(self) -> EngineStats:
        """A snapshot of plain numbers. Thread-safe."""
        num_blocks, num_free = self.pool.num_blocks, self.pool.num_free
        cache, counters, requests = self.pool.counters, self._counters, self.opened.counters
        graphs, tallies = self.executor.graph_stats(), self.executor.tallies()
        num_pictures = 0 if self.pictures is None else len(self.pictures)
        drafts = SpeculationCounters() if self.speculator is None else self.speculator.counters
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting) + len(self.grammars) + num_pictures,
            max_waiting=self.limits.max_waiting,
            num_blocks=num_blocks,
            num_free_blocks=num_free,
            kv_cache_usage=(num_blocks - num_free) / num_blocks,
            num_preemptions=self.scheduler.num_preemptions,
            num_steps=counters.steps,
            prompt_tokens=requests.prompt_tokens,
            generation_tokens=requests.generation_tokens,
            num_requests=requests.requests,
            num_errors=requests.errors,
            last_step_s=self._last_step_s,
            num_cached_blocks=self.pool.num_cached,
            prefix_cache_queries=cache.queried_tokens,
            prefix_cache_hits=cache.hit_tokens,
            prefix_cache_evictions=cache.evictions,
            num_swaps=self.scheduler.num_swaps,
            swapped_out_blocks=counters.swapped_out_blocks,
            swapped_in_blocks=counters.swapped_in_blocks,
            num_host_blocks=self.limits.num_host_blocks,
            num_free_host_blocks=0 if self.host_pool is None else self.host_pool.num_free,
            num_decode_graphs=graphs.num_graphs,
            decode_graph_bytes=graphs.size_bytes,
            num_graph_steps=graphs.num_steps,
            num_failed_graphs=graphs.num_failed,
            num_recorded_forwards=graphs.num_forwards,
            num_forward_steps=graphs.num_forward_steps,
            num_waiting_tokens=self.num_unscheduled_tokens,
            num_paused=len(self.scheduler.paused),
            iteration_token_counts=tuple(counters.steps_by_tokens),
            iteration_tokens=counters.step_tokens,
            num_drafts=drafts.num_drafts,
            num_draft_tokens=drafts.num_draft_tokens,
            num_accepted_tokens=drafts.num_accepted_tokens,
            accepted_by_position=tuple(drafts.accepted_by_position),
            rank_step_s=tuple(tally.step_ns / 1e9 for tally in tallies),
            rank_waited_s=tuple(tally.waited_ns / 1e9 for tally in tallies),
        )

    def check_invariants(self) -> None:
        """Assert that queues, rows, blocks and open requests agree. For tests."""
        self.scheduler.check_invariants()
        for sequence in self.scheduler.running + self.scheduler.waiting:
            assert self.requests.get(sequence.request.request_id) is sequence.request, "a closed request is queued"
        for request in self.requests.values():
            assert request.open_sequences, "an ended request is open"
        assert self.scheduler.paused <= set(self.requests.values()), "an ended request is paused"
        unscheduled = sum(not request.was_scheduled for request in self.requests.values())
        assert unscheduled == self.num_unscheduled, "unscheduled requests are miscounted"
        tokens = sum(request.num_prompt_tokens for request in self.requests.values() if not request.was_scheduled)
        assert tokens == self.num_unscheduled_tokens, "unscheduled tokens are miscounted"
        running = [opened.step for opened in self._open]
        assert all(step in running for step in self.scheduler.open_steps), "an ended step is open"

    def _encode(self, pictures: PictureQueue, outputs: list[EngineOutput]) -> None:
        """Go on with the pictures that requests wait for."""

        def start(request: Request | Embedding) -> None:
            if isinstance(request, Embedding):
                self.embedder.add(request)
            else:
                self.opened.start_with_pictures(request)

        def fail(request: Request | Embedding) -> None:
            if isinstance(request, Embedding):
                self.embedder.fail(request, "the pictures could not be encoded")
                pictures.release(request)
            else:
                outputs.extend(self.opened.end(request, "error", "the pictures could not be encoded"))

        pictures.advance(start, fail, is_idle=not (self._open or self.scheduler.has_work))

    def _start_compiled(self, outputs: list[EngineOutput]) -> bool:
        """Let the requests queue whose grammars are compiled; False when there is nothing else to do yet."""
        if not self._open and not self.scheduler.has_work:
            self.grammars.wait(GRAMMAR_WAIT_S)
        for compiled in self.grammars.take():
            request, error = compiled.request, compiled.error
            if not request.open_sequences:
                continue  # cancelled meanwhile
            if error is None:
                self.opened.start(request, compiled.matchers)
                continue
            if not isinstance(error, RequestError):
                logger.error("request %s: its grammar could not be compiled", request.request_id, exc_info=error)
            is_bad = isinstance(error, RequestError)
            reason = str(error) if is_bad else "the grammar could not be compiled"
            outputs += self.opened.end(request, "error", reason, error_code="invalid_grammar" if is_bad else None)
        return bool(self._open) or self.scheduler.has_work

    def _fill(self, poll: Poll, outputs: list[EngineOutput]) -> _OpenStep:
        """Start steps, each of sequences that are in no other, until as many are open as the executor takes. Returns
        the oldest, or one without work if none is open."""
        while True:
            outputs += poll()
            planned = self._start(self._plan(outputs))
            if not planned.step.chunks or len(self._open) == self.executor.depth:
                return self._open[0] if self._open else planned

    def _plan(self, outputs: list[EngineOutput]) -> _OpenStep:
        """Choose the next step and lay it out; the step before it may still run."""
        record = StepRecord(self.scheduler.num_steps, time.monotonic())
        record.num_running, record.num_waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        speculator = self.speculator
        if speculator is not None:
            if speculator.num_resting:
                speculator.num_resting -= 1
            elif speculator.is_asked:
                self.scheduler.drafts = speculator.propose(self.scheduler.running)
        step = self.scheduler.schedule()
        planned = time.monotonic()
        record.schedule_s = planned - record.start_s
        record.num_free_blocks = self.pool.num_free
        opened = _OpenStep(step, None, record)
        self._assemble(opened, outputs)
        record.prepare_s = time.monotonic() - planned
        return opened

    def _lead(self, following: _OpenStep, poll: Poll, outputs: list[EngineOutput]) -> bool:
        """Start a planned step while the one before it runs, if both are a graph's and nobody has just arrived.

        The sequences that the step before ends are computed once more, for nobody. What they wrote lies behind their
        committed tokens, and whoever gets the blocks next writes after them. Those who wait for what they leave have to
        wait for one step more.
        """
        assembled, waiting = following.assembled, self.scheduler.waiting
        if assembled is None or not self.executor.can_lead(assembled.input):
            return False
        num_waiting = len(waiting)
        cancelled = poll()
        outputs += cancelled
        if cancelled or len(waiting) > num_waiting:
            return False
        self._start(following)
        return True

    def _revise(self, opened: _OpenStep, outputs: list[EngineOutput]) -> _OpenStep:
        """Bring a planned step up to date: without those who have ended, with those who have arrived."""
        step, record = opened.step, opened.record
        begun = time.monotonic()
        planned, num_left = step.chunks, len(step.chunks)
        self.scheduler.extend(step)
        extended = time.monotonic()
        record.schedule_s += extended - begun
        if step.chunks is not planned or len(step.chunks) > num_left:
            self._assemble(opened, outputs)
            record.prepare_s += time.monotonic() - extended
        if not step.chunks:  # the commit may have made room for sequences that had to pause
            self._finish(self._start(opened), outputs)
            return self._plan(outputs)
        return opened

    def _assemble(self, opened: _OpenStep, outputs: list[EngineOutput]) -> None:
        """Make the step's value."""
        step, record = opened.step, opened.record
        loads = self._loads(step, outputs)
        opened.assembled = self.assembler.assemble(step, loads) if step.has_work else None
        if opened.assembled is not None:
            made = opened.assembled.input
            if made.loads or made.rows is not self._chunk_rows:
                self._chunk_rows, self._chunk_keys = made.rows, [self._keys[row] for row in made.rows.tolist()]
            record.set_chunks(self._chunk_keys, made.starts, made.counts)

    def _loads(self, step: Step, outputs: list[EngineOutput]) -> list[RowLoad]:
        """The rows of sequences that start to run; one that has none that can be made ends its request alone."""
        starting = [chunk.sequence for chunk in step.chunks if chunk.is_first]
        if not starting:
            return []
        now, loads = time.monotonic(), []
        for sequence in starting:
            request, row = sequence.request, sequence.row
            if sequence.is_finished:
                continue  # a choice before it could not be started
            if sequence.first_scheduled_s is None:
                sequence.first_scheduled_s = now
            self.opened.mark_scheduled(request)
            assert row is not None
            self._keys[row] = ChunkKey(
                request.request_id, sequence.index, sequence.num_prompt_tokens, request.arrival_s
            )
            try:
                loads.append(self.assembler.load_of(sequence))
            except Exception:
                logger.exception("request %s could not be started", request.request_id)
                outputs += self.opened.end(request, "error", "the request could not be started")
        step.drop_finished()
        if len(loads) < len(starting):
            rows = {chunk.sequence.row for chunk in step.chunks}
            loads = [load for load in loads if load.row in rows]
        return loads

    def _start(self, opened: _OpenStep) -> _OpenStep:
        """Begin the step, all before which are over. Without chunks it is done already."""
        step, record, assembled = opened.step, opened.record, opened.assembled
        opened.started_s = time.monotonic()
        if self.overlaps:
            record.start_s = opened.started_s
        if assembled is None:
            return opened
        made = assembled.input
        if made.has_transfers:  # those of sequences that have ended since were dropped
            made.swap_out, made.swap_in, made.copies = step.swap_out, step.swap_in, step.copies
            self._count_transfers(step, record)
        drafts: dict[Sequence, list[int]] = {}
        if step.num_drafts:
            drafts = {chunk.sequence: chunk.draft_ids for chunk in step.chunks if chunk.draft_ids}
        masks = self._masks.start(assembled.drawing, made.num_draws, drafts)
        proposed = self.speculator.distributions(drafts) if self.speculator is not None and drafts else {}
        if proposed:
            computation = self.executor.start(made, masks, [proposed.get(sequence) for sequence in assembled.drawing])
        else:
            computation = self.executor.start(made, masks)
        self.assembler.sent(made)
        if step.chunks or self.executor.depth > 1:
            opened.computation = computation
            self._open.append(opened)
            record.prepare_s += computation.started_s - opened.started_s
            opened.started_s = computation.started_s
        return opened

    def _note_proposals(
        self, speculator: Speculator, assembled: Assembled, step: Step, accepted: dict[Sequence, int] | None
    ) -> None:
        kept = dict.fromkeys(assembled.drawing, 1) if accepted is None else accepted
        drafted = {}
        if step.num_drafts:
            drafted = {chunk.sequence: len(chunk.draft_ids) for chunk in step.chunks if chunk.draft_ids}
        is_pure = step.num_tokens == len(assembled.drawing) + step.num_drafts
        speculator.observe(step.number, drafted, kept, is_pure=is_pure)

    def _show_states(self, speculator: Speculator, assembled: Assembled) -> None:
        """Tell the drafter what the step that is just over left of hidden states."""
        kept, made = self.executor.kept_rows, assembled.input
        if kept is None or kept.number != made.number:
            return
        speculator.follow(kept, partial(_left_chunks, assembled, kept))

    def _count_transfers(self, step: Step, record: StepRecord) -> None:
        record.swapped_out, record.swapped_in = len(step.swap_out), len(step.swap_in)
        record.copied = len(step.copies)
        self._counters.swapped_out_blocks += record.swapped_out
        self._counters.swapped_in_blocks += record.swapped_in

    def _finish(self, opened: _OpenStep, outputs: list[EngineOutput]) -> None:
        """Wait for the step and hand out what it drew."""
        step, record = opened.step, opened.record
        drawn: Drawn | None = None
        if opened.computation is not None:
            first = self._open.popleft()
            assert first is opened, "steps end in their order"
        following = self._open[0] if self._open else None
        if opened.computation is not None:
            try:
                drawn = opened.computation.result()
            except ExecutorLostError:
                raise
            except Exception:
                logger.exception("a step of %d sequences failed", len(step.chunks))
                record.has_failed = True
        ended = time.monotonic()
        record.run_s = ended - opened.started_s
        if record.has_failed:
            self.scheduler.abandon(step)
            for chunk in step.chunks:
                outputs += self.opened.end(chunk.sequence.request, "error", "the model failed in this step")
        else:
            accepted = None
            if drawn is not None and drawn.counts is not None and opened.assembled is not None:
                accepted = dict(zip(opened.assembled.drawing, drawn.counts, strict=True))
            self.scheduler.commit(step, accepted)
            if drawn is not None and opened.assembled is not None:
                speculator = self.speculator
                if speculator is not None and not speculator.num_resting and speculator.observes:
                    self._note_proposals(speculator, opened.assembled, step, accepted)
                self.opened.append(opened.assembled, drawn, ended, outputs)
                if speculator is not None and speculator.reads_states and following is None:
                    self._show_states(speculator, opened.assembled)
                num_tokens = opened.assembled.input.num_tokens
                if self.pictures is not None and opened.assembled.input.are_decodes:
                    self.pictures.budget.observe(record.run_s)
                if num_tokens:
                    self.scheduler.observe(num_tokens, record.run_s)
                    if self.executor.depth > 1:
                        made = opened.assembled.input
                        num_pairs = int((made.counts * (2 * made.starts + made.counts)).sum())
                        self.scheduler.observe_prompts(num_tokens, num_pairs, record.run_s)
                    self._counters.count_tokens(num_tokens)
            num_blocks, seconds = self.executor.take_timed()
            if num_blocks:
                self.scheduler.observe_transfer(num_blocks, seconds)
        record.preempted = [(s.request.request_id, s.index, way) for s, way in step.preempted]
        record.end_s = time.monotonic()
        record.commit_s = record.end_s - ended
        if following is not None:  # it was queued behind this one
            following.started_s, following.record.start_s = ended, record.end_s
        if opened.computation is not None or step.has_transfers:
            self.timeline.append(record)


def _left_chunks(assembled: Assembled, kept: KeptRows) -> list[LeftChunk]:
    """Whose hidden states a step left, as far as the tokens behind them are known."""
    made = assembled.input
    places = zip(assembled.sequences, kept.first.tolist(), made.starts.tolist(), made.counts.tolist(), strict=True)
    chunks = [
        LeftChunk(sequence, first, start, min(count, sequence.num_tokens - 1 - start))
        for sequence, first, start, count in places
        if not sequence.is_finished and sequence.request.pictures is None
    ]
    return [chunk for chunk in chunks if chunk.num_tokens > 0]
