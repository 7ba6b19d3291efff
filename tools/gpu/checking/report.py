"""The results folder of gpu_check, from which a resumed check continues.

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
from pathlib import Path
from typing import Any

from tools.gpu.checking.runner import Outcome
from tools.gpu.checking.summary import summary
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
