"""The section of the kernel report that holds the goals beside the model's bounds and what was measured."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from runtime.bench.kernels.goals import GOALS
from runtime.device.emulator.driver.architectures import GpuModel
from tools.kernel_costs.forecast import CONTEXT, StepForecast
from tools.kernel_costs.latencies import ASSUMPTIONS
from tools.kernel_costs.page import table
from tools.kernel_costs.published import BEYOND, CHECKS, MOST_ERROR
from tools.kernel_costs.roofline import Band

BEGIN, END = "<!-- goals -->", "<!-- end of goals -->"


def as_markdown(
    model: GpuModel, found: dict[str, Band], steps: Sequence[StepForecast], measured: Sequence[dict[str, Any]]
) -> str:
    """The section, between its marks. `measured`: as `rows_of` gives them."""
    parts = [BEGIN, "## Goals", "", _GOALS_TEXT, "", _goals(model, found, measured)]
    parts += ["", "### A decode step of one sequence", "", _STEPS_TEXT, "", _steps(steps)]
    parts += ["", "### What the model assumes", "", _ASSUMPTIONS_TEXT, "", _assumptions()]
    parts += ["", "### Held against published timings", "", _CHECKS_TEXT, "", _checks(), END]
    return "\n".join(parts)


_GOALS_TEXT = (
    "The model's column has latencies in it; its numbers and what they assume stand below. A linear layer is timed "
    "alone there, so that the gap in front of it and its first byte count, which a step mostly hides. Peers are taken "
    "for as fast as they were published to be: cuBLAS at 798 TFLOP/s, attention at FlashAttention-3's 602."
)
_STEPS_TEXT = (
    f"TPOT in ms, {CONTEXT:,} tokens of context, bf16, greedy, on the device alone. The launches are read from the "
    "graph that the engine records today, so that a kernel that is saved is saved here, too. The floor is the weights, "
    "keys and values at the sustained bandwidth. \"megakernel\" is `--decode megakernel` (docs/kernels.md): a fill and "
    "three kernels, of which one has all layers."
)
_ASSUMPTIONS_TEXT = (
    "A kernel is as slow as the slowest of what its counts say that it needs, at sustained rates, and to that come the "
    "gap in front of it, its first byte, its last wave and its ends (tools/kernel_costs/latencies.py). A band takes "
    "all fast, all expected or all slow values. Host time is not in it: the next step is launched while one runs."
)
_CHECKS_TEXT = (
    "The same model on work that others timed on an H100. The rates of tensor cores were chosen after the rows of "
    "fast.cu, the share of the softmax after another table of FlashAttention-3's paper, the barrier of a grid with "
    "the megakernel's row in sight; nothing else was fitted to these. A test holds all but the last to "
    f"{100 * MOST_ERROR:.0f} %."
)


def _goals(model: GpuModel, found: dict[str, Band], measured: Sequence[dict[str, Any]]) -> str:
    values: dict[str, list[float]] = {}
    for row in measured:
        if row.get("value") is not None:
            values.setdefault(row["goal"], []).append(row["value"])
    rows = []
    for goal in GOALS.values():
        each = found.get(goal.name)
        worst = (max if goal.is_most else min)(values[goal.name]) if goal.name in values else None
        rows.append([
            goal.work, goal.measure, f"{'≤' if goal.is_most else '≥'} {goal.must:g}", f"{goal.ahead:g}",
            *(("", "") if each is None else (band(each), each.limit)),
            "not yet measured" if worst is None else f"{worst:g} ({goal.verdict(worst)})",
        ])  # fmt: skip
    heads = ("work", "measure", "must", "ahead of peers", f"modelled ({model.name})", "limit", "measured")
    return table(heads, rows)


def _steps(steps: Sequence[StepForecast]) -> str:
    rows = [
        [each.name, each.product, str(each.num_launches), str(each.launches_a_layer), f"{each.floor_ms:.2f}",
         band(each.tpot_ms)]
        for each in steps
    ]  # fmt: skip
    return table(("model", "GPU", "launches", "a layer", "floor", "modelled"), rows)


def _assumptions() -> str:
    rows = [
        [each.what, f"{each.fast:g}", f"{each.expected:g}", f"{each.slow:g}", each.unit, each.because]
        for each in ASSUMPTIONS.values()
    ]
    return table(("number", "fast", "expected", "slow", "", "because"), rows)


def _checks() -> str:
    rows = [
        [each.work, f"{1e3 * each.measured_s:.3f}", f"{1e3 * each.modelled_s():.3f}", f"{100 * each.error:+.0f} %",
         each.source + (f"; not modelled: {each.because}" if each.because else "")]
        for each in (*CHECKS, *BEYOND)
    ]  # fmt: skip
    return table(("work (H100 SXM)", "published (ms)", "modelled (ms)", "error", "source"), rows)


def band(each: Band) -> str:
    """Expected, and from fast to slow. Raises ValueError for what is no number."""
    numbers = each.expected, each.fast, each.slow
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"the model gives {numbers}")
    digits = 1 if each.expected >= 10 else 2
    expected, fast, slow = (f"{number:.{digits}f}" for number in numbers)
    return f"{expected} ({fast} to {slow})"


def rows_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The measured rows of a report, with their goals. Raises ValueError where nothing in it was measured on a GPU."""
    if report.get("is_emulated", True):
        raise ValueError("the report was made on an emulated device: nothing in it was measured")
    if "sections" not in report:
        return list(report["rows"])
    found = [row for part in _results(report, "goals") for row in part["rows"]]
    for row in _results(report, "kernels"):
        if row["shape"].startswith("1 x 8192 queries") and "share_of_torch" in row:
            found.append({"goal": "prefill", "value": row["share_of_torch"]})
    found += [{"goal": "tpot", "value": row["tpot_ms"][1]} for row in _results(report, "qwen3-8b") if "tpot_ms" in row]
    for row in _results(report, "qwen3-8b batches"):
        if row.get("prompt_len") == 2048 and "batch" not in row:
            found.append({"goal": "prefill_2k", "value": row["prefill_ms"][1]})
    return found


def _results(report: dict[str, Any], section: str) -> list[dict[str, Any]]:
    """What the cases of one of gpu_check's sections found."""
    cases = report["sections"].get(section, {}).get("cases", {}).values()
    return [case["result"] for case in cases if "result" in case and "skipped" not in case["result"]]


def carried(before: str, page: str) -> str:
    """A page made anew, with the section that the one before it has."""
    section = re.search(re.escape(BEGIN) + ".*?" + re.escape(END), before, flags=re.DOTALL)
    return page if section is None else filled(page, section[0])


def filled(page: str, section: str) -> str:
    """A page with the section in place of the old one, or behind its first heading's paragraph."""
    if BEGIN in page:
        return re.sub(re.escape(BEGIN) + ".*?" + re.escape(END), lambda _: section, page, flags=re.DOTALL)
    head, rest = page.split("\n## ", 1)
    return f"{head}\n{section}\n\n## {rest}"
