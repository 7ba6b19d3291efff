"""The GPU check: its code runs on an emulated device, wrong results and hangs are reported, times are not faked."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.bench.kernels.cases import Prepared
from runtime.bench.kernels.table import error_share
from tools import gpu_check, gpu_check_build
from tools.gpu_check_kernels import cases
from tools.gpu_check_sections import Options, Section, sections
from tools.gpu_check_summary import summary

DEVICE = "emulated:sm_90a"


@pytest.mark.exhaustive  # minutes where nothing is compiled yet, against limits of its own that a busy machine breaks
@pytest.mark.emulator
def test_every_section_on_an_emulated_device(tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    assert gpu_check.main(["--device", DEVICE, "--quick", "--out", str(out), "--budget", "1500"]) == 0
    report = json.loads(out.read_text())
    found = report["sections"]
    assert report["is_emulated"]
    assert found["environment"]["result"]["device"]["arch"] == "sm_90a"
    assert found["environment"]["result"]["packages"]["numba"]
    assert found["bandwidth"]["result"].keys() == {"read", "copy", "host to device", "device to host"}
    built = found["build"]["result"]
    assert {name: worker.get("kernels", 0) > 0 for name, worker in built.items()} == {
        "cpu": False, "qwen3-8b": True, "0/1": True
    }  # fmt: skip
    rows = found["kernels"]["result"]["rows"]
    assert [row["case"] for row in rows] == [case.name for case in cases(is_quick=True)]
    for row in rows:
        assert 0 <= row["error_share"] <= 2e-2
        assert row["times"].keys() == {"ours"}
    assert "gb_per_s" not in json.dumps(report)  # an emulated device's times are compared with nothing
    assert "share_of_torch" not in json.dumps(report)
    tests = {name: outcome for name, outcome in found.items() if name.startswith("tests ")}
    assert len(tests) == len(list((gpu_check.ROOT / "tests" / "gpu").glob("test_*.py")))
    assert all("passed" in outcome["result"]["summary"] for outcome in tests.values())
    assert {found[f"sanitizer {tool}"]["why"] for tool in ("memcheck", "racecheck", "synccheck")} == {"needs a GPU"}
    text = out.with_suffix(".md").read_text()
    assert "Nothing here is a measurement" in text
    assert "| softmax f32 | 2 x 300 |  |" in text


@pytest.mark.emulator
def test_resume_keeps_what_was_done_well_and_does_the_rest(tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    command = ["--device", DEVICE, "--quick", "--out", str(out), "--sections", "environment", "bandwidth"]
    kept = {"status": "ok", "seconds": 1.0, "result": {"read": {"gb_per_s": 77.0}}}
    failed = {"status": "failed", "seconds": 1.0, "why": "it was", "output": ""}
    earlier = {"device": DEVICE, "is_quick": True, "is_emulated": True}
    out.write_text(json.dumps(earlier | {"sections": {"bandwidth": kept, "environment": failed}}))
    assert gpu_check.main([*command, "--resume"]) == 0
    found = json.loads(out.read_text())["sections"]
    assert found["bandwidth"] == kept
    assert found["environment"]["result"]["device"]["arch"] == "sm_90a"
    told = {**earlier, "is_quick": False}
    assert gpu_check.done_well(out, told) == {}
    assert gpu_check.done_well(tmp_path / "none.json", earlier) == {}


@pytest.mark.emulator
def test_the_hardwares_tests_run_on_an_emulated_device() -> None:
    section = gpu_check.find("tests test_device_on_hardware")
    outcome = gpu_check.run_apart(section, Options(DEVICE, True), 500.0)
    assert (outcome["status"], outcome.get("output")) == ("ok", None)
    assert "passed" in outcome["result"]["summary"]
    assert "deselected" in outcome["result"]["summary"]  # the first case of each


def test_kernels_that_do_not_compile_fail_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check_build, "QUICK_MODELS", ())
    with pytest.raises(AssertionError, match=r"1 workers failed; 0/1: (.|\n)*sm_1"):
        gpu_check_build.build("sm_1", is_ptx=True, is_quick=True, report=lambda _: None)


@pytest.mark.emulator
@pytest.mark.exhaustive  # a minute; the command runs it on every emulated check
@pytest.mark.parametrize("name", ["qwen3-8b"])
def test_a_models_figures(name: str) -> None:
    from tools.gpu_check_models import model_figures

    figures = model_figures(name, DEVICE, is_quick=True)
    assert figures["dtype"] == "bfloat16"
    for key in ("ttft_ms", "tpot_ms", "batch_tokens_per_s", "weight_bytes"):
        assert figures[key] > 0


def test_the_limits_fit_the_nine_minutes_and_names_are_unique() -> None:
    names = [section.name for section in sections()]
    assert len(set(names)) == len(names)
    assert gpu_check.BUDGET_S < 540
    assert all(gpu_check.LEAST_S < section.limit_s < gpu_check.BUDGET_S / 2 for section in sections())


def ready(expected: np.ndarray) -> Prepared:
    rows = np.arange(len(expected))
    return Prepared(lambda: None, 0, expected.shape, "f32", rows, expected, lambda *_: lambda: None)


def test_a_wrong_result_and_nan_are_errors() -> None:
    expected = np.array([1.0, -4.0], np.float32)
    assert error_share(np.array([1.0, -4.2], np.float32), ready(expected), 0.06, "ours") == pytest.approx(0.05)
    for wrong in ([1.5, -4.0], [np.nan, -4.0], [np.inf, -4.0]):
        with pytest.raises(AssertionError, match="ours result is wrong"):
            error_share(np.array(wrong, np.float32), ready(expected), 0.06, "ours")


def run_planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, limit_s: float = 60) -> dict[str, Any]:
    """A section whose process is a script instead of ours."""
    script = tmp_path / "planted.py"
    script.write_text(f"import json, os, sys, time\npath = sys.argv[sys.argv.index('--result') + 1]\n{code}\n")
    real = gpu_check.subprocess.Popen

    def popen(command: list[str], **options: Any) -> Any:
        return real([command[0], str(script), *command[3:]], **options)

    monkeypatch.setattr(gpu_check.subprocess, "Popen", popen)
    monkeypatch.setattr(gpu_check, "LEAST_S", 0.0)
    section = Section("planted", limit_s, lambda *_: {})
    return gpu_check.run_apart(section, Options("cuda:0", False), 100.0)


def test_a_hang_is_ended_and_what_it_reported_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = "json.dump({'result': {'rows': [1]}}, open(path, 'w'))\nprint('so far', flush=True)\ntime.sleep(1000)"
    start = time.monotonic()
    outcome = run_planted(monkeypatch, tmp_path, code, limit_s=3)
    assert time.monotonic() - start < 30
    assert outcome["status"] == "timed out"
    assert outcome["why"] == "not done after 3 s"
    assert outcome["result"] == {"rows": [1]}
    assert "so far" in outcome["output"]
    text = summary({"device": "cuda:0", "is_emulated": False, "sections": {"planted": outcome}})
    assert "## planted: timed out" in text
    assert "so far" in text


def test_a_crash_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outcome = run_planted(monkeypatch, tmp_path, "os.kill(os.getpid(), 9)")
    assert outcome["status"] == "failed"
    assert outcome["why"] == "the process ended with status -9"


def test_a_skipped_section_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outcome = run_planted(monkeypatch, tmp_path, "json.dump({'result': {'skipped': 'no tool'}}, open(path, 'w'))")
    assert (outcome["status"], outcome["why"]) == ("skipped", "no tool")


def test_no_time_left_and_no_hardware() -> None:
    section = Section("any", 60, lambda *_: {}, needs_hardware=True)
    assert gpu_check.run_apart(section, Options("cuda:0", False), 5.0)["why"] == "no time was left"
    assert gpu_check.run_apart(section, Options(DEVICE, True), 100.0)["why"] == "needs a GPU"


def test_an_exception_becomes_the_sections_reason(tmp_path: Path) -> None:
    def run(options: Options, report: Any) -> dict[str, Any]:
        report({"rows": [1, 2]})
        raise AssertionError("two is wrong")

    path = tmp_path / "result.json"
    assert gpu_check.run_here(Section("any", 60, run), Options(DEVICE, True), path) == 1
    assert json.loads(path.read_text()) == {"result": {"rows": [1, 2]}, "why": "AssertionError: two is wrong"}
    assert os.listdir(tmp_path) == ["result.json"]


def test_the_summary_compares_with_torch_and_bandwidth() -> None:
    row = {
        "case": "gemm", "shape": "1 x 1", "times": {"ours": {"median_us": 2.0}, "torch": {"median_us": 1.0}},
        "share_of_torch": 0.5, "gb_per_s": 1000.0, "tflop_per_s": 3.0, "error_share": 0.001,
    }  # fmt: skip
    figures = {
        "load_s": 1.0, "ttft_ms": 5.0, "tpot_ms": 9.0, "weight_bytes": 16_000_000_000, "batch": 32,
        "batch_tokens_per_s": 700.0,
    }  # fmt: skip
    outcome = {"status": "ok", "seconds": 1.0}
    found = {
        "bandwidth": outcome | {"result": {"read": {"gb_per_s": 4000.0}}},
        "kernels": outcome | {"result": {"rows": [row, {"case": "bad", "shape": "2", "error": "it is wrong"}]}},
        "model qwen3-8b": outcome | {"result": figures},
    }
    text = summary({"device": "cuda:0", "is_emulated": False, "sections": found})
    assert "| gemm | 1 x 1 | 2 | 1 | 0.5 | 1,000 | 0.25 | 3 | 1.0e-03 |" in text
    assert "| bad | 2 | it is wrong |" in text
    assert "| qwen3-8b | 1.0 | 5.0 | 9.0 | 4 | 32 | 700.0 |" in text
