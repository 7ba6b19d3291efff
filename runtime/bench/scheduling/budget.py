"""`bench budget`: the largest `max_num_batched_tokens` whose steps keep a target of time per output token.

Decodes run at a given context; beside them come prompt chunks of growing size, and each step is timed. A chunk is
taken from the end of a long prompt, where its attention is dearest: the prompt's beginning is in the prefix cache, so
that a single step computes just the chunk. The answer has been measured: after the first size that is too slow, the
sizes between it and the last good one are tried in halves.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from runtime.bench.environment import describe_engine
from runtime.bench.load.prompts import random_prompts
from runtime.bench.metrics import BenchmarkError, check_finite
from runtime.bench.scheduling.engines import Stepper

if TYPE_CHECKING:
    from runtime.engine.engine import Engine

FINEST = 8  # the answer is found to an eighth of itself
NUM_WARMUP_STEPS = 3


def bench_budget(
    engine: Engine,
    *,
    tpot_target_s: float | None = None,
    tpot_ratio: float | None = None,
    num_decodes: int,
    context_len: int,
    prompt_len: int,
    num_rounds: int,
    seed: int = 0,
) -> dict[str, Any]:
    """The budget for a target in seconds, or for `tpot_ratio` times the bare decode step.

    `sizes[i]` has `chunk`, `step_ms` (median over the rounds) and `steps_ms`; `max_num_batched_tokens` is
    `num_decodes` and the largest chunk whose median keeps the target. Raises `BenchmarkError` when the bare decode
    step, or one beside the smallest chunk, is slower than that.
    """
    if (tpot_target_s is None) == (tpot_ratio is None):
        raise BenchmarkError("name either a TPOT target or its ratio to a bare decode step")
    if min(num_decodes, context_len, num_rounds) < 1:
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
    bare = [measure.bare_step() for _ in range(max(num_rounds, 5))]
    bare_s = statistics.median(bare)
    target_s = tpot_target_s if tpot_target_s is not None else (tpot_ratio or 0.0) * bare_s
    if not bare_s <= target_s:
        raise BenchmarkError(
            f"a TPOT of {1e3 * target_s:.3f} ms cannot be kept: {num_decodes} decodes at context {context_len} "
            f"alone take {1e3 * bare_s:.3f} ms"
        )
    sizes: dict[int, list[float]] = {}

    def keeps(chunk: int) -> bool:
        sizes[chunk] = [measure.step_beside(chunk) for _ in range(num_rounds)]
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
        "environment": describe_engine(engine.info),
    }
    check_finite(report)
    return report


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
        # No cached block may match even the first token.
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
        """Start the decodes, or start them anew when they are about to end, and warm up."""
        if self._num_left > 1:
            return
        self._stepper.cancel_all()
        ids = [self._stepper.add(context, self._decode_len) for context in self._contexts]
        self._num_left = self._decode_len - len(self._stepper.first_token(ids[-1])[0])
        for _ in range(NUM_WARMUP_STEPS):
            self._step()
