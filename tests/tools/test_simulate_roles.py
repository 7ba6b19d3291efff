"""`tools.simulate_roles`: its commands are the ones `bench roles` takes, and it counts what its parts say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.commands.running import invoke
from tools.simulate_roles import collected, held_out, runs


def cell(own: list[float], others: list[float]) -> dict[str, Any]:
    return {
        "engines": 2, "ttft_s": 0.25, "tpot_s": 0.0075,
        "first_requests": list(range(len(own))), "best": {"chunked": 1.0, "static": 2.0, "auto": 2.0},
        "in_windows": {"chunked": [9.0] * len(own), "static": others, "auto": own},
        "auto_of_better": own[0] / others[0] if others[0] else None,
    }  # fmt: skip


def test_every_run_is_a_command() -> None:
    every = list(runs())
    assert len(every) == len(set(every)) == 28
    status, text, _ = invoke("bench", "roles", "--help")
    assert status == 0
    for run in every:
        words = run.command(Path("traces"), Path("parts"), Path("before"))
        assert all(word in text for word in words if word.startswith("--"))
        assert words[words.index("--output-json") + 1] == str(Path("parts") / run.name)


def test_windows_after_the_first_half_are_held_out() -> None:
    assert held_out(cell([1.0, 1.0, 3.0, 12.0], [1.0, 1.0, 1.0, 1.0])) == pytest.approx(
        {"auto_of_better": 6.0, "standard_error": 6.0 * 0.6931}, rel=1e-3
    )
    assert held_out(cell([1.0], [1.0])) is None
    assert held_out(cell([1.0, 1.0], [1.0, 0.0])) is None


def test_parts_are_collected(tmp_path: Path) -> None:
    first, second = list(runs())[:2]
    for run, own in ((first, 0.98), (second, 0.9612345)):
        report = {"cells": [cell([own, 1.0], [1.0, 1.0]), cell([0.0, 0.0], [0.0, 0.0])], "environment": {"date": "d"}}
        (tmp_path / run.name).write_text(json.dumps(report), encoding="utf-8")
    report = collected(tmp_path)
    assert report["all_windows"]["num_cells"] == 2
    assert report["all_windows"]["num_within_3_percent"] == 1
    assert report["all_windows"]["smallest_auto_of_better"] == 0.9612
    assert report["held_out_windows"]["num_within_3_percent"] == 2
    assert report["cells_that_nothing_serves"] == 2
    assert len(report["not_run"]) == 84 - 2
    assert report["not_run"][:2] == ["qwen3-8b, conv, 2 engines, 0.5/0.015", "qwen3-8b, conv, 2 engines, 1/0.05"]
