"""An engine process without a model, which starts in a fraction of a second: for tests of processes and sockets.

    python -m tests.runtime.engine.light_engine --fd N

Choice i of a request draws its last prompt token plus i, plus one, and so on. A prompt that begins with one of the ids
below does harm; a `model` that is the path of an existing file keeps the engine from starting.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from models.errors import ModelLoadError
from runtime.engine.admission import prepare
from runtime.engine.errors import RequestError
from runtime.engine.messages import (
    EngineInfo,
    EngineOutput,
    EngineRequest,
    EngineStats,
    FinishReason,
    RequestTimes,
    TokenLogprobs,
)
from runtime.engine.process.main import ProcessServer, main
from runtime.engine.process.wire import Start
from runtime.engine.scheduling.block_pool import BlockPool
from runtime.engine.scheduling.sequence import Request

VOCAB_SIZE = 1_000_000
EXITS, RAISES, HANGS, REFUSED = VOCAB_SIZE - 1, VOCAB_SIZE - 2, VOCAB_SIZE - 3, VOCAB_SIZE - 4
"""Prompts that begin with one of these end the process, end the engine's loop, never end their step, or are refused by
the engine, after they were sent."""
STEP_S = 0.002


class _Unread(ModuleType):
    """Stands for a module from which others import classes that only their annotations name."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return object


class LightEngine:
    """What `ThreadEngineClient` knows of an `Engine`."""

    def __init__(self, max_waiting: int) -> None:
        self.info = EngineInfo(
            model_name="light",
            model_path="light",
            architecture="Light",
            device="cpu",
            dtype="float32",
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(),
            max_model_len=100_000,
            max_num_seqs=256,
            max_num_batched_tokens=2048,
            max_waiting=max_waiting,
            block_size=16,
            num_blocks=8,
            kv_cache_bytes=0,
            weight_bytes=0,
        )
        self.limits = SimpleNamespace(max_waiting=max_waiting)
        self.pool = BlockPool(8, 16)
        self.timeline: deque[Any] = deque()
        self.executor = SimpleNamespace(close=lambda: None, tallies=list, takes_any_thread=False)
        self.embedder = SimpleNamespace(prepare=lambda *asked: SimpleNamespace(future=Future()))
        self.has_embeddings, self.hand_overs = False, None
        self.pauses = SimpleNamespace(blocks=False, is_stopped=False, is_changing=False, version="0")
        self.num_unscheduled = self.num_unscheduled_tokens = self.num_requests = self.num_tokens = 0
        self._open: dict[str, tuple[Request, dict[int, int]]] = {}  # drawn tokens by choice

    def embed(self, embedding: Any) -> None:
        """Nobody computes it."""

    @property
    def has_work(self) -> bool:
        return bool(self._open)

    def prepare(self, request: EngineRequest, *, is_prepared: bool = False) -> Request:
        if request.prompt_token_ids[0] == REFUSED:
            raise RequestError("refused")
        return prepare(request, self.info)

    def admit(self, request: Request) -> None:
        self._open[request.request_id] = (request, dict.fromkeys(range(request.params.n), 0))
        self.num_requests += 1
        self.num_unscheduled += 1
        self.num_unscheduled_tokens += request.num_prompt_tokens

    def step(self, poll: Callable[[], list[EngineOutput]]) -> list[EngineOutput]:
        time.sleep(STEP_S)
        outputs = poll()
        self.num_unscheduled = self.num_unscheduled_tokens = 0
        for request, sampled in list(self._open.values()):
            do_harm(int(request.prompt_ids[0]))
            for index in list(sampled):
                sampled[index] += 1
                self.num_tokens += 1
                token_id = (int(request.prompt_ids[-1]) + index + sampled[index]) % VOCAB_SIZE
                is_last = sampled[index] >= request.max_tokens
                outputs.append(self._output(request, index, [token_id], "length" if is_last else None))
        return outputs

    def advance_embeddings(self) -> None:
        """There are none."""

    def cancel(self, request_id: str, index: int | None = None) -> list[EngineOutput]:
        if request_id not in self._open:
            return []
        request, sampled = self._open[request_id]
        return [self._output(request, i, [], "abort") for i in list(sampled) if index in (None, i)]

    def cancel_all(self) -> list[EngineOutput]:
        return [output for request_id in list(self._open) for output in self.cancel(request_id)]

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._open) - self.num_unscheduled,
            num_waiting=self.num_unscheduled,
            max_waiting=self.info.max_waiting,
            num_blocks=8,
            num_free_blocks=8,
            kv_cache_usage=0.0,
            num_preemptions=0,
            num_steps=0,
            prompt_tokens=0,
            generation_tokens=self.num_tokens,
            num_requests=self.num_requests,
            num_errors=0,
            last_step_s=time.monotonic(),
        )

    def logits(self, token_ids: list[int]) -> np.ndarray:
        do_harm(token_ids[0])
        return np.array(token_ids, np.float32)[:, None]

    wants_rest = False

    def rest(self) -> None:
        pass

    rest_long = rest

    def publish_blocks(self, secret: bytes) -> None:
        """It has no blocks."""

    def take_block_changes(self) -> None:
        """It has no blocks."""

    def close(self) -> None:
        pass

    def _output(
        self, request: Request, index: int, token_ids: list[int], finish_reason: FinishReason | None
    ) -> EngineOutput:
        if finish_reason is not None:
            sampled = self._open[request.request_id][1]
            del sampled[index]
            if not sampled:
                del self._open[request.request_id]
        logprobs = None
        if request.params.logprobs is not None:
            top = range(request.params.logprobs)
            logprobs = [TokenLogprobs(i, -1.0, 1, list(top), [-float(k) for k in top]) for i in token_ids]
        return EngineOutput(
            request_id=request.request_id,
            index=index,
            new_token_ids=token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            logprobs=logprobs,
            finish_reason=finish_reason,
            times=RequestTimes(
                arrival_s=request.arrival_s, first_scheduled_s=None, first_token_s=None, last_token_s=time.monotonic()
            ),
        )


def do_harm(token_id: int) -> None:
    if token_id == EXITS:
        os._exit(9)
    if token_id == RAISES:
        raise RuntimeError("planted")
    if token_id == HANGS:
        time.sleep(1000)


class LightProcess(ProcessServer):
    def make_engine(self, start: Start) -> Any:
        match start.model:
            case "exits":
                os._exit(3)
            case "breaks":
                raise ZeroDivisionError("planted")
            case "needs memory":
                raise MemoryError
            case str(path) if Path(path).exists():
                raise ModelLoadError(f"{path} is in the way")
        return LightEngine(start.config.max_waiting)


if __name__ == "__main__":
    # ThreadEngineClient's other imports. They import Numba, which takes longer than the rest of the start.
    for each in ("runtime.engine.engine", "runtime.engine.steps.embedder", "runtime.engine.steps.executor"):
        sys.modules[each] = _Unread(each)
    main(LightProcess)
