"""Half a minute of the soak: mixed traffic on a whole server, every answer checked, nothing held afterwards."""

from __future__ import annotations

from tools.soak import soak


def test_half_a_minute() -> None:
    record = soak(0.5, clients=6, report=lambda line: None)
    assert record["failures"] == [], record
    assert record["num_requests"] > 20
    assert record["completion_tokens"] > 100
    assert len(record["requests"]) >= 10
