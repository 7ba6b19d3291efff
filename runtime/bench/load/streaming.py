"""`bench streaming`: a burst of short requests, as when many users press the key in the same moment."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from runtime.bench.environment import describe_engine
from runtime.bench.load.burst import Burst, run_burst
from runtime.bench.load.prompts import random_prompts
from runtime.bench.metrics import BenchmarkError, check_finite, check_outputs, percentiles_of, summarize
from runtime.bench.peers.greedy import check_same_greedy

if TYPE_CHECKING:
    from runtime.llm import LLM


def bench_streaming(
    llm: LLM,
    *,
    num_requests: int,
    prompt_len: int,
    max_tokens: int,
    num_warmup_rounds: int = 2,
    num_rounds: int = 1,
    seed: int = 0,
) -> dict[str, Any]:
    """Submits `num_requests` distinct prompts at once, `num_rounds` times, and reports the median round.

    Milliseconds: `submit_wall_ms`; `mean/median/std/p50/p99` of `add_request_ms` (one submit call),
    `ttft_ms`, `tpot_ms`, `e2el_ms`; `latency_percentiles_ms`. `completion_throughput` is output tokens per
    second of the whole burst. Each round's tokens must equal the warm-up's, which is verified first. The
    median round is that of the median wall time; `wall_times_s` gives them all.

    Before each burst one request of as many tokens as the burst's prompts together is timed alone, as far as the model
    takes so many: `lone_ttft_ms` is the median, `ttft_ratio` that of the rounds' ratios of the median TTFT to it (1.0:
    the burst shared one forward pass; None: not measured).
    """
    if num_rounds < 1:
        raise BenchmarkError(f"--num-rounds {num_rounds} must be at least 1")
    client, info = llm.client, llm.client.info
    prompts = random_prompts(num_requests, prompt_len, info.vocab_size, seed)
    expected = run_burst(client, prompts, max_tokens).token_ids
    check_outputs(expected, max_tokens, info.vocab_size, "warm-up")
    for _ in range(num_warmup_rounds - 1):
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
        "environment": describe_engine(info),
    }
    check_finite(report)
    return report
