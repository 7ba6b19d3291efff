"""What a check writes, and what a resumed one takes over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.gpu.checking.report import MOST_FILES, Report, summary
from tools.gpu.sections import Options

REAL, EMULATED = Options("cuda:0"), Options("emulated:sm_90a", is_quick=True)


def outcome(status: str = "ok", **cases: dict[str, Any]) -> dict[str, Any]:
    return {"status": status, "seconds": 1.5, "cases": {name: {"seconds": 0.1, **case} for name, case in cases.items()}}


def test_everything_is_written_at_once_and_taken_over(tmp_path: Path) -> None:
    first = Report(tmp_path / "first", REAL)
    beside = {"timeline-x.json": {"nodes": [["kernel", 0.0, 1.0]]}}
    first.add("a", outcome(one={"result": {"x": 1, "beside": beside}}))
    first.add("b", outcome("failed, unfinished", one={"result": {}}, two={"error": "E: wrong"}))
    data = json.loads((tmp_path / "first" / "report.json").read_text())
    assert data["sections"]["a"]["cases"]["one"]["result"] == {"x": 1, "files": ["timeline-x.json"]}
    assert "| b | failed, unfinished | 1.5 | 2 | 1 |" in (tmp_path / "first" / "summary.md").read_text()
    second = Report(tmp_path / "second", REAL, tmp_path / "first")
    assert json.loads((tmp_path / "second" / "timeline-x.json").read_text()) == beside["timeline-x.json"]
    assert second.data == data
    assert (second.is_done("a"), second.is_done("b"), second.is_done("c")) == (True, False, False)
    same = Report(tmp_path / "first", REAL, tmp_path / "first")
    assert same.data == data
    same.forget_errors()
    assert list(same.outcomes["b"]["cases"]) == ["one"]
    assert not same.is_done("b")


def test_results_of_another_device_are_refused(tmp_path: Path) -> None:
    Report(tmp_path, EMULATED).add("a", outcome(one={"result": {}}))
    with pytest.raises(ValueError, match=r"emulated:sm_90a.*cuda:0"):
        Report(tmp_path / "other", REAL, tmp_path)
    assert Report(tmp_path / "none", REAL, tmp_path / "nothing there").outcomes == {}


def test_no_more_files_than_come_back(tmp_path: Path) -> None:
    report = Report(tmp_path, REAL)
    beside = {f"timeline-{number}.json": [number] for number in range(9)}
    big = {"big.json": "x" * (17 << 20)}
    report.add("a", outcome(one={"result": {"beside": beside}}, two={"result": {"beside": big}}))
    assert len(list(tmp_path.iterdir())) == MOST_FILES
    cases = report.outcomes["a"]["cases"]
    assert sum("left out" in name for name in cases["one"]["result"]["files"]) == 3
    assert "left out" in cases["two"]["result"]["files"][0]


def times(median_us: float) -> dict[str, float]:
    return {"median_us": median_us, "low_us": median_us - 0.5, "high_us": median_us + 0.5}


def timed(case: str, shape: str, ours: float, **more: Any) -> dict[str, Any]:
    return {"case": case, "shape": shape, "error_share": 0.001, "times": {"ours": times(ours)}} | more


SECTIONS = {
    "environment": outcome(
        device={"result": {"name": "A GPU", "arch": "sm_90a"}}, torch={"result": {"skipped": "none"}}
    ),
    "bandwidth": outcome(bandwidth={"result": {"read": {"gb_per_s": 4000.0}}}),
    "kernels": outcome(
        one={"result": timed(
            "gemm", "1 x 1", 2.0, times={"ours": times(2.0), "torch": times(1.0)}, share_of_torch=0.5,
            gb_per_s=1000.0, tflop_per_s=3.0,
        )},
        two={"error": "AssertionError: it is\nwrong"},
    ),
    "goals": outcome(linear={"result": {"rows": [
        {"case": "gemm auto", "shape": "1 x 9", "times": {"ours": {"median_us": 7.0}, "cublas": {"median_us": 8.0}},
         "value": 0.9, "measure": "share", "must": 0.8, "ahead": 0.95, "verdict": "met"},
    ]}}),
    "qwen3-8b": outcome(
        load={"result": {"weight_bytes": 16_000_000_000}},
        decode={"result": {"tpot_ms": [4.9, 5.0, 5.2], "host_ms": [0.1, 0.2, 0.3], "tokens_per_s": 200.0}},
        **{"timeline of a step": {"result": {
            "nodes": 230, "step_us": 4900.0, "busy_us": 4500.0, "gaps_us": {"sum": 400, "median": 1.5, "overlap": 20},
            "kernels": {"gemv": [144, 4000.0]},
        }}},
    ),
    "quantized speed": outcome(one={"result": timed(
        "int4 g128", "16 x 8192 x 4096, plain", 6.0, kernels=["rounded", "gemm"], gb_per_s=3000.0, tflop_per_s=5.0,
        times={"ours": times(6.0), "bf16": times(18.6)}, share_of_bf16=3.1,
    )}),
    "experts speed": outcome(mixture={"result": timed(
        "mixture", "9 tokens", 5.0, touched=4, kernels=["gather"], gb_per_s=2000.0, tflop_per_s=1.5,
        times={"ours": times(5.0), "bf16": times(4.0)}, share_of_bf16=0.8,
    )}),
    "verification": outcome(steps={"result": {"by_tokens": {
        "8": {"steps": 7, "step_ms": [5.0, 5.1, 5.2], "host_ms": [1.0, 1.1, 1.2]},
    }}}),
    "tower": outcome(square={"result": {"layers": 24, "whole_ms": 9.0, "device_ms": 8.0, "host_ms": 7.0}}),
    "sampling speed": outcome(greedy={"result": timed("greedy", "9 rows", 9.0)}),
}  # fmt: skip


def test_the_summary_has_every_table() -> None:
    text = summary({"device": "cuda:0", "is_emulated": False, "sections": SECTIONS})
    for line in (
        "# GPU check: A GPU (cuda:0, sm_90a)",
        "| environment | ok | 1.5 | 2 |  | 1 |  |",
        "| kernels | two | AssertionError: it is wrong |",
        "| gemm | 1 x 1 |  | 2 | 1.5 to 2.5 | 1,000 | 0.25 | 3 | torch | 1 | 0.5 | 1.0e-03 |",
        "| gemm auto | 1 x 9 | 7 | 8 | 0.9 | share | 0.8 / 0.95 | met |",
        "| qwen3-8b | decode | 5 | 4 | 200.0 | 0.2 |  |",
        "| gemv | 144 | 4,000 | 27.8 |",
        "| int4 g128 | 16 x 8192 x 4096, plain | rounded + gemm | 6 | 5.5 to 6.5 | 3,000 | 0.75 | 5 | bf16 | 18.6 | "
        "3.1 | 1.0e-03 |",
        "| mixture | 9 tokens | gather | 5 | 4.5 to 5.5 | 2,000 | 0.5 | 1.5 | bf16 | 4 | 0.8 | 1.0e-03 |",
        "| steps | 8 | 7 | 5.1 | 1.1 |",
        "| square | 24 | 9 | 8 | 7 |",
        "| greedy | 9 rows |  | 9 | 8.5 to 9.5 |  |  |  |  |  |  | 1.0e-03 |",
    ):
        assert line in text.splitlines(), line


def test_an_emulated_devices_times_are_left_out() -> None:
    text = summary({"device": "emulated:sm_90a", "is_emulated": True, "sections": SECTIONS})
    assert "Nothing here is a measurement" in text
    assert "## Failures" in text
    assert "TPOT" not in text
    assert "µs" not in text
