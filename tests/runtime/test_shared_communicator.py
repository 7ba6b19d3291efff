"""Collectives of ranks that are processes: right, and named where ranks do not do the same, instead of waiting."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runtime.shared_communicator import shared_file


def run(scenario: str, num_ranks: int = 2, num_stages: int = 1, folder: Path | None = None) -> list[str]:
    """What each rank of each stage printed."""
    memory = shared_file(num_ranks, num_stages)
    environment, module = {**os.environ, "NUMBA_NUM_THREADS": "1"}, "tests.runtime.rank_scenarios"
    environment["XSERV_TEST_FOLDER"] = str(folder)
    try:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", module, scenario, *map(str, (memory, rank, num_ranks, num_stages))],
                pass_fds=(memory,), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(num_ranks * num_stages)
        ]  # fmt: skip
        said = [process.communicate(timeout=120) for process in processes]
    finally:
        os.close(memory)
    for process, (_, errors) in zip(processes, said):
        assert process.returncode == 0, errors
    return [out.strip() for out, _ in said]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.exhaustive_cases("3")
def test_sums_and_gathers(num_ranks: int) -> None:
    assert run("sums_and_gathers", num_ranks) == [""] * num_ranks


@pytest.mark.parametrize(
    ("scenario", "calls"),
    [
        ("other_collective", ["rank 0 called all_reduce of 64 bytes at ", "rank 1 called all_gather of 64 bytes at "]),
        ("other_count", ["rank 0 called all_reduce of 64 bytes at ", "rank 1 called all_reduce of 68 bytes at "]),
        ("swapped", ["rank 0 called all_gather_columns of 64 bytes", "rank 1 called all_reduce of 64 bytes at "]),
        ("one_fewer", ["rank 0 called all_reduce of 64 bytes at ", "rank 1 called end of step 7 as its collective 1"]),
        ("other_end", ["rank 0 called end of step 4 as its collective 4", "rank 1 called end of step 5 as its coll"]),
    ],
)
@pytest.mark.exhaustive_cases("one_fewer", "other_count", "swapped")
def test_a_mistake_is_named_on_every_rank(scenario: str, calls: list[str]) -> None:
    for said in run(scenario):
        assert "ranks do not do the same" in said
        assert all(call in said for call in calls), said
        assert said.count(" at runtime/rank_scenarios.py:") == sum(" of step " not in call for call in calls), said


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.exhaustive_cases("3")
def test_a_rank_ends_steps_before_the_others_do_up_to_a_bound(num_ranks: int, tmp_path: Path) -> None:
    assert run("ahead", num_ranks, folder=tmp_path) == [""] * num_ranks


def test_a_type_that_ranks_do_not_add_is_refused() -> None:
    assert all("all_reduce of bfloat16" in said for said in run("wrong_type"))


def test_a_rank_that_gives_up_is_not_waited_for() -> None:
    begun = time.monotonic()
    first, second = run("gives_up")
    assert "rank 1 failed: no more paper" in first
    assert second == ""
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize(
    ("num_ranks", "num_stages"),
    [(1, 2), *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in [(1, 4), (2, 3)])],
)
def test_what_stages_hand_over(num_ranks: int, num_stages: int) -> None:
    assert run("hands_over", num_ranks, num_stages) == [""] * (num_ranks * num_stages)


@pytest.mark.parametrize(
    ("scenario", "call"),
    [
        ("other_size", "rank 1 called receive of 68 bytes of step 3 at runtime/rank_scenarios.py:"),
        pytest.param(
            "other_step",
            "rank 1 called receive of 64 bytes of step 8 at runtime/rank_scenarios.py:",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_stages_that_do_not_do_the_same_are_named(scenario: str, call: str) -> None:
    first, second = run(scenario, 1, 2)
    assert first == ""  # it has handed over, and goes on
    assert call in second
    sent = "64 bytes of step 3" if scenario == "other_size" else "64 bytes of step 7"
    assert f"but was sent {sent}" in second


@pytest.mark.exhaustive
def test_a_stage_that_gives_up_is_not_waited_for() -> None:
    first, second = run("sender_gives_up", 1, 2)
    assert first == ""
    assert "rank 0 failed: no more paper" in second
