"""`bench latency`, `bench throughput`, `bench streaming`: batches of requests submitted at once.

Latency: the time of one batch from prompt to last token, repeated. Throughput: requests and tokens a second, with all
    requests at the start. Streaming: a burst of short requests, as of many simultaneous users. All are greedy and end
    by length.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from runtime.bench.environment import finished
from runtime.bench.load.burst import Burst, run_burst
from runtime.bench.load.prompts import random_prompts
from runtime.bench.metrics import (
    BenchmarkError,
    check_outputs,
    check_same_greedy,
    percentiles_of,
    summarize,
)
from runtime.engine.sampling_params import SamplingParams
from runtime.llm import LLM


def bench_latency(
    llm: LLM,
    *,
    input_len: int,
    output_len: int,
    batch_size: int,
    num_iters_warmup: int,
    num_iters: int,
    seed: int = 0,
) -> dict[str, Any]:
    """Times `num_iters` runs of the same batch of random prompts (greedy, EOS ignored).

    Keys as vLLM's: `avg_latency`, `latencies` and `percentiles` {"10" … "99"}, all in seconds. Every run must
    give the tokens of the first, which warms up and is not timed (there is always one).
    """
    if num_iters < 1:
        raise BenchmarkError(f"--num-iters {num_iters} must be at least 1")
    info = llm.client.info
    prompts = random_prompts(batch_size, input_len, info.vocab_size, seed)

    def run() -> tuple[list[list[int]], float]:
        burst = run_burst(llm.client, prompts, output_len)  # with nothing of an earlier run in the prefix cache
        return burst.token_ids, burst.wall_s

    expected, _ = run()
    check_outputs(expected, output_len, info.vocab_size, "warm-up")
    for _ in range(num_iters_warmup - 1):
        run()
    latencies: list[float] = []
    for iteration in range(num_iters):
        token_ids, seconds = run()
        check_same_greedy(f"run {iteration} against the warm-up", prompts, token_ids, expected, llm.logits)
        latencies.append(seconds)
    report = {
        "avg_latency": sum(latencies) / len(latencies),
        "latencies": latencies,
        "percentiles": percentiles_of(latencies, (10, 25, 50, 75, 90, 99)),
        "input_len": input_len,
        "output_len": output_len,
        "batch_size": batch_size,
        "num_iters_warmup": max(1, num_iters_warmup),
        "num_iters": num_iters,
    }
    return finished(report, info)


def bench_throughput(llm: LLM, *, input_len: int, output_len: int, num_prompts: int, seed: int = 0) -> dict[str, Any]:
    """Times one run of `num_prompts` distinct random prompts (greedy, EOS ignored), after a shorter warm-up.

    Keys as vLLM's: `elapsed_time` (s), `num_requests`, `total_num_tokens` (prompt and output),
    `requests_per_second`, `tokens_per_second`; beside them `total_output_tokens`, `output_tokens_per_second`.
    The warm-up, of other prompts, is as wide as the engine's batch; its outputs are verified before the run,
    the run's own after it.
    """
    info = llm.client.info
    num_warmup = min(num_prompts, info.max_num_seqs)
    prompts = random_prompts(num_warmup + num_prompts, input_len, info.vocab_size, seed)
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)

    def run(batch: list[list[int]], what: str) -> float:
        start = time.perf_counter()
        outputs = llm.generate(batch, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        if len(outputs) != len(batch):
            raise BenchmarkError(f"{what}: {len(outputs)} outputs for {len(batch)} prompts")
        check_outputs([list(o.outputs[0].token_ids) for o in outputs], output_len, info.vocab_size, what)
        return seconds

    run(prompts[:num_warmup], "warm-up")
    elapsed = run(prompts[num_warmup:], "timed run")
    total_output = num_prompts * output_len
    total = num_prompts * input_len + total_output
    report = {
        "elapsed_time": elapsed,
        "num_requests": num_prompts,
        "total_num_tokens": total,
        "total_output_tokens": total_output,
        "requests_per_second": num_prompts / elapsed,
        "tokens_per_second": total / elapsed,
        "output_tokens_per_second": total_output / elapsed,
        "input_len": input_len,
        "output_len": output_len,
    }
    return finished(report, info)


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

    Before each burst one request of as many tokens as the burst's prompts together is timed alone, if the model takes
    so many: `lone_ttft_ms` is the median, `ttft_ratio` that of the rounds' ratios of the median TTFT to it (1.0 if the
    burst shared one forward pass, None if not measured).
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
    }
    return finished(report, info)
