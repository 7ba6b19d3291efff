"""How soon the number of proposals is found, in virtual time, where steps are short: a look and the first step of a
shape cost much, the first steps with proposals behind others take longer than later ones, and no two take the same
time."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import numpy as np
import pytest

from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.speculation.drafter import Ids
from runtime.engine.speculation.evidence import STALE_STEPS, Draft, Ended, StepTimes
from runtime.engine.speculation.policy import (
    ALLOWANCE,
    BACK_OFF_STEPS,
    CREDIT_S,
    MOST_SETUP_STEPS,
    PAUSE_STEPS,
    DraftPolicy,
    TrialBudget,
)
from runtime.engine.speculation.speculator import Speculator
from tests.runtime.engine.fakes import VOCAB_SIZE
from tests.runtime.engine.speculation.test_ngram import grow, sequence
from tests.runtime.engine.speculation.test_speculator import ask, decoding

PLAIN_S, LOOK_S, RECORDED_S = 200e-6, 40e-6, 5e-3
"""A step without proposals, a look, and what the first step of a shape takes beside: a model of 260,000 parameters."""

CURVE = [1.0, 1.6, 1.8, 1.95, 2.15, 2.3, 2.5, 2.75]
"""What a step takes, by its proposals, as multiples of one without."""

LENGTH = 100
"""Tokens of each answer; another follows."""


class World:
    """One sequence after the other, whose next tokens are sevens at this rate, and a drafter that says nothing else."""

    name = "world"

    def __init__(self, rate: float, seed: int, *, fixed: int | None = None, stalls: float = 0.0) -> None:
        """``stalls``: how often a step with proposals waits for a processor."""
        self._rate, self._rng, self._stalls = rate, random.Random(seed), stalls
        self._now = self._warmth = 0.0
        self._known: set[int] = set()
        self._number = self.num_tokens = 0
        self._one = Speculator(
            self, fixed or 7, VOCAB_SIZE, fixed=fixed is not None, clock=lambda: self._now, hang_s=1e9
        )
        self._answer: Sequence | None = None

    def propose(self, sequence: Sequence, most: int) -> tuple[Ids, int]:
        self._now += LOOK_S
        return np.full(most, 7, np.int32), 0

    def end(self, sequence: Sequence) -> None:
        """Nothing is kept."""

    def speed(self, num_tokens: int) -> float:
        """Of so many tokens from here on: times as fast as without proposals."""
        begun, first = self._now, self.num_tokens
        while self.num_tokens < first + num_tokens:
            self._step()
        return (self.num_tokens - first) * self._plain_s() / (self._now - begun)

    @staticmethod
    def _plain_s() -> float:
        return PLAIN_S * (1.0 + 0.06 * math.sqrt(2.0 / math.pi))

    def _step(self) -> None:
        one = self._one
        if self._answer is None:
            self._answer = sequence([1, 2, 3])
            grow(self._answer, [4])
            self._answer.num_computed, self._answer.max_tokens = 3, LENGTH
            self._number += 1  # its prompt's step is in between
        answer = self._answer
        drafts = ask(one, [answer])
        count = len(drafts.get(answer, ()))
        seconds = PLAIN_S
        if count:
            seconds *= 1.0 + (CURVE[count] - 1.0) * (1.0 + 1.6 * 0.75**self._warmth)
            seconds += 0.0 if count in self._known else RECORDED_S
            seconds += 4e-3 * self._rng.random() if self._rng.random() < self._stalls else 0.0
            self._known.add(count)
        self._warmth = self._warmth + 1.0 if count else max(0.0, self._warmth - 0.3)
        self._now += seconds * (1.0 + abs(self._rng.gauss(0.0, 0.06)))
        came = [self._token()]
        while came[-1] == 7 and len(came) <= count:
            came.append(self._token())
        grow(answer, came[: LENGTH - answer.num_output_tokens])
        self.num_tokens += len(came)
        answer.num_computed += len(came)
        self._number += 1
        if one.policy.observes:
            one.policy.observe(Ended(self._number, {answer: count} if count else {}, {answer: len(came)}, is_pure=True))
        if answer.num_output_tokens >= LENGTH:
            one.end(answer)
            self._answer = None

    def _token(self) -> int:
        return 7 if self._rng.random() < self._rate else 8


def found(rate: float, *, behind: int, tokens: int, stalls: float = 0.0) -> float:
    """The median of some worlds' speeds."""
    speeds = []
    for seed in range(5):
        world = World(rate, seed, stalls=stalls)
        world.speed(behind)
        speeds.append(world.speed(tokens))
    return statistics.median(speeds)


@pytest.mark.parametrize("rate", [0.8, 0.9])
def test_what_pays_is_found_within_600_tokens(rate: float) -> None:
    best = max(sum(rate**at for at in range(most + 1)) / CURVE[most] for most in range(8))
    assert found(rate, behind=600, tokens=900) >= 0.85 * best, "looks included, which a curve of steps has not"


def test_little_is_gained_where_little_pays() -> None:
    """Three proposals would be 1.3 times as fast, and 1.2 with looks and ends of answers."""
    assert found(0.7, behind=1200, tokens=900) >= 1.05


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.5])
@pytest.mark.parametrize("stalls", [0.0, 0.3])
def test_nothing_is_lost_where_nothing_pays(rate: float, stalls: float) -> None:
    assert found(rate, behind=1200, tokens=1200, stalls=stalls) >= 0.98


@pytest.mark.parametrize("rate", [0.3, 0.5, 0.7])
def test_what_is_lost_from_the_start_is_bounded(rate: float) -> None:
    """By a credit, and a share of the time."""
    for seed in range(3):
        speed = World(rate, seed, stalls=0.3).speed(1500)
        assert 1500 * PLAIN_S * (1.0 / speed - 1.0) <= 1.25 * CREDIT_S + 0.02 * 1500 * PLAIN_S


def asked_at(look_s: float, plain_s: float, num_steps: int, *, num_fruitful: int = 0) -> list[int]:
    """The steps before which a drafter is asked, which finds something that always holds ``num_fruitful`` times."""
    now, asked = 0.0, list[int]()

    def look(decodes: list[Sequence]) -> dict[Sequence, Draft]:
        nonlocal now
        asked.append(step)
        now += look_s
        return {decodes[0]: Draft([7] * 7, 0)} if len(asked) <= num_fruitful else {}

    policy, (running,) = DraftPolicy(7, clock=lambda: now), decoding()
    for step in range(num_steps):
        counts = policy.plan([running], look)
        now += plain_s
        if policy.observes:
            policy.observe(Ended(step, counts, {running: 1 + counts.get(running, 0)}, is_pure=True))
    return asked


def pauses(asked: list[int]) -> list[int]:
    return [after - before - 1 for before, after in itertools.pairwise(asked)]


def test_back_offs_grow_to_what_questions_cost() -> None:
    assert set(pauses(asked_at(20e-6, 0.1, 100))) == {0}, "a question is nothing beside such a step"
    assert pauses(asked_at(51e-6, 1e-3, 150))[:5] == [BACK_OFF_STEPS, 12, 18, 25, 25]
    assert pauses(asked_at(1.0, 1e-3, 4000))[-1] == STALE_STEPS


def test_while_drafts_pay_pauses_time_plain_steps() -> None:
    asked = asked_at(20e-6, 0.1, 300, num_fruitful=300)
    assert [each for each in pauses(asked) if each] == [PAUSE_STEPS] * 4


def test_times_beside_plain_steps_are_those_of_the_machine_now() -> None:
    """It is twice as fast from now on."""
    times = StepTimes()
    for _ in range(2):
        times.observe(1, 0, 1.0)
        times.observe(1, 7, 4.0)
    times.observe(1, 7, 4.0)
    assert times.tried(8) == 4.0
    times.observe(1, 0, 0.5)
    assert times.plain(1) == 0.5
    assert times.tried(8) == 2.0
    assert times.curve(1)[7] == 0.5 + 1.5 * 0.75, "two measurements leave a quarter in doubt"


def test_an_account_bounds_what_trials_and_recordings_lose() -> None:
    account = TrialBudget()
    assert not account.allows(0.0), "no step is known"
    account.bound(3.0, 3.0)
    assert account.allows(6.0), "two of the longest"
    assert not account.allows(6.1)
    account.set_up(4.0, 1.0)
    assert account.allows(2.0)
    assert not account.allows(2.0, is_first=True), "that shape's first step may take four, too"
    account.settle(-3.0)
    assert not account.allows(0.0)
    account.earn(1.0, int(1.1 / ALLOWANCE))
    assert account.allows(0.0)
    for _ in range(10):
        account.settle(-2.0)
    account.earn(1.0, int(5.9 / ALLOWANCE))
    assert not account.allows(0.0), "no more than the limit is owed, and all of that is paid"
    account.earn(1.0, int(0.2 / ALLOWANCE))
    assert account.allows(0.0)


def test_what_a_first_step_takes_is_believed_up_to_a_bound() -> None:
    """The machine may have slept."""
    account = TrialBudget()
    account.bound(1e-3, 1e-3)
    account.set_up(1e9, 1e-4)
    assert account.setup_s == MOST_SETUP_STEPS * 1e-4
    account.set_up(0.0, 1e-4)
    assert account.setup_s == 0.5 * MOST_SETUP_STEPS * 1e-4


def test_gains_are_kept_for_bad_proposals_up_to_a_bound() -> None:
    account = TrialBudget()
    account.bound(1.0, 1.0)
    for _ in range(100):
        account.settle(1.0)
    assert account.balance_s == 4.0
    account.earn(1.0, 1000)
    assert account.balance_s == 4.0, "nothing is paid in beyond the limit"
