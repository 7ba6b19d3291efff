"""The numbers of `bench serve`, under vLLM's names, made of what the client saw of each request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.bench.metrics import BenchmarkError, summarize, time_per_output_token_s

METRICS = ("ttft", "tpot", "itl", "e2el")
GOALS = ("ttft", "tpot", "e2el")


@dataclass(slots=True)
class Answer:
    """One request as the client saw it; seconds. `start_s` is after the load's start; `itl_s` the gaps between chunks;
    `error` is None when all of the answer came."""

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
        """Seconds for each token after the first; None where there is no second one."""
        return time_per_output_token_s(self.latency_s, self.ttft_s, self.output_len)

    def meets(self, goodput: Mapping[str, float]) -> bool:
        """Whether no number is above its target, in milliseconds; what has no TPOT meets every TPOT."""
        values = {"ttft": self.ttft_s, "tpot": self.tpot_s or 0.0, "e2el": self.latency_s}
        return all(values[name] * 1e3 <= most_ms for name, most_ms in goodput.items())


def summary(
    answers: Sequence[Answer],
    duration_s: float,
    *,
    goodput: Mapping[str, float],
    percentile_metrics: Sequence[str],
    metric_percentiles: Sequence[float],
) -> dict[str, Any]:
    """Counts, throughputs and latencies; those of tokens and times are of completed requests alone.

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
    """Every request's numbers, in the order of sending: seconds; an empty `errors` entry for what went well."""
    return {
        "input_lens": [answer.input_len for answer in answers],
        "output_lens": [answer.output_len for answer in answers],
        "start_times": [answer.start_s for answer in answers],
        "ttfts": [answer.ttft_s for answer in answers],
        "itls": [answer.itl_s for answer in answers],
        "errors": [answer.error or "" for answer in answers],
    }


def _busiest_second(answers: Sequence[Answer]) -> float:
    """Most chunks that came in one second of the run; a chunk is a token, or several that came together."""
    seconds: Counter[int] = Counter()
    for answer in answers:
        now = answer.start_s + answer.ttft_s
        seconds[int(now)] += 1
        for gap in answer.itl_s:
            now += gap
            seconds[int(now)] += 1
    return float(max(seconds.values()))


def _most_open(answers: Sequence[Answer]) -> int:
    """Most requests that were open at once."""
    begins = [(answer.start_s, 1) for answer in answers]
    ends = [(answer.start_s + answer.latency_s, -1) for answer in answers]
    num_open = most = 0
    for _, change in sorted(begins + ends):
        num_open += change
        most = max(most, num_open)
    return most
