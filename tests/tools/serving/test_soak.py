"""The soak for a moment: mixed traffic on a whole server, every answer checked, nothing held afterwards."""

from __future__ import annotations

import pytest

from tools.serving.soak import soak


@pytest.mark.parametrize(
    ("minutes", "requests", "tokens", "samples"),
    [(0.1, 6, 30, 4), pytest.param(1.0, 30, 100, 10, marks=pytest.mark.exhaustive)],
)
@pytest.mark.exhaustive
def test_traffic(minutes: float, requests: int, tokens: int, samples: int) -> None:
    record = soak(minutes, clients=6, report=lambda line: None)
    assert record["failures"] == [], record
    assert record["num_requests"] > requests
    assert record["completion_tokens"] > tokens
    assert len(record["requests"]) >= samples
