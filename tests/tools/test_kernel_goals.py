"""The goals' table: the model is the slowest of its parts, and nothing is called measured that was not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.bench.kernels.goals import GOALS
from runtime.device.emulator.driver.architectures import H200
from tools import kernel_goals
from tools.kernel_costs.counts import Bench
from tools.kernel_costs.goals import BEGIN, END, as_markdown, carried, filled, rows_of
from tools.kernel_costs.roofline import Modelled, linear, per_operation, prefill, product
from tools.kernel_goals import main

FOUND = {"gemm": Modelled(1.0, {"issue": 0.5, "tensor cores": 1.25})}


def test_a_kernel_is_as_slow_as_what_it_needs_most() -> None:
    assert FOUND["gemm"].share == 0.8
    assert FOUND["gemm"].limit == "tensor cores"


def test_large_products_and_prefill_are_bound_by_the_tensor_cores_last_round() -> None:
    square = product(8192, 8192, 8192, H200)
    rounds = -(-64 * 32 // H200.num_sms)
    assert square.share <= 64 * 32 / (rounds * H200.num_sms) + 1e-9
    assert square.roofline_s == pytest.approx(2 * 8192**3 / H200.bf16_flops)
    long = prefill(8192, 32, 8, 128, H200)
    assert 0.3 < long.share < 1
    assert long.needs_s["tensor cores"] > long.roofline_s
    with pytest.raises(KeyError, match="no matmul by naive"):
        per_operation("matmul", "naive", "1x1", "sm_90a")


@pytest.mark.emulator
def test_few_rows_are_counted() -> None:
    found = linear(Bench("sm_90a"), 1, H200, 256, 512)
    assert found.roofline_s == 2 * (512 + 256 * 512 + 256) / H200.memory_bytes_per_s
    assert 0 < found.share <= 1


def test_the_table_says_what_was_not_measured() -> None:
    text = as_markdown(H200, FOUND, [])
    assert text.count("not yet measured") == len(GOALS)
    assert "| 0.80 | tensor cores |" in text
    rows: list[dict[str, Any]] = [
        {"goal": "gemm", "value": 1.03}, {"goal": "gemm", "value": 0.91}, {"goal": "launch"},
        {"goal": "graph", "value": 1.2},
    ]  # fmt: skip
    text = as_markdown(H200, FOUND, rows)
    assert "0.91 (met)" in text  # the worst of a goal's lines
    assert "1.2 (missed)" in text
    assert text.count("not yet measured") == len(GOALS) - 2
    with pytest.raises(ValueError, match="the model gives nan"):
        as_markdown(H200, {"gemm": Modelled(float("nan"), {"issue": 1.0})}, [])


def test_a_pages_section_is_made_anew() -> None:
    once = filled("# Title\n\nWords.\n\n## First\n\nrest\n", as_markdown(H200, FOUND, []))
    assert once.index("## Goals") < once.index("## First")
    assert filled(once, as_markdown(H200, FOUND, [])) == once
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


def test_a_checks_report_tells_the_prefills_share() -> None:
    kernels = [{"shape": "1 x 8192 queries, 8192 keys", "share_of_torch": 0.9}, {"shape": "1 x 2048 queries"}]
    rows = [{"goal": "gemm", "value": 1.0}]
    sections = {
        "goals": {"cases": {"gemm": {"result": {"rows": rows}}, "graph": {"error": "it is wrong"}}},
        "kernels": {"cases": {str(number): {"result": row} for number, row in enumerate(kernels)}},
    }
    found = rows_of({"is_emulated": False, "sections": sections})
    assert found == [{"goal": "gemm", "value": 1.0}, {"goal": "prefill", "value": 0.9}]
    assert rows_of({"is_emulated": False, "sections": {}}) == []


def test_the_report_shows_every_goal() -> None:
    page = (kernel_goals.ROOT / "docs" / "kernels_report.md").read_text()
    section = page[page.index(BEGIN) : page.index(END)]
    assert all(f"| {goal.work} |" in section for goal in GOALS.values())
