"""Collectives of ranks that are processes: right, and named where ranks do not do the same, instead of waiting."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from runtime.shared_communicator import shared_file


def run(scenario: str, num_ranks: int = 2) -> list[str]:
    """What each rank printed."""
    memory = shared_file(num_ranks)
    environment, module = {**os.environ, "NUMBA_NUM_THREADS": "1"}, "tests.runtime.rank_scenarios"
    try:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", module, scenario, str(memory), str(rank), str(num_ranks)],
                pass_fds=(memory,), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(num_ranks)
        ]  # fmt: skip
        said = [process.communicate(timeout=120) for process in processes]
    finally:
        os.close(memory)
    for process, (_, errors) in zip(processes, said):
        assert process.returncode == 0, errors
    return [out.strip() for out, _ in said]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sums_and_gathers(num_ranks: int) -> None:
    assert run("sums_and_gathers", num_ranks) == [""] * num_ranks


@pytest.mark.parametrize(
    ("scenario", "calls"),
    [
        ("other_collective", ["rank 0 called all_reduce of 64 bytes at ", "rank 1 called all_gather of 64 bytes at "]),
        ("other_count", ["rank 0 called all_reduce of 64 bytes at ", "rank 1 called all_reduce of 68 bytes at "]),
        ("swapped", ["rank 0 called all_gather_columns of 64 bytes", "rank 1 called all_reduce of 64 bytes at "]),
        ("one_fewer", ["rank 0 called all_reduce of 64 bytes at ", "rank 1 called end of step 7"]),
    ],
)
def test_a_mistake_is_named_on_every_rank(scenario: str, calls: list[str]) -> None:
    for said in run(scenario):
        assert "ranks do not do the same" in said
        assert all(call in said for call in calls), said
        assert said.count(" at runtime/rank_scenarios.py:") == sum(" of step " not in call for call in calls), said


def test_a_type_that_ranks_do_not_add_is_refused() -> None:
    assert all("all_reduce of bfloat16" in said for said in run("wrong_type"))


def test_a_rank_that_gives_up_is_not_waited_for() -> None:
    begun = time.monotonic()
    first, second = run("gives_up")
    assert "rank 1 failed: no more paper" in first
    assert second == ""
    assert time.monotonic() - begun < 60
