"""Commands of `xserv bench`, run in this process."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from typer.testing import CliRunner

from runtime.cli import app


def bench(*arguments: str, status: int = 0) -> dict[str, Any]:
    """The report of a benchmark, whose numbers are all finite."""
    result = CliRunner().invoke(app, ["bench", *arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == status, result.stderr
    report: dict[str, Any] = json.loads(result.stdout)
    assert all(math.isfinite(number) for number in numbers(report))
    return report


def numbers(value: Any) -> Iterator[float]:
    """The numbers in lists and objects, however deep."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, (int, float)):
        yield value
