"""`bench throughput`: how many requests and tokens a second, when all requests are there from the start."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from runtime.bench.environment import describe_engine
from runtime.bench.load.prompts import random_prompts
from runtime.bench.metrics import BenchmarkError, check_finite, check_outputs

if TYPE_CHECKING:
    from runtime.llm import LLM


def bench_throughput(llm: LLM, *, input_len: int, output_len: int, num_prompts: int, seed: int = 0) -> dict[str, Any]:
    """Times one run of `num_prompts` distinct random prompts (greedy, EOS ignored), after a shorter warm-up.

    Keys as vLLM's: `elapsed_time` (s), `num_requests`, `total_num_tokens` (prompt and output),
    `requests_per_second`, `tokens_per_second`; beside them `total_output_tokens`, `output_tokens_per_second`.
    The warm-up, of other prompts, is as wide as the engine's batch; its outputs are verified before the run,
    the run's own after it.
    """
    from runtime.engine.sampling_params import SamplingParams

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
        "environment": describe_engine(info),
    }
    check_finite(report)
    return report
