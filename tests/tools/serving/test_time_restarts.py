"""The times of restarts are those of prompts that were read back."""

from __future__ import annotations

from pathlib import Path

import models
from tools.serving.time_restarts import measure


def test_a_restart_reads_the_prompt_back() -> None:
    found = measure(Path(models.__file__).parent / "demo", 300, 1, 0.0)
    times = found["medians"]
    assert times["cold"]["num_cached_tokens"] < 16
    assert 280 <= times["restored"]["num_cached_tokens"] <= times["warm"]["num_cached_tokens"] <= 320
    assert min(found["restored_over_warm"].values()) > 0
