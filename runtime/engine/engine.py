"""The engine's plain loop: schedule → run → commit.

It works in token ids alone; text, stop strings and parsers are the client's side (``runtime.text``). One
thread owns an ``Engine``; others reach it through ``runtime.engine.client``. Only ``prepare`` and ``stats``
may be called from anywhere.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence as Sequences
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.engine.admission import as_token_ids, prepare
from runtime.engine.block_pool import BlockPool
from runtime.engine.config import EngineLimits
from runtime.engine.errors import ContextLengthExceededError, RequestError
from runtime.engine.host_pool import HostPool
from runtime.engine.messages import EngineInfo, EngineOutput, EngineRequest, EngineStats, FinishReason, TokenLogprobs
from runtime.engine.runner import Drawn, Model, Runner
from runtime.engine.scheduler import Scheduler
from runtime.engine.sequence import Request, Sequence, State
from runtime.engine.step import Chunk
from runtime.kv_cache import HostPages, KVCache
from runtime.kv_transfer import KVTransfer

logger = logging.getLogger("xserv.engine")


@dataclass(slots=True)
class _Counters:
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    requests: int = 0
    errors: int = 0


class Engine:
    """A model, its KV cache, its scheduler.

    info    what clients are told
    model   floor 5's model, or anything with the same four members
    limits  as ``runtime.engine.config.resolve`` gives them
    seed    of the generator that draws seeds for requests without one; None: from the OS
    """

    def __init__(
        self, model: Model, kv_cache: KVCache, limits: EngineLimits, info: EngineInfo, seed: int | None = None
    ) -> None:
        self.info = info
        self.limits = limits
        num_slots = limits.num_host_blocks
        self.pool = BlockPool(
            limits.num_blocks,
            limits.block_size,
            enable_prefix_caching=limits.enable_prefix_caching,
            host_pool=HostPool(num_slots) if num_slots else None,
        )
        self.transfer = KVTransfer(kv_cache, HostPages(kv_cache.spec, num_slots) if num_slots else None)
        self.scheduler = Scheduler(limits, self.pool)
        self.runner = Runner(model, kv_cache, limits, info.vocab_size)
        self.requests: dict[str, Request] = {}
        self.num_unscheduled = 0
        self._seeds = random.Random(seed)
        self._counters = _Counters()
        self._last_step_s = time.monotonic()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def prepare(self, request: EngineRequest) -> Request:
        """See ``runtime.engine.admission.prepare``. Thread-safe."""
        return prepare(request, self.info)

    def add(self, request: EngineRequest) -> None:
        """Check a request and put it in the waiting queue. Raises as ``prepare`` does."""
        self.admit(self.prepare(request))

    def admit(self, request: Request) -> None:
        """Put a prepared request in the waiting queue.

        Its first choice computes the prompt; the others join the queue when that is done, and share its
        blocks. Raises ``RequestError`` when the id is in use.
        """
        if request.request_id in self.requests:
            raise RequestError(f"request_id {request.request_id!r} is in use", param="request_id")
        request.number = self._counters.requests
        self._counters.requests += 1
        seed = request.params.seed
        request.seed = (self._seeds.getrandbits(64) if seed is None else seed) & (2**64 - 1)
        request.sequences = [Sequence(request, index) for index in range(request.params.n)]
        self.requests[request.request_id] = request
        self.num_unscheduled += 1
        self.scheduler.add(request.sequences[0])

    def cancel(self, request_id: str, index: int | None = None) -> list[EngineOutput]:
        """End a request (or one choice of it) now and free its blocks.

        Returns one output with "abort" for each choice that it ended; none for unknown ids.
        """
        request = self.requests.get(request_id)
        if request is None:
            return []
        if index is None or request.params.n == 1:
            return self._end(request, "abort")
        outputs = [
            self._end_choice(sequence, "abort")
            for sequence in request.open_sequences
            if sequence.index == index
        ]
        if request.sequences[0].is_finished:
            self._release_held(request)
        return outputs

    def cancel_all(self) -> list[EngineOutput]:
        return [output for request_id in list(self.requests) for output in self.cancel(request_id)]

    def step(self) -> list[EngineOutput]:
        """Schedule, run and commit one batch; nothing when there is no work.

        When the model fails, the requests of this batch end with "error" and all others go on.
        """
        step = self.scheduler.schedule()
        outputs = self._load_rows(step.chunks)
        step.drop_finished()
        if step.has_work:
            try:
                self.transfer.run(step.swap_out, step.swap_in, step.copies)
                drawn = self.runner.start(self.runner.prepare(step.chunks)).result() if step.chunks else None
            except Exception:
                logger.exception("a step of %d sequences failed", len(step.chunks))
                self.scheduler.abandon(step)
                for chunk in step.chunks:
                    outputs += self._end(chunk.sequence.request, "error", "the model failed in this step")
            else:
                self.scheduler.commit(step)
                if drawn is not None:
                    outputs += self._commit(drawn)
        self._counters.steps += 1
        self._last_step_s = time.monotonic()
        return outputs

    def logits(self, token_ids: Sequences[int]) -> NDArray[np.float32]:
        """The raw logits after each of 1 … ``max_model_len`` tokens, ``[num_tokens, vocab_size]`` float32.

        Raises ``RequestError``, ``ContextLengthExceededError``.
        """
        ids = as_token_ids("token_ids", token_ids, self.info.vocab_size)
        if len(ids) > self.limits.max_model_len:
            raise ContextLengthExceededError(len(ids), self.limits.max_model_len)
        return self.runner.logits(ids)

    def stats(self) -> EngineStats:
        """A snapshot of plain numbers. Thread-safe."""
        num_blocks, num_free = self.pool.num_blocks, self.pool.num_free
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            max_waiting=self.limits.max_waiting,
            num_blocks=num_blocks,
            num_free_blocks=num_free,
            kv_cache_usage=(num_blocks - num_free) / num_blocks,
            num_preemptions=self.scheduler.num_preemptions,
            num_steps=self._counters.steps,
            prompt_tokens=self._counters.prompt_tokens,
            generation_tokens=self._counters.generation_tokens,
            num_requests=self._counters.requests,
            num_errors=self._counters.errors,
            last_step_s=self._last_step_s,
        )

    def check_invariants(self) -> None:
        """Assert that queues, rows, blocks and open requests agree. For tests."""
        self.scheduler.check_invariants()
        for sequence in self.scheduler.running + self.scheduler.waiting:
            assert self.requests.get(sequence.request.request_id) is sequence.request, (
                "a closed request is queued"
            )
        for request in self.requests.values():
            assert request.open_sequences, "an ended request is open"
        unscheduled = sum(not request.was_scheduled for request in self.requests.values())
        assert unscheduled == self.num_unscheduled, "unscheduled requests are miscounted"

    def _load_rows(self, chunks: list[Chunk]) -> list[EngineOutput]:
        """Write the rows of sequences that start to run; one that cannot be written ends its request
        alone."""
        outputs: list[EngineOutput] = []
        now = time.monotonic()
        for chunk in chunks:
            sequence = chunk.sequence
            if not chunk.is_first or sequence.is_finished:
                continue
            if sequence.first_scheduled_s is None:
                sequence.first_scheduled_s = now
            self._mark_scheduled(sequence.request)
            try:
                self.runner.load(sequence)
            except Exception:
                logger.exception("request %s could not be started", sequence.request.request_id)
                outputs += self._end(sequence.request, "error", "the request could not be started")
        return outputs

    def _commit(self, drawn: Drawn) -> list[EngineOutput]:
        """Append and hand out the drawn tokens."""
        outputs: list[EngineOutput] = []
        now = time.monotonic()
        for request, entries in drawn.prompt_logprobs:
            assert request.prompt_logprobs is not None
            request.prompt_logprobs += entries
        for i, sequence in enumerate(drawn.sequences):
            if sequence.is_finished:
                continue  # ended by a failure of a sibling in this very step
            try:
                if drawn.is_valid[i]:
                    logprobs = drawn.logprobs and drawn.logprobs[i]
                    outputs += self._commit_token(sequence, drawn.token_ids[i], logprobs, now)
                else:
                    outputs += self._end(sequence.request, "error", "the logits held NaN or allowed no token")
            except Exception:
                logger.exception("request %s failed", sequence.request.request_id)
                outputs += self._end(sequence.request, "error", "the request failed")
        return outputs

    def _commit_token(
        self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None, now: float
    ) -> list[EngineOutput]:
        request = sequence.request
        is_first_token = sequence.num_output_tokens == 0
        if is_first_token:
            sequence.first_token_s = now
            if sequence.index == 0:
                self._counters.prompt_tokens += request.num_prompt_tokens
                self._release_held(request)
        sequence.append(token_id)
        sequence.last_token_s = now
        self._counters.generation_tokens += 1
        finish_reason, stop_reason = finish_of(sequence)
        if finish_reason is not None:
            self._finish(sequence)
        return [
            EngineOutput(
                request_id=request.request_id,
                index=sequence.index,
                new_token_ids=[token_id],
                num_prompt_tokens=request.num_prompt_tokens,
                logprobs=None if logprobs is None else [logprobs],
                prompt_logprobs=request.prompt_logprobs if is_first_token and sequence.index == 0 else None,
                finish_reason=finish_reason,
                stop_reason=stop_reason,
                times=None if finish_reason is None else sequence.times(),
            )
        ]

    def _release_held(self, request: Request) -> None:
        """Let the choices queue that waited for the first one to compute the prompt."""
        for sequence in request.sequences:
            if sequence.state is State.HELD:
                self.scheduler.add(sequence)

    def _end(self, request: Request, reason: FinishReason, error: str | None = None) -> list[EngineOutput]:
        """End every open choice of a request."""
        return [self._end_choice(sequence, reason, error) for sequence in request.open_sequences]

    def _end_choice(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> EngineOutput:
        self._finish(sequence)
        self._counters.errors += reason == "error"
        return EngineOutput(
            request_id=sequence.request.request_id,
            index=sequence.index,
            new_token_ids=[],
            num_prompt_tokens=sequence.num_prompt_tokens,
            finish_reason=reason,
            error=error,
            times=sequence.times(),
        )

    def _finish(self, sequence: Sequence) -> None:
        request = sequence.request
        self.scheduler.finish(sequence)
        if not request.open_sequences:
            del self.requests[request.request_id]
            self._mark_scheduled(request)

    def _mark_scheduled(self, request: Request) -> None:
        """The request no longer counts against ``max_waiting``."""
        if not request.was_scheduled:
            request.was_scheduled = True
            self.num_unscheduled -= 1


def finish_of(sequence: Sequence) -> tuple[FinishReason | None, int | None]:
    """Whether the token just appended ends the choice: (finish_reason, stop_reason), in vLLM's order."""
    request = sequence.request
    token_id = sequence.last_token_id
    if sequence.num_output_tokens >= request.params.min_tokens and token_id in request.stop_ids:
        return "stop", request.stop_ids[token_id]
    if sequence.num_output_tokens >= request.max_tokens:
        return "length", None
    return None, None
