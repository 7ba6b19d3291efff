"""The inventory reads metrics as a server shows them."""

from __future__ import annotations

from tools import inventory


def test_metrics_have_their_labels() -> None:
    assert inventory.metrics()["counter xserv:prefix_cache_missed"] == ["engine", "model_name", "reason"]
