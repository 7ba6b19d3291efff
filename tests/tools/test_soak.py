"""A minute of the soak: mixed traffic on a whole server, every answer checked, nothing held afterwards."""

from __future__ import annotations

from tools.soak import soak


def test_a_minute() -> None:
    record = soak(1.0, clients=6, report=lambda line: None)
    assert record["failures"] == [], record
    assert record["num_requests"] > 30
    assert record["completion_tokens"] > 100
    assert len(record["requests"]) >= 10
