"""Everything worth knowing of this engine on a GPU, in one command that ends within nine minutes.

    python -m tools.gpu_check                                    # cuda:0; writes gpu_check.json and gpu_check.md
    python -m tools.gpu_check --resume                           # goes on with it: what was done well is kept
    python -m tools.gpu_check --device emulated:sm_90a --quick   # the same code without a GPU; its times mean nothing

It needs numba, numba-cuda, cuda-bindings, numpy, safetensors and ml_dtypes, and compares with torch where that is
installed. What else the engine imports and the image lacks comes in a folder, made beforehand where there is a network:

    pip install --target packages --no-deps msgspec regex jinja2 markupsafe huggingface_hub rich pytest iniconfig pluggy
    python -m tools.gpu_check --packages packages

Kernels are compiled first, by all cores, into the cache below `$XDG_CACHE_HOME`: where that folder is kept, or carried
to a machine with the same versions of Python, numba and the CUDA tools, a later check compiles nothing.

Each section runs in a process of its own under a limit of its own, so that a hang or a crash costs that section alone;
what it had reported by then is kept. The JSON and the summary are written after each. The exit status is 1 where a
section failed, 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.gpu_check_sections import ROOT, Options, Section, find, sections
from tools.gpu_check_summary import summary

BUDGET_S = 520.0
EMULATED_PATIENCE = 5
"""Times the limits: an emulated device compiles itself first, and may share its processor."""

LEAST_S = 10.0
"""A section that has less time left than this is not begun."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    told = Options(options.device, options.quick)
    if options.run_section:
        return run_here(find(options.run_section), told, Path(options.result))
    chosen = [
        section
        for section in sections()
        if section.name != "verification" and (not options.sections or section.name.split()[0] in options.sections)
    ]
    deadline = time.monotonic() + options.budget
    report: dict[str, Any] = {"device": told.device, "is_quick": told.is_quick, "is_emulated": not told.is_real}
    report["sections"] = done_well(Path(options.out), report) if options.resume else {}
    for section in chosen:
        if section.name in report["sections"]:
            continue
        print(f"{section.name} ...", end=" ", flush=True)
        outcome = run_apart(section, told, deadline - time.monotonic(), options.packages)
        report["sections"][section.name] = outcome
        print(f"{outcome['status']}, {outcome['seconds']} s  {outcome.get('why', '')}", flush=True)
        Path(options.out).write_text(json.dumps(report, indent=1) + "\n")
        Path(options.out).with_suffix(".md").write_text(summary(report))
    print(f"\n{summary(report)}")
    return int(any(outcome["status"] in ("failed", "timed out") for outcome in report["sections"].values()))


def done_well(path: Path, report: dict[str, Any]) -> dict[str, Any]:
    """The sections that an earlier check ended well, by name; none where there was none, or it was of other sizes."""
    if not path.exists():
        return {}
    earlier = json.loads(path.read_text())
    if any(earlier[name] != value for name, value in report.items()):
        return {}
    return {name: outcome for name, outcome in earlier["sections"].items() if outcome["status"] == "ok"}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_check", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda:0", help="cuda:N, or emulated:sm_90a to try the check itself")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--out", default="gpu_check.json", help="the JSON; the summary goes beside it, ending in .md")
    parser.add_argument("--sections", nargs="+", choices=sorted({each.name.split()[0] for each in sections()}))
    parser.add_argument("--resume", action="store_true", help="keep what --out holds of sections that ended well")
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="SECONDS", help="for all sections together")
    parser.add_argument("--packages", metavar="FOLDER", help="put before the installed packages, for what they lack")
    parser.add_argument("--run-section", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    return parser


def run_here(section: Section, told: Options, path: Path) -> int:
    """A child's work: the section, its result or its error in `path`. Reports on the way are written as they come."""

    def write(result: dict[str, Any]) -> None:
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps(result))
        beside.replace(path)

    kept: dict[str, Any] = {}

    def report(result: dict[str, Any]) -> None:
        kept.update(result)
        write({"result": kept})

    try:
        write({"result": section.run(told, report)})
    except Exception as error:
        traceback.print_exc()
        write({"result": kept, "why": f"{type(error).__name__}: {error}"})
        return 1
    return 0


def run_apart(section: Section, told: Options, left_s: float, packages: str | None = None) -> dict[str, Any]:
    """The section in a process of its own: {"status", "seconds", "result", "why", "output"}, the last two on trouble.

    Status is "ok", "failed", "timed out" or "skipped". `left_s`: seconds that the whole check has left.
    """
    if section.needs_hardware and not told.is_real:
        return {"status": "skipped", "seconds": 0.0, "why": "needs a GPU"}
    limit_s = min(section.limit_s * (1 if told.is_real else EMULATED_PATIENCE), left_s)
    if limit_s < LEAST_S:
        return {"status": "skipped", "seconds": 0.0, "why": "no time was left"}
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log.txt"
        command = [sys.executable, "-m", "tools.gpu_check", "--device", told.device, "--run-section", section.name]
        command += ["--result", str(result), *(["--quick"] if told.is_quick else [])]
        start = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env=_environment(packages), stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            try:
                status = "ok" if process.wait(limit_s) == 0 else "failed"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                status = "timed out"
        outcome: dict[str, Any] = {"status": status, "seconds": round(time.monotonic() - start, 1)}
        outcome.update(json.loads(result.read_text()) if result.exists() else {})
        if status == "ok" and "skipped" in outcome.get("result", {}):
            outcome |= {"status": "skipped", "why": outcome.pop("result")["skipped"]}
        if status != "ok":
            died = f"the process ended with status {process.returncode}"
            outcome.setdefault("why", f"not done after {limit_s:.0f} s" if status == "timed out" else died)
            outcome["output"] = log.read_text(errors="replace")[-4000:]
        return outcome


def _environment(packages: str | None) -> dict[str, str]:
    folders = [str(ROOT), str(Path(packages).resolve()) if packages else "", os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, folders))}


if __name__ == "__main__":
    sys.exit(main())
