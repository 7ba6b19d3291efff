"""The engine's loop: schedule → run → commit, step by step or with the next step planned while one runs.

The plain loop is the oracle of the overlapped one. Both give the same outputs: everything that depends on the tokens of
the previous step (the last token ids, penalties, finished choices) is filled in between its commit and the next step's
start; the rest of the next step is prepared while the previous one runs. If decode graphs run both, the next step
starts before the previous one is over (`OpenSteps.overlap`).

The engine works in token ids alone; text, stop strings and parsers belong to the client (``runtime.text``). One thread
owns an ``Engine``; others reach it through ``runtime.engine.process.client``. Any thread may call ``prepare`` and
``stats``, and read ``timeline``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Sequences
from concurrent.futures import Future
from functools import partial

import numpy as np
from numpy.typing import NDArray

from runtime.collector import collect_idle
from runtime.engine.adapters import Adapters, Reader
from runtime.engine.admission import prepare, prompt_of, record_of
from runtime.engine.errors import RequestError
from runtime.engine.grammar.compiling import GrammarQueue
from runtime.engine.grammar.grammar import grammar_error
from runtime.engine.grammar.matcher import LazyVocabulary
from runtime.engine.limits import EngineLimits
from runtime.engine.messages import EngineInfo, EngineOutput, EngineRequest, EngineStats
from runtime.engine.open_requests import OpenRequests, is_parked
from runtime.engine.open_steps import OpenSteps, Poll
from runtime.engine.picture_queue import EncodingBudget, PictureQueue
from runtime.engine.scheduling.block_events import BlockChanges, BlockEvents, SharedDigest
from runtime.engine.scheduling.block_pool import pool_of
from runtime.engine.scheduling.fresh_pages import FreshPages
from runtime.engine.scheduling.scheduler import Scheduler
from runtime.engine.scheduling.sequence import Request
from runtime.engine.scheduling.stored_prefixes import StoredPrefixes
from runtime.engine.speculation.evidence import SpeculationCounters
from runtime.engine.speculation.speculator import Speculator
from runtime.engine.steps.assemble import Assembler
from runtime.engine.steps.embedder import SHARED_TOKENS, Embedder, Embedding
from runtime.engine.steps.executor import Executor
from runtime.engine.steps.step_input import Mode
from runtime.engine.timeline import Timeline
from runtime.engine.transfer.arrivals import Arrivals
from runtime.engine.transfer.hand_overs import HandOvers
from runtime.engine.transfer.transport import Transport
from runtime.engine.weights.commands import Command, GivenArrays, WeightSource
from runtime.engine.weights.engine_weights import EngineWeights
from runtime.engine.weights.pauses import Pauses
from runtime.kv.layer_copies import LayerCopies
from runtime.kv.page_bytes import PageBytes
from runtime.kv.page_store import PageStore
from runtime.linear.low_rank import LowRankMaps

logger = logging.getLogger("xserv.engine")

GPU_ROWS_PER_TOKEN = 16
"""Image rows that a GPU encodes between two steps, for each token that a step may have: an eighth of an image of 1,024
tokens by Qwen3-VL-8B's tower, where steps may have 2,048."""

START_WAIT_S = 1e-3
"""How long a step without work waits for a grammar or an adapter before it returns, so that messages are polled."""


class Engine:
    """A model, its KV cache, its scheduler.

    info      static facts for clients
    executor  runs the steps
    limits    as ``runtime.engine.config.resolve`` gives them
    seed      of the generator that draws seeds for requests without one; None takes it from the OS
    timeline  a record of each of the latest steps
    embedder  computes embeddings, one forward pass at a time between two steps
    vocabulary  the text of the model's ids, for grammars; with None, requests with a grammar are refused
    speculator  proposes draft tokens for decodes, or None
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
        self.pool = pool_of(limits)
        self.host_pool = self.pool.host_pool
        self.scheduler = Scheduler(limits, self.pool, depth=executor.depth)
        self.executor = executor
        self.overlaps = executor.overlaps
        mode: Mode = "eager" if limits.decode_graphs == "off" else "record"
        self.assembler = Assembler(limits, mode)
        shared = SHARED_TOKENS if info.device == "cpu" and not info.pooling.generates else None
        self.embedder = Embedder(executor, limits, info.vocab_size, info.images, info.pooling, shared)
        self.opened = OpenRequests(self.scheduler, seed)
        self.vocabulary = vocabulary
        self.grammars = GrammarQueue()
        self.pictures: PictureQueue | None = None
        if info.images is not None:
            rows = None if info.device == "cpu" else GPU_ROWS_PER_TOKEN * limits.max_num_batched_tokens
            self.pictures = PictureQueue(executor, info.images, EncodingBudget(rows))
            self.embedder.on_end = self.pictures.release
            self.opened.on_request_end.append(self.pictures.release)
        self.adapters: Adapters | None = None
        self.hand_overs: HandOvers | None = None
        self.fresh_pages: FreshPages | None = None
        self.steps = OpenSteps(
            self.scheduler, self.opened, executor, self.assembler, limits.max_num_seqs, self.pictures
        )
        self.weights = EngineWeights(self)
        self.pauses = Pauses(self.weights, self.opened, self.scheduler)
        if speculator is not None:
            self.use(speculator)
        self._block_events: BlockEvents | None = None
        self._last_step_s = time.monotonic()

    def use(self, speculator: Speculator | None) -> None:
        """Propose draft tokens with it from the next step on; None ends speculation. Raises ``RequestError`` if several
        steps are open at once."""
        self.scheduler.drafts = {}
        if speculator is None:
            self.steps.speculator = self.opened.on_end = None
            return
        if self.executor.depth > 1:
            raise RequestError("speculation needs steps that follow one another", param="speculation")
        if speculator.wanted is not None:
            layers, width, dtype, of_last = speculator.wanted
            self.executor.keep_layers(layers, width, dtype, of_last=of_last)
        self.steps.speculator = speculator
        self.opened.on_end = speculator.end
        for request in self.requests.values():
            speculator.expect(request)

    def store_prefixes(self, pages: PageBytes, store: PageStore, fingerprint: str) -> None:
        """Keep prefixes in a store, too, whose pages have this fingerprint. To be called before the first request."""
        picture_of = None if self.pictures is None else self.pictures.keys.known_digest
        self.scheduler.stored = StoredPrefixes(self.pool, pages, store, fingerprint, picture_of)

    def take_adapters(self, maps: LowRankMaps, read: Reader, most_kept: int) -> None:
        """Serve adapters in the slots of ``maps``. To be called before the first request."""
        self.adapters = adapters = Adapters(maps, read, self.executor, most_kept, partial(is_parked, self.scheduler))
        self.opened.on_request_end.append(adapters.release)
        if self.pictures is not None:
            self.pictures.changes_tower = adapters.changes_tower

    def hand_over(
        self,
        stored: StoredPrefixes,
        transports: dict[str, Transport],
        arrivals: Arrivals,
        copies: LayerCopies | None,
        *,
        has_fleet: bool,
    ) -> None:
        """Hand requests over to other engines, and take theirs. To be called before the first request."""
        self.scheduler.stored = stored
        self.hand_overs = HandOvers(self.pool, stored, transports, arrivals, copies, has_fleet=has_fleet)
        self.scheduler.reserved, self.scheduler.on_pages = self.hand_overs.reserved, self.hand_overs.note
        self.hand_overs.states_after = self.scheduler.states_after
        self.steps.on_start, self.steps.on_ran = self.hand_overs.look_ahead, self.hand_overs.step_ran
        self.opened.on_request_begin = self.hand_overs.begin
        self.opened.relays = partial(self.hand_overs.relays, self.opened)
        self.opened.on_request_end.append(self.hand_overs.end)

    @property
    def speculator(self) -> Speculator | None:
        return self.steps.speculator

    @property
    def timeline(self) -> Timeline:
        return self.steps.timeline

    def publish_blocks(self, secret: bytes) -> None:
        """From now on ``take_block_changes`` reports the contents of its blocks, as digests keyed by this secret
        (``SharedDigest``). To be called before the first request."""
        picture_of = None if self.pictures is None else self.pictures.keys.digest_of
        self._block_events = self.pool.publish(SharedDigest(secret, picture_of))

    def take_block_changes(self) -> BlockChanges | None:
        """The changes since the last call; None if there are none, or if blocks are not published."""
        return None if self._block_events is None else self._block_events.take()

    @property
    def has_work(self) -> bool:
        if self.pauses.is_held and (self.pauses.can_advance or self.pauses.blocks):
            return self.pauses.can_advance
        has_pictures = self.pictures is not None and len(self.pictures) > 0
        return self._has_work_beside_pictures or has_pictures

    @property
    def _has_work_beside_pictures(self) -> bool:
        handed = self.hand_overs
        is_awaited = self._awaits_beside_pages or (handed is not None and (len(handed) > 0 or handed.has_pages))
        return bool(self.steps.open) or self.scheduler.has_work or is_awaited

    @property
    def requests(self) -> dict[str, Request]:
        """The open requests, by id."""
        return self.opened.by_id

    @property
    def num_unscheduled(self) -> int:
        """Requests of which nothing has been scheduled: those that count against ``max_waiting``."""
        return self.opened.num_unscheduled

    @property
    def num_unscheduled_tokens(self) -> int:
        """Prompt tokens of those requests."""
        return self.opened.num_unscheduled_tokens

    def prepare(self, request: EngineRequest, *, is_prepared: bool = False) -> Request:
        """See ``runtime.engine.admission``: ``prepare``, or ``record_of`` if another process has done that.
        Thread-safe."""
        prepared = (record_of if is_prepared else prepare)(request, self.info)
        if request.adapter is not None:
            assert self.adapters is not None, "refused by admission"
            prepared.adapter = self.adapters.prepare(request.adapter)
        if prepared.awaits_grammar and self.vocabulary is None:
            raise grammar_error("this engine knows no text, so that it follows no grammar")
        return prepared

    def add(self, request: EngineRequest) -> None:
        """Check a request and put it in the waiting queue. Raises as ``prepare`` does."""
        self.admit(self.prepare(request))

    def admit(self, request: Request) -> None:
        """Put a prepared request in the waiting queue, once its grammar, if any, is compiled. Raises ``RequestError``
        if its id is in use."""
        self.opened.admit(request)
        if self.hand_overs is not None:
            self.hand_overs.admit(request)
        self.pauses.take_in(request)
        self.await_parts(request)

    def await_parts(self, request: Request) -> None:
        """Let a request that was admitted wait for its grammar, its images and its adapter."""
        if self.speculator is not None:
            self.speculator.expect(request)
        if request.awaits_grammar:
            assert self.vocabulary is not None
            self.grammars.add(request, self.vocabulary)
        if request.awaits_adapter:  # before its pictures: an adapter may change their encoder
            assert self.adapters is not None, "prepared for another engine"
            self.adapters.add(request)
        elif request.awaits_pictures:
            self._await_pictures(request)

    def _await_pictures(self, request: Request) -> None:
        assert self.pictures is not None, "prepared for another engine"
        self.pictures.add(request)

    def embed(self, embedding: Embedding) -> None:
        """Start a prepared embedding, with its images first if it has any."""
        if embedding.pictures is None:
            self.embedder.add(embedding)
        else:
            assert self.pictures is not None, "prepared for another engine"
            self.pictures.add(embedding)

    def cancel(self, request_id: str, index: int | None = None) -> list[EngineOutput]:
        """End a request (or one choice of it) now and free its blocks.

        Returns one output with "abort" for each choice that it ended, none for an unknown id.
        """
        return self.opened.cancel(request_id, index)

    def pause(self, request_id: str) -> None:
        self.pauses.pause_unread(request_id)

    def resume(self, request_id: str) -> None:
        if self.pauses.resume_read(request_id):
            self._go_on(self.requests[request_id])

    def _go_on(self, request: Request) -> None:
        """A request that was paused goes on."""
        if self.adapters is not None:
            self.adapters.resume(request)

    def order(self, command: Command | GivenArrays) -> Future[NDArray[np.float32]]:
        """See ``EngineClient.order``."""
        return self.pauses.order(command)

    def start_with(self, source: WeightSource, version: str) -> None:
        """Serve these weights; to be called before the first request. Raises as ``EngineClient.update_weights``."""
        self.weights.load_weights(source)
        self.weights.use_weights()
        self.opened.weight_version = version

    def advance_embeddings(self) -> None:
        """Run one forward pass over prompts to embed, if there is work and the engine is awake."""
        if not self.pauses.is_stopped:
            self.embedder.advance()

    @property
    def has_embeddings(self) -> bool:
        """Whether prompts to embed can be computed."""
        return self.embedder.has_work and not self.pauses.is_stopped

    def cancel_all(self) -> list[EngineOutput]:
        """End every request."""
        return [output for request_id in list(self.requests) for output in self.cancel(request_id)]

    def step(self, poll: Poll = list) -> list[EngineOutput]:
        """Run one step to its end and return its outputs; an empty list if there is no work.

        In the overlapped loop the next step is already running on return. ``poll`` is called before it begins.

        If the model fails, the requests of this step end with "error" and all others go on. An exception raised here
        (by the scheduler's bookkeeping or a transfer of blocks) leaves pages in doubt: the engine must not go on.
        """
        outputs: list[EngineOutput] = []
        if self.pauses.is_held and not self.pauses.advance(outputs, self._go_on):
            return outputs
        if self.pictures is not None and len(self.pictures) > 0:
            self.encode_pictures(outputs)
            if not self._has_work_beside_pictures:
                return outputs
        adapters = self.adapters if self.adapters is not None and len(self.adapters) > 0 else None
        if self.hand_overs is not None:
            self.hand_overs.relay(self.opened)
            self.hand_overs.send_waiting()
            self.hand_overs.let_go()  # not at the step's end: the second token would wait for it
            if self.hand_overs.has_pages:
                self.hand_overs.take_in(self.scheduler)
                if not self._has_work_beside_pictures:
                    return outputs
        arriving = self.hand_overs if self.hand_overs is not None and len(self.hand_overs) > 0 else None
        if arriving is not None and not self._start_handed_over(arriving, outputs) and not self._awaits_beside_pages:
            return outputs
        if len(self.grammars) > 0 and not self._start_compiled(outputs) and adapters is None:
            return outputs
        if adapters is not None and not self._start_adapted(adapters, outputs):
            return outputs
        self.executor.record()
        if self.executor.depth > 1:
            opened = self.steps.fill(poll, outputs)
        else:
            opened = self.steps.open[0] if self.steps.open else self.steps.start(self.steps.plan(outputs))
        if self.overlaps and self.executor.depth == 1:
            speculator = self.speculator
            holds = speculator is not None and speculator.wants_tokens()
            following = self.steps.plan(outputs) if opened.computation is not None and not holds else None
            overlaps = following is not None and self.steps.overlap(following, poll, outputs)
            self.steps.finish(opened, outputs)
            if following is not None and not overlaps:
                outputs += poll()
                self.steps.start(self.steps.revise(following, outputs))
        else:
            self.steps.finish(opened, outputs)
        if (stored := self.scheduler.stored) is not None:
            stored.write_some()
        if self.hand_overs is not None:
            self.hand_overs.announce(outputs)
        self.steps.counters.steps += 1
        self._last_step_s = time.monotonic()
        return outputs

    def rest(self) -> None:
        """Do deferred work while idle: record the decode graph that the last step lacked, and store prefixes."""
        if self.hand_overs is not None:
            self.hand_overs.send_waiting()
            self.hand_overs.let_go()
        if not self.has_work and not self.pauses.is_held:
            self.executor.record()
            if (stored := self.scheduler.stored) is not None:
                stored.write_some(is_idle=True)
                if stored.longest_warm:
                    self.executor.expect(min(stored.longest_warm, self.limits.max_model_len))
            collect_idle()

    def rest_long(self) -> None:
        """``rest``, and what takes too long between two requests: read back prefixes of an earlier engine, and let
        pages get memory."""
        self.rest()
        stored = self.scheduler.stored
        if stored is not None and not self.has_work and not self.pauses.is_held:
            stored.warm()
        if self.fresh_pages is not None and not self.has_work and not self.pauses.is_held:
            self.fresh_pages.allocate_some()

    @property
    def wants_rest(self) -> bool:
        """Whether prefixes wait for the disk, or to be read back, or pages for memory, although no step runs."""
        stored, fresh = self.scheduler.stored, self.fresh_pages
        has_work = stored is not None and (stored.num_waiting > 0 or stored.wants_to_warm)
        return (has_work or (fresh is not None and fresh.is_wanted)) and not self.pauses.is_held

    def close(self) -> None:
        """Wait for the running step and drop it; no further step runs."""
        self.pauses.close()
        self.grammars.close()
        if self.adapters is not None:
            self.adapters.close()
        if self.hand_overs is not None:
            self.hand_overs.close()
        if (stored := self.scheduler.stored) is not None:
            stored.close()
        self.executor.close()
        self.steps.close()

    def logits(self, token_ids: Sequences[int]) -> NDArray[np.float32]:
        """The raw logits after each of 1 … ``max_model_len`` tokens, ``[num_tokens, vocab_size]`` float32.

        Raises ``RequestError``, ``ContextLengthExceededError``.
        """
        if not self.pauses.has_weights:
            raise RequestError("the engine sleeps: it computes no logits", param="token_ids")
        most = self.limits.max_model_len
        return self.executor.logits(prompt_of("token_ids", token_ids, self.info.vocab_size, most, has_answer=False))

    def load_adapter(self, name: str, path: str) -> Future[NDArray[np.float32]]:
        """See ``EngineClient.load_adapter``. Thread-safe."""
        if self.adapters is None:
            raise RequestError("the engine takes no adapters: start it with enable_lora", param="lora_name")
        return self.adapters.load(name, path)

    def reset_prefix_cache(self) -> NDArray[np.float32]:
        """See ``EngineClient.reset_prefix_cache``; an idle engine reads no prefixes of an earlier one back any more."""
        if (stored := self.scheduler.stored) is not None:
            stored.stop_warming()
        return np.array(self.pool.drop_prefixes(), np.float32)

    def stats(self) -> EngineStats:
        """A snapshot of plain numbers. Thread-safe."""
        num_blocks, num_free = self.pool.num_blocks, self.pool.num_free
        cache, counters, requests = self.pool.counters, self.steps.counters, self.opened.counters
        graphs, tallies = self.executor.graph_stats(), self.executor.tallies()
        num_pictures = 0 if self.pictures is None else len(self.pictures)
        num_adapted = 0 if self.adapters is None else len(self.adapters)
        drafts = SpeculationCounters() if self.speculator is None else self.speculator.counters
        stored = self.scheduler.stored
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting) + len(self.grammars) + num_pictures + num_adapted,
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
            prefix_cache_missed=tuple(cache.missed_tokens.values()),
            prefix_cache_restored=0 if stored is None else stored.num_restored,
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
            **({} if self.hand_overs is None else self.hand_overs.stats()),
            sleep_level=self.pauses.sleep_level,
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
        running = [opened.step for opened in self.steps.open]
        assert all(step in running for step in self.scheduler.open_steps), "an ended step is open"

    def encode_pictures(self, outputs: list[EngineOutput]) -> None:
        """Encode more of the images that requests wait for."""
        pictures = self.pictures
        assert pictures is not None, "the model reads none"

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

        pictures.advance(start, fail, is_idle=not (self.steps.open or self.scheduler.has_work))

    def _start_adapted(self, adapters: Adapters, outputs: list[EngineOutput]) -> bool:
        """Queue the requests whose adapters lie in slots, or let them wait for their pictures; False if there is no
        other work yet."""

        def start(request: Request) -> None:
            self.opened.start_with_adapter(request)
            if request.awaits_pictures:
                self._await_pictures(request)

        def fail(request: Request, why: str) -> None:
            outputs.extend(self.opened.end(request, "error", why))

        if not self.steps.open and not self.scheduler.has_work:
            adapters.wait(START_WAIT_S)
        adapters.advance(start, fail)
        return bool(self.steps.open) or self.scheduler.has_work

    @property
    def _awaits_beside_pages(self) -> bool:
        return len(self.grammars) > 0 or (self.adapters is not None and len(self.adapters) > 0)

    def _start_handed_over(self, arriving: HandOvers, outputs: list[EngineOutput]) -> bool:
        """Queue the requests whose pages have come; False if there is no other work yet."""

        def fail(request: Request, why: str) -> None:
            outputs.extend(self.opened.end(request, "error", why, error_code="stale_lease"))

        if not self.steps.open and not self.scheduler.has_work:
            arriving.wait(START_WAIT_S)
        arriving.advance(self.opened.start_with_pages, fail)
        return bool(self.steps.open) or self.scheduler.has_work

    def _start_compiled(self, outputs: list[EngineOutput]) -> bool:
        """Queue the requests whose grammars are compiled; False if there is no other work yet."""
        if not self.steps.open and not self.scheduler.has_work:
            self.grammars.wait(START_WAIT_S)
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
        return bool(self.steps.open) or self.scheduler.has_work
