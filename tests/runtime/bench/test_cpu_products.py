"""`bench products`: rates that follow from its own numbers, and no time for a wrong product."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from runtime.bench import cpu_products
from runtime.bench.cpu_products import as_lines, bench_products
from runtime.bench.metrics import BenchmarkError
from runtime.bench.peers import cpu_limits

TINY: dict[str, Any] = {"rows": (1, 9), "width": 96, "depth": 256, "num_rounds": 3, "working_set_bytes": 1 << 18}


@pytest.fixture(autouse=True)
def short_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor's limits are measured in milliseconds, not in a second of all cores."""
    monkeypatch.setattr(cpu_limits, "WARM_UP_S", 1e-3)
    monkeypatch.setattr(
        cpu_products, "open_meter", partial(cpu_limits.open_meter, read_buffer_bytes=1 << 22, loop_s=1e-3)
    )


def test_rates_of_each_format_and_number_of_rows() -> None:
    report = bench_products(("float32", "Q4_0"), **TINY)
    found = [(row["format"], row["rows"]) for row in report["results"]]
    assert found == [("float32", 1), ("Q4_0", 1), ("float32", 9), ("Q4_0", 9)]
    for row in report["results"]:
        assert 0 < row["best_s"] <= row["median_s"]
        assert row["ops_per_s"] == pytest.approx(2 * row["rows"] * 96 * 256 / row["median_s"])
        assert row["bytes_per_s"] == pytest.approx(row["weight_bytes"] / row["median_s"], rel=1e-2)
    [arranging] = report["arranging"]
    assert arranging["format"] == "Q4_0"
    assert arranging["median_s"] > 0
    assert arranging["copy_median_s"] > 0
    assert len(as_lines(report)) == 9


def test_a_wrong_product_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_products, "_recorded", None)
    monkeypatch.setattr(cpu_products.Tensor, "numpy", lambda self: np.full(self.shape, np.nan, np.float32))
    with pytest.raises(BenchmarkError, match="float32, 1 rows: off by nan of the largest"):
        bench_products(("float32",), **TINY)


def test_an_unknown_format() -> None:
    with pytest.raises(BenchmarkError, match="--formats 'int3' is none of float32, bfloat16, int8, fp8"):
        bench_products(("int3",), **TINY)
