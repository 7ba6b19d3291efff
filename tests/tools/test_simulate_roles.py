"""`tools.simulate_roles`: its commands are the ones `bench roles` takes, and it counts what its parts say."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.commands.running import invoke
from tools import simulate_roles
from tools.simulate_roles import TRACES, collected, held_out, runs


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


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    folder = tmp_path / "traces"
    folder.mkdir()
    for name in TRACES.values():
        (folder / name).write_text(name, encoding="utf-8")
    return folder


def test_parts_are_collected(tmp_path: Path, traces: Path) -> None:
    first, second = list(runs())[:2]
    for run, own in ((first, 0.98), (second, 0.9612345)):
        write(tmp_path / run.name, [cell([own, 1.0], [1.0, 1.0]), cell([0.0, 0.0], [0.0, 0.0])])
    report = collected(tmp_path, traces)
    assert report["all_windows"]["num_cells"] == 2
    assert report["all_windows"]["num_within_3_percent"] == 1
    assert report["all_windows"]["smallest_auto_of_better"] == 0.9612
    assert report["held_out_windows"]["num_within_3_percent"] == 2
    assert report["cells_that_nothing_serves"] == 2
    assert len(report["not_run"]) == 84 - 2
    assert report["not_run"][:2] == ["qwen3-8b, conv, 2 engines, 0.5/0.015", "qwen3-8b, conv, 2 engines, 1/0.05"]
    digest = hashlib.sha256(TRACES["code"].encode()).hexdigest()
    assert report["traces"][TRACES["code"]]["sha256"] == digest


def test_collecting_again_keeps_the_notes(tmp_path: Path, traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.json"
    write(tmp_path / next(runs()).name, [cell([1.0, 1.0], [1.0, 1.0])])
    for more in (["--note", "seen"], [], ["--note", "and again"]):
        words = ["simulate_roles", str(traces), str(tmp_path), str(out), "--collect", *more]
        monkeypatch.setattr(sys, "argv", words)
        simulate_roles.main()
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["notes"] == ["seen", "and again"]
    assert report["date"] == "2026-11-30"


def write(part: Path, cells: list[dict[str, Any]]) -> None:
    environment = {"date": "2026-11-30T12:00:00+00:00"}
    part.write_text(json.dumps({"cells": cells, "environment": environment}), encoding="utf-8")
