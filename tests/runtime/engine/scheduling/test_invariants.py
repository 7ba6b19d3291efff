"""Broken bookkeeping is noticed: by the full check in tests, and by the cheap one of every step."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from runtime.engine.errors import InvariantError
from runtime.engine.scheduling.scheduler import Scheduler
from tests.runtime.engine.scheduler_cases import add, make_driver, run


def lose_a_block(scheduler: Scheduler) -> None:
    scheduler.running[1].blocks[0].pop()


def write_into_anothers_block(scheduler: Scheduler) -> None:
    first, second = scheduler.running
    second.blocks[0][-1] = first.blocks[0][-1]


def lose_a_row(scheduler: Scheduler) -> None:
    scheduler.free_rows.pop()


def give_no_row(scheduler: Scheduler) -> None:
    scheduler.running[1].row = None


def count_too_far(scheduler: Scheduler) -> None:
    scheduler.running[1].num_computed += 40


def swap_two(scheduler: Scheduler) -> None:
    scheduler.running.reverse()


def share_a_block(scheduler: Scheduler) -> None:
    scheduler.pool.share(scheduler.running[1].blocks[0])


@pytest.mark.parametrize(
    "damage", [lose_a_block, write_into_anothers_block, lose_a_row, give_no_row, count_too_far, swap_two]
)
def test_the_full_check_finds_it(damage: Callable[[Scheduler], None]) -> None:
    driver = make_driver()
    add(driver, 6)
    add(driver, 6)
    run(driver)
    driver.scheduler.check_invariants()
    damage(driver.scheduler)
    with pytest.raises(AssertionError):
        driver.scheduler.check_invariants()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lose_a_row, "2 sequences run and 5 rows are free, of 8"),
        (share_a_block, r"choice 0 of request 'r1' has to write to block \d+, which 2 hold"),
        (give_no_row, "choice 0 of request 'r1' .* row None"),
    ],
)
def test_every_step_finds_it(damage: Callable[[Scheduler], None], words: str, caplog: pytest.LogCaptureFixture) -> None:
    driver = make_driver()
    add(driver, 6)
    add(driver, 6)
    run(driver)
    damage(driver.scheduler)
    with caplog.at_level(logging.ERROR, "xserv.engine"), pytest.raises(InvariantError, match=words):
        driver.scheduler.schedule()
    assert "step 1: " in caplog.text
