"""The pure scheduler under random load: every invariant after each step, every page read is the reader's own, no
deadlock, no leak."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from runtime.engine.config import BATCHING, POLICIES, VICTIMS
from runtime.kv.kinds import FULL, AnyKind, State, Window, blocks_of_sequence
from tests.runtime.engine.scheduler_driver import CACHE_KINDS, STATE_KINDS, Driver, add_random_request, random_limits

NUM_SCENARIOS = 10_000
EACH_TIME = 1_000  # of them, in `make test`
SCENARIOS_PER_TEST = 1_000
STEPS_PER_SCENARIO = 16
STEPS_PER_STYLE = 4_000
ROUNDS_PER_DRIVER = 120

CHUNKINGS = {
    "budget": {},
    "fixed": {"prefill_chunk": 3},
    "staged": {"prefill_chunk_stages": (64, 32, 2, 16)},
}


def sometimes_add(driver: Driver, rng: random.Random, most: int) -> None:
    if driver.num_requests < most and rng.random() < 0.4:
        add_random_request(driver, rng)


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=[pytest.mark.exhaustive] * (first >= EACH_TIME))
        for first in range(0, NUM_SCENARIOS, SCENARIOS_PER_TEST)
    ],
)
def test_a_near_full_pool_never_deadlocks(first: int) -> None:
    """Every request ends, or was refused since it is longer than the context."""
    found = run_scenarios(range(first, first + SCENARIOS_PER_TEST), CACHE_KINDS)
    assert found["steps"] >= STEPS_PER_SCENARIO * SCENARIOS_PER_TEST
    assert min(found["preemptions"], 5 * found["swaps"], 5 * found["refused"]) > 150, "the pools are not near full"


@pytest.mark.parametrize("num_scenarios", [500, pytest.param(10_000, marks=pytest.mark.exhaustive)])
def test_states_are_those_of_the_tokens_before(num_scenarios: int) -> None:
    """As above, in groups whose pages are recurrent states, also after draft tokens of which only some were kept."""
    found = run_scenarios(range(num_scenarios), STATE_KINDS, drafts=0.3)
    assert min(found["steps"] // 10, found["drafts"]) >= num_scenarios
    assert min(found["preemptions"], found["swaps"], found["hit_tokens"] // 20) >= num_scenarios // 50


def test_a_host_slot_holds_the_last_copy_planned_for_it() -> None:
    """A state's page takes a prefix's place on the device, then a victim takes the prefix's new slot on the host."""
    assert run_scenarios(range(7334, 7335), STATE_KINDS, drafts=0.3)["swaps"] > 0


def run_scenarios(seeds: range, kinds: Sequence[tuple[AnyKind, ...]], drafts: float = 0.0) -> Counter[str]:
    """Runs a scenario for each seed, with each of these groups' kinds in turn. Returns what happened, how often."""
    found: Counter[str] = Counter()
    for seed in seeds:
        rng = random.Random(seed)
        limits = random_limits(rng, cache_kinds=kinds[seed % len(kinds)])
        driver = Driver(rng, limits, overlaps=rng.random() < 0.5, eos=rng.choice((0.0, 0.1)), drafts=drafts)
        num_wanted = rng.randrange(2, 7)
        for _ in range(num_wanted // 2):
            add_random_request(driver, rng)
        driver.arrivals = partial(sometimes_add, driver, rng, num_wanted)  # type: ignore[method-assign]
        try:
            driver.drain()
        except Exception as error:
            raise AssertionError(f"scenario {seed} with {driver.limits}") from error
        assert (driver.outcome.aborted, driver.outcome.failed) == (0, 0)
        assert driver.outcome.finished >= driver.num_requests > 0 or driver.outcome.refused > 0
        found["steps"] += driver.num_steps
        found["preemptions"] += driver.scheduler.num_preemptions
        found["drafts"] += driver.num_drafts
        found["swaps"] += driver.scheduler.num_swaps
        found["refused"] += driver.outcome.refused
        found["hit_tokens"] += driver.pool.counters.hit_tokens
    return found


def test_groups_of_several_pools_draw_on_their_own() -> None:
    """Each group's blocks are its pool's, whatever was preempted, swapped, offloaded and found again."""
    num_preemptions = num_swaps = num_cached = num_offloads = 0
    for seed in range(180):
        rng = random.Random(seed)
        kinds, pools = rng.choice(
            [
                ((FULL, Window(3)), (0, 1)),
                ((FULL, Window(2), Window(2)), (0, 1, 1)),
                ((FULL, FULL), (0, 1)),
                ((FULL, State(), State(), Window(3)), (0, 1, 1, 0)),
            ]
        )
        limits = random_limits(rng, cache_kinds=kinds)
        chunk = 1 if limits.scheduling.batching == "stall-free" else None
        needed = [
            blocks_of_sequence(
                limits.max_model_len, [kind for kind, own in zip(kinds, pools) if own == pool], limits.block_size,
                chunk=chunk,
            )
            for pool in (0, 1)
        ]  # fmt: skip
        sizes = needed[0] + rng.randrange(3), needed[1] + rng.randrange(3)
        limits = replace(
            limits, num_blocks=sum(sizes), pool_sizes=sizes, cache_pools=pools, block_bytes=(1, 3),
            num_host_blocks=2 * limits.num_host_blocks, host_pool_sizes=(limits.num_host_blocks,) * 2,
        )  # fmt: skip
        driver = Driver(rng, limits, overlaps=seed % 2 == 0, eos=rng.choice((0.0, 0.1)), drafts=0.2)
        driver.arrivals = partial(sometimes_add, driver, rng, 12)  # type: ignore[method-assign]
        add_random_request(driver, rng)
        try:
            driver.drain()
        except Exception as error:
            raise AssertionError(f"scenario {seed} with {driver.limits}") from error
        num_preemptions += driver.scheduler.num_preemptions
        num_swaps += driver.scheduler.num_swaps
        num_cached += driver.pool.counters.hit_tokens
        num_offloads += driver.pool.counters.offloads
    assert min(num_preemptions, num_swaps, num_cached, num_offloads) > 20


@pytest.mark.parametrize(
    ("policy", "batching"),
    [  # each policy and each way of batching once; all together in make test-all
        pytest.param(policy, batching, marks=[pytest.mark.exhaustive] * (i % len(POLICIES) != j % len(POLICIES)))
        for i, batching in enumerate(BATCHING)
        for j, policy in enumerate(POLICIES)
    ],
)
def test_steady_load(batching: str, policy: str) -> None:
    """Arrivals, aborts and failing steps all the time, for every victim rule and every way to cut prompts."""
    chunkings = CHUNKINGS if batching == "stall-free" else {"budget": {}}
    num_steps = 0
    combinations = itertools.cycle(itertools.product(VICTIMS, chunkings, (False, True)))
    kinds = itertools.cycle((CACHE_KINDS[0], *CACHE_KINDS[3:6]))
    for number in itertools.count():
        victim, chunking, overlaps = next(combinations)
        if num_steps >= STEPS_PER_STYLE:
            break
        rng = random.Random(f"{batching} {policy} {number}")
        fixed = {"prefill_chunk": None, "prefill_chunk_stages": None, **CHUNKINGS[chunking]}
        limits = random_limits(
            rng, cache_kinds=next(kinds), batching=batching, scheduling_policy=policy, victim=victim, **fixed
        )
        driver = Driver(rng, limits, overlaps=overlaps, eos=0.03, failure=0.005)
        for _ in range(ROUNDS_PER_DRIVER):
            if len(driver.open) < 8 and rng.random() < 0.4:
                add_random_request(driver, rng)
            if driver.open and rng.random() < 0.03:
                driver.abort(rng.choice(driver.open))
            driver.step()
        driver.drain()
        assert driver.outcome.finished > 0
        num_steps += driver.num_steps
    assert number >= 2 * len(VICTIMS) * len(chunkings), "not every combination was tried"


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(rng=st.randoms(use_true_random=False), overlaps=st.booleans(), failure=st.sampled_from((0.0, 0.05)))
def test_any_scenario_ends(rng: random.Random, overlaps: bool, failure: float) -> None:
    """As above, with aborts between planning and running a step, in a form that hypothesis can make smaller."""
    limits = random_limits(rng, cache_kinds=rng.choice((*CACHE_KINDS, *STATE_KINDS)))
    driver = Driver(rng, limits, overlaps=overlaps, eos=0.05, failure=failure, drafts=0.3)

    def arrivals() -> None:
        if driver.num_requests < 6 and rng.random() < 0.4:
            add_random_request(driver, rng)
        if driver.open and rng.random() < 0.1:
            driver.abort(rng.choice(driver.open))

    driver.arrivals = arrivals  # type: ignore[method-assign]
    for _ in range(3):
        add_random_request(driver, rng)
    driver.drain()


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of arrivals, steps and aborts."""

    @initialize(seed=st.integers(0, 10**6), overlaps=st.booleans())
    def start(self, seed: int, overlaps: bool) -> None:
        self.rng = random.Random(seed)
        limits = random_limits(self.rng, cache_kinds=self.rng.choice((*CACHE_KINDS, *STATE_KINDS)))
        self.driver = Driver(self.rng, limits, overlaps=overlaps, eos=0.05, drafts=0.3)

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=40),
        max_tokens=st.integers(1, 20),
        n=st.integers(1, 3),
        salt=st.sampled_from((None, "a")),
    )
    def add(self, prompt: list[int], max_tokens: int, n: int, salt: str | None) -> None:
        self.driver.add(prompt, max_tokens=max_tokens, n=n, cache_salt=salt)

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()

    @precondition(lambda self: self.driver.open)
    @rule(choice=st.integers(0, 10**6))
    def abort(self, choice: int) -> None:
        self.driver.abort(self.driver.open[choice % len(self.driver.open)])

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.drain()


SchedulerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestScheduler = SchedulerMachine.TestCase
