"""The check's report as a page that is read: what was run, what failed, and the tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from runtime.bench.kernels.bench_kernels import as_lines


def summary(report: dict[str, Any]) -> str:
    """Markdown. An emulated device's times are left out: they say nothing of a GPU."""
    found = report["sections"]
    lines = [f"# GPU check: {_device(report)}", ""]
    if report["is_emulated"]:
        lines += ["Emulated: this shows that the check's code runs. Nothing here is a measurement.", ""]
    lines += _table(
        ("section", "status", "seconds", ""),
        (
            (name, each["status"], each["seconds"], each.get("why", "").split("\n")[0][:160])
            for name, each in found.items()
        ),
    )
    rates = _result(found, "bandwidth")
    if rates:
        shown = ((name, _number(each.get("gb_per_s"))) for name, each in rates.items())
        lines += ["", "## Bandwidth", "", *_table(("", "GB/s"), shown)]
    read = rates.get("read", {}).get("gb_per_s")
    if rows := _result(found, "kernels").get("rows"):
        told = "Medians with a cold cache; each result was verified first. A share of 1 is as fast."
        lines += ["", "## Kernels", "", told, ""]
        heads: tuple[str, ...]
        heads = ("case", "shape", "µs", "torch µs", "torch µs / µs", "GB/s", "of read", "TFLOP/s", "worst error")
        lines += _table(heads, (_kernel(row, report["is_emulated"], read) for row in rows))
    if goals := _result(found, "goals"):
        lines += ["", "## Goals", "", "```", *as_lines(goals), "```"]
    models = {name.split()[1]: each["result"] for name, each in found.items() if _is_model(name, each)}
    if models:
        lines += ["", "## End to end, dummy weights", ""]
        heads = ("model", "load s", "TTFT ms", "TPOT ms", "least TPOT ms", "batch", "tokens/s")
        lines += _table(heads, (_model(name, each, report["is_emulated"], read) for name, each in models.items()))
    alone = [row for row in _result(found, "kernels").get("rows", ()) if "torch_error" in row]
    lines += ["", *(f"No torch for {row['case']} {row['shape']}: {row['torch_error'][:200]}" for row in alone)]
    for name, each in found.items():
        if each["status"] in ("failed", "timed out"):
            log = each["output"].strip()[-1500:]
            lines += ["", f"## {name}: {each['status']}", "", each["why"], "", "```", log, "```"]
    return "\n".join(lines) + "\n"


def _device(report: dict[str, Any]) -> str:
    device = _result(report["sections"], "environment").get("device")
    return f"{device['name']} ({report['device']}, {device['arch']})" if device else str(report["device"])


def _result(found: dict[str, Any], name: str) -> dict[str, Any]:
    result: dict[str, Any] = found.get(name, {}).get("result", {})
    return result


def _is_model(name: str, outcome: dict[str, Any]) -> bool:
    return name.startswith("model ") and "ttft_ms" in outcome.get("result", {})


def _kernel(row: dict[str, Any], is_emulated: bool, read: float | None) -> tuple[Any, ...]:
    if "error" in row:
        return (row["case"], row["shape"], row["error"].split("\n")[0][:120], *[""] * 6)
    times = {} if is_emulated else {name: each["median_us"] for name, each in row["times"].items()}
    rate = row.get("gb_per_s")
    return (
        row["case"], row["shape"], _number(times.get("ours")), _number(times.get("torch")),
        _number(row.get("share_of_torch")), _number(rate), _number(rate / read if rate and read else None),
        _number(row.get("tflop_per_s")), f"{row['error_share']:.1e}",
    )  # fmt: skip


def _model(name: str, figures: dict[str, Any], is_emulated: bool, read: float | None) -> tuple[Any, ...]:
    """`least TPOT`: the weights read once at the measured bandwidth."""
    if is_emulated:
        return (name, *[""] * 4, figures["batch"], "")
    least = figures["weight_bytes"] / read / 1e6 if read else None
    return (
        name, figures["load_s"], figures["ttft_ms"], figures["tpot_ms"], _number(least), figures["batch"],
        figures["batch_tokens_per_s"],
    )  # fmt: skip


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _table(heads: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> list[str]:
    cells = [heads, tuple("---" for _ in heads), *rows]
    return [f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |" for row in cells]
