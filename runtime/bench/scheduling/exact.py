"""`bench exact`: scheduling must not change an answer. The same requests under many schedules, compared to the bit.

Every schedule serves the same seeded requests: shared prompt beginnings, one to three choices, greedy and sampled, with
penalties, logprobs and prompt logprobs. The first one serves them one after another, each alone. The others vary
everything that a scheduler may change: batch, chunks, batching style, policy, pool size (so that requests are preempted
in either way), prefix cache, overlap, block size, threads. Token ids, finish reasons and the bits of every log
probability must be those of the first.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np

from models.checkpoints.hub import model_name, resolve_model
from runtime.backends import cpu
from runtime.bench.environment import finished
from runtime.bench.metrics import BenchmarkError, interleaved, timed
from runtime.engine.config import EngineConfig
from runtime.engine.engine import Engine
from runtime.engine.make_engine import engine_over, loaded_model
from runtime.engine.messages import EngineInfo, EngineOutput, EngineRequest, TokenLogprobs
from runtime.engine.sampling_params import SamplingParams

MakeEngine = Callable[[Mapping[str, Any]], Engine]
"""An engine with these settings (`EngineConfig`'s fields), always over the same weights."""

_Key = tuple[str, int]  # a request and its choice


@dataclass(frozen=True, slots=True)
class Schedule:
    """A way to serve.

    Attributes:
        name: its purpose.
        settings: `EngineConfig`'s fields. `num_blocks` is a multiple of the longest request's blocks here.
        arrivals: all at once, a few at each step, or each after the last has ended.
        num_workers: threads on the cpu, or None for all.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    arrivals: Literal["together", "trickling", "one by one"] = "together"
    num_workers: int | None = None


_TINY = {"num_blocks": 1.5, "block_size": 8, "max_num_seqs": 16, "max_num_batched_tokens": 96}
_SWAP_BYTES = 64 << 20
SCHEDULES = (
    Schedule("each alone", {"max_num_seqs": 1, "enable_prefix_caching": False}, "one by one"),
    Schedule("all together", {"max_num_seqs": 64}),
    Schedule("tiny pool, recompute", {**_TINY, "preemption": "recompute"}, "trickling"),
    Schedule("tiny pool, swap", {**_TINY, "preemption": "swap", "swap_space_bytes": _SWAP_BYTES}, "trickling"),
    Schedule("chunks of seven", {"max_num_seqs": 7, "max_num_batched_tokens": 7}, "trickling"),
    Schedule("staged chunks", {"prefill_chunk_stages": (96, 32, 3, 96)}),
    Schedule("prefill first", {"batching": "prefill-first", "max_num_seqs": 24}, "trickling"),
    Schedule("whole prompts", {"batching": "orca", "max_num_seqs": 24}),
    Schedule("static batches", {"batching": "static", "max_num_seqs": 12}),
    Schedule(
        "deadlines, no prefix cache",
        {**_TINY, "scheduling_policy": "deadline", "victim": "shortest-remaining", "enable_prefix_caching": False},
    ),
    Schedule(
        "one thread, least recently used",
        {**_TINY, "victim": "least-recently-used", "preemption": "swap", "swap_space_bytes": _SWAP_BYTES},
        num_workers=1,
    ),
    Schedule("overlap", {"overlap": "on", "max_num_seqs": 32}, "trickling"),
    Schedule("overlap, tiny pool", {**_TINY, "overlap": "on"}, "trickling"),
)


@dataclass(slots=True)
class Answer:
    """The answer of one choice of a request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None

    def add(self, output: EngineOutput) -> None:
        self.token_ids += output.new_token_ids
        self.logprobs += output.logprobs or []
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.finish_reason is not None:
            if output.finish_reason in ("error", "abort"):
                raise BenchmarkError(f"request {output.request_id} ended with {output.finish_reason}: {output.error}")
            self.finish_reason = output.finish_reason


def make_requests(count: int, max_model_len: int, vocab_size: int, seed: int = 0) -> list[EngineRequest]:
    """Seeded requests of at most `max_model_len` tokens, prompt and answer together."""
    rng = random.Random(seed)
    shared = [[rng.randrange(vocab_size) for _ in range(max_model_len // 4)] for _ in range(3)]
    requests = []
    for number in range(count):
        prompt = rng.choice(shared)[: rng.randrange(max_model_len // 4)] if rng.random() < 0.6 else []
        prompt = prompt + [rng.randrange(vocab_size) for _ in range(rng.randrange(1, max_model_len // 6))]
        values: dict[str, Any] = {
            "max_tokens": rng.randrange(1, max_model_len // 3), "logprobs": 3, "ignore_eos": True, "temperature": 0.0,
        }  # fmt: skip
        if number % 2:
            values |= {"temperature": rng.uniform(0.5, 1.5), "seed": rng.getrandbits(40), "n": rng.choice((1, 1, 2, 3))}
            values |= rng.choice(({}, {"top_k": 8}, {"top_p": 0.9}, {"min_p": 0.05}))
        values |= rng.choice(
            ({}, {}, {"frequency_penalty": 0.4, "presence_penalty": 0.2}, {"repetition_penalty": 1.2},
             {"prompt_logprobs": 2})
        )  # fmt: skip
        requests.append(
            EngineRequest(request_id=f"r{number}", prompt_token_ids=prompt, params=SamplingParams(**values))
        )
    return requests


def serve(engine: Engine, requests: Sequence[EngineRequest], arrivals: str, seed: int = 0) -> dict[_Key, Answer]:
    """Every choice's answer. The engine is stepped on this thread."""
    rng = random.Random(seed)
    answers = {(request.request_id, index): Answer() for request in requests for index in range(request.params.n)}
    waiting = list(reversed(requests))
    while waiting or engine.has_work:
        if arrivals == "together":
            count = len(waiting)
        elif arrivals == "trickling":
            count = rng.choice((0, 2, 4))
        else:
            count = 0 if engine.has_work else 1
        for _ in range(min(count, len(waiting))):
            engine.add(waiting.pop())
        for output in engine.step():
            answers[output.request_id, output.index].add(output)
    unfinished = [key for key, answer in answers.items() if answer.finish_reason is None]
    if unfinished:
        raise BenchmarkError(f"{len(unfinished)} choices did not end, {unfinished[0]} among them")
    return answers


def differences(ours: Mapping[_Key, Answer], theirs: Mapping[_Key, Answer]) -> list[str]:
    """One line for each choice that is not the same to the bit."""
    lines = []
    for key, mine in ours.items():
        other = theirs[key]
        what = None
        if mine.token_ids != other.token_ids:
            what = f"token {_first_difference(mine.token_ids, other.token_ids)}"
        elif mine.finish_reason != other.finish_reason:
            what = f"finish reason {mine.finish_reason} instead of {other.finish_reason}"
        elif (at := _first_difference(_bits(mine.logprobs), _bits(other.logprobs))) is not None:
            what = f"logprob {at}"
        elif (at := _first_difference(_bits(mine.prompt_logprobs), _bits(other.prompt_logprobs))) is not None:
            what = f"prompt logprob {at}"
        if what is not None:
            lines.append(f"{key[0]} choice {key[1]}: {what}")
    return lines


def _first_difference(ours: Sequence[object], theirs: Sequence[object]) -> int | None:
    for index, (mine, other) in enumerate(zip(ours, theirs)):
        if mine != other:
            return index
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def _bits(entries: Sequence[TokenLogprobs | None] | None) -> list[tuple[int, int, bytes, tuple[int, ...]] | None]:
    """Each entry in a form that compares by bits, including NaN and the sign of zero."""
    return [None if entry is None else _bits_of(entry) for entry in entries or ()]


def _bits_of(entry: TokenLogprobs) -> tuple[int, int, bytes, tuple[int, ...]]:
    numbers = np.array([entry.logprob, *entry.top_logprobs])
    return entry.token_id, entry.rank, numbers.tobytes(), tuple(entry.top_ids)


def engine_maker(arguments: Mapping[str, Any], *, exact: bool) -> MakeEngine:
    """Engines over one loading of the model; `arguments` are `build_engine`'s. Raises its errors."""
    given = {name: value for name, value in arguments.items() if name in EngineConfig.__dataclass_fields__}
    folder = resolve_model(arguments.get("model"))
    loaded = loaded_model(folder, EngineConfig(**{**given, "exact": exact}))

    def make(settings: Mapping[str, Any]) -> Engine:
        config = EngineConfig(**{**given, "kv_cache_bytes": None, **settings, "exact": exact})
        return engine_over(loaded, folder, config, model_name(arguments.get("model")))

    return make


def bench_exact(
    make_engine: MakeEngine,
    make_default_engine: MakeEngine,
    *,
    num_requests: int = 300,
    num_schedules: int = len(SCHEDULES),
    num_rounds: int = 3,
    max_model_len: int = 96,
    seed: int = 0,
    report_progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Serves the requests under the first `num_schedules` of `SCHEDULES`, then times both modes.

    Args:
        make_engine: builds an engine in exact mode; make_default_engine: one in the default mode.
        num_rounds: interleaved timed runs of each mode; the medians give `cost`, exact time ÷ default time.
        report_progress: gets a line a schedule.

    Returns `schedules` (name, seconds, preemptions, different choices), `num_choices`, `num_different`, `is_exact`,
    `cost`, `environment`. Raises BenchmarkError if a request fails or none was preempted.
    """
    if not 2 <= num_schedules <= len(SCHEDULES):
        raise BenchmarkError(f"--num-schedules {num_schedules} must be 2 to {len(SCHEDULES)}")
    rows: list[dict[str, Any]] = []
    expected: dict[_Key, Answer] = {}
    requests: list[EngineRequest] = []
    info: EngineInfo | None = None
    for schedule in SCHEDULES[:num_schedules]:
        engine = _engine_for(make_engine, schedule, max_model_len)
        if not requests:
            requests = make_requests(num_requests, max_model_len, engine.info.vocab_size, seed)
            info = engine.info
        start = time.perf_counter()
        with _workers(schedule.num_workers):
            answers = serve(engine, requests, schedule.arrivals, seed)
        seconds = time.perf_counter() - start
        expected = expected or answers
        found = differences(answers, expected)
        rows.append({
            "name": schedule.name, "seconds": seconds, "num_steps": engine.stats().num_steps,
            "num_preemptions": engine.stats().num_preemptions, "num_different": len(found), "first": found[:5],
        })  # fmt: skip
        report_progress(f"{schedule.name}: {len(found)} of {len(answers)} differ ({seconds:.1f} s)")
    if num_schedules == len(SCHEDULES) and not any(row["num_preemptions"] for row in rows):
        raise BenchmarkError("no request was preempted: the pools are too large to prove anything")

    def together(make: MakeEngine) -> float:
        return timed(serve, _engine_for(make, SCHEDULES[1], max_model_len), requests, "together", seed)()

    works = {"exact": partial(together, make_engine), "default": partial(together, make_default_engine)}
    seconds_of = interleaved(works, num_rounds)
    medians = {mode: statistics.median(seconds) for mode, seconds in seconds_of.items() if seconds}
    num_different = sum(row["num_different"] for row in rows)
    report = {
        "schedules": rows,
        "num_requests": num_requests,
        "num_choices": len(expected),
        "num_different": num_different,
        "is_exact": num_different == 0,
        "exact_seconds": seconds_of["exact"],
        "default_seconds": seconds_of["default"],
        "cost": medians["exact"] / medians["default"] if medians else 1.0,
    }
    return finished(report, info)


def _engine_for(make_engine: MakeEngine, schedule: Schedule, max_model_len: int) -> Engine:
    settings: dict[str, Any] = {"max_model_len": max_model_len, **schedule.settings}
    block_size = settings.get("block_size", 16)
    settings["num_blocks"] = math.ceil(settings.get("num_blocks", 64) * -(-max_model_len // block_size))
    return make_engine(settings)


@contextmanager
def _workers(count: int | None) -> Iterator[None]:
    """A context in which cpu operations use so many threads; None changes nothing."""
    if count is not None:
        cpu.set_num_workers(count)
    try:
        yield
    finally:
        cpu.set_num_workers(cpu.MAX_WORKERS)
