"""How prompts are cut."""

from __future__ import annotations

import pytest

from runtime.engine.scheduling.chunking import StagedChunks
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
