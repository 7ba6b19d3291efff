"""`bench products --rates`: a row of the table of measured processors."""

from __future__ import annotations

import pytest

from numba_kernels.cpu import target
from runtime.bench import cpu_rates


def test_a_row_has_the_rates_of_the_units_that_the_processor_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_rates, "LOOP_S", 1e-3)
    report = cpu_rates.bench_rates(3, read_buffer_bytes=1 << 22)
    assert report["tiles"] == target.TILES
    assert {"read", "float32"} <= set(report["rates"])
    assert ("bfloat16" in report["rates"]) == target.compiled_for("avx512bf16")
    for rate in report["rates"].values():
        assert 0 < rate["lowest"] <= rate["median"] <= rate["best"]
    head, _, row = cpu_rates.as_row(report).splitlines()
    assert head.count("|") == row.count("|")
    assert f"({report['processor']})" in row
    assert row.endswith(f"`{target.TILES}` |")
