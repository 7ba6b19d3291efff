"""The open requests: how they are admitted, grow token by token, and end.

This module queues choices at the scheduler, removes them, and makes the outputs; the engine decides when steps run.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain, repeat
from typing import cast

from runtime.engine.errors import RequestError
from runtime.engine.grammar.masks import can_draw_end
from runtime.engine.grammar.matcher import GrammarMatcher, readable
from runtime.engine.messages import EngineOutput, ErrorCode, FinishReason, ProposalCounts, TokenLogprobs
from runtime.engine.scheduling.scheduler import Scheduler
from runtime.engine.scheduling.sequence import Request, Sequence, State
from runtime.engine.steps.assemble import Assembled
from runtime.engine.steps.sampler import last_ids
from runtime.engine.steps.step_input import Sampled
from runtime.engine.weights.commands import FIRST_VERSION

logger = logging.getLogger("xserv.engine")


@dataclass(slots=True)
class RequestCounters:
    """Counts since the engine's start: admitted requests, prompt tokens of those that have sampled their first token,
    sampled tokens, choices that ended with an error."""

    requests: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    errors: int = 0


class OpenRequests:
    """Requests with unfinished choices. Not thread-safe: it belongs to the engine's loop.

    by_id            the requests
    num_unscheduled  those of which nothing has been scheduled; num_unscheduled_tokens: their prompts' tokens
    on_end           called with each finished choice, or None
    on_request_begin called with each request whose first step is planned, or None
    on_request_end   called with each finished request
    relays           whether a choice with a lease goes on here for now, though it has a token to leave with
    weight_version   of the weights that compute them
    """

    def __init__(self, scheduler: Scheduler, seed: int | None) -> None:
        self.by_id: dict[str, Request] = {}
        self.num_unscheduled = 0
        self.num_unscheduled_tokens = 0
        self.counters = RequestCounters()
        self.weight_version = FIRST_VERSION
        self._scheduler = scheduler
        self._seeds = random.Random(seed)
        self.on_end: Callable[[Sequence], None] | None = None
        self.on_request_begin: Callable[[Request], None] | None = None
        self.on_request_end: list[Callable[[Request], None]] = []
        self.relays: Callable[[Sequence], bool] = lambda sequence: False

    def admit(self, request: Request) -> None:
        """Put a prepared request in the waiting queue.

        Its first choice computes the prompt; the others join the queue afterwards, and share its blocks. A request with
        a grammar is queued once that is compiled (``start``). Raises ``RequestError`` if the id is in use.
        """
        if request.request_id in self.by_id:
            raise RequestError(f"request_id {request.request_id!r} is in use", param="request_id")
        request.number = self.counters.requests
        self.counters.requests += 1
        seed = request.params.seed
        request.seed = (self._seeds.getrandbits(64) if seed is None else seed) & (2**64 - 1)
        self._open(request)
        self._queue(request)

    def _open(self, request: Request) -> None:
        request.sequences = [Sequence(request, index) for index in range(request.params.n)]
        self.by_id[request.request_id] = request
        self.num_unscheduled += 1
        self.num_unscheduled_tokens += request.num_prompt_tokens

    def begin_again(self, old: Request, fresh: Request) -> list[EngineOutput]:
        """Put a request that has computed nothing in the place of an open one, for the choices that are open. Returns
        an output for each of them that has had some."""
        ended = [sequence.index for sequence in old.sequences if sequence.is_finished]
        begun = [sequence for sequence in old.open_sequences if sequence.num_output_tokens]
        for sequence in old.open_sequences:
            self._finish_choice(sequence)
        fresh.number, fresh.seed, fresh.arrival_s = old.number, old.seed, old.arrival_s
        fresh.num_restarts = old.num_restarts + bool(begun)
        self._open(fresh)
        for index in ended:
            fresh.sequences[index].state = State.FINISHED
        self._queue(fresh)
        return [
            EngineOutput(
                request_id=fresh.request_id, index=sequence.index, new_token_ids=[],
                num_prompt_tokens=sequence.num_prompt_tokens, begins_again=True,
                weight_version=self.weight_version, num_restarts=fresh.num_restarts,
            )
            for sequence in begun
        ]  # fmt: skip

    def start(self, request: Request, matchers: list[GrammarMatcher]) -> None:
        """Queue a request whose grammar is compiled, with one matcher a choice."""
        request.awaits_grammar = False
        for sequence, matcher in zip(request.sequences, matchers, strict=True):
            sequence.matcher = matcher
            for token_id in () if sequence.is_finished else sequence.output_ids.tolist():
                if not matcher.consume(token_id):
                    logger.warning("request %s: its grammar refuses a token that it has", request.request_id)
        self._queue(request)

    def start_with_pictures(self, request: Request) -> None:
        """Queue a request whose images are encoded."""
        request.awaits_pictures = False
        self._queue(request)

    def start_with_adapter(self, request: Request) -> None:
        """Queue a request whose adapter lies in a slot."""
        request.awaits_adapter = False
        self._queue(request)

    def start_with_pages(self, request: Request) -> None:
        """Queue a request whose pages have come, or will not come."""
        request.awaits_pages = False
        self._queue(request)

    def _queue(self, request: Request) -> None:
        if request.is_awaiting:
            return
        first = request.sequences[0]
        if first.is_finished or first.num_output_tokens:
            self._release_held(request)
        else:
            self._scheduler.add(first)

    def cancel(self, request_id: str, index: int | None = None) -> list[EngineOutput]:
        """End a request (or one choice of it) now and free its blocks.

        Returns one output with "abort" for each choice that it ended, none for an unknown id.
        """
        request = self.by_id.get(request_id)
        if request is None:
            return []
        if index is None or request.params.n == 1:
            return self.end(request, "abort")
        outputs = [
            self._end_choice(sequence, "abort") for sequence in request.open_sequences if sequence.index == index
        ]
        if request.sequences[0].is_finished:
            self._release_held(request)
        return outputs

    def pause(self, request_id: str) -> None:
        """From the next step on the request holds nothing but its output; unknown ids are ignored."""
        if (request := self.by_id.get(request_id)) is not None:
            self._scheduler.paused.add(request)

    def resume(self, request_id: str) -> None:
        """Continue a paused request; others are left as they are."""
        request = self.by_id.get(request_id)
        if request is None or request not in self._scheduler.paused:
            return
        self._scheduler.paused.discard(request)
        first = request.sequences[0]
        if first.is_finished or first.num_output_tokens:
            self._release_held(request)
        elif first.state is State.HELD and not request.is_awaiting:
            self._scheduler.add(first)

    def append(self, assembled: Assembled, sampled: Sampled, now: float, outputs: list[EngineOutput]) -> None:
        """Append and output the sampled tokens."""
        for request, entries in zip(assembled.prompt_requests, sampled.prompt_logprobs):
            assert request.prompt_logprobs is not None
            request.prompt_logprobs += entries
        sequences: Iterable[Sequence] = assembled.sampling_sequences
        if sampled.counts is not None:
            sequences = chain.from_iterable(repeat(each, n) for each, n in zip(sequences, sampled.counts, strict=True))
        logprobs = repeat(None) if sampled.logprobs is None else sampled.logprobs
        finished = State.FINISHED
        num_appended = 0
        for i, (sequence, token_id, is_valid, entry) in enumerate(
            zip(sequences, sampled.token_ids, sampled.is_valid, logprobs)
        ):
            if sequence.state is finished:
                continue  # cancelled, ended by an earlier token, or by a failure of a sibling in this very step
            try:
                if not is_valid:
                    reason, code = "its sampling parameters failed", cast("ErrorCode | None", None)
                    if i in sampled.failures:
                        code, reason = sampled.failures[i]
                    elif i not in sampled.broken:
                        reason, code = _reason(sequence), _error_code(sequence)
                    outputs += self.end(sequence.request, "error", reason, error_code=code)
                    continue
                request = sequence.request
                sequence.append(token_id)
                if sampled.mus is not None:
                    sequence.mirostat_mu = sampled.mus[i]
                num_appended += 1
                sequence.last_token_s = now
                if (
                    entry is not None
                    or token_id in request.stop_ids
                    or not 1 < sequence.num_output_tokens < request.max_tokens
                    or sequence.matcher is not None
                    or sequence.mirostat_mu is not None
                    or request.lease
                ):
                    outputs += self._first_or_last(sequence, token_id, entry, now)
                    continue
                outputs.append(  # the usual case
                    EngineOutput(
                        request_id=request.request_id,
                        index=sequence.index,
                        new_token_ids=[token_id],
                        num_prompt_tokens=sequence.num_prompt_tokens,
                        weight_version=self.weight_version,
                        num_restarts=request.num_restarts,
                    )
                )
            except Exception:
                logger.exception("request %s failed", sequence.request.request_id)
                outputs += self.end(sequence.request, "error", "the request failed")
        self.counters.generation_tokens += num_appended

    def _first_or_last(
        self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None, now: float
    ) -> list[EngineOutput]:
        """The output of the token just appended, with all that any token may bring; and one without a token if the
        grammar has ended the choice."""
        request = sequence.request
        is_first = sequence.num_output_tokens == 1
        if is_first:
            sequence.first_token_s = now
            if request.asked is not None and not request.asked.restarts and _all_have_begun(request):
                request.asked = None  # it ends when the weights change
            if sequence.index == 0:
                self.counters.prompt_tokens += request.num_prompt_tokens
                self._release_held(request)
        finish_reason, stop_reason = finish_of(sequence)
        is_complete = False
        if sequence.matcher is not None and finish_reason != "stop":
            if not sequence.matcher.consume(token_id):
                return self.end(request, "error", _reason(sequence), error_code="invalid_grammar")
            is_complete = sequence.matcher.is_complete and (
                finish_reason == "length" or not can_draw_end(sequence, sequence.matcher.vocabulary)
            )
            finish_reason = None if is_complete else finish_reason
        leaves = finish_reason is None and not is_complete and bool(request.lease) and not self.relays(sequence)
        if finish_reason is not None or leaves:
            self._finish_choice(sequence)
        output = EngineOutput(
            request_id=request.request_id,
            index=sequence.index,
            new_token_ids=[token_id],
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_cached_tokens=sequence.num_cached_tokens if is_first else None,
            prefix_miss=sequence.miss if is_first else None,
            cached_ids=sequence.cached_ids if is_first else [],
            logprobs=None if logprobs is None else [logprobs],
            prompt_logprobs=request.prompt_logprobs if is_first and sequence.index == 0 else None,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            times=sequence.times() if finish_reason is not None or leaves else None,
            proposals=None if finish_reason is None else _proposals(sequence),
            mirostat_mu=sequence.mirostat_mu,
            is_handed_over=leaves,
            offered=request.offered,
            weight_version=self.weight_version,
            num_restarts=request.num_restarts,
        )
        return [output, self._end_choice(sequence, "stop")] if is_complete else [output]

    def _release_held(self, request: Request) -> None:
        """Queue the choices that are held."""
        if request.is_awaiting:
            return
        for sequence in request.sequences:
            if sequence.state is State.HELD:
                self._scheduler.add(sequence)

    def end(
        self, request: Request, reason: FinishReason, error: str | None = None, *, error_code: ErrorCode | None = None
    ) -> list[EngineOutput]:
        """End every open choice of a request."""
        return [self._end_choice(sequence, reason, error, error_code) for sequence in request.open_sequences]

    def is_alone(self, request: Request) -> bool:
        """Whether the request is the only one, has one choice, and is not paused."""
        return len(self.by_id) == request.params.n == 1 and not self._scheduler.paused

    def hand_over(self, sequence: Sequence) -> EngineOutput:
        """Have a choice leave between two steps."""
        return self._end_choice(sequence, None)

    def _end_choice(
        self,
        sequence: Sequence,
        reason: FinishReason | None,
        error: str | None = None,
        error_code: ErrorCode | None = None,
    ) -> EngineOutput:
        """The last output of a choice here; without a reason it is handed over."""
        self._finish_choice(sequence)
        self.counters.errors += reason == "error"
        return EngineOutput(
            request_id=sequence.request.request_id,
            index=sequence.index,
            new_token_ids=[],
            num_prompt_tokens=sequence.num_prompt_tokens,
            finish_reason=reason,
            error=error,
            error_code=error_code,
            times=sequence.times(),
            proposals=_proposals(sequence),
            mirostat_mu=sequence.mirostat_mu if reason is None else None,
            is_handed_over=reason is None,
            offered=sequence.request.offered,
            weight_version=self.weight_version,
            num_restarts=sequence.request.num_restarts,
        )

    def _finish_choice(self, sequence: Sequence) -> None:
        request = sequence.request
        self._scheduler.finish(sequence)
        if self.on_end is not None:
            self.on_end(sequence)
        if not request.open_sequences:
            del self.by_id[request.request_id]
            for release in self.on_request_end:
                release(request)
            self._scheduler.paused.discard(request)
            self.mark_scheduled(request)

    def mark_scheduled(self, request: Request) -> None:
        """The request no longer counts against ``max_waiting`` and ``max_waiting_tokens``."""
        if not request.was_scheduled:
            request.was_scheduled = True
            if self.on_request_begin is not None:
                self.on_request_begin(request)
            self.num_unscheduled -= 1
            self.num_unscheduled_tokens -= request.num_prompt_tokens


def _all_have_begun(request: Request) -> bool:
    return all(sequence.num_output_tokens for sequence in request.open_sequences)


def is_parked(scheduler: Scheduler, request: Request) -> bool:
    """Whether a request is paused, and its choices are out of all steps that may still be started; so are its
    images."""
    held = (State.HELD, State.FINISHED)
    is_paused = request in scheduler.paused and not request.awaits_pictures
    return is_paused and all(sequence.state in held for sequence in request.sequences)


def _proposals(sequence: Sequence) -> ProposalCounts | None:
    return None if sequence.proposals is None else ProposalCounts(*sequence.proposals)


def _reason(sequence: Sequence) -> str:
    """The reason why nothing could be sampled."""
    if sequence.matcher is None or sequence.matcher.error is None:
        return "the logits held NaN or allowed no token"
    logger.warning("request %s: its grammar failed: %s", sequence.request.request_id, sequence.matcher.error[:400])
    return f"the grammar could not be followed: {readable(sequence.matcher.error)}"


def _error_code(sequence: Sequence) -> ErrorCode | None:
    """The request's field that left nothing to sample; None if the logits were at fault."""
    if sequence.matcher is not None and sequence.matcher.error is not None:
        return "invalid_grammar"
    params = sequence.request.params
    allowed = params.allowed_token_ids
    if sequence.matcher is not None:
        has_more = allowed is not None or params.bad_words_token_ids is not None or params.min_tokens > 0
        return "unsatisfiable_request" if has_more else None
    is_all_forbidden = allowed is not None and not set(allowed).difference(_forbidden_ids(sequence))
    return "unsatisfiable_request" if is_all_forbidden else None


def _forbidden_ids(sequence: Sequence) -> set[int]:
    """The ids that ``min_tokens`` and bad words forbid next."""
    request, params = sequence.request, sequence.request.params
    forbidden = set(last_ids(params.bad_words_token_ids or [], sequence.output_ids).tolist())
    if sequence.num_output_tokens < params.min_tokens:
        forbidden.update(request.eos_token_ids, params.stop_token_ids or ())
    return forbidden


def finish_of(sequence: Sequence) -> tuple[FinishReason | None, int | None]:
    """(finish_reason, stop_reason) if the token just appended ends the choice, in vLLM's order; else None for both."""
    request = sequence.request
    token_id, count = sequence.last_token_id, sequence.num_output_tokens
    if token_id in request.stop_ids and count >= request.params.min_tokens:
        return "stop", request.stop_ids[token_id]
    if count >= request.max_tokens:
        return "length", None
    return None, None
