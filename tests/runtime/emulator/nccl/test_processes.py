"""The emulated NCCL between processes: numbers, and a rank that differs or cannot come, found within a second."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from runtime.emulator.nccl.board import new_unique_id

pytestmark = pytest.mark.emulator


def run(scenario: str) -> list[str]:
    """What each rank printed."""
    unique_id, descriptor = new_unique_id()
    try:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.runtime.emulator.nccl.nccl_rank", scenario, unique_id.hex(), rank],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in ("0", "1")
        ]  # fmt: skip
        said = [process.communicate(timeout=300) for process in processes]
    finally:
        os.close(descriptor)
    for process, (_, errors) in zip(processes, said):
        assert process.returncode == 0, errors
    return [out.strip() for out, _ in said]


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        ("ends", "rank 0 called ncclAllReduce of 600,000 float32 source at 0 of window 0"),
        pytest.param("aborts", "rank 1 has aborted the communicator, its last call", marks=pytest.mark.exhaustive),
        pytest.param("differs", "rank 1 called ncclAllReduce of 599,999 float32", marks=pytest.mark.exhaustive),
    ],
)
def test_what_keeps_a_rank_from_coming_is_named(scenario: str, words: str) -> None:
    said = run(scenario)
    assert words in said[0]
    if scenario == "ends":
        assert "rank 1 has ended (process " in said[0]
    assert "at nccl/nccl_rank.py:" in said[0]
    assert float(said[0].split()[0]) < 30  # under a second where the machine is not busy
    assert scenario != "differs" or words in said[1]
