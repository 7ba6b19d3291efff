"""`bench streaming`: a burst of many short requests, and each token's arrival.

Requests, all greedy and ended by length, are submitted to an engine client at once or at given times.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.bench.environment import finished
from runtime.bench.load.samples import random_prompts
from runtime.bench.metrics import (
    BenchmarkError,
    check_outputs,
    check_same_greedy,
    percentiles_of,
    summarize,
    time_per_output_token_s,
)
from runtime.bench.options import StreamingOptions
from runtime.engine.messages import AdapterRef, EngineOutput, EngineRequest
from runtime.engine.process.client import EngineClient
from runtime.engine.sampling_params import SamplingParams
from runtime.llm import LLM


@dataclass(slots=True)
class RequestRecord:
    """One request's life; times are `time.perf_counter()` seconds."""

    submit_s: float
    add_latency_s: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """Seconds from submission to the first token."""
        return self.token_times_s[0] - self.submit_s

    @property
    def latency_s(self) -> float:
        """Seconds from submission to the last token."""
        return self.token_times_s[-1] - self.submit_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None if there is only one."""
        return time_per_output_token_s(self.latency_s, self.ttft_s, len(self.token_ids))

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between each token and the next."""
        return [after - before for before, after in itertools.pairwise(self.token_times_s)]


@dataclass(frozen=True, slots=True)
class Burst:
    """All records of one burst, in the order of submission."""

    records: list[RequestRecord]
    submit_wall_s: float

    @property
    def start_s(self) -> float:
        """The time of the first submission."""
        return self.records[0].submit_s

    @property
    def end_s(self) -> float:
        """The time of the last request's last token."""
        return max(record.token_times_s[-1] for record in self.records)

    @property
    def wall_s(self) -> float:
        """Seconds from the first submission to the last token."""
        return self.end_s - self.start_s

    @property
    def token_ids(self) -> list[list[int]]:
        """Each request's tokens."""
        return [record.token_ids for record in self.records]


def run_burst(
    client: EngineClient,
    prompts: Sequence[Sequence[int]],
    max_tokens: int | Sequence[int],
    *,
    arrivals_s: Sequence[float] | None = None,
    timeout_s: float = 600.0,
    clock: Callable[[], float] = time.perf_counter,
    adapters: Sequence[AdapterRef | None] | None = None,
) -> Burst:
    """Submits every prompt (greedy, EOS ignored) and waits for the last token.

    The prompts of a burst may share cached prefixes with each other, never with an earlier burst: it has a cache salt
    of its own.

    max_tokens  new tokens, one number for all or one for each
    arrivals_s  seconds from now at which each is submitted, ascending; None submits all at once
    clock       of the records' times; only a wall clock goes with `arrivals_s`
    adapters    one for each, or None

    Raises `BenchmarkError` if a request ends other than by length, or `timeout_s` after the last submission.
    """
    lengths = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens)
    params = {
        length: SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
        for length in set(lengths)
    }
    salt = uuid.uuid4().hex
    requests = [
        EngineRequest(
            request_id=f"burst-{index}",
            prompt_token_ids=list(prompt),
            params=params[length],
            cache_salt=salt,
            adapter=adapter,
        )
        for index, (prompt, length, adapter) in enumerate(
            zip(prompts, lengths, adapters or [None] * len(prompts), strict=True)
        )
    ]
    records: list[RequestRecord] = []
    all_finished, lock = threading.Event(), threading.Lock()
    num_open = len(requests)

    def sink_of(record: RequestRecord) -> Callable[[EngineOutput], None]:
        def sink(output: EngineOutput) -> None:
            nonlocal num_open
            now = clock()
            record.token_ids.extend(output.new_token_ids)
            record.token_times_s.extend([now] * len(output.new_token_ids))
            if output.finish_reason is not None:
                record.finish_reason, record.error = output.finish_reason, output.error
                with lock:  # several engines have a thread each
                    num_open -= 1
                    if num_open == 0:
                        all_finished.set()

        return sink

    start = clock()
    for index, request in enumerate(requests):
        if arrivals_s is not None:
            time.sleep(max(0.0, start + arrivals_s[index] - clock()))
        record = RequestRecord(submit_s=clock())
        records.append(record)
        client.submit(request, sink_of(record))
        record.add_latency_s = clock() - record.submit_s
    submit_wall = clock() - start
    if not all_finished.wait(timeout_s):
        for request in requests:
            client.cancel(request.request_id)
        raise BenchmarkError(f"{num_open} of {len(requests)} requests had not finished after {timeout_s:g} s")
    for index, record in enumerate(records):
        if record.finish_reason != "length":
            reason = f": {record.error}" if record.error else ""
            raise BenchmarkError(f"request {index} ended by {record.finish_reason!r}, not by length{reason}")
    return Burst(records, submit_wall)


def bench_streaming(llm: LLM, options: StreamingOptions, seed: int = 0) -> dict[str, Any]:
    """Submits `num_requests` distinct prompts at once, `num_rounds` times, and reports the median round.

    Milliseconds: `submit_wall_ms`; `mean/median/std/p50/p99` of `add_request_ms` (one submit call),
    `ttft_ms`, `tpot_ms`, `e2el_ms`; `latency_percentiles_ms`. `completion_throughput` is output tokens per
    second of the whole burst. Each round's tokens must equal the warm-up's, which is verified first. The
    median round is that of the median wall time; `wall_times_s` gives them all.

    Before each burst one request of as many tokens as the burst's prompts together is timed alone, if the model takes
    so many: `lone_ttft_ms` is the median, `ttft_ratio` that of the rounds' ratios of the median TTFT to it (1.0 if the
    burst shared one forward pass, None if not measured).
    """
    num_requests, prompt_len, max_tokens = options.num_requests, options.prompt_len, options.max_tokens
    num_rounds = options.num_rounds
    if num_rounds < 1:
        raise BenchmarkError(f"--num-rounds {num_rounds} must be at least 1")
    client, info = llm.client, llm.client.info
    prompts = random_prompts(num_requests, prompt_len, info.vocab_size, seed)
    expected = run_burst(client, prompts, max_tokens).token_ids
    check_outputs(expected, max_tokens, info.vocab_size, "warm-up")
    for _ in range(options.num_warmup_rounds - 1):
        run_burst(client, prompts, max_tokens)
    rounds: list[Burst] = []
    lone_ttfts_s: list[float] = []
    num_tokens = min(num_requests * prompt_len, info.max_num_batched_tokens)
    is_comparable = num_tokens == num_requests * prompt_len < info.max_model_len
    lone_prompt = random_prompts(1, num_tokens, info.vocab_size, seed)
    if is_comparable:
        run_burst(client, lone_prompt, 1)
    for index in range(num_rounds):
        if is_comparable:
            lone_ttfts_s.append(run_burst(client, lone_prompt, 1).records[0].ttft_s)
        burst = run_burst(client, prompts, max_tokens)
        what = f"round {index} against the warm-up"
        check_same_greedy(what, prompts, burst.token_ids, expected, llm.logits)
        rounds.append(burst)
    wall_times = [burst.wall_s for burst in rounds]
    median = sorted(rounds, key=lambda burst: burst.wall_s)[len(rounds) // 2]
    records = median.records
    latencies = [record.latency_s for record in records]
    ratios = [
        statistics.median(record.ttft_s for record in burst.records) / lone_s
        for burst, lone_s in zip(rounds, lone_ttfts_s)
    ]
    report = {
        "num_requests": num_requests,
        "prompt_len": prompt_len,
        "max_tokens": max_tokens,
        "num_rounds": num_rounds,
        "duration": median.wall_s,
        "wall_times_s": wall_times,
        "submit_wall_ms": median.submit_wall_s * 1e3,
        **summarize("add_request", [record.add_latency_s for record in records], (50, 99)),
        **summarize("ttft", [record.ttft_s for record in records], (50, 99)),
        "lone_ttft_ms": 1e3 * statistics.median(lone_ttfts_s) if lone_ttfts_s else None,
        "ttft_ratio": statistics.median(ratios) if ratios else None,
        **summarize("tpot", [t for record in records if (t := record.tpot_s) is not None], (50, 99)),
        **summarize("e2el", latencies, (50, 99)),
        "latency_percentiles_ms": {
            name: value * 1e3 for name, value in percentiles_of(latencies, (10, 25, 50, 75, 90, 99)).items()
        },
        "total_output_tokens": num_requests * max_tokens,
        "completion_throughput": num_requests * max_tokens / median.wall_s,
        "request_throughput": num_requests / median.wall_s,
    }
    return finished(report, info)
