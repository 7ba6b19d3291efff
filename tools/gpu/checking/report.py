"""The results folder of gpu_check, from which a resumed check continues, and its page. Needs only Python.

    report.json    everything: {"device", "is_quick", "is_emulated", "sections": {name: Outcome}}
    summary.md     the same for a person
    *.json         large results of a case, such as a timeline (`beside`)

Written again after each case, so that no result is lost when the check ends. At most MOST_FILES files of MOST_BYTES
each, the limits of what comes back from a remote machine.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tools.gpu.checking.runner import Outcome
from tools.gpu.sections import Options

MOST_FILES = 8
MOST_BYTES = 16 << 20


class Report:
    """The results so far. `outcomes`: by section."""

    def __init__(self, folder: Path, options: Options, earlier: Path | None = None) -> None:
        """`earlier`: the results folder of a previous check, of the same device and sizes; its files are copied.

        Raises ValueError if it has another device or other sizes.
        """
        self.folder = folder
        self._head = {"device": options.device, "is_quick": options.is_quick, "is_emulated": not options.is_real}
        self.outcomes: dict[str, Outcome] = {}
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        if earlier is not None and (earlier / "report.json").is_file():
            known = json.loads((earlier / "report.json").read_text(encoding="utf-8"))
            other = {name: known.get(name) for name, value in self._head.items() if known.get(name) != value}
            if other:
                raise ValueError(f"{earlier}: its report has {other}, this check {self._head}")
            self.outcomes = known["sections"]
            if earlier.resolve() != folder.resolve():
                for path in earlier.glob("*.json"):
                    shutil.copyfile(path, folder / path.name)

    @property
    def data(self) -> dict[str, Any]:
        """The content of report.json."""
        return {**self._head, "sections": self.outcomes}

    def is_done(self, name: str) -> bool:
        """Whether all cases of a section are done."""
        return self.outcomes.get(name, {}).get("status") in ("ok", "failed", "skipped")

    def forget_errors(self) -> None:
        """Drops failed cases, so that they run again."""
        for outcome in self.outcomes.values():
            for name in [name for name, case in outcome["cases"].items() if "error" in case]:
                del outcome["cases"][name]
                outcome["status"] = "unfinished"
            if outcome["status"] == "skipped":
                outcome["status"] = "unfinished"

    def add(self, name: str, outcome: Outcome) -> None:
        """Adds a section's results, and writes everything."""
        with self._lock:  # sections may run side by side, each in a thread
            for case in outcome["cases"].values():
                self._move_beside(case.get("result"))
            self.outcomes[name] = {**outcome, "cases": dict(outcome["cases"])}
            self._write("report.json", json.dumps(self.data, indent=1) + "\n")
            self._write("summary.md", summary(self.data))

    def _move_beside(self, result: Any) -> None:
        """A result's "beside", {file name: value}, becomes files of those names; ones beyond the limits are left out,
        with a note."""
        if not isinstance(result, dict) or not isinstance(result.get("beside"), dict):
            return
        written = []
        for name, value in result.pop("beside").items():
            text = json.dumps(value)
            others = {path.name for path in self.folder.iterdir()} | {"report.json", "summary.md"}
            fits = len(text) < MOST_BYTES and len(others | {name}) <= MOST_FILES
            written.append(name if fits else f"{name} left out: {len(text):,} bytes, {len(others)} other files")
            if fits:
                self._write(name, text)
        result["files"] = written

    def _write(self, name: str, text: str) -> None:
        new = self.folder / f"{name}.new"
        new.write_text(text, encoding="utf-8")
        new.replace(self.folder / name)


# The page: cases run, failures, and tables

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
