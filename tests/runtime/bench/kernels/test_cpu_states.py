"""`bench kernels --device cpu --parts states`: shares that follow from its own numbers, and no time for a wrong
result."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from runtime.backends.cpu_threads import num_workers
from runtime.bench import cpu_rates
from runtime.bench.kernels import cpu_states
from runtime.bench.metrics import BenchmarkError

TINY: dict[str, Any] = {
    "heads": ((1, 2),), "sequences": (1, 3), "num_runs": 2, "state_bytes": 1, "read_buffer_bytes": 1 << 22,
}  # fmt: skip


def test_the_share_is_that_of_the_bytes_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_rates, "LOOP_S", 1e-3)
    before = num_workers()
    report = cpu_states.bench_states(**TINY)
    assert num_workers() == before
    assert [row["sequences"] for row in report["rows"]] == [1, 3]
    for row in report["rows"]:
        assert row["bytes"] == row["sequences"] * 2 * 2 * 128 * 128 * 4
        assert row["share"] == pytest.approx(row["bytes"] / row["scan_seconds"] / row["read_limit"])
    assert len(cpu_states.as_lines(report)) == 2 + len(report["rows"])


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_states.Case, "recording", None)
    monkeypatch.setattr(cpu_states.Tensor, "numpy", lambda self: np.full(self.shape, np.nan, np.float32))
    with pytest.raises(BenchmarkError, match="1 key and 2 value heads, 1 sequences: off by nan of the largest"):
        cpu_states.bench_states(**TINY)
