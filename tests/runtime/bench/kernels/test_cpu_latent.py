"""`bench kernels --device cpu`: shares that follow from its own numbers, and no time for a wrong result."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from runtime.backends.cpu_threads import num_workers
from runtime.bench import cpu_rates
from runtime.bench.kernels import cpu_latent
from runtime.bench.metrics import BenchmarkError

TINY: dict[str, Any] = {
    "heads": (4,), "shapes": ((1, 40), (2, 300)), "num_runs": 2, "read_buffer_bytes": 1 << 22,
}  # fmt: skip


def test_the_share_is_that_of_the_longer_of_reading_and_multiplying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_rates, "LOOP_S", 1e-3)
    before = num_workers()
    report = cpu_latent.bench_latent(**TINY)
    assert num_workers() == before
    shapes = [(row["dtype"], row["sequences"], row["tokens"]) for row in report["rows"]]
    assert shapes == [(dtype, *shape) for dtype in ("bfloat16", "float32") for shape in TINY["shapes"]]
    for row in report["rows"]:
        rows = row["sequences"] * row["tokens"]
        least = max(
            rows * 576 * (2 if row["dtype"] == "bfloat16" else 4) / row["read_limit"],
            rows * 2 * 4 * 1088 / row["operations_limit"],
        )
        assert row["share"] == pytest.approx(least / row["seconds"])
    assert len(cpu_latent.as_lines(report)) == 2 + len(report["rows"])


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_latent.Case, "recording", None)
    monkeypatch.setattr(cpu_latent.Tensor, "numpy", lambda self: np.full(self.shape, np.nan, np.float32))
    with pytest.raises(BenchmarkError, match="bfloat16, 4 heads, 1 x 40: off by nan of the largest"):
        cpu_latent.bench_latent(**TINY)
