"""Pages of layers with a window: when they are taken and given up, and what prefixes can still be found."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.engine.errors import InvariantError
from runtime.engine.scheduling.sequence import Sequence
from runtime.kv.groups import NO_BLOCK
from runtime.kv.kinds import FULL, Window
from tests.runtime.engine.scheduler_cases import add, chunks_of, first_chunk, make_driver, run

PROMPT = [(3 * position) % 4 for position in range(40)]


def held(sequence: Sequence) -> list[int]:
    """Pages that it holds, by group."""
    return [len(ids) - first for ids, first in zip(sequence.blocks, sequence.first_pages)]


def test_a_prompt_holds_a_window_and_a_chunk_then_a_window() -> None:
    """Blocks of 4 tokens, chunks of 16, a window of 8."""
    driver = make_driver(cache_kinds=(FULL, Window(8)))
    sequence = add(driver, 64, max_tokens=30)
    seen = []
    for _ in range(4):
        step = driver.scheduler.schedule()
        seen.append(held(sequence))
        driver._end_step(driver._begin(step))
    assert seen == [[16, 4], [16, 4 + 2], [16, 4 + 2], [16, 4 + 2]]
    assert sequence.blocks[1][:14] == [NO_BLOCK] * 14
    while len(sequence.output_ids) < 20:
        driver.step()
        assert held(sequence)[0] == -(-sequence.num_computed // 4)
        assert held(sequence)[1] <= 8 // 4 + 1
    driver.drain()


def test_all_layers_may_have_a_window() -> None:
    driver = make_driver(cache_kinds=(Window(8),), num_blocks=7, max_model_len=400)
    sequence = add(driver, 300, max_tokens=90)
    while not sequence.is_finished:
        (step,) = run(driver)
        assert step.num_tokens > 0
        assert driver.pool.num_free >= 0
    assert sequence.num_output_tokens == 90


def test_pages_are_given_up_when_a_step_is_committed_not_when_it_is_planned() -> None:
    """What a step that runs has drawn may be taken back."""
    driver = make_driver(cache_kinds=(Window(8),))
    sequence = add(driver, 16, max_tokens=30)
    first = driver.scheduler.schedule()
    second = driver.scheduler.schedule()
    assert sequence.num_computed == 17
    assert sequence.first_pages == [0]
    driver.scheduler.commit(first)
    assert sequence.first_pages == [(16 - 8 + 1) // 4]
    sequence.append(0)
    driver.scheduler.commit(second)
    assert sequence.first_pages == [(17 - 8 + 1) // 4]


def test_a_window_needs_only_its_last_pages_of_a_prefix() -> None:
    """The pages behind the window have been given up and taken by others."""
    driver = make_driver(cache_kinds=(FULL, Window(8)), num_blocks=20, max_model_len=40)
    assert first_chunk(driver, PROMPT[:36]) == (0, 16)
    pool = driver.pool
    taken = pool.allocate(pool.num_free - (9 + 3))  # the first pages in the window go, oldest first
    pool.release(taken)
    assert first_chunk(driver, [*PROMPT[:36], 0, 1])[0] >= 36
    assert first_chunk(driver, [*PROMPT[:16], 3, 3, 3, 3])[0] < 16, "no window before token 16 is left"


def test_a_prefix_that_one_group_lost_is_computed_again() -> None:
    driver = make_driver(cache_kinds=(FULL, Window(8)))
    assert first_chunk(driver, PROMPT[:12]) == (0, 12)
    hit = driver.pool.find(np.array(PROMPT[:12], np.int32), None)
    assert hit.num_tokens == 12
    lost = hit.blocks[1][2]
    assert lost is not None
    node = driver.pool._nodes[lost]
    assert node is not None
    driver.pool._parts[0].idle.discard(node)
    driver.pool._clear(lost)
    assert driver.pool.find(np.array(PROMPT[:12], np.int32), None).num_tokens == 8


@pytest.mark.parametrize("overlaps", [False, True])
def test_swapped_pages_are_those_in_the_window(overlaps: bool) -> None:
    driver = make_driver(
        cache_kinds=(FULL, Window(4), Window(4)), num_blocks=24, max_model_len=32, num_host_blocks=40,
        preemption="swap", overlaps=overlaps,
    )  # fmt: skip
    sequences = [add(driver, 4, max_tokens=24) for _ in range(3)]
    while not driver.scheduler.num_swaps:
        driver.step()
    (victim,) = [sequence for sequence in sequences if sequence.host_slots]
    num_pages = -(-victim.num_computed // 4)
    assert num_pages > 3
    assert [len(slots) for slots in victim.host_slots] == [num_pages - first for first in victim.first_pages]
    assert max(len(slots) for slots in victim.host_slots[1:]) <= 2
    driver.drain()
    assert driver.outcome.finished == 3


def test_a_first_chunk_takes_what_there_is() -> None:
    """A pool for one sequence and the least chunk."""
    driver = make_driver(cache_kinds=(FULL, Window(8)), num_blocks=10 + 3 + 1, max_model_len=40)
    request = driver.add(PROMPT[:39], max_tokens=1)
    assert request is not None
    steps = run(driver, 3)
    assert [chunks_of(step) for step in steps] == [[(0, 0, 16)], [(0, 16, 8)], [(0, 24, 8)]]
    driver.drain()


def test_every_step_finds_a_page_that_was_given_up_too_early() -> None:
    driver = make_driver(cache_kinds=(Window(8),))
    sequence = add(driver, 16, max_tokens=30)
    run(driver)
    driver.pool.release(sequence.blocks[0][2:3])
    sequence.blocks[0][2] = NO_BLOCK
    sequence.first_pages = [3]
    with pytest.raises(InvariantError, match="to read page 2 before token 16, but has given up 3 pages"):
        driver.scheduler.schedule()


def test_the_map_tells_blocks_in_windows() -> None:
    driver = make_driver(cache_kinds=(FULL, Window(8)), num_blocks=16)
    add(driver, 12, max_tokens=9)
    run(driver)
    assert driver.pool.run_lengths() == "3u1c2w10f"
