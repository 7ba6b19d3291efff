"""`bench roles`: the search for a goodput, the cells of its report, and the step times it reads."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.bench.load.traces import Trace, TraceRequest
from runtime.bench.metrics import BenchmarkError
from runtime.bench.scheduling.ablation import (
    SHARE,
    Search,
    Target,
    Variant,
    bench_roles,
    line_of,
    plot,
    read_targets,
    spread,
    static,
)
from runtime.bench.scheduling.fleet_runs import Deployment, ServedModel, TracePrompts
from runtime.bench.scheduling.measured_steps import read_models
from runtime.bench.scheduling.roofline import LINKS, Link
from runtime.engine.scheduling.step_model import LinearStepModel, StepFeatures
from tests.runtime.commands.running import invoke

MODEL = ServedModel("m", LinearStepModel((4e-3, 0.0, 2e-5, *[0.0] * 5, 0.0, 3e-8)), (0, 0.0), 4, 40_000, 16, 64, 1000.0)
STEPS = Path(__file__).resolve().parents[4] / "docs/measurements/2026-11-30-step-times.json"


def trace(num_requests: int) -> Trace:
    generator = np.random.default_rng(0)
    times = np.cumsum(generator.exponential(0.1, num_requests)).tolist()
    lengths = generator.integers(1, 800, num_requests).tolist()
    outputs = generator.integers(1, 60, num_requests).tolist()
    return Trace("random", tuple(TraceRequest(*each) for each in zip(times, lengths, outputs)))


def chunked(budget: int, num_engines: int = 1) -> Variant:
    return Variant("chunked", f"{budget}", lambda: Deployment((budget,) * num_engines))


def test_a_goodput_is_the_last_rate_that_keeps_the_targets() -> None:
    for guess in (0.5, 500.0):
        search = Search(TracePrompts(trace(100)), MODEL, Target(0.2, 0.02), guess)
        variant = chunked(512)
        found = search.goodput(variant, 0.01)
        assert search.run(variant, found / search.base).attainment(0.2, 0.02) >= SHARE
        assert search.run(variant, 1.02 * found / search.base).attainment(0.2, 0.02) < SHARE
    assert search.goodput(chunked(512, 2), 0.01) == found  # kept by name


def test_targets_that_no_rate_keeps_have_a_goodput_of_none() -> None:
    search = Search(TracePrompts(trace(50)), MODEL, Target(1.0, 0.001), 10.0)
    assert search.goodput(chunked(512), 0.01) == 0.0


def test_a_trace_that_is_too_short_is_refused() -> None:
    search = Search(TracePrompts(trace(5)), MODEL, Target(5.0, 5.0), 10.0)
    with pytest.raises(BenchmarkError, match="all 5 requests of random at once keep the targets"):
        search.goodput(chunked(512), 0.01)


def test_a_slower_link_costs_goodput_unless_pages_travel_while_others_are_computed() -> None:
    found = {}
    for name, link, is_layerwise in (("fast", LINKS["nvlink4"], False), ("late", Link(0.0, 1e6), False),
                                     ("hidden", Link(0.0, 1e8), True), ("shown", Link(0.0, 1e8), False)):  # fmt: skip
        search = Search(TracePrompts(trace(200)), MODEL, Target(0.5, 0.012), 10.0)
        found[name] = search.goodput(replace(static(MODEL, 2, 1, link, is_layerwise=is_layerwise), name=name), 0.02)
    assert found["late"] < 0.5 * found["fast"]
    assert found["shown"] <= found["hidden"] * 1.02


def test_a_report_has_a_cell_for_each_fleet_and_target() -> None:
    told: list[str] = []
    report = bench_roles(
        trace(120),
        MODEL,
        engines=[2, 4],
        targets=[Target(0.3, 0.008)],
        budgets=[128, 512],
        links={"slow": Link(1e-3, 1e8), "fast": LINKS["nvlink4"]},
        requests_per_engine=30,
        report_cell=lambda cell: told.append(line_of(cell)),
    )
    assert [cell["engines"] for cell in report["cells"]] == [2, 4]
    assert len(told) == 2
    assert "auto / better" in told[0]
    for cell in report["cells"]:
        assert set(cell["goodput"]["static"]) == {f"{n}:{cell['engines'] - n}" for n in range(1, cell["engines"])}
        for kind, rates in cell["goodput"].items():
            assert cell["best"][kind] == max(rates.values()) > 0.0
            figures = cell["at_goodput"][kind]
            assert figures["attainment"] >= SHARE
            assert figures["tpot_s"]["p50"] <= figures["tpot_s"]["p99.9"]
        assert cell["at_goodput"]["static"]["handed_over_share"] > 0.8
        assert cell["at_goodput"]["chunked"]["moved_bytes_per_request"] == 0.0
    assert set(report["cells"][1]["links"]) == {
        f"{name}, {how}" for name in ("slow", "fast") for how in ("by layers", "after the first token")
    }
    json.dumps(report)
    drawn = plot([report])
    assert drawn.count("<rect") == 1 + 3 + 2 * 3
    assert "4 engines, 0.3 s / 8 ms" in drawn


def test_a_cell_is_searched_in_windows_and_its_error_is_that_of_their_ratios() -> None:
    told: list[dict[str, Any]] = []
    asked: dict[str, Any] = {
        "engines": [2], "targets": [Target(0.3, 0.008)], "budgets": [128, 512], "links": {"link": Link(1e-3, 1e9)},
        "requests_per_engine": 30, "windows": 3, "report_cell": told.append,
    }  # fmt: skip
    report = bench_roles(trace(150), MODEL, **asked)
    (cell,) = report["cells"]
    assert cell["first_requests"] == [0, 75]  # two of 60 fit, a power of two
    rival = max(("chunked", "static"), key=cell["best"].__getitem__)
    ratios = [own / other for own, other in zip(cell["in_windows"]["auto"], cell["in_windows"][rival])]
    assert cell["auto_of_better"] == pytest.approx((ratios[0] * ratios[1]) ** 0.5)
    spread = cell["auto_of_better"] * abs(math.log(ratios[0] / ratios[1])) / 2
    assert cell["standard_error"] == pytest.approx(spread)
    for kind, rates in cell["in_windows"].items():
        assert cell["best"][kind] == pytest.approx(math.prod(rates) ** 0.5)
    known = bench_roles(trace(150), MODEL, **asked, before=json.loads(json.dumps(report)))["cells"][0]
    assert known["num_runs"] < 0.5 * cell["num_runs"]
    assert known["best"]["auto"] == pytest.approx(cell["best"]["auto"], rel=0.02)  # from another guess
    assert {**known, "num_runs": 0}.keys() == {**cell, "num_runs": 0}.keys()
    with pytest.raises(BenchmarkError, match="the report before has no cell"):
        bench_roles(trace(150), MODEL, **{**asked, "targets": [Target(0.3, 0.009)]}, before=report)
    with pytest.raises(BenchmarkError, match="0 windows"):
        bench_roles(trace(150), MODEL, **{**asked, "windows": 0})


def test_a_run_that_ends_early_is_lost_for_sure() -> None:
    """A request counted as late before its end is late at its end, by either target."""
    for target in (Target(0.05, 1.0), Target(10.0, 0.006)):
        search = Search(TracePrompts(trace(300)), MODEL, target, 10.0)
        for rate in (0.5, 4.0, 30.0):
            kept = search.run(chunked(512), rate / search.base).attainment(target.ttft_s, target.tpot_s)
            assert search.kept(chunked(512), rate / search.base) == (
                kept if kept >= 0.85 else pytest.approx(0, abs=kept)
            )


@pytest.mark.parametrize(
    ("engines", "budgets", "problem"),
    [("2", "512", ""), ("1", "512", "at least 2"), ("2", "0", "each must be at least 1"), ("0", "512", "at least 2")],
)
def test_the_command(engines: str, budgets: str, problem: str, tmp_path: Path) -> None:
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2026-11-30 10:00:{number:02}.0000000,{each.input_len},{each.output_len}"
              for number, each in enumerate(trace(60).requests)]  # fmt: skip
    (tmp_path / "trace.csv").write_text("\n".join(lines), encoding="utf-8")
    drawn = tmp_path / "roles.svg"
    status, text, errors = invoke(
        "bench", "roles", str(tmp_path / "trace.csv"), "--steps", str(STEPS), "--engines", engines,
        "--targets", "0.05/0.006", "--budgets", budgets, "--requests-per-engine", "30", "--plot", str(drawn),
    )  # fmt: skip
    assert (status == 0) == (problem == "")
    assert problem in errors
    if not problem:
        assert "auto / better" in text
        assert drawn.read_text(encoding="utf-8").count("<rect") == 1 + 3 + 3


def test_arrivals_of_the_same_time_are_spread() -> None:
    requests = tuple(TraceRequest(time, 1, 1) for time in (0.0, 0.0, 0.0, 3.0, 6.0, 6.0))
    assert [each.arrival_s for each in spread(Trace("t", requests)).requests] == [0.0, 1.0, 2.0, 3.0, 6.0, 6.0]


@pytest.mark.parametrize("text", ["1", "1/x", "0/1", "1/nan", "1/inf"])
def test_targets_are_two_positive_times(text: str) -> None:
    assert read_targets("0.5/0.01,1/2") == [Target(0.5, 0.01), Target(1.0, 2.0)]
    with pytest.raises(BenchmarkError, match="a target is"):
        read_targets(text)


def test_the_committed_step_times_are_fitted_within_their_errors() -> None:
    models = read_models(STEPS)
    assert set(models) == {"qwen3-8b", "gpt-oss-20b", "qwen3-0.6b-cpu"}
    assert models["qwen3-8b"][1]["median_error"] < 0.02
    assert models["gpt-oss-20b"][1]["median_error"] < 0.03
    assert all(errors.get("largest_error", 0.0) < 0.12 for _, errors in models.values())
    model = models["qwen3-8b"][0]
    assert model.token_bytes == 147_456
    assert model.steps.seconds(StepFeatures(2048, 1, 2048 * 1024.5, 0.0)) == pytest.approx(0.0457, rel=0.03)


def test_a_file_without_step_times_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    path.write_text('{"models": {"m": {}}}', encoding="utf-8")
    with pytest.raises(BenchmarkError, match="not a file of measured steps"):
        read_models(path)
