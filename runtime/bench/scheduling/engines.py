"""Engines to measure: several with different limits on one loaded model, stepped by hand or run by a client."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec

from runtime.bench.metrics import BenchmarkError
from runtime.bench.scheduling.roofline import PRESETS
from runtime.engine.engine import Engine
from runtime.engine.messages import EngineOutput, EngineRequest
from runtime.engine.process.client import EngineClient
from runtime.engine.process.thread_client import ThreadEngineClient
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.steps.local_executor import LocalExecutor


@contextmanager
def model_arguments(arguments: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """`build_engine`'s arguments; without a model, random weights of Qwen3-0.6B's shapes."""
    if "model" in arguments:
        yield dict(arguments)
        return
    with tempfile.TemporaryDirectory(prefix="qwen3-0.6b-shapes-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(PRESETS["qwen3-0.6b"]), encoding="utf-8")
        yield {**arguments, "model": folder, "load_format": "dummy"}


def like(engine: Engine, **settings: Any) -> Engine:
    """An engine on the same model and the same KV pages, with other settings: fields of `EngineLimits` or of its
    `scheduling`. The given engine must be idle, and stay so while this one works."""
    if engine.has_work:
        raise BenchmarkError("the engine has work: another on its KV pages would overwrite them")
    old, names = engine.limits, {field.name for field in fields(engine.limits.scheduling)}
    scheduling = replace(old.scheduling, **{name: settings[name] for name in settings if name in names})
    limits = replace(old, scheduling=scheduling, **{name: settings[name] for name in settings if name not in names})
    limits = replace(limits, max_num_seqs=min(limits.max_num_seqs, limits.max_num_batched_tokens))
    changed = {"max_num_seqs": limits.max_num_seqs, "max_num_batched_tokens": limits.max_num_batched_tokens}
    info = msgspec.structs.replace(engine.info, **changed)
    executor = local(engine)
    return Engine(LocalExecutor(executor.model, executor.kv_cache, limits, info.vocab_size), limits, info, seed=0)


def local(engine: Engine) -> LocalExecutor:
    """The engine's executor. Raises BenchmarkError if it is not of this process."""
    if not isinstance(engine.executor, LocalExecutor):
        raise BenchmarkError(f"the engine's steps run in {type(engine.executor).__name__}, must run in LocalExecutor")
    return engine.executor


@contextmanager
def served(engine: Engine) -> Iterator[EngineClient]:
    """A context with a client to the engine in a thread of its own."""
    client = ThreadEngineClient(engine)
    try:
        yield client
    finally:
        client.close()


class Stepper:
    """An engine stepped by hand, with requests that are greedy and end by length alone."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._count = 0

    def add(self, prompt: Sequence[int], max_tokens: int) -> str:
        """Queue a prompt; returns the request's id."""
        request_id = f"bench-{self._count}"
        self._count += 1
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self.engine.add(EngineRequest(request_id=request_id, prompt_token_ids=list(prompt), params=params))
        return request_id

    def step(self) -> tuple[float, list[EngineOutput]]:
        """One step: its seconds and its outputs. Raises `BenchmarkError` when a request failed."""
        start = time.perf_counter()
        outputs = self.engine.step()
        seconds = time.perf_counter() - start
        for output in outputs:
            if output.finish_reason not in (None, "length"):
                raise BenchmarkError(f"{output.request_id} ended by {output.finish_reason!r}: {output.error}")
        return seconds, outputs

    def first_token(self, request_id: str) -> tuple[list[float], int]:
        """Step until this request has a token: the seconds of each step, and the token."""
        times = []
        while self.engine.has_work:
            seconds, outputs = self.step()
            times.append(seconds)
            for output in outputs:
                if output.request_id == request_id and output.new_token_ids:
                    return times, output.new_token_ids[0]
        raise BenchmarkError(f"{request_id} ended without a token")

    def drain(self) -> None:
        """Step until there is no work."""
        while self.engine.has_work:
            self.step()

    def cancel_all(self) -> None:
        """End every open request."""
        self.engine.cancel_all()
