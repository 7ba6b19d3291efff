"""How many proposals are tried, in virtual time: what it gains, and what it may cost."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.speculation.drafter import Ids
from runtime.engine.speculation.evidence import Ended
from runtime.engine.speculation.speculator import Speculator
from tests.runtime.engine.fakes import VOCAB_SIZE
from tests.runtime.engine.speculation.test_ngram import grow, sequence
from tests.runtime.engine.speculation.test_speculator import ask

LENGTH = 128
"""Tokens of each answer; another sequence follows."""

CURVES: dict[str, Callable[[int, int], float]] = {
    "eight rows cost little more than one": lambda n, d: 10 + 0.3 * (n + d - 1) + 2.4 * ((n + d - 1) // 8),
    "each token costs a third of the first": lambda n, d: 2 + 0.6 * (n + d - 1),
    "any proposal doubles a step": lambda n, d: (2 if d else 1) + 0.05 * (n + d - 1),
    "tiles of six rows": lambda n, d: 10 + 4 * ((n + d - 1) // 6) + 0.2 * (n + d),
}
"""Seconds of a step of n sequences with d proposals."""


class Sevens:
    name = "sevens"

    def propose(self, sequence: Sequence, most: int) -> tuple[Ids, int]:
        return np.full(most, 7, np.int32), 0

    def end(self, sequence: Sequence) -> None:
        """Nothing is kept."""


def speed(curve: Callable[[int, int], float], num: int, rate: float, num_steps: int, fixed: int | None = None) -> float:
    """Tokens per second of ``num`` sequences whose next tokens are sevens at this rate."""
    now = 0.0
    one = Speculator(Sevens(), fixed or 7, VOCAB_SIZE, fixed=fixed is not None, clock=lambda: now)
    rng = random.Random(3)
    left: dict[Sequence, int] = {}
    tokens = number = 0
    while tokens < num_steps * num:
        while len(left) < num:
            fresh = sequence([1, 2, 3])
            grow(fresh, [4])
            fresh.num_computed = 3
            left[fresh] = LENGTH
        drafts = ask(one, left)
        now += curve(num, sum(map(len, drafts.values())))
        kept = {}
        for each in left:
            come = [7 if rng.random() < rate else 8]
            while come[-1] == 7 and len(come) <= len(drafts.get(each, ())):
                come.append(7 if rng.random() < rate else 8)
            kept[each] = min(left[each], len(come))
            grow(each, come[: kept[each]])
            each.num_computed += kept[each]
            left[each] -= kept[each]
        tokens += sum(kept.values())
        number += 1
        if one.policy.observes:
            one.policy.observe(Ended(number, {each: len(ids) for each, ids in drafts.items()}, kept, is_pure=True))
        for each in [each for each in left if not left[each]]:
            del left[each]
            one.end(each)
    return tokens / now


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("num", [1, 4])
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.7, 0.9])
def test_it_is_hardly_ever_slower(name: str, num: int, rate: float) -> None:
    """From the first step on, when nothing is known yet."""
    curve = CURVES[name]
    assert speed(curve, num, rate, 300) >= 0.98 * num / curve(num, 0)


@pytest.mark.parametrize("name", ["eight rows cost little more than one", "tiles of six rows"])
@pytest.mark.parametrize(("num", "rate"), [(1, 0.8), (1, 0.3), (4, 0.5), (4, 0.8), (32, 0.9)])
def test_it_is_near_the_best_fixed_number(name: str, num: int, rate: float) -> None:
    curve = CURVES[name]
    best = max(speed(curve, num, rate, 200, fixed=most) for most in (1, 2, 3, 5, 7))
    assert speed(curve, num, rate, 500) >= 0.9 * best


def test_speedup_of_a_memory_bound_model() -> None:
    """Eight rows cost 1.24 of one: 2.5 times as fast with four of five proposals right."""
    assert speed(lambda n, d: 1 + 0.24 / 7 * (n + d - 1), 1, 0.8, 500) >= 2.5


def test_it_falls_to_none_when_proposals_are_right_no_more() -> None:
    one = Speculator(Sevens(), 7, VOCAB_SIZE, clock=lambda: now)
    now, tried = 0.0, []
    running = sequence([1, 2, 3])
    grow(running, [4])
    running.num_computed = 3
    for step in range(400):
        drafts = ask(one, [running])
        count = len(drafts.get(running, ()))
        tried.append(count)
        now += 1.0 + 0.1 * count
        is_right = step < 200
        one.policy.observe(Ended(step, {running: count}, {running: 1 + (count if is_right else 0)}, is_pure=True))
    assert set(tried[50:200]) == {0, 7}
    assert tried[50:200].count(0) <= 20, "in pauses, of which the time of a step without is known"
    assert sum(tried[200:]) < 120, "a tenth of a step each: less than 6 % of 200 steps"
    assert sum(tried[300:]) * 0.1 < 0.02 * 100


def test_short_steps_whose_shapes_take_forty_to_record_lose_little() -> None:
    """A look costs a quarter of a step, and any proposal triples it."""

    def curve(n: int, d: int) -> float:
        return 600e-6 + 45e-6 * (n + d) if d else 200e-6

    recorded: set[tuple[int, int]] = set()

    def seconds(n: int, d: int) -> float:
        first = 0.0 if d == 0 or (n, d) in recorded else 8e-3
        recorded.add((n, d))
        return curve(n, d) + first

    assert speed(seconds, 1, 0.5, 4000) >= 0.98 / curve(1, 0)
    assert len(recorded - {(1, 0)}) <= 2


def test_short_steps_whose_first_trials_are_slow_find_what_pays() -> None:
    """Behind a nap a step with proposals takes nearly twice as long as the twentieth of its kind."""
    num_warm = num_plain = 0

    def seconds(n: int, d: int) -> float:
        nonlocal num_warm, num_plain
        if not d:
            num_plain += 1
            return 200e-6
        num_warm = 0 if num_plain > 20 else num_warm + 1
        num_plain = 0
        return 200e-6 * (1.3 + 0.15 * d) * (1.0 + 0.9 * 0.8**num_warm)

    best = sum(0.9**at for at in range(8)) / (1.3 + 0.15 * 7)
    assert speed(seconds, 1, 0.9, 12_000) * 200e-6 >= 0.8 * best, "the first steps included"
