"""Steps that are left out, and the account of what trying may cost."""

from __future__ import annotations

from runtime.engine.speculation.account import MOST_SETUP_STEPS, TrialAccount
from runtime.engine.speculation.naps import MOST_STEPS, Naps
from runtime.engine.speculation.step_times import StepTimes


def test_naps_are_as_long_as_looks_cost() -> None:
    naps = Naps()
    assert naps.begin(20e-6, 0.1) == 0, "a look is nothing beside such a step"
    assert not naps.sleeps_on()
    assert naps.begin(50e-6, 1e-3) == 25
    assert naps.num_resting == 23
    assert naps.is_asleep
    assert not naps.is_seen
    assert [naps.sleeps_on() and naps.is_seen for _ in range(2)] == [True] * 2, "the last two are timed"
    assert not naps.sleeps_on()
    assert naps.begin(50e-6, 1e-3, spares=True) == 12
    assert naps.takes_naps
    naps.end()
    assert not naps.takes_naps
    assert not naps.sleeps_on()
    assert naps.begin(1.0, 1e-3) == MOST_STEPS


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


def test_gains_pay_for_first_steps_only_while_these_are_not_paid_for() -> None:
    account = TrialAccount()
    account.bound(1.0, 30.0)
    account.settle(1.0)
    assert (account.balance_s, account.setup_s) == (3.0, 0.0)
    account.set_up(5.0, 1.0)
    account.settle(1.0)
    assert (account.balance_s, account.setup_s) == (3.5, -4.5)


def test_an_account_bounds_what_trials_and_recordings_lose() -> None:
    account = TrialAccount()
    assert not account.allows(0.0), "no step is known"
    account.bound(1.0, 3.0)
    assert account.allows(2.0)
    assert not account.allows(2.1)
    assert account.allows_setup
    account.set_up(40.0, 1.0)
    assert not account.allows_setup
    account.earn(1.0, 15_000)
    assert not account.allows_setup
    account.earn(1.0, 1200)
    assert account.allows_setup
    assert account.is_full
    for _ in range(10):
        account.settle(-2.0)
    assert not account.is_full
    assert not account.allows(0.0)
    account.set_up(1e9, 1.0)
    account.earn(1.0, int(MOST_SETUP_STEPS / 0.0025))
    assert account.allows_setup, "no more than so many steps are believed"
