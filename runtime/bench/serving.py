"""`bench serve`: an OpenAI-compatible server under load, seen from a client, with vLLM's fields.

Requests are streaming completions of random token ids. They arrive at `request_rate` a second: gaps from a
gamma distribution of shape `burstiness` (1: a Poisson process), all at once for an infinite rate; never
more than `max_concurrency` are open. Times are the client's: TTFT until the first chunk with a choice, ITL
between chunks, E2EL until `[DONE]`, TPOT = (E2EL − TTFT) / (output_len − 1).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

from runtime.bench.environment import describe_machine
from runtime.bench.http_client import Origin, get_json, stream_events
from runtime.bench.metrics import BenchmarkError, check_finite, summarize, time_per_output_token_s
from runtime.bench.prompts import random_prompts, varied_lengths

METRICS = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is sent. Lengths in tokens; `request_rate` in requests a second, infinite for all at once."""

    num_prompts: int
    random_input_len: int
    random_output_len: int
    random_range_ratio: float = 0.0
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    ignore_eos: bool = True
    temperature: float = 0.0
    seed: int = 0
    num_warmups: int = 1

    def __post_init__(self) -> None:
        for name in ("num_prompts", "random_input_len", "random_output_len", "num_warmups"):
            if getattr(self, name) < 1:
                raise BenchmarkError(f"--{name.replace('_', '-')} {getattr(self, name)} must be at least 1")
        for name in ("request_rate", "burstiness"):
            if not getattr(self, name) > 0:
                raise BenchmarkError(f"--{name.replace('_', '-')} {getattr(self, name)} must be above 0")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise BenchmarkError(f"--max-concurrency {self.max_concurrency} must be at least 1")


@dataclass(slots=True)
class Answer:
    """One request as the client saw it; seconds."""

    ttft_s: float = 0.0
    latency_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)
    input_len: int = 0
    output_len: int = 0


async def bench_serve(
    base_url: str,
    load: Load,
    *,
    vocab_size: int,
    model: str | None = None,
    api_key: str | None = None,
    percentile_metrics: tuple[str, ...] = METRICS,
    metric_percentiles: tuple[float, ...] = (99.0,),
) -> dict[str, Any]:
    """Warms up and verifies, then applies the load; the report has vLLM's keys.

    `vocab_size` bounds the random ids. `model` None: the first that `/v1/models` lists. Raises
    `BenchmarkError` when a request fails, ends early, or (with `ignore_eos`) gives another number of tokens
    than was asked for.
    """
    for name in percentile_metrics:
        if name not in METRICS:
            raise BenchmarkError(f"--percentile-metrics: {name!r} is none of {', '.join(METRICS)}")
    origin = Origin.parse(base_url)
    model = model or await _first_model(origin, api_key)
    input_lens = varied_lengths(load.num_prompts, load.random_input_len, load.random_range_ratio, load.seed)
    output_lens = varied_lengths(load.num_prompts, load.random_output_len, load.random_range_ratio, load.seed + 1)
    longest = max(input_lens + [load.random_input_len])
    prompts = random_prompts(load.num_prompts + load.num_warmups, longest, vocab_size, load.seed)

    async def ask(prompt: list[int], output_len: int) -> Answer:
        return await _complete(origin, model, prompt, output_len, load, api_key)

    for prompt in prompts[load.num_prompts :]:
        await ask(prompt[: load.random_input_len], load.random_output_len)

    gate = asyncio.Semaphore(load.max_concurrency or load.num_prompts)

    async def send(prompt: list[int], output_len: int) -> Answer:
        async with gate:
            return await ask(prompt, output_len)

    start = time.perf_counter()
    async with _all_or_nothing() as tasks:
        arrivals = _arrivals(load)
        for prompt, input_len, output_len in zip(prompts, input_lens, output_lens):
            delay = start + next(arrivals) - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            tasks.append(asyncio.create_task(send(prompt[:input_len], output_len)))
        answers = await asyncio.gather(*tasks)
    duration = time.perf_counter() - start

    total_input = sum(answer.input_len for answer in answers)
    total_output = sum(answer.output_len for answer in answers)
    values: dict[str, list[float]] = {
        "ttft": [answer.ttft_s for answer in answers],
        "tpot": [
            tpot for a in answers if (tpot := time_per_output_token_s(a.latency_s, a.ttft_s, a.output_len)) is not None
        ],
        "itl": [gap for answer in answers for gap in answer.itl_s],
        "e2el": [answer.latency_s for answer in answers],
    }
    report: dict[str, Any] = {
        "backend": "openai",
        "base_url": str(origin),
        "model_id": model,
        "num_prompts": load.num_prompts,
        "request_rate": "inf" if math.isinf(load.request_rate) else load.request_rate,
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency,
        "random_input_len": load.random_input_len,
        "random_output_len": load.random_output_len,
        "random_range_ratio": load.random_range_ratio,
        "duration": duration,
        "completed": len(answers),
        "failed": 0,
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(answers) / duration,
        "output_throughput": total_output / duration,
        "total_token_throughput": (total_input + total_output) / duration,
    }
    for name in percentile_metrics:
        report.update(summarize(name, values[name], metric_percentiles))
    report["environment"] = describe_machine()
    check_finite(report)
    return report


@contextlib.asynccontextmanager
async def _all_or_nothing() -> AsyncIterator[list[asyncio.Task[Answer]]]:
    """A list of tasks; whichever are still open when the block is left, by an error, are cancelled."""
    tasks: list[asyncio.Task[Answer]] = []
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _arrivals(load: Load) -> Iterator[float]:
    """Seconds after the start at which each request is sent; the gaps' mean is exactly 1 / request_rate."""
    if math.isinf(load.request_rate):
        return iter([0.0] * load.num_prompts)
    generator = random.Random(load.seed)
    gaps = [
        generator.gammavariate(load.burstiness, 1.0 / (load.request_rate * load.burstiness))
        for _ in range(load.num_prompts)
    ]
    scale = load.num_prompts / load.request_rate / sum(gaps)
    times, now = [], 0.0
    for gap in gaps:
        times.append(now)
        now += gap * scale
    return iter(times)


async def _first_model(origin: Origin, api_key: str | None) -> str:
    models = (await get_json(origin, "/v1/models", api_key)).get("data") or []
    if not models:
        raise BenchmarkError(f"{origin}/v1/models lists no model: name one with --model")
    return str(models[0]["id"])


async def _complete(
    origin: Origin, model: str, prompt: list[int], output_len: int, load: Load, api_key: str | None
) -> Answer:
    payload: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_len,
        "temperature": load.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if load.ignore_eos:
        payload["ignore_eos"] = True
    answer = Answer()
    start = last = time.perf_counter()
    usage: dict[str, Any] | None = None
    has_first = False
    events = stream_events(origin, "/v1/completions", payload, api_key)
    async with contextlib.aclosing(events):
        async for event in events:
            now = time.perf_counter()
            usage = event.get("usage") or usage
            if not event.get("choices"):
                continue
            if not has_first:
                answer.ttft_s, has_first = now - start, True
            else:
                answer.itl_s.append(now - last)
            last = now
    answer.latency_s = last - start
    if usage is None or not has_first:
        missing = "chunks" if usage else "usage"
        raise BenchmarkError(f"{origin}: an answer without {missing} cannot be counted")
    answer.input_len, answer.output_len = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
    if answer.input_len < len(prompt):
        raise BenchmarkError(f"{origin} counted {answer.input_len} prompt tokens of {len(prompt)} sent")
    if answer.output_len > output_len or answer.output_len < (output_len if load.ignore_eos else 1):
        raise BenchmarkError(f"{origin} gave {answer.output_len} tokens where {output_len} were asked for")
    return answer
