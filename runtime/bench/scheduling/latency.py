"""`bench latency`: how long one batch takes from prompt to last token, again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from runtime.bench.environment import describe_engine
from runtime.bench.load.burst import run_burst
from runtime.bench.load.prompts import random_prompts
from runtime.bench.metrics import BenchmarkError, check_finite, check_outputs, percentiles_of
from runtime.bench.peers.greedy import check_same_greedy

if TYPE_CHECKING:
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
        burst = run_burst(llm.client, prompts, output_len)  # which finds nothing of an earlier run in the prefix cache
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
        "environment": describe_engine(info),
    }
    check_finite(report)
    return report
