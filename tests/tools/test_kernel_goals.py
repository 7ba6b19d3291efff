"""The goals' table: the model's launches are the graph's, it meets published timings, and nothing is called measured
that was not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.bench.kernels.goals import GOALS
from runtime.device import gpu as gpu_module
from runtime.device.emulator.driver.architectures import H100, H200
from tools import kernel_goals
from tools.gpu.serving.models import MODELS, TINY
from tools.kernel_costs.forecast import (
    StepForecast,
    context_of,
    draw_instructions,
    forecast,
    megakernel_forecast,
    timings,
)
from tools.kernel_costs.goals import BEGIN, END, as_markdown, carried, filled, rows_of
from tools.kernel_costs.latencies import ASSUMPTIONS, Timing
from tools.kernel_costs.launch_lists import Launched, Step, decode_step, repeated
from tools.kernel_costs.published import CHECKS, MOST_ERROR, Published
from tools.kernel_costs.roofline import Band, Modelled, per_operation, prefill, product, step_s
from tools.kernel_costs.verification import Verified
from tools.kernel_goals import main

FOUND = {"gemm": Band(0.9, 0.8, 0.7, "tensor cores")}
STEPS = [StepForecast("toy", "H200", 20, 9, 1.0, Band(1.25, 1.5, 2.0, ""))]


@pytest.fixture(autouse=True)
def _devices_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that does nothing is not left to the tests behind."""
    monkeypatch.setattr(gpu_module, "_opened", {})


def test_a_kernel_is_as_slow_as_what_it_needs_most_and_its_latencies() -> None:
    kernel = Modelled({"issue": 0.5, "tensor cores": 1.25}, 0.25)
    assert kernel.seconds == 1.5
    assert kernel.limit == "tensor cores"
    assert Modelled({"memory": 0.5}, 1.0).limit == "latencies"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.work)
def test_the_model_meets_published_timings(check: Published) -> None:
    assert abs(check.error) < MOST_ERROR
    assert check.source


def test_assumptions_are_in_order() -> None:
    rates = {"bandwidth", "tensor", "cache_bandwidth", "issue"}
    for name, each in ASSUMPTIONS.items():
        values = [each.fast, each.expected, each.slow]
        assert values == sorted(values, reverse=name in rates), name
        assert each.because, name


def test_large_products_and_prefill_are_bound_by_the_tensor_cores_last_round() -> None:
    timing = Timing(H200)
    square = product(8192, 8192, 8192, timing)
    rounds = -(-64 * 32 // H200.num_sms)
    least = 2 * 8192**3 / timing.tensor_flops
    assert square.needs_s["tensor cores"] == pytest.approx(least * rounds * H200.num_sms / (64 * 32))
    assert square.limit == "tensor cores"
    assert prefill(8192, 32, 8, 128, timing).limit == "tensor cores"
    with pytest.raises(KeyError, match="no matmul by naive"):
        per_operation("matmul", "naive", "1x1", "sm_90a")


def test_a_last_wave_costs_what_its_blocks_have_on_their_way() -> None:
    model, at_once = H200, 2 * H200.num_sms
    fast, expected, slow = timings(model)
    whole = 1e9 / expected.bytes_per_s
    assert expected.stream_s(1e9, at_once, at_once, 1 << 20) == pytest.approx(whole)
    alone = [each.stream_s(1e9, at_once + 1, at_once, 1 << 15) * each.bytes_per_s for each in (fast, expected, slow)]
    assert alone[0] < alone[1] < alone[2]
    each = 1e9 / (at_once + 1)
    last = each * slow.of("memory") / (1 << 15)
    assert slow.stream_s(1e9, at_once + 1, at_once, 1 << 15) == pytest.approx(
        at_once * each / slow.bytes_per_s + last
    )
    few = expected.stream_s(1e9, 4, at_once, 1 << 15)
    assert few == pytest.approx(1e9 * expected.of("memory") / (4 << 15), rel=0.5)


def test_launches_that_repeat_are_layers() -> None:
    a, b, c = (Launched(name) for name in "abc")
    assert repeated([a, b, c, b, c, b, c, a]) == (1, 2, 3)
    assert repeated([a, b, b, c]) == (1, 1, 2)
    with pytest.raises(ValueError, match="no launches repeat"):
        repeated([a, b, c])


@pytest.mark.emulator
def test_a_steps_launches_are_its_graphs() -> None:
    """Four products a layer and one of the vocabulary, whatever else; all layers are counted."""
    config = MODELS["qwen3-0.6b"] | {"vocab_size": 512}
    step = decode_step(config)
    products = [each.product for each in step.layer if each.product is not None]
    assert products == [(1, 4096, 1024), (1, 1024, 2048), (1, 6144, 1024), (1, 1024, 3072)]
    assert step.num_layers == 28
    assert step.weight_bytes == 2 * (28 * 1024 * (4096 + 2048 + 6144 + 3072) + 512 * 1024)
    assert sum(each.name.startswith("attention_decode") for each in step.layer) == 1
    assert sum(each.name.startswith("sampling") for each in step.once) == 1
    assert all(each.is_dependent for each in step.layer)
    fewer = Step(step.once, step.layer[1:], step.num_layers)
    context = context_of(config, 1e5)
    saved = step_s(Timing(H100), step, context) - step_s(Timing(H100), fewer, context)
    assert 28e-6 < saved < 28 * 6e-6


@pytest.mark.emulator
def test_the_draw_is_counted() -> None:
    few, many = (draw_instructions(vocabulary) for vocabulary in (2048, 8192))
    assert 2048 / 32 < few < many


@pytest.mark.emulator
def test_a_forecast_lies_above_its_floor() -> None:
    step = decode_step(TINY["qwen3-8b"] | {"num_hidden_layers": 3})
    found = forecast("qwen3-8b", H200, step, 1e5)
    band = found.tpot_ms
    assert found.floor_ms < band.fast < band.expected < band.slow
    assert found.num_launches == step.num_launches
    whole = megakernel_forecast("qwen3-8b", H200, step, 1e5)
    assert whole.floor_ms == found.floor_ms < whole.tpot_ms.fast < whole.tpot_ms.expected < found.tpot_ms.expected


@pytest.mark.emulator
def test_a_step_with_proposals_is_recorded_as_it_is_served() -> None:
    """Eight tokens of one sequence: products of eight rows, one launch of attention, a draw behind each."""
    config = TINY["qwen3-8b"] | {"num_hidden_layers": 3}
    step, plain = decode_step(config, num_proposals=7, context=100), decode_step(config)
    assert {each.product[0] for each in step.layer if each.product is not None} == {8}
    assert sum(each.name.startswith("attention_decode") for each in step.layer) == 1
    assert step.weight_bytes == plain.weight_bytes


def test_the_best_number_of_proposals() -> None:
    found = Verified(1, 1024, {0: 1.0, 1: 1.1, 3: 2.0})
    assert found.speedup(0.0) == (1.0, 0)
    assert found.speedup(0.5) == (pytest.approx(1.5 / 1.1), 1)
    assert found.speedup(1.0) == (pytest.approx(2.0), 3)


def test_the_table_says_what_was_not_measured() -> None:
    text = as_markdown(H200, FOUND, STEPS, [])
    assert text.count("not yet measured") == len(GOALS)
    assert "| 0.80 (0.90 to 0.70) | tensor cores |" in text
    rows: list[dict[str, Any]] = [
        {"goal": "gemm", "value": 1.03}, {"goal": "gemm", "value": 0.91}, {"goal": "launch"},
        {"goal": "graph", "value": 1.2},
    ]  # fmt: skip
    text = as_markdown(H200, FOUND, STEPS, rows)
    assert "0.91 (met)" in text  # the worst of a goal's lines
    assert "1.2 (missed)" in text
    assert text.count("not yet measured") == len(GOALS) - 2
    with pytest.raises(ValueError, match=r"the model gives .*nan"):
        as_markdown(H200, {"gemm": Band(1.0, float("nan"), 1.0, "")}, STEPS, [])


def test_a_pages_section_is_made_anew() -> None:
    once = filled("# Title\n\nWords.\n\n## First\n\nrest\n", as_markdown(H200, FOUND, STEPS, []))
    assert once.index("## Goals") < once.index("## First")
    assert filled(once, as_markdown(H200, FOUND, STEPS, [])) == once
    assert once.endswith("## First\n\nrest\n")
    anew = carried(once, "# Title\n\n## Other\n")
    assert BEGIN in anew
    assert anew.endswith("## Other\n")
    assert carried("no section", "# Title\n\n## Other\n") == "# Title\n\n## Other\n"


def test_an_emulated_report_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    file.write_text(json.dumps({"is_emulated": True, "rows": []}))
    with pytest.raises(SystemExit):
        main(["--measured", str(file)])
    assert "nothing in it was measured" in capsys.readouterr().err


def test_a_checks_report_tells_the_prefills_share_and_the_models_steps() -> None:
    kernels = [{"shape": "1 x 8192 queries, 8192 keys", "share_of_torch": 0.9}, {"shape": "1 x 2048 queries"}]
    rows = [{"goal": "gemm", "value": 1.0}]
    sections = {
        "goals": {"cases": {"gemm": {"result": {"rows": rows}}, "graph": {"error": "it is wrong"}}},
        "kernels": {"cases": {str(number): {"result": row} for number, row in enumerate(kernels)}},
        "qwen3-8b": {"cases": {"load": {"result": {}}, "batch 1": {"result": {"tpot_ms": [4.3, 4.4, 4.5]}}}},
        "qwen3-8b batches": {"cases": {
            "batch 32": {"result": {"batch": 32, "prompt_len": 2048, "prefill_ms": 99.0}},
            "prefill 2048": {"result": {"prompt_len": 2048, "prefill_ms": [44.0, 45.0, 46.0]}},
        }},
    }  # fmt: skip
    found = rows_of({"is_emulated": False, "sections": sections})
    assert found == [
        {"goal": "gemm", "value": 1.0}, {"goal": "prefill", "value": 0.9}, {"goal": "tpot", "value": 4.4},
        {"goal": "prefill_2k", "value": 45.0},
    ]  # fmt: skip
    assert rows_of({"is_emulated": False, "sections": {}}) == []


def test_the_report_shows_every_goal() -> None:
    page = (kernel_goals.ROOT / "docs" / "kernels_report.md").read_text()
    section = page[page.index(BEGIN) : page.index(END)]
    assert all(f"| {goal.work} |" in section for goal in GOALS.values())
