"""`bench nccl`: each way on emulated ranks, after its numbers were compared."""

from __future__ import annotations

import pytest

from runtime.bench.collectives import as_lines, bench_collectives
from runtime.errors import InvalidArgumentError

pytestmark = pytest.mark.emulator


@pytest.mark.exhaustive
def test_each_collective_in_each_way() -> None:
    report = bench_collectives("emulated:sm_90a", num_ranks=2, sizes=(1024, 1 << 21), num_calls=2, num_rounds=1)
    rows = [(row["collective"], row["bytes"], row["way"]) for row in report["results"]]
    assert len(set(rows)) == len(rows) == 4 * (3 + 2)
    assert all(row["us"] > 0 for row in report["results"])
    lines = as_lines(report)
    assert "times say nothing" in lines[0]
    assert len(lines) == 2 + len(rows)


def test_what_cannot_be_measured_is_refused() -> None:
    for settings, words in (
        ({"device": "cpu", "num_ranks": 2}, "device is 'cpu'"),
        ({"device": "emulated", "num_ranks": 1}, "num_ranks is 1, must be at least 2"),
        ({"device": "emulated", "num_ranks": 2, "sizes": (40,)}, "a size is 40 bytes, must be a multiple of 16"),
        ({"device": "emulated", "num_ranks": 2, "collectives": ("gather",)}, "'gather' is none of all_reduce"),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            bench_collectives(**settings)  # type: ignore[arg-type]
