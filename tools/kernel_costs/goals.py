"""The section of the kernel report that holds the goals beside the model's bounds and what was measured."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from runtime.bench.kernels.goals import GOALS, Goal
from runtime.device.emulator.driver.architectures import GpuModel
from tools.kernel_costs.page import table
from tools.kernel_costs.roofline import Modelled

BEGIN, END = "<!-- goals -->", "<!-- end of goals -->"


def as_markdown(model: GpuModel, found: dict[str, Modelled], measured: Sequence[dict[str, Any]]) -> str:
    """The section, between its marks. `measured`: as `rows_of` gives them."""
    values: dict[str, list[float]] = {}
    for row in measured:
        if row.get("value") is not None:
            values.setdefault(row["goal"], []).append(row["value"])
    rows = []
    for goal in GOALS.values():
        each = found.get(goal.name)
        if each is not None and not math.isfinite(each.share):
            raise ValueError(f"{goal.name}: the model gives {each.share}")
        worst = (max if goal.is_most else min)(values[goal.name]) if goal.name in values else None
        rows.append([
            goal.work, goal.measure, f"{'≤' if goal.is_most else '≥'} {goal.must:g}", f"{goal.ahead:g}",
            *(("", "") if each is None else (_share(goal, each), each.limit)),
            "not yet measured" if worst is None else f"{worst:g} ({goal.verdict(worst)})",
        ])  # fmt: skip
    share = f"modelled share of the roofline ({model.name})"
    heads = ("work", "measure", "must", "ahead of peers", share, "limit", "measured")
    text = (
        "The model takes a kernel for as slow as the slowest of what its counts say that it needs, each at the "
        "product's peak rate (tools/kernel_goals.py); latencies are not in it, so these are upper bounds."
    )
    return "\n".join([BEGIN, "## Goals", "", text, "", table(heads, rows), END])


def _share(goal: Goal, each: Modelled) -> str:
    return f"{each.share:.2f}" + (f" ({1e3 * each.seconds:.2f} ms)" if goal.measure == "ms" else "")


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
