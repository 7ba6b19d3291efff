"""The prefix cache of a model with states beside one of attention alone, of as many bytes.

The engine's own scheduler and block pools serve a trace's prompts, each with one token of answer, as fast as they come:
there is no clock, and what counts is which prompt tokens are found. A budget is a share of the bytes of all different
prompt pages; a hybrid's is divided into pages of tokens and pages of states, those of running sequences included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.bench.load.traces import Trace, numbered
from runtime.bench.metrics import BenchmarkError
from runtime.engine.limits import EngineLimits
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.scheduling.block_pool import pool_of
from runtime.engine.scheduling.scheduler import Scheduler
from runtime.engine.scheduling.sequence import Request
from runtime.engine.scheduling.sequence import Sequence as Choice
from runtime.kv.kinds import FULL, AnyKind, State


@dataclass(frozen=True, slots=True)
class Hybrid:
    """The bytes that matter: of one token's keys and values in bfloat16, and of one sequence's state in float32."""

    token_bytes: int
    state_bytes: int


def _qwen3_5(num_layers: int, kv_heads: int, value_heads: int) -> Hybrid:
    """Three of four layers have a state of 128 x 128 a value head, and a convolution of four taps in bfloat16."""
    with_state = num_layers * 3 // 4
    convolution = 3 * (2 * 16 + value_heads) * 128 * 2
    return Hybrid(
        (num_layers - with_state) * 2 * kv_heads * 256 * 2, with_state * (value_heads * 128 * 128 * 4 + convolution)
    )


HYBRIDS = {
    "qwen3.5-9b": _qwen3_5(32, 4, 32),
    "qwen3.5-27b": _qwen3_5(64, 4, 48),
    "qwen3.5-35b-a3b": _qwen3_5(40, 2, 32),
}

_TOKEN = -(1 << 31)  # the sampled token of every request: no prompt has it
_PARAMS = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)


def bench_state_cache(
    trace: Trace,
    models: Sequence[str] = tuple(HYBRIDS),
    budgets: Sequence[float] = (0.05, 0.2, 1.0),
    *,
    state_share: float = 0.2,
    max_num_seqs: int = 16,
    report_progress: Callable[[str], None] = print,
) -> dict[str, Any]:
    """For each budget the hits of attention alone, and for each hybrid its own, why it missed, and their ratio. Raises
    BenchmarkError for an unknown hybrid, a share or budget that cannot be, a budget that no sequence fits, or a trace
    without hashes."""
    if unknown := [name for name in models if name not in HYBRIDS]:
        raise BenchmarkError(f"models: {unknown[0]!r}, must be some of {', '.join(HYBRIDS)}")
    if wrong := [budget for budget in budgets if not 0 < budget < math.inf]:
        raise BenchmarkError(f"budgets: {wrong[0]}, must be above 0")
    if not 0 < state_share < 1:
        raise BenchmarkError(f"state_share is {state_share}, must be above 0 and below 1")
    size = trace.hash_block_len
    pages = {each for request in trace.requests for each in request.hash_ids[: request.input_len // size]}
    if not pages:
        raise BenchmarkError(f"trace {trace.name} has no hashes of prompts, such as Mooncake's have")
    rows: list[dict[str, Any]] = []
    for budget in budgets:
        num_pages = round(budget * len(pages))
        plain = _hits(trace, (FULL,), (num_pages,), max_num_seqs)
        rows.append({"budget": budget, "model": "attention alone", "num_pages": num_pages, **plain})
        report_progress(str(rows[-1]))
        for name in models:
            hybrid = HYBRIDS[name]
            pages_a_state = hybrid.state_bytes / (hybrid.token_bytes * size)
            num_states = int(state_share * num_pages / pages_a_state)
            sizes = (num_pages - round(num_states * pages_a_state), num_states)
            found = _hits(trace, (FULL, State()), sizes, max_num_seqs)
            rows.append(
                {
                    "budget": budget, "model": name, "num_pages": sizes[0], "num_states": num_states,
                    "state_bytes_share": num_states * pages_a_state / num_pages, **found,
                    "hits_of_attention": found["hit_tokens"] / max(1, plain["hit_tokens"]),
                }
            )  # fmt: skip
            report_progress(str(rows[-1]))
    return {"trace": trace.name, "state_share": state_share, "max_num_seqs": max_num_seqs, "results": rows}


def _hits(trace: Trace, kinds: tuple[AnyKind, ...], sizes: tuple[int, ...], max_num_seqs: int) -> dict[str, Any]:
    size = trace.hash_block_len
    if sizes[0] < -(-(trace.longest + 1) // size) or min(sizes) < 2:
        states = "".join(f" and {count} states" for count in sizes[1:])
        raise BenchmarkError(
            f"budgets: {sizes[0]} pages of {size} tokens{states} are too few for a request of {trace.longest} tokens "
            "and 2 states: raise them"
        )
    limits = EngineLimits(
        max_model_len=trace.longest + size, max_num_seqs=max_num_seqs, max_num_batched_tokens=16 * size,
        block_size=size, num_blocks=sum(sizes), max_waiting=max_num_seqs, cache_kinds=kinds,
        cache_pools=tuple(range(len(kinds))), pool_sizes=sizes,
    )  # fmt: skip
    pool = pool_of(limits)
    scheduler = Scheduler(limits, pool)
    waiting = iter(range(len(trace.requests)))
    while True:
        while len(scheduler.waiting) < 2 and (index := next(waiting, None)) is not None:
            request = Request(str(index), trace.prompt_ids(index, numbered), _PARAMS, max_tokens=1, arrival_s=0.0)
            request.number = index
            choice = Choice(request, 0)
            request.sequences = [choice]
            scheduler.add(choice)
        if not scheduler.has_work:
            break
        step = scheduler.schedule()
        scheduler.commit(step)
        for chunk in step.chunks:
            if chunk.is_last:
                chunk.sequence.append(_TOKEN)
                scheduler.finish(chunk.sequence)
    counters = pool.counters
    return {
        "queried_tokens": counters.queried_tokens, "hit_tokens": counters.hit_tokens,
        "missed_tokens": dict(counters.missed_tokens), "num_preemptions": scheduler.num_preemptions,
    }  # fmt: skip
