"""`bench speculation`: what proposals are worth, by how often they are right and how many sequences decode.

Others may use the machine. So the engines take turns in short stretches, and what is reported are medians of ratios,
each between stretches of the same turn.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from runtime.bench.environment import describe_engine
from runtime.bench.load.prompts import random_prompts
from runtime.bench.metrics import BenchmarkError, check_finite
from runtime.bench.scheduling.engines import like

if TYPE_CHECKING:
    from runtime.engine.engine import Engine
    from runtime.engine.scheduling.sequence import Sequence as Choice
    from runtime.engine.speculation.drafter import Ids

FIXED = (1, 3, 7)
"""Proposals a sequence and step that the engine's own choice is held against."""

PROMPT_LEN = 16


class Scripted:
    """Knows the answers, and is wrong as often as it is told to: each proposal is right with probability ``rate``."""

    name = "scripted"

    def __init__(self, answers: dict[str, list[int]], rate: float, vocab_size: int) -> None:
        self.answers, self._rate, self._vocab_size = answers, rate, vocab_size
        self._rng = random.Random(0)

    def propose(self, sequence: Choice, most: int) -> tuple[Ids, int]:
        """``most`` tokens; behind the first wrong one nothing matters."""
        known = self.answers[sequence.request.request_id][sequence.num_output_tokens :][:most]
        drafts = np.array(known, np.int32)
        for place in range(len(drafts)):
            if self._rng.random() >= self._rate:
                drafts[place] = (drafts[place] + 1) % self._vocab_size
                break
        return drafts, 0

    def end(self, sequence: Choice) -> None:
        """Nothing is kept."""


def bench_speculation(
    engine: Engine,
    *,
    batches: Sequence[int],
    rates: Sequence[float],
    output_len: int,
    num_rounds: int,
    seed: int = 0,
) -> dict[str, Any]:
    """Tokens per second of decodes without proposals, with as many as the engine chooses, and with fixed numbers, in
    turns. ``rows`` has one for each number of sequences and each rate. Medians of the rounds' ratios: `speedup`, the
    engine's choice against none; `of_best_fixed`, against the best fixed number, none included; `of_curve`, against
    what the best number would give by the times of its steps alone.

    On a cpu, and with `exact`, all have to give the same tokens. Raises `BenchmarkError`.
    """
    from runtime.engine.speculation.speculator import Speculator

    limits, vocab_size = engine.limits, engine.info.vocab_size
    if not batches or min(batches) < 1 or max(batches) > limits.max_num_seqs:
        raise BenchmarkError(f"--batches {list(batches)} must be 1 to {limits.max_num_seqs} sequences (max_num_seqs)")
    if not rates or not all(0.0 <= rate <= 1.0 for rate in rates):
        raise BenchmarkError(f"--rates {list(rates)} must be between 0 and 1")
    if num_rounds < 1:
        raise BenchmarkError(f"--num-rounds {num_rounds} must be at least 1")
    if not 2 <= output_len <= limits.max_model_len - PROMPT_LEN:
        raise BenchmarkError(f"--output-len {output_len} must be 2 to {limits.max_model_len - PROMPT_LEN} tokens")
    is_exact = limits.exact or engine.info.device == "cpu"
    rows = []
    for batch in batches:
        prompts = random_prompts(batch, PROMPT_LEN, vocab_size, seed)
        modes = ["off", "chosen", *(f"{most} fixed" for most in FIXED)]
        engines = {mode: like(engine, enable_prefix_caching=False) for mode in modes}
        answers, _ = _run(engines["off"], prompts, output_len)
        for rate in rates:
            for mode, each in engines.items():
                if mode != "off":
                    most = max(FIXED) if mode == "chosen" else int(mode.split()[0])
                    each.use(Speculator(Scripted(answers, rate, vocab_size), most, vocab_size, fixed=mode != "chosen"))
            speeds: dict[str, list[float]] = {mode: [] for mode in modes}
            for number in range(num_rounds + 1):  # the first warms up
                for mode in modes if number % 2 else reversed(modes):
                    tokens, speed = _run(engines[mode], prompts, output_len)
                    if is_exact and tokens != answers:
                        raise BenchmarkError(f"{mode}, {batch} sequences: the tokens are not those without proposals")
                    if number:
                        speeds[mode].append(speed)
            medians = {mode: statistics.median(each) for mode, each in speeds.items()}
            ratios = {mode: _median_ratio(speeds[mode], speeds["off"]) for mode in modes}
            best = max((mode for mode in modes if mode != "chosen"), key=lambda mode: ratios[mode])
            allowed = {mode: _allowed(engines[mode], batch, rate) / medians["off"] for mode in modes[2:]}
            counters = engines["chosen"].stats()
            rows.append(
                {
                    "num_sequences": batch, "rate": rate, "tokens_per_s": medians,
                    "speedups": ratios, "speedup": ratios["chosen"],
                    "of_best_fixed": _median_ratio(speeds["chosen"], speeds[best]),
                    "of_curve": ratios["chosen"] / max(1.0, *allowed.values()),
                    "num_draft_tokens": counters.num_draft_tokens, "num_accepted_tokens": counters.num_accepted_tokens,
                }
            )  # fmt: skip
    report = {
        "rows": rows,
        "output_len": output_len,
        "num_rounds": num_rounds,
        "environment": describe_engine(engine.info),
    }
    check_finite(report)
    return report


def _median_ratio(speeds: list[float], others: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(speeds, others, strict=True))


def _allowed(engine: Engine, batch: int, rate: float) -> float:
    """Tokens per second that the engine's fixed number of proposals gives, by the times of its steps."""
    assert engine.speculator is not None
    most = len(engine.speculator.counters.accepted_by_position)
    seconds = engine.speculator.times.tried(batch * (1 + most))
    return batch * sum(rate**place for place in range(most + 1)) / seconds if seconds else 0.0


def _run(engine: Engine, prompts: list[list[int]], output_len: int) -> tuple[dict[str, list[int]], float]:
    """The answers, and tokens per second from when all have their first token."""
    from runtime.engine.messages import EngineRequest
    from runtime.engine.sampling_params import SamplingParams

    params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
    answers: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        answers[str(number)] = []
        engine.add(EngineRequest(request_id=str(number), prompt_token_ids=prompt, params=params))
    begun, num_before = 0.0, 0
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise BenchmarkError(output.error)
            answers[output.request_id] += output.new_token_ids
        if not begun and all(answers.values()):
            begun, num_before = time.perf_counter(), sum(map(len, answers.values()))
    return answers, (sum(map(len, answers.values())) - num_before) / (time.perf_counter() - begun)
