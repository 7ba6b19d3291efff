"""`bench kernels` on an emulated device: all is verified and counted, wrong results stop it, no time is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from typer.testing import CliRunner

from runtime.bench.kernels import bench_kernels as kernels
from runtime.bench.kernels.bench_kernels import as_lines, bench_kernels, parts_named, roofline_svg, roofs
from runtime.bench.kernels.case import MOST_ROWS, prepare, sampled, verify
from runtime.bench.kernels.goals import GOALS, Goal
from runtime.bench.kernels.operations import attention_case, product_case
from runtime.bench.metrics import BenchmarkError
from runtime.cli import app
from runtime.device.gpu import Gpu

DEVICE = "emulated:sm_90a"


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return bench_kernels(DEVICE)


@pytest.mark.emulator
@pytest.mark.exhaustive
def test_every_part_is_verified_and_counted(report: dict[str, Any]) -> None:
    assert report["is_emulated"]
    assert {row["goal"] for row in report["rows"]} == {
        "gemm", "linear_1", "linear_few", "prefill", "decode", "state", "launch", "graph", "upload"
    }  # fmt: skip
    for row in report["rows"]:
        assert "value" not in row  # an emulated device's times are compared with nothing
        assert "verdict" not in row
        assert row["must"] == GOALS[row["goal"]].must
        if "counted" in row:
            assert 0 <= row["error_share"] <= 2e-2
            assert row["counted"]["moved_per_least_byte"] >= 0.99
            assert row["counted"]["warp_instructions"] > 0
            assert "times" not in row
    text = "\n".join(as_lines(report))
    assert "times mean nothing" in text
    assert report["cublas"] == "needs a GPU"


@pytest.mark.emulator
@pytest.mark.exhaustive
def test_the_roofline_has_a_point_for_each_case(report: dict[str, Any]) -> None:
    root = ElementTree.fromstring(roofline_svg(report, *roofs(report)))
    titles = [each.text or "" for each in root.iter() if each.tag.endswith("title")]
    for row in report["rows"]:
        assert any(row["shape"] in title for title in titles) == ("counted" in row)


@pytest.mark.emulator
def test_a_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = product_case("auto", 8, 16, 16, "bf16")
    gpu = Gpu.of(DEVICE)
    inputs, ready = prepare(gpu, case, 1)
    assert verify(gpu, case, ready)["error_share"] <= case.tolerance
    with pytest.raises(AssertionError, match="ours result is wrong"):
        verify(gpu, case, ready, lambda: None)  # the place holds NaN
    ready.expected[0, 0] += 1.0
    with pytest.raises(AssertionError, match="ours result is wrong"):
        verify(gpu, case, ready)
    monkeypatch.setattr(kernels, "cases", lambda is_quick: [("gemm", case)])
    monkeypatch.setattr(kernels, "prepare", lambda gpu, case, seed: (inputs, ready))
    with pytest.raises(AssertionError, match="ours result is wrong"):
        bench_kernels(DEVICE, parts=("gemm",))


def test_rows_of_large_results_are_sampled_from_first_to_last() -> None:
    assert sampled(3).tolist() == [0, 1, 2]
    rows = sampled(8192)
    assert len(rows) == MOST_ROWS
    assert (rows[0], rows[-1]) == (0, 8191)


@pytest.mark.emulator
def test_sampled_rows_of_attention_are_the_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    case = attention_case("flash", "bf16", 2, 5, 40, 4, 2, 64)
    gpu = Gpu.of(DEVICE)
    monkeypatch.setattr("runtime.bench.kernels.case.MOST_ROWS", 1000)
    _, whole = prepare(gpu, case, 3)
    monkeypatch.setattr("runtime.bench.kernels.case.MOST_ROWS", 7)
    _, part = prepare(gpu, case, 3)
    assert len(part.rows) == 7
    assert np.allclose(whole.expected[part.rows], part.expected, rtol=1e-4, atol=1e-5)
    assert verify(gpu, case, part)["error_share"] <= case.tolerance


@pytest.mark.parametrize(
    ("goal", "value", "verdict"),
    [
        ("gemm", 1.02, "ahead"), ("gemm", 0.9, "met"), ("gemm", 0.89, "missed"), ("gemm", float("nan"), "missed"),
        ("tpot", 3.9, "ahead"), ("tpot", 4.4, "met"), ("tpot", 4.5, "missed"), ("tpot", float("nan"), "missed"),
    ],
)  # fmt: skip
def test_verdicts(goal: str, value: float, verdict: str) -> None:
    found: Goal = GOALS[goal]
    assert found.verdict(value) == verdict


def test_the_page_shows_every_goal() -> None:
    page = (Path(__file__).parents[4] / "docs" / "kernels.md").read_text()
    for goal in GOALS.values():
        bound = f"{'≤' if goal.is_most else '≥'} {goal.must:g}"
        assert f"| {goal.work} | {goal.measure} | {bound} | {goal.ahead:g} |" in page, goal.name


def test_rates_become_shares_of_what_was_measured() -> None:
    rates = {"read": {"gb_per_s": 4000.0}, "copy": {"gb_per_s": 3000.0}, "host to device": {"gb_per_s": 50.0}}
    rows: list[dict[str, Any]] = [
        {"goal": "linear_1", "gb_per_s": 3600.0}, {"goal": "gemm", "share_of_cublas": 0.95}, {"goal": "gemm"},
        {"goal": "upload", "gb_per_s": 20.0}, {"goal": "launch", "value": 3.2},
        {"goal": "state", "gb_per_s": 2100.0},
    ]  # fmt: skip
    for row in rows:
        kernels._judge(row, rates)
    assert [row.get("value") for row in rows] == [0.9, 0.95, None, 0.4, 3.2, 0.7]
    assert [row.get("verdict") for row in rows] == ["met", "met", None, "missed", "met", "met"]


def test_parts_are_named() -> None:
    assert parts_named("gemm, graph") == ("gemm", "graph")
    with pytest.raises(BenchmarkError, match="'gem' is none of gemm, linear"):
        parts_named("gem")


@pytest.mark.emulator
def test_the_command(tmp_path: Path) -> None:
    files = [tmp_path / "report.json", tmp_path / "roofline.svg"]
    options = ["--parts", "gemm", "--output-json", str(files[0]), "--plot", str(files[1])]
    done = CliRunner().invoke(app, ["bench", "kernels", "--device", DEVICE, *options])
    assert done.exit_code == 0, done.output
    assert "times mean nothing" in done.output
    assert [row["goal"] for row in json.loads(files[0].read_text())["rows"]] == ["gemm"]
    assert ElementTree.parse(files[1]).getroot().tag.endswith("svg")
