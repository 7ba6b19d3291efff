"""`bench stalls`: how long decodes wait while a long prompt is computed beside them.

Decodes run alone until their usual time per token is known; then a long prompt comes, and every gap between two of
their tokens counts until it has its first token. Measured twice: stall-free with a budget (from `bench budget`'s
measurement unless one is named), and prefill-first, which computes the prompt whole.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from runtime.bench.environment import describe_engine
from runtime.bench.load.prompts import random_prompts
from runtime.bench.metrics import BenchmarkError, check_finite, percentiles_of
from runtime.bench.scheduling.budget import bench_budget
from runtime.bench.scheduling.engines import Stepper, like

if TYPE_CHECKING:
    from runtime.engine.engine import Engine

NUM_WARMUP_STEPS = 3


def bench_stalls(
    engine: Engine,
    *,
    budget: int | None,
    tpot_ratio: float,
    num_decodes: int,
    context_len: int,
    prompt_len: int,
    num_usual_steps: int,
    num_rounds: int,
    seed: int = 0,
) -> dict[str, Any]:
    """Usual TPOT, and the median, 99th percentile and largest gap while the prompt is computed, for both styles.

    budget      `max_num_batched_tokens` of the stall-free style; None: measured for `tpot_ratio` times a bare decode
                step, which leaves room for the noise of single steps below the ratio that is wanted
    num_rounds  how often the measurement of the budget is repeated for each size

    The gap that counts is `p99_ratio`, of the 99th percentile to the usual TPOT of the same run.
    """
    if min(num_decodes, context_len, prompt_len, num_usual_steps) < 1:
        raise BenchmarkError("decodes, contexts, the prompt and the usual steps must each be at least 1")
    measured = None
    if budget is None:
        measured = bench_budget(
            engine,
            tpot_ratio=tpot_ratio,
            num_decodes=num_decodes,
            context_len=context_len,
            prompt_len=prompt_len,
            num_rounds=num_rounds,
            seed=seed,
        )
        budget = int(measured["max_num_batched_tokens"])
    if budget <= num_decodes:
        raise BenchmarkError(f"a budget of {budget} tokens leaves none for a prompt beside {num_decodes} decodes")
    num_steps = NUM_WARMUP_STEPS + num_usual_steps + -(-prompt_len // (budget - num_decodes)) + 2
    if context_len + num_steps > engine.limits.max_model_len:
        raise BenchmarkError(
            f"with a budget of {budget} tokens a prompt of {prompt_len} takes {num_steps} steps: decodes of context "
            f"{context_len} would end before, at max_model_len {engine.limits.max_model_len}"
        )
    contexts = random_prompts(num_decodes, context_len, engine.info.vocab_size, seed + 3)
    [prompt] = random_prompts(1, prompt_len, engine.info.vocab_size, seed + 4)
    styles: dict[str, Mapping[str, Any]] = {
        "stall-free": {"batching": "stall-free", "max_num_batched_tokens": budget},
        "prefill-first": {"batching": "prefill-first"},
    }
    results = {
        name: _gaps(like(engine, enable_prefix_caching=False, **settings), contexts, prompt, num_usual_steps)
        for name, settings in styles.items()
    }
    report = {
        "p99_ratio": results["stall-free"]["p99_ratio"],
        "budget": budget,
        "num_decodes": num_decodes,
        "context_len": context_len,
        "prompt_len": prompt_len,
        "results": results,
        "environment": describe_engine(engine.info),
    }
    for result in results.values():
        check_finite(result)
    if measured is not None:
        report["budget_measurement"] = measured
    return report


def _gaps(engine: Engine, contexts: list[list[int]], prompt: list[int], num_usual_steps: int) -> dict[str, Any]:
    """Milliseconds; a step's time is the gap of every decode in it, and of those that had to sit it out."""
    limits = engine.limits
    decode_len = limits.max_model_len - len(contexts[0])
    stepper = Stepper(engine)
    ids = [stepper.add(context, decode_len) for context in contexts]
    stepper.first_token(ids[-1])
    for _ in range(NUM_WARMUP_STEPS):
        stepper.step()
    usual = [stepper.step()[0] for _ in range(num_usual_steps)]
    request_id = stepper.add(prompt, 1)
    gaps = []
    waited_s, has_begun = 0.0, False
    while not has_begun or waited_s or request_id in engine.requests:
        seconds, outputs = stepper.step()
        has_begun = True
        waited_s += seconds
        if any(output.request_id == ids[0] for output in outputs):
            gaps.append(waited_s)
            waited_s = 0.0
        if ids[0] not in engine.requests:
            raise BenchmarkError(f"the decodes ended before the prompt of {len(prompt)} tokens was computed")
    engine.cancel_all()
    quantiles = percentiles_of([1e3 * gap for gap in gaps], (50, 99))
    usual_ms = 1e3 * statistics.median(usual)
    return {
        "usual_tpot_ms": usual_ms,
        "num_gaps": len(gaps),
        "p50_gap_ms": quantiles["50"],
        "p99_gap_ms": quantiles["99"],
        "max_gap_ms": 1e3 * max(gaps),
        "p99_ratio": quantiles["99"] / usual_ms,
        "max_ratio": 1e3 * max(gaps) / usual_ms,
        "ttft_s": sum(gaps),
    }
