"""What each style puts into a step, chunk by chunk."""

from __future__ import annotations

import pytest

from tests.runtime.engine.scheduler_cases import add, chunks_of, make_driver, run


@pytest.mark.parametrize(
    ("batching", "first", "later", "chunks"),
    [
        # decodes come first, and prompts fill what is left
        ("stall-free", [3, 4], [30, 5],
         [[(0, 3, 1), (1, 4, 1), (2, 0, 14)], [(0, 4, 1), (1, 5, 1), (2, 14, 14)],
          [(0, 5, 1), (1, 6, 1), (2, 28, 2), (3, 0, 5)]]),
        # decodes wait; a prompt longer than the budget goes alone
        ("prefill-first", [3], [10, 10, 20],
         [[(1, 0, 10)], [(2, 0, 10)], [(3, 0, 20)], [(0, 3, 1), (1, 10, 1), (2, 10, 1), (3, 20, 1)]]),
        # whole prompts are mixed with decodes
        ("orca", [3], [10, 10, 20],
         [[(0, 3, 1), (1, 0, 10)], [(0, 4, 1), (1, 10, 1), (2, 0, 10)], [(3, 0, 20)],
          [(0, 5, 1), (1, 11, 1), (2, 10, 1), (3, 20, 1)]]),
    ],
)  # fmt: skip
def test_each_style(batching: str, first: list[int], later: list[int], chunks: list[list[tuple[int, ...]]]) -> None:
    driver = make_driver(batching=batching)
    for length in first:
        add(driver, length)
    run(driver)
    for length in later:
        add(driver, length)
    assert [chunks_of(step) for step in run(driver, len(chunks))] == chunks


def test_a_burst_shares_one_step() -> None:
    driver = make_driver(max_num_batched_tokens=32)
    for _ in range(8):
        add(driver, 4)
    (step,) = run(driver)
    assert chunks_of(step) == [(number, 0, 4) for number in range(8)]
    assert all(chunk.is_first and chunk.is_last for chunk in step.chunks)


def test_a_static_batch_ends_before_the_next_begins() -> None:
    driver = make_driver(batching="static")
    add(driver, 3, max_tokens=2)
    add(driver, 3, max_tokens=4)
    run(driver)
    add(driver, 3)
    steps = run(driver, 4)
    assert [len(step.chunks) for step in steps] == [2, 1, 1, 1]
    assert chunks_of(steps[3]) == [(2, 0, 3)]


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("batching", ["orca", "prefill-first", "static"])
def test_a_prompt_beyond_the_budget_ends_even_if_others_decode(batching: str, overlaps: bool) -> None:
    driver = make_driver(batching=batching, overlaps=overlaps)
    for length in (5, 60, 17, 16, 3):
        add(driver, length, max_tokens=5)
    driver.drain()
    assert driver.outcome.finished == 5


def test_arrivals_join_a_planned_step() -> None:
    driver = make_driver()
    add(driver, 3)
    scheduler = driver.scheduler
    scheduler.commit(scheduler.schedule())
    scheduler.running[0].append(0)
    step = scheduler.schedule()
    assert chunks_of(step) == [(0, 3, 1)]
    add(driver, 20)
    scheduler.extend(step)
    assert chunks_of(step) == [(0, 3, 1), (1, 0, 15)]
    assert step.num_tokens == 16


def test_who_has_ended_leaves_a_planned_step() -> None:
    driver = make_driver()
    first, second = add(driver, 3), add(driver, 4)
    scheduler = driver.scheduler
    running = scheduler.schedule()
    planned = scheduler.schedule()
    assert chunks_of(planned) == [(0, 3, 1), (1, 4, 1)]
    assert first.num_pending == second.num_pending == 2
    scheduler.commit(running)
    first.append(1)
    second.append(1)
    scheduler.finish(first)
    scheduler.extend(planned)
    assert chunks_of(planned) == [(1, 4, 1)]
    assert (planned.num_tokens, second.num_pending) == (1, 1)
    scheduler.finish(second)
    scheduler.extend(planned)
    assert not planned.has_work
    assert not scheduler.open_steps
    scheduler.check_invariants()


def test_the_last_token_is_not_scheduled_twice() -> None:
    driver = make_driver()
    add(driver, 3, max_tokens=1)
    running = driver.scheduler.schedule()
    planned = driver.scheduler.schedule()
    assert running.has_work
    assert not planned.has_work
    assert driver.scheduler.has_work


def test_three_steps_at_once_are_refused() -> None:
    driver = make_driver()
    add(driver, 3)
    driver.scheduler.schedule()
    driver.scheduler.schedule()
    with pytest.raises(AssertionError, match="before the first was committed"):
        driver.scheduler.schedule()
