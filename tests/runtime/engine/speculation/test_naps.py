"""Steps that are left out, and the account of what trying may cost."""

from __future__ import annotations

from runtime.engine.speculation.account import ALLOWANCE, MOST_SETUP_STEPS, TrialAccount
from runtime.engine.speculation.naps import FIRST_STEPS, MOST_STEPS, Naps
from runtime.engine.speculation.step_times import StepTimes


def test_naps_grow_to_what_looks_cost() -> None:
    naps = Naps()
    assert naps.begin(20e-6, 0.1) == 0, "a look is nothing beside such a step"
    assert not naps.sleeps_on()
    assert naps.begin(50e-6, 1e-3) == FIRST_STEPS
    assert naps.num_resting == FIRST_STEPS - 2
    assert naps.is_asleep
    assert not naps.is_seen
    assert [naps.sleeps_on() and naps.is_seen for _ in range(2)] == [True] * 2, "the last two are timed"
    assert not naps.sleeps_on()
    assert [naps.begin(50e-6, 1e-3) for _ in range(4)] == [12, 18, 25, 25]
    assert naps.takes_naps
    naps.end()
    assert not naps.takes_naps
    assert not naps.sleeps_on()
    assert [naps.begin(1.0, 1e-3) for _ in range(20)][-1] == MOST_STEPS


def test_a_pause_is_timed_behind_steps_of_its_kind() -> None:
    naps = Naps()
    assert naps.pause() == 2
    assert not naps.is_seen
    assert [naps.sleeps_on() and naps.is_seen for _ in range(2)] == [True] * 2
    assert not naps.sleeps_on()
    assert not naps.takes_naps


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
    account = TrialAccount()
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
    account = TrialAccount()
    account.bound(1e-3, 1e-3)
    account.set_up(1e9, 1e-4)
    assert account.setup_s == MOST_SETUP_STEPS * 1e-4
    account.set_up(0.0, 1e-4)
    assert account.setup_s == 0.5 * MOST_SETUP_STEPS * 1e-4


def test_gains_are_kept_for_bad_proposals_up_to_a_bound() -> None:
    account = TrialAccount()
    account.bound(1.0, 1.0)
    for _ in range(100):
        account.settle(1.0)
    assert account.balance_s == 4.0
    account.earn(1.0, 1000)
    assert account.balance_s == 4.0, "nothing is paid in beyond the limit"
