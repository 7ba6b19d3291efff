"""A quarter of a minute of the soak: mixed traffic on a whole server, every answer checked, nothing held afterwards."""

from __future__ import annotations

from tools.soak import soak


def test_a_quarter_of_a_minute() -> None:
    record = soak(0.25, clients=6, report=lambda line: None)
    assert record["failures"] == [], record
    assert record["num_requests"] > 10
    assert record["completion_tokens"] > 50
    assert len(record["requests"]) >= 8
