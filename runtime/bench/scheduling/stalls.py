"""`bench stalls`: stalls of decodes while a long prompt is computed beside them.

Decodes run alone until their usual time per token is known; then a long prompt arrives, and every gap between two of
their tokens counts until its first token. Measured twice: stall-free with a budget (measured unless given), and
prefill-first, which computes the prompt whole.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from runtime.bench.environment import finished
from runtime.bench.load.samples import random_prompts
from runtime.bench.metrics import BenchmarkError, percentiles_of
from runtime.bench.options import StallsOptions
from runtime.bench.scheduling.engines import Stepper, like
from runtime.engine.engine import Engine

FINEST = 8  # the budget is found to an eighth of itself
NUM_WARMUP_STEPS = 3


def bench_stalls(engine: Engine, options: StallsOptions, seed: int = 0) -> dict[str, Any]:
    """Usual TPOT, and the median, 99th percentile and largest gap while the prompt is computed, for both styles.

    Without a `budget`, `max_num_batched_tokens` of the stall-free style, it is measured for `tpot_ratio` times a bare
    decode step, which leaves room for the noise of single steps below the target. The metric is `p99_ratio`, the 99th
    percentile over the usual TPOT of the same run.
    """
    num_decodes, context_len, prompt_len = options.num_decodes, options.context_len, options.prompt_len
    if min(num_decodes, context_len, prompt_len, options.num_usual_steps) < 1:
        raise BenchmarkError("decodes, contexts, the prompt and the usual steps must each be at least 1")
    measured = measure_budget(engine, options, seed) if options.budget is None else None
    budget = options.budget if measured is None else int(measured["max_num_batched_tokens"])
    assert budget is not None
    if budget <= num_decodes:
        raise BenchmarkError(f"a budget of {budget} tokens leaves none for a prompt beside {num_decodes} decodes")
    num_steps = NUM_WARMUP_STEPS + options.num_usual_steps + -(-prompt_len // (budget - num_decodes)) + 2
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
        name: _gaps(like(engine, enable_prefix_caching=False, **settings), contexts, prompt, options.num_usual_steps)
        for name, settings in styles.items()
    }
    report = {
        "p99_ratio": results["stall-free"]["p99_ratio"],
        "budget": budget,
        "num_decodes": num_decodes,
        "context_len": context_len,
        "prompt_len": prompt_len,
        "results": results,
    }
    if measured is not None:
        report["budget_measurement"] = measured
    return finished(report, engine.info)


def _gaps(engine: Engine, contexts: list[list[int]], prompt: list[int], num_usual_steps: int) -> dict[str, Any]:
    """Gaps in milliseconds; a step's time is the gap of every decode in it, and of those left out of it."""
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


def measure_budget(engine: Engine, options: StallsOptions, seed: int = 0) -> dict[str, Any]:
    """The largest `max_num_batched_tokens` whose steps take at most `tpot_ratio` times a step of the decodes alone.

    Decodes run at a given context; beside them come prompt chunks of growing size, and each step is timed. A chunk is
    taken from the end of a long prompt, where its attention is most expensive: the prompt's beginning is in the prefix
    cache, so that a single step computes just the chunk. After the first size that is too slow, bisection between it
    and the last good one follows.

    `sizes[i]` has `chunk`, `step_ms` (median over the rounds) and `steps_ms`; `max_num_batched_tokens` is
    `num_decodes` and the largest chunk whose median keeps the target. Raises `BenchmarkError` if the bare decode step,
    or one with the smallest chunk, is slower than that.
    """
    num_decodes, context_len, prompt_len = options.num_decodes, options.context_len, options.prompt_len
    if min(num_decodes, context_len, options.num_rounds) < 1:
        raise BenchmarkError("decodes, their context and rounds must each be at least 1")
    limits = engine.limits
    largest = min(limits.max_num_batched_tokens - num_decodes, prompt_len)
    if largest < 1 or prompt_len >= limits.max_model_len or num_decodes >= limits.max_num_seqs:
        raise BenchmarkError(
            f"{num_decodes} decodes beside a prompt of {prompt_len} tokens do not fit max_num_seqs="
            f"{limits.max_num_seqs}, max_num_batched_tokens={limits.max_num_batched_tokens}, "
            f"max_model_len={limits.max_model_len}"
        )
    measure = _Measurement(engine, num_decodes, context_len, prompt_len, seed)
    bare = [measure.bare_step() for _ in range(max(options.num_rounds, 5))]
    bare_s = statistics.median(bare)
    target_s = options.tpot_ratio * bare_s
    if not bare_s <= target_s:
        raise BenchmarkError(
            f"a TPOT of {1e3 * target_s:.3f} ms cannot be kept: {num_decodes} decodes at context {context_len} "
            f"alone take {1e3 * bare_s:.3f} ms"
        )
    sizes: dict[int, list[float]] = {}

    def keeps(chunk: int) -> bool:
        sizes[chunk] = [measure.step_beside(chunk) for _ in range(options.num_rounds)]
        return statistics.median(sizes[chunk]) <= target_s

    good, size = 0, 1
    bad: int | None = None
    while bad is None and good < largest:
        size = min(size, largest)
        if keeps(size):
            good, size = size, 2 * size
        else:
            bad = size
    while bad is not None and bad - good > max(1, good // FINEST):
        middle = (good + bad) // 2
        if keeps(middle):
            good = middle
        else:
            bad = middle
    measure.close()
    if good == 0:
        slow = 1e3 * statistics.median(sizes[1])
        raise BenchmarkError(
            f"a TPOT of {1e3 * target_s:.3f} ms leaves no room for a prompt: one of its tokens beside "
            f"{num_decodes} decodes takes {slow:.3f} ms, the decodes alone {1e3 * bare_s:.3f} ms"
        )
    report = {
        "max_num_batched_tokens": num_decodes + good,
        "tpot_target_ms": 1e3 * target_s,
        "bare_decode_ms": 1e3 * bare_s,
        "num_decodes": num_decodes,
        "context_len": context_len,
        "prompt_len": prompt_len,
        "sizes": [
            {
                "chunk": chunk,
                "step_ms": 1e3 * statistics.median(times),
                "steps_ms": [1e3 * seconds for seconds in times],
                "keeps_target": statistics.median(times) <= target_s,
            }
            for chunk, times in sorted(sizes.items())
        ],
    }
    return finished(report, engine.info)


class _Measurement:
    """Running decodes, and a long prompt whose beginning is in the prefix cache."""

    def __init__(self, engine: Engine, num_decodes: int, context_len: int, prompt_len: int, seed: int) -> None:
        vocab_size = engine.info.vocab_size
        self._stepper = Stepper(engine)
        self._block_size = engine.limits.block_size
        [self._prompt] = random_prompts(1, prompt_len, vocab_size, seed)
        self._contexts = random_prompts(num_decodes, context_len, vocab_size, seed + 1)
        self._num_fresh = 0
        self._vocab_size = vocab_size
        self._decode_len = engine.limits.max_model_len - context_len
        self._num_left = 0
        self._stepper.add(self._prompt, 1)
        self._stepper.drain()
        self._start_decodes()

    def bare_step(self) -> float:
        """Seconds of a step of the decodes alone."""
        self._start_decodes()
        return self._step()

    def step_beside(self, chunk: int) -> float:
        """Seconds of a step of the decodes and the last ``chunk`` tokens of a long prompt."""
        self._start_decodes()
        kept = (len(self._prompt) - chunk) // self._block_size * self._block_size
        self._num_fresh += 1
        [fresh] = random_prompts(1, chunk, self._vocab_size, self._num_fresh)
        # No cached block may match, not even the first token.
        fresh[0] = (self._prompt[kept] + 1 + self._num_fresh % (self._vocab_size - 1)) % self._vocab_size
        request_id = self._stepper.add([*self._prompt[:kept], *fresh], 1)
        seconds = self._step()
        [computed] = [c.num_tokens for c in self._last_chunks() if c.request_id == request_id]
        if computed != chunk or request_id in self._stepper.engine.requests:
            raise BenchmarkError(f"a chunk of {chunk} tokens was to be timed, but {computed} were computed")
        return seconds

    def close(self) -> None:
        self._stepper.cancel_all()

    def _step(self) -> float:
        self._num_left -= 1
        return self._stepper.step()[0]

    def _last_chunks(self) -> Any:
        return self._stepper.engine.timeline[-1].chunks

    def _start_decodes(self) -> None:
        """Starts the decodes, or restarts them when they are about to end, and warms up."""
        if self._num_left > 1:
            return
        self._stepper.cancel_all()
        ids = [self._stepper.add(context, self._decode_len) for context in self._contexts]
        self._num_left = self._decode_len - len(self._stepper.first_token(ids[-1])[0])
        for _ in range(NUM_WARMUP_STEPS):
            self._step()
