"""`bench kernels --device cpu`: numbers that follow from its own, and no time for a wrong result."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from runtime.backends.cpu_threads import num_workers
from runtime.bench import cpu_rates
from runtime.bench.kernels import cpu_adapters, cpu_latent, cpu_states
from runtime.bench.metrics import BenchmarkError

ADAPTERS: dict[str, Any] = {
    "maps": (((48, 16), 64), ((64,), 64)), "layers": dict.fromkeys(cpu_adapters.FORMATS, 1), "num_runs": 2,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "heads": (4,), "shapes": ((1, 40), (2, 300)), "num_runs": 2, "read_buffer_bytes": 1 << 22,
}  # fmt: skip
STATES: dict[str, Any] = {
    "heads": ((1, 2),), "sequences": (1, 3), "num_runs": 2, "state_bytes": 1, "read_buffer_bytes": 1 << 22,
}  # fmt: skip


def test_costs_are_those_beside_no_adapter() -> None:
    before = num_workers()
    report = cpu_adapters.bench_adapters(**ADAPTERS)
    assert num_workers() == before
    rows = {(row["format"], row["sequences"], row["adapters"]): row for row in report["rows"]}
    assert len(rows) == 3 * 5
    for (format, sequences, adapters), row in rows.items():
        base = rows[format, sequences, 0]
        assert row["more"] == pytest.approx(row["seconds"] / base["seconds"] - 1)
        assert row["bytes_share"] == pytest.approx(adapters * rows[format, 1, 1]["bytes_share"])
        assert (row["error"] > 0) == (adapters > 0)
    assert len(cpu_adapters.as_lines(report)) == 2 + len(rows)


def test_the_share_is_that_of_the_longer_of_reading_and_multiplying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_rates, "LOOP_S", 1e-3)
    before = num_workers()
    report = cpu_latent.bench_latent(**LATENT)
    assert num_workers() == before
    shapes = [(row["dtype"], row["sequences"], row["tokens"]) for row in report["rows"]]
    assert shapes == [(dtype, *shape) for dtype in ("bfloat16", "float32") for shape in LATENT["shapes"]]
    for row in report["rows"]:
        rows = row["sequences"] * row["tokens"]
        least = max(
            rows * 576 * (2 if row["dtype"] == "bfloat16" else 4) / row["read_limit"],
            rows * 2 * 4 * 1088 / row["operations_limit"],
        )
        assert row["share"] == pytest.approx(least / row["seconds"])
    assert len(cpu_latent.as_lines(report)) == 2 + len(report["rows"])


def test_the_share_is_that_of_the_bytes_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_rates, "LOOP_S", 1e-3)
    before = num_workers()
    report = cpu_states.bench_states(**STATES)
    assert num_workers() == before
    assert [row["sequences"] for row in report["rows"]] == [1, 3]
    for row in report["rows"]:
        assert row["bytes"] == row["sequences"] * 2 * 2 * 128 * 128 * 4
        assert row["share"] == pytest.approx(row["bytes"] / row["scan_seconds"] / row["read_limit"])
    assert len(cpu_states.as_lines(report)) == 2 + len(report["rows"])


@pytest.mark.parametrize(
    ("module", "recorded", "bench", "sizes", "words"),
    [
        (cpu_adapters, "Layers", "bench_adapters", ADAPTERS, "bfloat16, 1 rows"),
        (cpu_latent, "Case", "bench_latent", LATENT, "bfloat16, 4 heads, 1 x 40"),
        (cpu_states, "Case", "bench_states", STATES, "1 key and 2 value heads, 1 sequences"),
    ],
)
def test_a_wrong_result_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, recorded: str, bench: str, sizes: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(getattr(module, recorded), "recording", None)
    monkeypatch.setattr(module.Tensor, "numpy", lambda self: np.full(self.shape, np.nan, np.float32))
    with pytest.raises(BenchmarkError, match=f"{words}: off by nan of the largest"):
        getattr(module, bench)(**sizes)
