"""`bench speculation`: the speedup of speculation, by acceptance rate and number of decoding sequences.

Other load disturbs, and two engines differ by some percent by memory placement. So one engine does it all, with and
without proposals in turns and in random order, and medians of ratios are reported, each between stretches of the same
turn.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import numpy as np

from runtime.bench.environment import finished
from runtime.bench.load.samples import random_prompts
from runtime.bench.metrics import BenchmarkError
from runtime.bench.options import SpeculationOptions, numbers
from runtime.bench.scheduling.engines import like
from runtime.engine.config import integers
from runtime.engine.engine import Engine
from runtime.engine.messages import EngineRequest
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.scheduling.sequence import Sequence as Choice
from runtime.engine.speculation.drafter import Ids
from runtime.engine.speculation.speculator import Speculator

CURVE = (1, 2, 3, 5, 7)
"""Proposals a sequence whose steps are timed."""

CURVE_ROUNDS, COLD_STEPS = 5, 4
"""Rounds of timed answers, and the steps after a prompt that are not timed: short steps take up to twice as long there
as later."""

AGAIN = "off again"
"""Without proposals a second time: by how much the machine alone makes ratios differ from 1."""

PROMPT_LEN = 16


class Scripted:
    """A drafter that knows the answers, with a scripted acceptance rate: at each place of an answer it is right with
    probability ``rate``, deterministically per round and place."""

    name = "scripted"

    def __init__(self, answers: dict[str, list[int]], rate: float, vocab_size: int) -> None:
        self.answers, self._rate, self._vocab_size = answers, rate, vocab_size
        self.begin(0)

    def begin(self, number: int) -> None:
        """A round of this number."""
        self._is_wrong = {}
        for request_id, answer in self.answers.items():
            rng = random.Random(f"{number} {request_id}")
            self._is_wrong[request_id] = np.array([rng.random() >= self._rate for _ in answer], np.bool_)

    def propose(self, sequence: Choice, most: int) -> tuple[Ids, int]:
        """``most`` tokens; tokens after the first wrong one do not matter."""
        request_id, first = sequence.request.request_id, sequence.num_output_tokens
        drafts = np.array(self.answers[request_id][first : first + most], np.int32)
        places = self._is_wrong[request_id][first : first + most].nonzero()[0]
        if places.size:
            drafts[places[0]] = (drafts[places[0]] + 1) % self._vocab_size
        return drafts, 0

    def end(self, sequence: Choice) -> None:
        """Does nothing: there is no state."""


def bench_speculation(engine: Engine, options: SpeculationOptions, seed: int = 0) -> dict[str, Any]:
    """Tokens per second of decodes without proposals, with the engine's draft length, and with fixed ones, in turns,
    each while all sequences decode. ``rows`` has one for each number of sequences and each rate. Medians of the rounds'
    ratios: `speedup`, the engine's choice against none; `of_best_fixed`, against the best of the ``fixed`` numbers,
        none included; `of_curve`, against the best of ``CURVE``, or none, predicted by step times alone, measured just
        before (`step_times`, by proposals a sequence, as multiples of `plain_step_s`);
    `off_of_itself`, none against none. `from_start` is the choice's speed over all rounds, including warm-up rounds,
    where it has learnt nothing at first, against none in the others.

    On a cpu, and with `exact`, all must give the same tokens. Raises `BenchmarkError`.
    """
    limits, vocab_size = engine.limits, engine.info.vocab_size
    batches, rates = integers("batches", options.batches), numbers("rates", options.rates)
    fixed = integers("fixed", options.fixed) if options.fixed else ()
    output_len, num_rounds, num_warm_rounds = options.output_len, options.num_rounds, options.num_warm_rounds
    if not batches or min(batches) < 1 or max(batches) > limits.max_num_seqs:
        raise BenchmarkError(f"--batches {list(batches)} must be 1 to {limits.max_num_seqs} sequences (max_num_seqs)")
    if not rates or not all(0.0 <= rate <= 1.0 for rate in rates):
        raise BenchmarkError(f"--rates {list(rates)} must be between 0 and 1")
    if num_rounds < 1:
        raise BenchmarkError(f"--num-rounds {num_rounds} must be at least 1")
    if num_warm_rounds < 1:
        raise BenchmarkError(f"--num-warm-rounds {num_warm_rounds} must be at least 1")
    if not all(1 <= most <= max(CURVE) for most in fixed):
        raise BenchmarkError(f"--fixed {list(fixed)} must be 1 to {max(CURVE)} proposals")
    if not 2 <= output_len <= limits.max_model_len - PROMPT_LEN:
        raise BenchmarkError(f"--output-len {output_len} must be 2 to {limits.max_model_len - PROMPT_LEN} tokens")
    is_exact = limits.exact or engine.info.device == "cpu"
    rows, rng = [], random.Random(seed)
    timed = like(engine, enable_prefix_caching=False)
    for batch in batches:
        prompts = random_prompts(batch, PROMPT_LEN, vocab_size, seed)
        timed.use(None)
        answers, _, _ = _run(timed, prompts, output_len)
        for rate in rates:
            step_times, plain_s = _step_times(timed, prompts, answers, output_len, rate)
            modes: dict[str, Speculator | None] = {"off": None, AGAIN: None}
            drafter = Scripted(answers, rate, vocab_size)
            modes["chosen"] = chosen = Speculator(drafter, max(CURVE), vocab_size)
            for most in fixed:
                modes[f"{most} fixed"] = Speculator(drafter, most, vocab_size, fixed=True)
            speeds: dict[str, list[float]] = {mode: [] for mode in modes}
            spent_tokens, spent_s = 0, 0.0
            for number in range(num_warm_rounds + num_rounds):
                drafter.begin(number)
                learns_alone = number < num_warm_rounds - 1  # others have only shapes to learn
                for mode in ("chosen",) if learns_alone else rng.sample(list(modes), len(modes)):
                    timed.use(modes[mode])
                    said, num_tokens, seconds = _run(timed, prompts, output_len)
                    if is_exact and said != answers:
                        raise BenchmarkError(f"{mode}, {batch} sequences: the tokens are not those without proposals")
                    if mode == "chosen":
                        spent_tokens, spent_s = spent_tokens + num_tokens, spent_s + seconds
                    if number >= num_warm_rounds:
                        speeds[mode].append(num_tokens / seconds)
            medians = {mode: statistics.median(each) for mode, each in speeds.items()}
            ratios = {mode: _median_ratio(speeds[mode], speeds["off"]) for mode in modes}
            best = max((mode for mode in modes if mode not in ("chosen", AGAIN)), key=lambda mode: ratios[mode])
            allowed = [sum(rate**at for at in range(most + 1)) / each for most, each in step_times.items()]
            rows.append(
                {
                    "num_sequences": batch, "rate": rate, "tokens_per_s": medians,
                    "speedups": ratios, "speedup": ratios["chosen"], "off_of_itself": ratios[AGAIN],
                    "from_start": spent_tokens / spent_s / medians["off"],
                    "of_best_fixed": _median_ratio(speeds["chosen"], speeds[best]),
                    "allowed": max(allowed), "of_curve": ratios["chosen"] / max(allowed),
                    "plain_step_s": plain_s, "step_times": {str(most): each for most, each in step_times.items()},
                    "num_draft_tokens": chosen.counters.num_draft_tokens,
                    "num_accepted_tokens": chosen.counters.num_accepted_tokens,
                }
            )  # fmt: skip
    timed.use(None)
    report = {
        "rows": rows,
        "output_len": output_len,
        "num_rounds": num_rounds,
        "num_warm_rounds": num_warm_rounds,
    }
    return finished(report, engine.info)


def _median_ratio(speeds: list[float], others: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(speeds, others, strict=True))


def _step_times(
    engine: Engine, prompts: list[list[int]], answers: dict[str, list[int]], output_len: int, rate: float
) -> tuple[dict[int, float], float]:
    """The relative time of a step with proposals, by proposals per sequence, from the previous step's end to its own;
    and seconds of a step without. Medians of answers in turns, each a median over the answer's steps, except its first
    `COLD_STEPS` and its end, where fewer proposals are possible. The first answers of each number record their shapes,
    and are not timed. Numbers for which answers are too short are left out."""
    found: dict[int, list[float]] = {}
    drafter = Scripted(answers, rate, engine.info.vocab_size)
    for is_timed in (False, *[True] * CURVE_ROUNDS):
        for most in (0, *CURVE):
            engine.use(Speculator(drafter, most, engine.info.vocab_size, fixed=True) if most else None)
            times: list[float] = []
            _run(engine, prompts, output_len, times)
            # Every sequence has at least `most` tokens left before this step, for any acceptance.
            num_whole = (output_len - 1) // (1 + most)
            whole = times[min(COLD_STEPS, num_whole // 2) : num_whole]
            if is_timed and whole:
                found.setdefault(most, []).append(statistics.median(whole))
    plain_s = found.pop(0)
    ratios = {most: _median_ratio(times_s, plain_s) for most, times_s in found.items()}
    return {0: 1.0, **ratios}, statistics.median(plain_s)


def _run(
    engine: Engine, prompts: list[list[int]], output_len: int, times: list[float] | None = None
) -> tuple[dict[str, list[int]], int, float]:
    """The answers, and the tokens and seconds from when all had their first token to when one had its last: with
    proposals some end earlier, and then fewer decode. ``times`` gets the seconds of each step from the same start to
    the end."""
    params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
    answers: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        answers[str(number)] = []
        engine.add(EngineRequest(request_id=str(number), prompt_token_ids=prompt, params=params))
    begun, last, num_before = 0.0, 0.0, 0
    ended, num_tokens = 0.0, 0
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise BenchmarkError(output.error)
            answers[output.request_id] += output.new_token_ids
        if times is not None:
            now = time.perf_counter()
            if begun:
                times.append(now - last)
            last = now
        if not begun and all(answers.values()):
            begun, num_before = time.perf_counter(), sum(map(len, answers.values()))
        if not ended and any(len(answer) == output_len for answer in answers.values()):
            ended, num_tokens = time.perf_counter(), sum(map(len, answers.values()))
    return answers, num_tokens - num_before, ended - begun
