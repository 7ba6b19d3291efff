"""Two checkouts in turns: here this one beside itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from runtime.bench.metrics import BenchmarkError
from runtime.bench.peers.workloads import Workload
from tools.comparing.compare_checkouts import TINY, Case, compare, table

PYTHONS = {"before": Path(sys.executable), "after": Path(sys.executable)}


@pytest.mark.exhaustive
def test_each_workload_is_measured_on_both_sides() -> None:
    kinds = {"decode": (2, 5, 4), "prefill": (1, 20, 1), "burst": (3, 4, 3)}
    workloads = tuple(Workload(kind, kind, *numbers, kind) for kind, numbers in kinds.items())
    rows = compare(PYTHONS, (Case("tiny", TINY, "float32", workloads),), num_rounds=2)
    assert [(row["workload"], row["unit"]) for row in rows] == [
        (kind, unit) for kind in kinds for unit in ("tokens/s", "processor ms")
    ]
    for row in rows:
        assert row["has_same_tokens"]
        assert {side: len(rates) for side, rates in row["rounds"].items()} == {"before": 2, "after": 2}
        assert all(rate > 0 for rates in row["rounds"].values() for rate in rates)
        best = max if row["unit"] == "tokens/s" else min
        assert row["bests"]["after"] == best(row["rounds"]["after"])
        assert row["ratio_of_bests"] == row["bests"]["after"] / row["bests"]["before"]
    assert len(table(rows).splitlines()) == 2 + len(rows)


@pytest.mark.exhaustive
def test_a_side_that_fails_is_named() -> None:
    longer = (Workload("x", "x", 1, TINY.max_positions, 2, "decode"),)
    with pytest.raises(BenchmarkError, match="after failed at 'run'"):
        compare(PYTHONS, (Case("tiny", TINY, "float32", longer),), num_rounds=1)
