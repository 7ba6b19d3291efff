"""How prompts are cut."""

from __future__ import annotations

import random

import pytest

from runtime.engine.config import SchedulingConfig
from runtime.engine.scheduling.chunking import EqualChunks, FixedChunks, PromptTimes, StagedChunks, chunking_of
from tests.runtime.engine.scheduler_cases import add, chunks_of, make_driver, run


def test_a_fixed_chunk_leaves_room_for_others() -> None:
    driver = make_driver(prefill_chunk=6)
    add(driver, 15)
    add(driver, 9)
    steps = run(driver, 3)
    assert chunks_of(steps[0]) == [(0, 0, 6), (1, 0, 6)]
    assert chunks_of(steps[1]) == [(0, 6, 6), (1, 6, 3)]
    assert chunks_of(steps[2]) == [(1, 9, 1), (0, 12, 3)]


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        ((512, 128, 4, 4096), [512, 384, 256, 128]),
        ((512, 128, 3, 3000), [512, 320, 128]),
        ((256, 32, 4, 400), [256, 192, 128, 32]),
        ((64, 64, 2, 100), [64, 64]),
        ((96, 32, 1, 100), [96]),
    ],
)
def test_staged_sizes_are_multiples_of_32(arguments: tuple[int, int, int, int], sizes: list[int]) -> None:
    assert StagedChunks(*arguments).sizes == sizes


def test_staged_chunks_shrink_as_a_prompt_proceeds() -> None:
    driver = make_driver(
        prefill_chunk_stages=(128, 32, 4, 512), max_num_batched_tokens=1000, num_blocks=400, max_model_len=1600
    )
    add(driver, 600)
    add(driver, 20)
    steps = run(driver, 12)
    sizes = [count for step in steps for number, _, count in chunks_of(step) if number == 0 and count > 1]
    assert sizes == [128, 96, 96, 64, *[32] * 6, 24]
    assert chunks_of(steps[0])[1] == (1, 0, 20)


A, B, C = 3e-9, 2e-5, 4e-3


def seconds(num_computed: int, num_tokens: int) -> float:
    return C + B * num_tokens + A * (2 * num_computed * num_tokens + num_tokens**2)


def measured(noise: float, count: int = 200) -> PromptTimes:
    rng, times = random.Random(2), PromptTimes()
    for _ in range(count):
        start, size = rng.randrange(0, 30_000), rng.randrange(1, 512)
        taken = seconds(start, size) * rng.uniform(1 - noise, 1 + noise)
        times.observe(size, 2 * start * size + size**2, taken)
    return times


@pytest.mark.parametrize(("noise", "most_off"), [(0.0, 1e-4), (0.1, 0.1)])
def test_chunks_take_as_long_wherever_they_begin(noise: float, most_off: float) -> None:
    times = measured(noise)
    for start in (0, 500, 5_000, 50_000):
        size = times.as_long_as(512, start)
        assert seconds(start, size) == pytest.approx(seconds(0, 512), rel=most_off)


def test_what_cannot_be_told_changes_nothing() -> None:
    times = PromptTimes()
    assert times.as_long_as(256, 10_000) == 256.0
    for _ in range(100):
        times.observe(16, 300, 0.01)  # all alike
    assert times.as_long_as(256, 10_000) == 256.0
    assert measured(0.0, count=5).as_long_as(256, 10_000) == 256.0


def test_open_steps_share_the_budget_unless_chunks_are_configured() -> None:
    times = measured(0.0)
    chunks = chunking_of(SchedulingConfig(), 1024, 2, times)
    assert isinstance(chunks, EqualChunks)
    assert chunks.most(0) == 512
    sizes = [chunks.most(start) for start in range(0, 100_000, 1000)]
    assert sizes == sorted(sizes, reverse=True)
    assert all(size % 32 == 0 and 32 <= size <= 512 for size in sizes)
    assert sizes[-1] < 128
    assert chunking_of(SchedulingConfig(), 20, 4, times).most(0) == 20
    assert isinstance(chunking_of(SchedulingConfig(), 1024, 1, times), FixedChunks)
    assert chunking_of(SchedulingConfig(prefill_chunk=100), 1024, 2, times).most(5) == 100
    staged = chunking_of(SchedulingConfig(prefill_chunk_stages=(256, 64, 3, 100)), 1024, 2, times)
    assert isinstance(staged, StagedChunks)
