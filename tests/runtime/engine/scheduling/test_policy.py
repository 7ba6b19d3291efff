"""Whose turn it is."""

from __future__ import annotations

import pytest

from runtime.engine.scheduling.sequence import Sequence
from tests.runtime.engine.scheduler_cases import add, make_driver, run
from tests.runtime.engine.scheduler_driver import Driver


def finishing_order(driver: Driver, sequences: list[Sequence]) -> list[int]:
    order: list[int] = []
    while len(order) < len(sequences):
        driver.step()
        order += [i for i, sequence in enumerate(sequences) if sequence.is_finished and i not in order]
    return order


def test_first_come_first_served() -> None:
    driver = make_driver(scheduling_policy="fcfs", max_num_seqs=1)
    assert finishing_order(driver, [add(driver, 3) for _ in range(4)]) == [0, 1, 2, 3]


def test_priority_comes_before_arrival() -> None:
    driver = make_driver(scheduling_policy="priority", max_num_seqs=1)
    sequences = [add(driver, 3, priority=priority) for priority in (0, 2, -1, 0, 1)]
    assert finishing_order(driver, sequences) == [2, 0, 3, 4, 1]


@pytest.mark.parametrize(("ageing_s", "is_overtaken_for"), [(0.5, 50), (2.0, 200)])
def test_nobody_starves(ageing_s: float, is_overtaken_for: int) -> None:
    """A stream of more urgent requests that fills the engine delays another for one unit of ageing (the driver's
    steps take 0.01 s), not for ever."""
    driver = make_driver(scheduling_policy="priority", max_num_seqs=1, ageing_s=ageing_s)
    patient = add(driver, 3, max_tokens=1, priority=1)
    count = 0
    while not patient.is_finished:
        if len(driver.open) < 3:
            add(driver, 3, max_tokens=1, priority=0)
        driver.step()
        count += 1
        assert count < 1000
    assert abs(count - is_overtaken_for) <= 5


def test_the_nearest_deadline_comes_first() -> None:
    driver = make_driver(scheduling_policy="deadline", max_num_seqs=1, ttft_target_s=1.0)
    sequences = [
        add(driver, 3),
        add(driver, 3, ttft_target_s=9.0),
        add(driver, 3, ttft_target_s=0.5),
        add(driver, 3, ttft_target_s=1.5),
    ]
    assert finishing_order(driver, sequences) == [2, 0, 3, 1]


def test_a_long_prompt_has_less_slack() -> None:
    driver = make_driver(scheduling_policy="deadline", ttft_target_s=1.0)
    for _ in range(5):
        driver.scheduler.costs.observe_step(100, 1.0)
    short, long = add(driver, 3), add(driver, 103)
    assert driver.scheduler.waiting == [long, short]
    assert short.order[0] - long.order[0] == pytest.approx(1.0)


def test_a_preempted_sequence_is_due_when_its_next_token_is() -> None:
    driver = make_driver(scheduling_policy="deadline", ttft_target_s=1.0, tpot_target_s=0.25)
    sequence = add(driver, 3, tpot_target_s=0.5)
    before = sequence.order[0]
    run(driver, 3)
    assert sequence.num_output_tokens == 3
    prefill_s = driver.scheduler.costs.compute_s(sequence.num_tokens)
    assert driver.scheduler.policy.order(sequence)[0] == pytest.approx(before + 3 * 0.5 - prefill_s)
