"""`bench serve`: an OpenAI-compatible server under load, seen from a client, with vLLM's fields.

Requests are streaming completions or chats. They arrive at `request_rate` a second: gaps from a gamma distribution of
shape `burstiness` (1 is a Poisson process), all at once for an infinite rate; those of a trace at its own times. Never
more than `max_concurrency` are open. Times are the client's: TTFT until the first chunk with output, ITL between such
chunks, E2EL until the last, TPOT = (E2EL − TTFT) / (output_len − 1).
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.bench.environment import finished
from runtime.bench.load.http_client import Event, Origin, Usage, first_model, stream_events
from runtime.bench.load.samples import Sample
from runtime.bench.metrics import BenchmarkError, summarize, time_per_output_token_s
from runtime.bench.options import Load

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
METRICS = ("ttft", "tpot", "itl", "e2el")
GOALS = ("ttft", "tpot", "e2el")


def check_load(load: Load, samples: Sequence[Sample] = ()) -> None:
    """Raises `BenchmarkError` for a wrong value, and for samples that cannot be sent with this load."""
    if load.endpoint not in PATHS:
        raise BenchmarkError(f"--endpoint {load.endpoint!r} is none of {', '.join(PATHS)}")
    for name in ("request_rate", "burstiness", "timeout_s"):
        if not getattr(load, name) > 0:
            raise BenchmarkError(f"--{name.replace('_', '-')} {getattr(load, name)} must be above 0")
    if load.max_concurrency is not None and load.max_concurrency < 1:
        raise BenchmarkError(f"--max-concurrency {load.max_concurrency} must be at least 1")
    if load.endpoint == "chat" and any(isinstance(sample.prompt, list) for sample in samples):
        raise BenchmarkError("--endpoint chat takes prompts of text, not of token ids")
    if not math.isinf(load.request_rate) and any(sample.arrival_s is not None for sample in samples):
        raise BenchmarkError("--request-rate: a trace has its own arrivals; --trace-rate makes them denser")


def arrivals(load: Load, samples: Sequence[Sample], seed: int = 0) -> list[float]:
    """Each request's seconds after the start; the gaps' mean is exactly 1 / request_rate. With an infinite rate all
    come at once, or at a trace's own times."""
    if math.isinf(load.request_rate):
        return [sample.arrival_s or 0.0 for sample in samples]
    generator = random.Random(seed)
    gaps = [generator.gammavariate(load.burstiness, 1.0 / (load.request_rate * load.burstiness)) for _ in samples]
    scale = len(gaps) / load.request_rate / sum(gaps)
    times, now = [], 0.0
    for gap in gaps:
        times.append(now)
        now += gap * scale
    return times


@dataclass(slots=True)
class Answer:
    """One request as the client saw it; seconds. `start_s` is after the load's start; `itl_s` the gaps between chunks;
    `error` is None for a complete answer."""

    start_s: float
    ttft_s: float = 0.0
    latency_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)
    input_len: int = 0
    output_len: int = 0
    num_events: int = 0
    error: str | None = None

    @property
    def tpot_s(self) -> float | None:
        """Seconds for each token after the first; None if there is no second one."""
        return time_per_output_token_s(self.latency_s, self.ttft_s, self.output_len)

    def meets(self, goodput: Mapping[str, float]) -> bool:
        """Whether all numbers meet their targets, in milliseconds; without a TPOT, that target is met."""
        values = {"ttft": self.ttft_s, "tpot": self.tpot_s or 0.0, "e2el": self.latency_s}
        return all(values[name] * 1e3 <= most_ms for name, most_ms in goodput.items())


async def bench_serve(
    base_url: str,
    load: Load,
    samples: Sequence[Sample],
    warmups: Sequence[Sample] = (),
    *,
    model: str | None = None,
    api_key: str | None = None,
    goodput: Mapping[str, float] | None = None,
    percentile_metrics: Sequence[str] = METRICS,
    metric_percentiles: Sequence[float] = (99.0,),
    save_detailed: bool = False,
    seed: int = 0,
    between: Callable[[], Awaitable[None]] | None = None,
) -> dict[str, Any]:
    """Warms up and verifies, then applies the load; the report has vLLM's keys.

    warmups        sent before, one by one; they must succeed
    model          by default the first that `/v1/models` lists
    goodput        most milliseconds of `ttft`, `tpot`, `e2el`: `request_goodput` counts the requests that meet all
    save_detailed  every request's own numbers, too
    between        called after the warm-up, before the load

    A request fails if it is refused, ends early, or (with `ignore_eos`) has another number of tokens than requested; it
    counts in `failed` and `error_counts`. Raises `BenchmarkError` if a warm-up fails, or every request.
    """
    goodput = dict(goodput or {})
    check_load(load, [*samples, *warmups])
    for name in percentile_metrics:
        if name not in METRICS:
            raise BenchmarkError(f"--percentile-metrics: {name!r} is none of {', '.join(METRICS)}")
    for name, most_ms in goodput.items():
        if name not in GOALS or not 0 < most_ms < math.inf:
            raise BenchmarkError(f"--goodput {name}:{most_ms:g} is not ttft, tpot or e2el and milliseconds above 0")
    origin = Origin.parse(base_url)
    model = model or await first_model(origin, api_key)
    start = time.perf_counter()
    for sample in warmups:
        warmup = await _ask(origin, model, sample, load, api_key, start)
        if warmup.error is not None:
            raise BenchmarkError(warmup.error)
    if between is not None:
        await between()
    gate = asyncio.Semaphore(load.max_concurrency or len(samples))
    start = time.perf_counter()

    async def send(sample: Sample, arrival_s: float) -> Answer:
        delay = start + arrival_s - time.perf_counter()
        if delay > 0:
            await asyncio.sleep(delay)
        async with gate:
            return await _ask(origin, model, sample, load, api_key, start)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(send(*pair)) for pair in zip(samples, arrivals(load, samples, seed))]
    answers = [task.result() for task in tasks]
    duration_s = time.perf_counter() - start
    report: dict[str, Any] = {
        "backend": "openai" if load.endpoint == "completions" else "openai-chat",
        "base_url": str(origin),
        "endpoint": PATHS[load.endpoint],
        "model_id": model,
        "num_prompts": len(samples),
        "request_rate": "inf" if math.isinf(load.request_rate) else load.request_rate,
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency,
        "ignore_eos": load.ignore_eos,
        "temperature": load.temperature,
        "seed": seed,
        "goodput": goodput or None,
        **summary(
            answers,
            duration_s,
            goodput=goodput,
            percentile_metrics=percentile_metrics,
            metric_percentiles=metric_percentiles,
        ),
    }
    if save_detailed:
        report |= details(answers)
    return finished(report)


async def _ask(origin: Origin, model: str, sample: Sample, load: Load, api_key: str | None, begun: float) -> Answer:
    """Sends and measures one request. Its failure is in the answer's `error`."""
    start = last = time.perf_counter()
    answer = Answer(start - begun)
    usage: Usage | None = None
    has_first = False

    def take(event: Event) -> None:
        nonlocal last, usage, has_first
        answer.num_events += 1
        usage = event.usage or usage
        if not event.choices:
            return
        now = time.perf_counter()
        if any(choice.has_output for choice in event.choices):
            if has_first:
                answer.itl_s.append(now - last)
            else:
                answer.ttft_s, has_first = now - start, True
            last = now
        answer.latency_s = now - start

    try:
        async with asyncio.timeout(load.timeout_s):
            await stream_events(origin, PATHS[load.endpoint], _payload(model, sample, load), api_key, take)
        if usage is None or not answer.latency_s:
            raise BenchmarkError(f"{origin}: an answer without {'chunks' if usage else 'usage'} cannot be counted")
        _count(origin, answer, usage, sample, load.ignore_eos)
    except TimeoutError:
        answer.error = f"{origin}: no whole answer within {load.timeout_s:g} s"
    except BenchmarkError as error:
        answer.error = str(error)
    if answer.error is not None:
        answer.latency_s = time.perf_counter() - start
    elif not has_first:  # an answer without text has only its end
        answer.ttft_s = answer.latency_s
    return answer


def _payload(model: str, sample: Sample, load: Load) -> dict[str, Any]:
    payload: dict[str, Any] = {
        "model": model,
        "max_tokens": sample.output_len,
        "temperature": load.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if load.endpoint == "chat":
        payload["messages"] = [{"role": "user", "content": sample.prompt}]
    else:
        payload["prompt"] = sample.prompt
    if load.ignore_eos:
        payload["ignore_eos"] = True
    return payload


def _count(origin: Origin, answer: Answer, usage: Usage, sample: Sample, is_exact: bool) -> None:
    """The server's counts, checked for plausibility. Raises `BenchmarkError`."""
    answer.input_len, answer.output_len = usage.prompt_tokens, usage.completion_tokens
    if isinstance(sample.prompt, list) and answer.input_len < len(sample.prompt):
        raise BenchmarkError(f"{origin} counted {answer.input_len} prompt tokens of {len(sample.prompt)} sent")
    if answer.output_len > sample.output_len or answer.output_len < (sample.output_len if is_exact else 1):
        raise BenchmarkError(f"{origin} gave {answer.output_len} tokens where {sample.output_len} were asked for")


def summary(
    answers: Sequence[Answer],
    duration_s: float,
    *,
    goodput: Mapping[str, float],
    percentile_metrics: Sequence[str],
    metric_percentiles: Sequence[float],
) -> dict[str, Any]:
    """Counts, throughputs and latencies; tokens and times only of completed requests.

    Raises `BenchmarkError`, with the first error, when no request was completed.
    """
    completed = [answer for answer in answers if answer.error is None]
    errors = [answer.error for answer in answers if answer.error is not None]
    if not completed:
        raise BenchmarkError(f"all {len(answers)} requests failed; the first: {errors[0]}")
    total_input = sum(answer.input_len for answer in completed)
    total_output = sum(answer.output_len for answer in completed)
    good = sum(answer.meets(goodput) for answer in completed)
    report: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(completed),
        "failed": len(errors),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(completed) / duration_s,
        "request_goodput": good / duration_s if goodput else None,
        "output_throughput": total_output / duration_s,
        "total_token_throughput": (total_input + total_output) / duration_s,
        "max_output_tokens_per_s": _busiest_second(completed),
        "max_concurrent_requests": _most_open(answers),
        "total_events": sum(answer.num_events for answer in answers),
        "error_counts": dict(Counter(errors)),
    }
    values: dict[str, list[float]] = {
        "ttft": [answer.ttft_s for answer in completed],
        "tpot": [tpot for answer in completed if (tpot := answer.tpot_s) is not None],
        "itl": [gap for answer in completed for gap in answer.itl_s],
        "e2el": [answer.latency_s for answer in completed],
    }
    for name in percentile_metrics:
        report.update(summarize(name, values[name], metric_percentiles))
    return report


def details(answers: Sequence[Answer]) -> dict[str, list[Any]]:
    """Every request's numbers, in the order of sending: seconds; an empty `errors` entry for a success."""
    return {
        "input_lens": [answer.input_len for answer in answers],
        "output_lens": [answer.output_len for answer in answers],
        "start_times": [answer.start_s for answer in answers],
        "ttfts": [answer.ttft_s for answer in answers],
        "itls": [answer.itl_s for answer in answers],
        "errors": [answer.error or "" for answer in answers],
    }


def _busiest_second(answers: Sequence[Answer]) -> float:
    """The most chunks in one second of the run; a chunk is a token, or several that came together."""
    seconds: Counter[int] = Counter()
    for answer in answers:
        now = answer.start_s + answer.ttft_s
        seconds[int(now)] += 1
        for gap in answer.itl_s:
            now += gap
            seconds[int(now)] += 1
    return float(max(seconds.values()))


def _most_open(answers: Sequence[Answer]) -> int:
    """The most open requests."""
    begins = [(answer.start_s, 1) for answer in answers]
    ends = [(answer.start_s + answer.latency_s, -1) for answer in answers]
    num_open = most = 0
    for _, change in sorted(begins + ends):
        num_open += change
        most = max(most, num_open)
    return most


def run_bench(measure: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """Runs it on the cheapest event loop: uvloop's, if installed."""
    try:
        import uvloop
    except ImportError:
        make_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    else:
        make_loop = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=make_loop) as runner:
        return runner.run(measure)
