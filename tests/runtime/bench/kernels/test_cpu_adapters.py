"""`bench kernels --device cpu --parts adapters`: its own numbers' ratios, and no time for a wrong result."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from runtime.backends.cpu_threads import num_workers
from runtime.bench.kernels import cpu_adapters
from runtime.bench.metrics import BenchmarkError

TINY: dict[str, Any] = {
    "maps": (((48, 16), 64), ((64,), 64)), "layers": dict.fromkeys(cpu_adapters.FORMATS, 1), "num_runs": 2,
}  # fmt: skip


def test_costs_are_those_beside_no_adapter() -> None:
    before = num_workers()
    report = cpu_adapters.bench_adapters(**TINY)
    assert num_workers() == before
    rows = {(row["format"], row["sequences"], row["adapters"]): row for row in report["rows"]}
    assert len(rows) == 3 * 5
    for (format, sequences, adapters), row in rows.items():
        base = rows[format, sequences, 0]
        assert row["more"] == pytest.approx(row["seconds"] / base["seconds"] - 1)
        assert row["bytes_share"] == pytest.approx(adapters * rows[format, 1, 1]["bytes_share"])
        assert (row["error"] > 0) == (adapters > 0)
    assert len(cpu_adapters.as_lines(report)) == 2 + len(rows)


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_adapters.Layers, "recording", None)
    monkeypatch.setattr(cpu_adapters.Tensor, "numpy", lambda self: np.full(self.shape, np.nan, np.float32))
    with pytest.raises(BenchmarkError, match="bfloat16, 1 rows: off by nan of the largest"):
        cpu_adapters.bench_adapters(**TINY)
