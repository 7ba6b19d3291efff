"""An `EngineClient` without an engine: it answers what a test has written, from a thread of its own as the
real one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.engine.errors import ContextLengthExceededError, EngineDeadError, QueueFullError
from runtime.engine.messages import (
    EngineInfo,
    EngineOutput,
    EngineRequest,
    EngineState,
    EngineStats,
    PrefixMiss,
    ProposalCounts,
    StepView,
    TokenLogprobs,
)
from runtime.engine.process.client import OutputSink, Watchers

Script = Callable[[EngineRequest, int], list[int]]
"""The ids that a choice would go on to draw, without end or until an EOS id."""


@dataclass
class _Open:
    number: int
    request: EngineRequest
    sink: OutputSink
    ids: list[list[int]]
    position: list[int]
    open_choices: set[int] = field(default_factory=set)


class FakeEngineClient:
    """Draws one token for each open choice in each step.

    script     what is drawn
    step_s     how long a step takes
    step_gate  while clear, no step is made
    failing    request numbers (in order of submission) whose first step fails
    watchers   see `watch`; a test shows them what it likes

    `die` ends what is open as a dead engine process does; `state` is what it is set to then, until `reset` or
    `revive`.
    """

    def __init__(
        self,
        script: Script,
        *,
        vocab_size: int = 260,
        eos_token_ids: tuple[int, ...] = (258,),
        max_model_len: int = 256,
        max_waiting: int = 1000,
        model_name: str = "fake-model",
    ) -> None:
        self.script = script
        self.info = EngineInfo(
            model_name=model_name,
            model_path="",
            architecture="Fake",
            device="cpu",
            dtype="float32",
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            max_model_len=max_model_len,
            max_num_seqs=256,
            max_num_batched_tokens=2048,
            max_waiting=max_waiting,
            block_size=16,
            num_blocks=100,
            kv_cache_bytes=0,
            weight_bytes=0,
        )
        self.requests: list[EngineRequest] = []
        self.cancelled: list[str] = []
        self.failing: set[int] = set()
        self.step_s = 0.0
        self.proposals: ProposalCounts | None = None  # of each choice
        self.prefix_miss: PrefixMiss | None = None
        self.cached_ids: list[int] = []
        self.step_gate = threading.Event()
        self.step_gate.set()
        self.is_dead = False
        self.state: EngineState = "ready"
        self.retry_after_s: float | None = None
        self.watchers = Watchers()
        self._open: dict[str, _Open] = {}
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def reset(self, script: Script) -> None:
        """As new, with another script."""
        assert not self._open
        self.script = script
        self.requests.clear()
        self.cancelled.clear()
        self.failing.clear()
        self.step_s = 0.0
        self.proposals = self.prefix_miss = None
        self.cached_ids = []
        self.step_gate.set()
        self.revive()

    def die(self, state: EngineState = "down", retry_after_s: float | None = 2.0) -> None:
        """As an engine process that is killed."""
        with self._lock:
            self.is_dead, self.state, self.retry_after_s = True, state, retry_after_s
            for found in list(self._open.values()):
                self._end(found, set(found.open_choices), "error", engine_died=True)

    def revive(self) -> None:
        self.is_dead, self.state, self.retry_after_s = False, "ready", None

    @property
    def engines(self) -> list[Any]:
        return [self]

    @property
    def routing(self) -> None:
        return None

    def watch(self, sink: Callable[[StepView], None]) -> Callable[[], None]:
        return self.watchers.add(sink)

    @property
    def num_open(self) -> int:
        """Requests with a choice that has not finished."""
        return len(self._open)

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        if self._is_closed or self.is_dead:
            raise EngineDeadError("closed", self.retry_after_s)
        num_prompt_tokens = len(request.prompt_token_ids)
        if num_prompt_tokens >= self.info.max_model_len:
            raise ContextLengthExceededError(num_prompt_tokens, self.info.max_model_len)
        request.params.validate(self.info.vocab_size)
        choices = range(request.params.n)
        with self._lock:
            if len(self._open) >= self.info.max_waiting:
                raise QueueFullError(self.info.max_waiting, 1.5)
            ids = [list(self.script(request, index)) for index in choices]
            self._open[request.request_id] = _Open(
                len(self.requests), request, sink, ids, [0 for _ in choices], set(choices)
            )
            self.requests.append(request)
        self._work.set()

    def pause(self, request_id: str) -> None:
        """It goes on: whoever is not read is waited for by nobody."""

    def resume(self, request_id: str) -> None:
        """It was never paused."""

    def cancel(self, request_id: str, index: int | None = None) -> None:
        with self._lock:
            self.cancelled.append(request_id)
            found = self._open.get(request_id)
            if found is not None:
                ended = set(found.open_choices) if index is None else found.open_choices & {index}
                self._end(found, ended, "abort")

    def stats(self) -> EngineStats:
        if self.is_dead:
            raise EngineDeadError("dead", self.retry_after_s)
        return EngineStats(
            num_running=len(self._open),
            num_waiting=0,
            max_waiting=self.info.max_waiting,
            num_blocks=100,
            num_free_blocks=100 - len(self._open),
            kv_cache_usage=0.0,
            num_preemptions=0,
            num_steps=0,
            prompt_tokens=0,
            generation_tokens=0,
            num_requests=len(self.requests),
            num_errors=0,
            last_step_s=0.0,
        )

    def logits(self, token_ids: Any) -> Any:
        raise AssertionError("the server asks for no logits")

    def reset_prefix_cache(self) -> Future[NDArray[np.float32]]:
        future: Future[NDArray[np.float32]] = Future()
        future.set_result(np.array([7, self.num_open], np.float32))
        return future

    def close(self, drain: bool = False) -> None:
        with self._lock:
            self._is_closed = True
            self.state = "closing"
            for found in list(self._open.values()):
                self._end(found, set(found.open_choices), "abort")
        self.step_gate.set()
        self._work.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_closed:
            self._work.wait()
            self.step_gate.wait()
            time.sleep(self.step_s)
            with self._lock:
                for found in list(self._open.values()):
                    if found.number in self.failing:
                        self._end(found, set(found.open_choices), "error")
                    else:
                        self._step(found)
                if not self._open and not self._is_closed:
                    self._work.clear()

    def _step(self, found: _Open) -> None:
        request, params = found.request, found.request.params
        room = self.info.max_model_len - len(request.prompt_token_ids)
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        for index in sorted(found.open_choices):
            position = found.position[index]
            token_id = found.ids[index][position]
            found.position[index] += 1
            finish_reason = stop_reason = None
            if token_id in request.eos_token_ids and not params.ignore_eos:
                finish_reason = "stop"
            elif token_id in (params.stop_token_ids or ()):
                finish_reason, stop_reason = "stop", token_id
            elif position + 1 >= limit:
                finish_reason = "length"
            is_first = position == 0 and index == 0
            wants_prompt = is_first and params.prompt_logprobs is not None
            output = EngineOutput(
                request_id=request.request_id,
                index=index,
                new_token_ids=[token_id],
                num_prompt_tokens=len(request.prompt_token_ids),
                logprobs=None if params.logprobs is None else [self._logprobs(token_id, params.logprobs)],
                prompt_logprobs=self._prompt_logprobs(request) if wants_prompt else None,
                finish_reason=finish_reason,
                stop_reason=stop_reason,
                proposals=None if finish_reason is None else self.proposals,
                prefix_miss=self.prefix_miss if is_first else None,
                cached_ids=self.cached_ids if is_first else [],
                num_cached_tokens=self.prefix_miss.checkpoint if is_first and self.prefix_miss else None,
            )
            if finish_reason is not None:
                self._close_choice(found, index)
            found.sink(output)

    def _logprobs(self, token_id: int, num_top: int) -> TokenLogprobs:
        top_ids = [(token_id + i) % self.info.vocab_size for i in range(num_top)]
        return TokenLogprobs(token_id, -0.25, 1, top_ids, [-0.25 - i for i in range(num_top)])

    def _prompt_logprobs(self, request: EngineRequest) -> list[TokenLogprobs | None]:
        num_top = request.params.prompt_logprobs or 0
        return [None, *(self._logprobs(token_id, num_top) for token_id in request.prompt_token_ids[1:])]

    def _end(self, found: _Open, choices: set[int], reason: Any, engine_died: bool = False) -> None:
        for index in sorted(choices):
            self._close_choice(found, index)
            found.sink(
                EngineOutput(
                    request_id=found.request.request_id,
                    index=index,
                    new_token_ids=[],
                    num_prompt_tokens=len(found.request.prompt_token_ids),
                    finish_reason=reason,
                    error="secret detail" if reason == "error" else None,
                    engine_died=engine_died,
                )
            )

    def _close_choice(self, found: _Open, index: int) -> None:
        found.open_choices.discard(index)
        if not found.open_choices:
            self._open.pop(found.request.request_id, None)
