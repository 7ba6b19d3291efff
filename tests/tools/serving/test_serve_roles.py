"""`tools.serving.serve_roles`: goodput from the shares of requests that kept their targets at some rates."""

from __future__ import annotations

from typing import Any

import pytest

from tools.serving.serve_roles import goodput


def runs(points: list[tuple[float, float]]) -> list[dict[str, Any]]:
    return [{"variant": "auto", "rate": rate, "measured": {"attainment": share}} for rate, share in points]


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(4.0, 1.0), (6.0, 0.8)], 5.0),
        ([(6.0, 0.8), (4.0, 1.0)], 5.0),
        ([(4.0, 1.0), (6.0, 0.7), (6.0, 0.9)], 5.0),  # the mean of two runs
        ([(2.0, 1.0), (4.0, 0.85), (5.0, 0.91), (6.0, 0.8)], 3.667),  # 0.88 at 4 and 5
        ([(2.0, 1.0), (4.0, 0.93), (5.0, 0.95), (6.0, 0.86)], 5.5),
        ([(4.0, 0.8), (6.0, 0.7)], None),
        ([(4.0, 1.0), (6.0, 0.9)], None),
        ([(4.0, float("nan")), (6.0, 0.9)], None),
    ],
)
def test_goodput_is_between_the_rates_that_were_run(points: list[tuple[float, float]], expected: float | None) -> None:
    assert goodput([*runs(points), {"variant": "512", "rate": 4.0}], "auto", "measured") == expected
