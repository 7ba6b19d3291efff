"""Runs a section in a process of its own, which may hang, crash or lose the device: only the case at fault is lost.
Another process then continues after that case."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.gpu.sections import ROOT, Options, Section

Outcome = dict[str, Any]
"""A section's: {"status", "seconds", "cases": {name: {"seconds", "result"} or {"seconds", "error"}}, "log"}.

Status: "ok", "failed" (a case has an error), "unfinished" (its time was up; a resumed run goes on), "skipped".
"""

EMULATED_PATIENCE = 12
"""Times the limits: an emulated device compiles itself first, and may share its processor."""
MOST_PROCESSES = 4
LEAST_S = 8.0
"""A section that has less time left than this is not begun."""
POLL_S = 0.1
LOG_CHARACTERS = 6000


@dataclass(frozen=True, slots=True)
class Launcher:
    """A worker's command without arguments, and its environment."""

    environment: Mapping[str, str]
    command: tuple[str, ...] = (sys.executable, "-m", "tools.gpu.checking.worker")


def run_section(
    section: Section, options: Options, launcher: Launcher, left_s: float, earlier: Outcome | None,
    report: Callable[[Outcome], None], unchanged: Collection[str] = (),
) -> Outcome:  # fmt: skip
    """Runs the rest of a section. `earlier`: results of a previous run. `left_s`: remaining seconds of the whole check.
    `report` gets each new outcome. Cases in `unchanged` are left out."""
    found: Outcome = {"status": "unfinished", "seconds": 0.0, "cases": {}, **(earlier or {})}
    if section.needs_hardware and not options.is_real:
        return found | {"status": "skipped", "why": "needs a GPU"}
    patience = 1 if options.is_real else EMULATED_PATIENCE
    start, before_s = time.monotonic(), found["seconds"]
    deadline = start + min(section.limit_s * patience, left_s)
    for _ in range(MOST_PROCESSES):
        if deadline - time.monotonic() < LEAST_S:
            break
        num_known = len(found["cases"])
        is_over, log = _run_process(section, options, launcher, found["cases"], unchanged, deadline, patience)
        found["seconds"] = round(before_s + time.monotonic() - start, 1)
        if log:
            found["log"] = (found.get("log", "") + log)[-LOG_CHARACTERS:]
        if is_over:
            found["status"] = "ok"
            break
        if len(found["cases"]) == num_known:  # another process would get no further
            found["why"] = log.strip().splitlines()[-1]
            break
        report(found)
    if any("error" in case for case in found["cases"].values()):
        found["status"] = "failed" if found["status"] == "ok" else "failed, unfinished"
    if found["status"] == "ok":
        found.pop("why", None)
    report(found)
    return found


def _run_process(
    section: Section, options: Options, launcher: Launcher, cases: dict[str, Any], unchanged: Collection[str],
    deadline: float, patience: float,
) -> tuple[bool, str]:  # fmt: skip
    """Adds to `cases`. Returns whether the section is done, and the end of a failed process's output."""
    with tempfile.TemporaryDirectory() as folder:
        results, known, log = (Path(folder) / name for name in ("results", "known.json", "log"))
        results.touch()
        known.write_text(json.dumps([*cases, *unchanged]), encoding="utf-8")
        command = [
            *launcher.command, section.name, "--device", options.device, *["--quick"] * options.is_quick,
            "--results", str(results), "--known", str(known),
        ]  # fmt: skip
        with log.open("wb") as output, results.open(encoding="utf-8") as lines:
            process = subprocess.Popen(
                command, cwd=ROOT, env=launcher.environment, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            reader, why = _Reader(lines, cases), ""
            try:
                while process.poll() is None and not why:
                    time.sleep(POLL_S)
                    reader.read()
                    why = reader.why_too_late(deadline, section.case_limit_s * patience)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                status = process.wait()
            reader.read()
        if reader.running is not None and why != _TIME_IS_UP:
            cases[reader.running] = {
                "seconds": round(time.monotonic() - reader.begun, 2),
                "error": why or f"the process ended with status {status}",
            }
        said = log.read_text(errors="replace", encoding="utf-8")
    if reader.is_over and status == 0:
        return True, "" if all("error" not in case for case in cases.values()) else said
    return False, f"{said.strip()}\n[{why or f'status {status}'}]\n"


_TIME_IS_UP = "the section's time is up"


class _Reader:
    """Follows a worker's lines.

    Attributes:
        running: the case that has begun and not ended.
        begun: its start, by the monotonic clock; before the first case, the process's start.
        is_over: whether no case is left.
    """

    def __init__(self, lines: Any, cases: dict[str, Any]) -> None:
        self._lines, self._cases, self._partial = lines, cases, ""
        self.running: str | None = None
        self.begun = time.monotonic()
        self.is_over = False

    def read(self) -> None:
        """Reads the new lines."""
        while text := self._lines.readline():
            self._partial += text
            if not text.endswith("\n"):
                return
            line, self._partial = json.loads(self._partial), ""
            if "begin" in line:
                self.running, self.begun = line["begin"], time.monotonic()
            elif "end" in line:
                self._cases[line.pop("end")] = line
                self.running, self.begun = None, time.monotonic()
            else:
                self.is_over = True

    def why_too_late(self, deadline: float, limit_s: float) -> str:
        """The reason to kill the process now, or ""."""
        now = time.monotonic()
        if now > deadline:
            return _TIME_IS_UP
        return f"not done after {limit_s:.0f} s" if now - self.begun > limit_s else ""
