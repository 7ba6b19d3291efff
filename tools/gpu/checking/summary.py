"""The check's report as a page: cases run, failures, and tables. Needs only Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

Row = tuple[Any, ...]
MOST_ERROR_CHARACTERS = 300
MOST_NODES = 20


def summary(report: dict[str, Any]) -> str:
    """Markdown. An emulated device's times are left out: they are meaningless."""
    found = report["sections"]
    lines = [f"# GPU check: {_device(report)}", ""]
    if report["is_emulated"]:
        lines += ["Emulated: this shows that the check's code runs. Nothing here is a measurement.", ""]
    lines += _table(("section", "status", "seconds", "cases", "failed", "skipped", ""), map(_section, found.items()))
    failures = list(_failures(found))
    if failures:
        lines += ["", "## Failures", "", *_table(("section", "case", "error"), failures)]
    if not report["is_emulated"]:
        for title, part in _PARTS.items():
            if table := part(found):
                lines += ["", f"## {title}", "", *table]
    return "\n".join(lines) + "\n"


def results(found: dict[str, Any], section: str) -> dict[str, dict[str, Any]]:
    """A section's results by case, without failed and skipped ones."""
    cases = found.get(section, {}).get("cases", {})
    return {
        name: case["result"] for name, case in cases.items() if "result" in case and "skipped" not in case["result"]
    }


def _device(report: dict[str, Any]) -> str:
    device = results(report["sections"], "environment").get("device")
    return f"{device['name']} ({report['device']}, {device['arch']})" if device else str(report["device"])


def _section(item: tuple[str, dict[str, Any]]) -> Row:
    name, outcome = item
    cases = outcome["cases"].values()
    failed = sum("error" in case for case in cases) or ""
    skipped = sum("skipped" in case.get("result", {}) for case in cases) or ""
    return (name, outcome["status"], outcome["seconds"], len(cases), failed, skipped, outcome.get("why", ""))


def _failures(found: dict[str, Any]) -> Iterator[Row]:
    for section, outcome in found.items():
        for name, case in outcome["cases"].items():
            if "error" in case:
                yield section, name, " ".join(case["error"].split())[:MOST_ERROR_CHARACTERS]


def _read_rate(found: dict[str, Any]) -> float | None:
    """GB/s of the read kernel."""
    rate: float | None = results(found, "bandwidth").get("bandwidth", {}).get("read", {}).get("gb_per_s")
    return rate


def _bandwidth(found: dict[str, Any]) -> list[str]:
    rates = results(found, "bandwidth").get("bandwidth", {})
    return _table(("", "GB/s"), ((name, _number(rate.get("gb_per_s"))) for name, rate in rates.items()))


def _models(found: dict[str, Any]) -> list[str]:
    rows = []
    for section in found:
        cases = results(found, section)
        read = _read_rate(found)
        for name, case in cases.items():
            least = cases["load"]["weight_bytes"] / read / 1e6 if read and "load" in cases else None
            if "tpot_ms" in case or "prefill_ms" in case:
                tpot, prefill = (_middle(case.get(key)) for key in ("tpot_ms", "prefill_ms"))
                host = _middle(case.get("host_ms"))
                rows.append((section, name, tpot, _number(least), case.get("tokens_per_s", ""), host, prefill))
    heads = ("model", "case", "TPOT ms", "weights read once, ms", "tokens/s", "host ms", "prefill ms")
    return _table(heads, rows)


def _timelines(found: dict[str, Any]) -> list[str]:
    lines = []
    for section in found:
        step = results(found, section).get("timeline of a step")
        if step is not None:
            gaps = step["gaps_us"]
            lines += [
                f"{section}: {step['nodes']} nodes in {step['step_us']} µs, busy {step['busy_us']}, gaps {gaps['sum']} "
                f"(median {gaps['median']}), overlap {gaps['overlap']}.", "",
            ]  # fmt: skip
            shown = list(step["kernels"].items())[:MOST_NODES]
            rows = ((name, count, _number(us), _number(us / count)) for name, (count, us) in shown)
            lines += [*_table(("kernel", "launches", "µs", "µs each"), rows), ""]
    return lines


def _timed(section: str) -> Callable[[dict[str, Any]], list[str]]:
    """The table of timed cases (`runtime.bench.kernels.case`), each beside its peer."""

    def part(found: dict[str, Any]) -> list[str]:
        read, rows = _read_rate(found), []
        for row in results(found, section).values():
            times, rate = dict(row["times"]), row.get("gb_per_s")
            ours = times.pop("ours")
            peer = next(iter(times), "")
            rows.append((
                row["case"], row["shape"], " + ".join(row.get("kernels", ())), _number(ours["median_us"]),
                _quartiles(ours), _number(rate), _number(rate / read if rate and read else None),
                _number(row.get("tflop_per_s")), peer, _number(times[peer]["median_us"] if peer else None),
                _number(row.get(f"share_of_{peer}")), f"{row['error_share']:.1e}",
            ))  # fmt: skip
        heads = ("case", "shape", "kernels", "µs", "quartiles", "GB/s", "of read", "TFLOP/s", "peer", "its µs")
        return _table((*heads, "its µs / µs", "worst error"), rows)

    return part


def _quartiles(times: dict[str, float]) -> str:
    return f"{_number(times['low_us'])} to {_number(times['high_us'])}"


def _goals(found: dict[str, Any]) -> list[str]:
    rows = []
    for part in results(found, "goals").values():
        for row in part["rows"]:
            times = {name: each["median_us"] for name, each in row["times"].items()}
            rows.append((
                row["case"], row["shape"], _number(times["ours"]), _number(times.get("cublas")),
                _number(row.get("value")), row["measure"], f"{row['must']:g} / {row['ahead']:g}",
                row.get("verdict", ""),
            ))  # fmt: skip
    return _table(("case", "shape", "µs", "cuBLAS µs", "value", "measure", "must / ahead", ""), rows)


def _steps(found: dict[str, Any]) -> list[str]:
    rows = []
    for name, case in results(found, "verification").items():
        for count, steps in case.get("by_tokens", {}).items():  # a timeline has none
            rows.append((name, count, steps["steps"], _middle(steps["step_ms"]), _middle(steps["host_ms"])))
    return _table(("", "tokens of a step", "steps", "step ms", "host ms"), rows)


def _tower(found: dict[str, Any]) -> list[str]:
    rows = (
        (name, case["layers"], _number(case["whole_ms"]), _number(case["device_ms"]), _number(case["host_ms"]))
        for name, case in results(found, "tower").items()
    )
    return _table(("picture", "layers", "ms", "on the device", "until all was queued"), rows)


_PARTS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "Bandwidth": _bandwidth,
    "Models, dummy weights": _models,
    "A decode step, by kernel": _timelines,
    "Goals": _goals,
    "Kernels": _timed("kernels"),
    "Products of quantised weights": _timed("quantized speed"),
    "Experts": _timed("experts speed"),
    "Steps that try proposals": _steps,
    "A vision tower": _tower,
    "Latent attention": _timed("latent speed"),
    "Sampling": _timed("sampling speed"),
}


def _middle(quartiles: list[float] | float | None) -> str:
    """The median."""
    return _number(quartiles[1] if isinstance(quartiles, list) else quartiles)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"


def _table(heads: tuple[str, ...], rows: Iterable[Row]) -> list[str]:
    """The lines of a table; empty without rows."""
    cells = [[str(cell).replace("|", "/").replace("\n", " ") for cell in row] for row in rows]
    marks = ["---"] * len(heads)
    return [f"| {' | '.join(row)} |" for row in (list(heads), marks, *cells)] if cells else []
