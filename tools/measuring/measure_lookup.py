"""Measures speculation's CPU time on the engine's thread, without the model, per sequence and step.

    python -m tools.measuring.measure_lookup [--tokens 32768] [--steps 400] [--sequences 1 8]

*drafter*: one proposal, of a sequence that has grown by one token: index update, search, and proposal. *engine*: all
    that speculation adds to a step with every proposal verified: `Speculator.plan` and `DraftPolicy.observe`, divided
    by the sequences of a step. Sequences start with the given number of tokens, and the store of the tenant's answers
    is full. *cold*: 64 MB are read before each step, like a model's weights, to evict texts and indices from the
    caches.

Texts: *words* are drawn from 100,000 ids with a language's distribution (Zipf): matches are short, so `suffix` also
    searches the answers; *repeated* is a stretch of 500 of them over and over, which is found at once; *one token* has
the longest chain of places.

*off*: the engine's checks in a step without a speculator.

Medians over the steps, in microseconds, less the clock's own time.
"""

from __future__ import annotations

import argparse
import time
import timeit
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from runtime.engine.config import EngineConfig
from runtime.engine.engine import Engine
from runtime.engine.make_engine import engine_of
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.scheduling.sequence import Request, Sequence
from runtime.engine.scheduling.step import Step
from runtime.engine.speculation.evidence import Ended
from runtime.engine.speculation.ngram import MOST_KEPT_TOKENS, NgramDrafter, SuffixDrafter
from runtime.engine.speculation.speculator import Speculator

VOCAB_SIZE, NUM_WORDS, STRETCH = 151_936, 100_000, 500
MOST = 7
"""Proposals for a sequence in a step."""

WEIGHTS_BYTES = 64 << 20

Ids = NDArray[np.int32]


def words(rng: np.random.Generator, count: int) -> Ids:
    """Ids whose frequency falls with their rank."""
    ranks = np.exp(rng.random(count) * np.log(NUM_WORDS)).astype(np.int64)
    ids: Ids = (ranks * 7919 % VOCAB_SIZE).astype(np.int32)
    return ids


TEXTS: dict[str, Callable[[np.random.Generator, int], Ids]] = {
    "words": words,
    "repeated": lambda rng, count: np.resize(words(rng, STRETCH), count),
    "one token": lambda _, count: np.full(count, 11, np.int32),
}


def sequence_of(ids: Ids) -> Sequence:
    """A sequence that has computed all but the last of these tokens; all but that one are its prompt."""
    most = len(ids) + 100_000
    found = Sequence(Request("x", ids[:-1], SamplingParams(max_tokens=most), max_tokens=most, arrival_s=0.0), 0)
    found.num_pending += 1
    found.append(int(ids[-1]))
    found.num_computed = len(ids) - 1
    return found


def grow(sequence: Sequence, token_id: int) -> None:
    sequence.num_pending += 1
    sequence.append(token_id)
    sequence.num_computed += 1


def median_us(nanoseconds: list[int]) -> float:
    """The median, less the time of two readings of the clock."""
    clock = []
    for _ in range(1001):
        begun = time.thread_time_ns()
        clock.append(time.thread_time_ns() - begun)
    return (float(np.median(nanoseconds)) - float(np.median(clock))) / 1000


def measure(
    drafter: NgramDrafter, ids: Ids, num_tokens: int, num_sequences: int, *, is_cold: bool
) -> tuple[float, float]:
    """Microseconds per sequence and step: of the drafter alone, and of the whole engine."""
    rng = np.random.default_rng(1)
    weights = np.ones(WEIGHTS_BYTES // 8) if is_cold else np.ones(1)
    if isinstance(drafter, SuffixDrafter):
        answer = sequence_of(words(rng, 2))
        for token_id in words(rng, MOST_KEPT_TOKENS):
            grow(answer, int(token_id))
        drafter.end(answer)
    num_steps = len(ids) - num_tokens
    alone, engine = [], []
    running = [sequence_of(ids[:num_tokens]) for _ in range(num_sequences)]
    speculator = Speculator(drafter, MOST, VOCAB_SIZE, fixed=True)
    for step in range(num_steps):
        for sequence in running:
            grow(sequence, int(ids[num_tokens + step]))
        weights.sum()
        begun = time.thread_time_ns()
        drafts = speculator.plan(running)
        drafted = {sequence: len(found) for sequence, found in drafts.items()}
        speculator.policy.observe(Ended(step, drafted, dict.fromkeys(running, 1), is_pure=True))
        engine.append(time.thread_time_ns() - begun)
    for sequence in running:
        speculator.end(sequence)
    sequence = sequence_of(ids[:num_tokens])
    for step in range(num_steps):
        grow(sequence, int(ids[num_tokens + step]))
        weights.sum()
        begun = time.thread_time_ns()
        drafter.propose(sequence, MOST)
        alone.append(time.thread_time_ns() - begun)
    return median_us(alone[1:]), median_us(engine[1:]) / num_sequences


def asked_when_off(engine: Engine, step: Step) -> None:
    """The checks in a step: `OpenSteps.plan`, `start` and `finish`, `Engine.step`, `Scheduler.schedule`,
    and `OpenRequests` at a sequence's end."""
    steps = engine.steps
    if steps.speculator is not None or engine.scheduler.drafts or step.num_drafts:
        raise AssertionError("speculation is off")
    drafts: dict[Sequence, list[int]] = {}
    speculator = steps.speculator
    if (steps.speculator is not None and drafts) or speculator is not None or speculator is not None:
        raise AssertionError("speculation is off")
    speculator = engine.speculator
    if (speculator is not None and speculator.wants_tokens()) or engine.opened.on_end is not None:
        raise AssertionError("speculation is off")


def off_us() -> float:
    engine = engine_of(None, EngineConfig(device="cpu", speculation="off", max_model_len=64))
    step = Step(0, 1)
    times = timeit.repeat(lambda: asked_when_off(engine, step), number=10_000, timer=time.thread_time)
    none = timeit.repeat(lambda: None, number=10_000, timer=time.thread_time)
    engine.close()
    return (min(times) - min(none)) * 1e6 / 10_000


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    print("| drafter | text | caches | sequences | drafter, us | engine, us |\n|---|---|---|--:|--:|--:|")
    for kind in (NgramDrafter, SuffixDrafter):
        for name, text in TEXTS.items():
            ids = text(np.random.default_rng(0), options.tokens + options.steps)
            for is_cold in (False, True):
                for num in options.sequences:
                    alone, engine = measure(kind(), ids, options.tokens, num, is_cold=is_cold)
                    caches = "cold" if is_cold else "warm"
                    print(f"| {kind.name} | {name} | {caches} | {num} | {alone:.1f} | {engine:.1f} |", flush=True)
    print(f"\noff: {off_us():.2f} us a step")


if __name__ == "__main__":
    main()
