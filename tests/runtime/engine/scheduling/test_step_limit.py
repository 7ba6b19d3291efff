"""Steps of limited time: prompts get what the decodes leave, none is left without for long, and nothing deadlocks."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.engine.scheduling.step_limit import MOST_WITHOUT, StepLimit
from runtime.engine.scheduling.step_model import LinearStepModel, features_of
from tests.runtime.engine.scheduler_driver import CACHE_KINDS, STATE_KINDS, Driver, add_random_request, random_limits
from tests.runtime.engine.scheduling.test_scheduler import sometimes_add

MODEL = LinearStepModel((1.0, 0.0, 0.1, *[0.0] * 5, 0.01, 0.0))
"""A second, 0.1 s a token, and 0.01 s a pair of a prompt."""


def chunk(start: int, count: int, *, is_decode: bool) -> Any:
    sequence = SimpleNamespace(num_prompt_tokens=start if is_decode else start + count)
    return SimpleNamespace(start=start, num_tokens=count, is_last=is_decode, draft_ids=(), sequence=sequence)


DECODES = [chunk(7, 1, is_decode=True), chunk(9, 1, is_decode=True)]


@pytest.mark.parametrize("seconds", [1.0, 1.21, 1.7, 3.0, 9.0])
def test_the_most_tokens_within_the_time(seconds: float) -> None:
    limit = StepLimit(64, seconds, MODEL)
    found = limit.most(DECODES, 10, 40)
    for count in range(1, 41):
        within = MODEL.seconds(features_of([(7, 1), (9, 1), (10, count)])) <= seconds
        assert (count <= found) == within, count


def test_no_prompt_overtakes_one_that_did_not_fit() -> None:
    limit = StepLimit(64, 1.7, MODEL)
    assert limit.most(DECODES, 1000, 40) < 40
    assert limit.most(DECODES, 0, 3) == 3
    limit.is_full = True
    assert limit.most(DECODES, 0, 3) == 0
    limit.begin()
    assert limit.most(DECODES, 0, 3) == 3


def test_a_step_without_decodes_and_one_without_a_limit_have_all_tokens() -> None:
    assert StepLimit(64, 0.0, MODEL).most(DECODES, 10, 40) == 40
    assert StepLimit(64, 1.0, MODEL).most([chunk(0, 8, is_decode=False)], 10, 40) == 40


def test_prompts_that_wait_get_a_step_at_last() -> None:
    limit = StepLimit(64, 1.0, MODEL)
    for number in range(MOST_WITHOUT):
        assert limit.most(DECODES, 0, 40) == 0, number
        limit.planned(DECODES, has_prompts=True)
        limit.begin()
    assert limit.most(DECODES, 0, 40) == 40
    limit.planned([*DECODES, chunk(0, 40, is_decode=False)], has_prompts=True)
    assert limit.most(DECODES, 40, 40) == 0
    limit.planned(DECODES, has_prompts=False)
    assert limit.num_without == 0


def test_steps_of_decodes_save_time_for_one_with_a_prompt() -> None:
    """Decodes take 1.2 s of 1.5; a prompt of 8 tokens adds 1.16 s, which four steps have saved."""
    limit = StepLimit(64, 1.5, MODEL, most_saved_s=2.0)
    seen, took_s = [], []
    for _ in range(60):
        limit.begin()
        count = limit.most(DECODES, 0, 8)
        chunks = [*DECODES, *([chunk(0, count, is_decode=False)] if count else [])]
        limit.planned(chunks, has_prompts=True)
        seen.append(count)
        took_s.append(MODEL.seconds(features_of([(each.start, each.num_tokens) for each in chunks])))
    assert set(seen) > {0}
    assert all(count == 0 or count >= 4 for count in seen)  # no small parts of it
    for end in range(1, len(took_s) + 1):
        assert sum(took_s[:end]) <= 1.5 * end + 1e-9
    assert sum(took_s) > 1.5 * 60 - 2.0
    other = StepLimit(64, 1.5, MODEL, most_saved_s=0.1)
    limit.saved_s = 1.0
    other.go_on(limit)
    assert other.saved_s == 0.1


@pytest.mark.parametrize("kinds", [CACHE_KINDS, STATE_KINDS], ids=["pages", "states"])
def test_every_request_ends_whatever_the_limit(kinds: Any) -> None:
    """Random requests in a near full pool, with limits that change; every invariant is checked after each step."""
    num_limited = 0
    for seed in range(200):
        rng = random.Random(seed)
        driver = Driver(rng, random_limits(rng, cache_kinds=kinds[seed % len(kinds)]), overlaps=rng.random() < 0.5)
        scheduler = driver.scheduler
        add_random_request(driver, rng)

        def arrive(driver: Driver = driver, rng: random.Random = rng) -> None:
            nonlocal num_limited
            if rng.random() < 0.2:
                most = rng.randrange(driver.limits.max_num_seqs, driver.limits.max_num_batched_tokens + 2)
                driver.scheduler.limit_steps(
                    StepLimit(most, rng.choice([0.0, 0.5, 1.3, 2.0]), MODEL, rng.choice([0.0, 5.0]))
                )
                num_limited += 1
            sometimes_add(driver, rng, 6)

        driver.arrivals = arrive  # type: ignore[method-assign]
        driver.drain()
        assert not scheduler.has_work
    assert num_limited > 500
