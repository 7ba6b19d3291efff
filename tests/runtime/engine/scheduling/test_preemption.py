"""Who gives up blocks, and how the content comes back."""

from __future__ import annotations

import pytest

from runtime.engine.scheduling.preemption import CostModel
from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.scheduling.step import Step
from tests.runtime.engine.scheduler_cases import add, chunks_of, make_driver, run
from tests.runtime.engine.scheduler_driver import Driver


def until_preemption(driver: Driver) -> Step:
    for _ in range(200):
        (step,) = run(driver)
        if step.preempted:
            return step
    raise AssertionError("nobody was preempted")


def crowd(**settings: object) -> tuple[Driver, list[Sequence]]:
    """Three sequences that will need 3 blocks each, of 8; each has its last step in a different place."""
    driver = make_driver(num_blocks=8, max_model_len=24, **settings)
    sequences = [add(driver, 4, max_tokens=9), add(driver, 4, max_tokens=8), add(driver, 4, max_tokens=7)]
    return driver, sequences


@pytest.mark.parametrize(("victim", "expected"), [("latest", 2), ("shortest-remaining", 2)])
def test_victims(victim: str, expected: int) -> None:
    driver, sequences = crowd(victim=victim)
    step = until_preemption(driver)
    assert step.preempted == [(sequences[expected], "recompute")]
    driver.drain()


def test_the_shortest_remaining_is_the_victim_wherever_it_stands() -> None:
    driver = make_driver(num_blocks=8, max_model_len=24, victim="shortest-remaining")
    sequences = [add(driver, 4, max_tokens=12), add(driver, 4, max_tokens=8), add(driver, 4, max_tokens=12)]
    assert until_preemption(driver).preempted == [(sequences[1], "recompute")]
    driver.drain()


def test_the_least_recently_used_is_the_victim() -> None:
    driver = make_driver(num_blocks=8, max_model_len=24, victim="least-recently-used")
    sequences = [add(driver, 4, max_tokens=12) for _ in range(3)]
    run(driver, 4)
    sequences[1].last_step -= 1  # as one whose chunk found no room in the last step
    assert until_preemption(driver).preempted[0][0] in (sequences[1], sequences[2])
    driver.drain()


def test_the_lowest_priority_is_the_victim() -> None:
    driver = make_driver(num_blocks=8, max_model_len=24)
    sequences = [add(driver, 4, max_tokens=12, priority=priority) for priority in (0, 1, 0)]
    assert until_preemption(driver).preempted == [(sequences[1], "recompute")]
    driver.drain()


def test_a_preempted_sequence_finds_its_own_blocks() -> None:
    driver, sequences = crowd()
    driver.clock_s = 0.0
    until_preemption(driver)
    victim = sequences[2]
    assert victim.num_computed == 0
    starts = {}
    while not victim.is_finished:
        (step,) = run(driver)
        starts |= {chunk.sequence: chunk.start for chunk in step.chunks if chunk.is_first}
    assert starts[victim] >= 4, "its full blocks were computed again"


def test_a_swapped_sequence_goes_on_where_it_was() -> None:
    driver, sequences = crowd(preemption="swap", num_host_blocks=8)
    step = until_preemption(driver)
    victim = sequences[2]
    assert step.preempted == [(victim, "swap")]
    num_computed = victim.num_computed
    assert len(step.swap_out) >= 2
    assert driver.pool.host_pool is not None
    resumed = []
    while not resumed:
        (step,) = run(driver)
        resumed = [chunk for chunk in step.chunks if chunk.sequence is victim]
    assert (resumed[0].start, resumed[0].num_tokens, resumed[0].is_first) == (num_computed, 1, True)
    driver.drain()


def test_without_room_on_the_host_a_victim_is_computed_again() -> None:
    driver, sequences = crowd(preemption="swap", num_host_blocks=1)
    assert until_preemption(driver).preempted == [(sequences[2], "recompute")]
    driver.drain()


def test_ending_a_swapped_sequence_frees_its_slots_and_the_plan() -> None:
    driver, sequences = crowd(preemption="swap", num_host_blocks=8)
    scheduler = driver.scheduler
    while True:
        step = scheduler.schedule()
        if step.preempted:
            break
        scheduler.commit(step)
        for chunk in step.chunks:
            chunk.sequence.append(0)
    (slots,) = sequences[2].host_slots
    assert slots
    scheduler.finish(sequences[2])
    assert not {slot for _, slot in step.swap_out} & set(slots)
    assert driver.pool.host_pool is not None
    assert driver.pool.host_pool.num_free == 8
    scheduler.check_invariants()


def test_the_cheaper_way_is_taken() -> None:
    costs = CostModel()
    assert costs.prefers_swap(1000, 10), "nothing is known of transfers: try one"
    for tokens in (10, 100, 200, 400) * 20:
        costs.observe_step(tokens, 0.005 + 0.001 * tokens)
    assert costs.compute_s(500) == pytest.approx(0.5, rel=1e-6)
    costs.observe_transfer(100, 1.0)  # 10 ms a block: 10 blocks out and in are 0.2 s
    assert costs.prefers_swap(201, 10)
    assert not costs.prefers_swap(199, 10)


def test_equal_steps_give_their_mean() -> None:
    costs = CostModel()
    assert costs.compute_s(7) == 0.0
    for _ in range(9):
        costs.observe_step(4, 0.02)
    assert costs.compute_s(8) == pytest.approx(0.04)


def test_steps_that_get_cheaper_cost_nothing_more() -> None:
    costs = CostModel()
    for tokens, seconds in ((10, 0.5), (100, 0.1)) * 5:
        costs.observe_step(tokens, seconds)
    assert costs.compute_s(8) == 0.0


def test_auto_asks_the_cost_model() -> None:
    ways = set()
    for seconds_per_block in (1e-9, 10.0):
        driver, _ = crowd(preemption="auto", num_host_blocks=8)
        driver.scheduler.costs.observe_transfer(1, seconds_per_block)
        for tokens in (1, 10, 20):
            driver.scheduler.costs.observe_step(tokens, 0.01 * tokens)
        ways.add(until_preemption(driver).preempted[0][1])
    assert ways == {"swap", "recompute"}


def test_the_first_in_order_goes_on_alone() -> None:
    driver = make_driver(num_blocks=4, max_model_len=16, max_num_seqs=4)
    sequences = [add(driver, 2, max_tokens=14) for _ in range(4)]
    while not sequences[0].is_finished:
        (step,) = run(driver)
        assert sequences[0] in [chunk.sequence for chunk in step.chunks]
    driver.drain()
    assert driver.outcome.finished == 4


def test_chunks_of_a_case() -> None:
    driver, _ = crowd()
    (step,) = run(driver)
    assert chunks_of(step) == [(0, 0, 4), (1, 0, 4), (2, 0, 4)]


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
