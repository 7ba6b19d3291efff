"""Steps without a question to the drafter, times of steps, and the budget of trials."""

from __future__ import annotations

import itertools

from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.speculation.evidence import STALE_STEPS, Draft, Ended, StepTimes
from runtime.engine.speculation.policy import (
    ALLOWANCE,
    BACK_OFF_STEPS,
    MOST_SETUP_STEPS,
    PAUSE_STEPS,
    DraftPolicy,
    TrialBudget,
)
from tests.runtime.engine.speculation.test_speculator import decoding


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
