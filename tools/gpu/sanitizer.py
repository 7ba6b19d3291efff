"""compute-sanitizer over the quick sizes of the sections with the most kernels."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tools.gpu.sections import ROOT, Case, Options, Result

WATCHED = ("hopper gemm", "attention", "gemm", "rows", "quantized", "experts", "latent")
"""Quantised products and experts by rings; products and latent attention in segments."""


def cases(options: Options, tool: str) -> Iterator[Case]:
    for section in WATCHED:
        yield Case(section, functools.partial(_watch, options, tool, section))


def _watch(options: Options, tool: str, section: str) -> Result:
    if options.is_dry:
        return {"skipped": "nothing runs"}
    program = shutil.which("compute-sanitizer")
    if program is None:
        return {"skipped": "compute-sanitizer is not on the PATH"}
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        command = [
            program, "--tool", tool, "--error-exitcode", "99", "--print-limit", "20", sys.executable, "-m",
            "tools.gpu.checking.worker", section, "--device", options.device, "--quick", "--results", str(results),
        ]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ, encoding="utf-8")
        lines = (
            [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()] if results.exists() else []
        )
    said = [line for line in done.stdout.splitlines() if line.startswith("=========")]
    errors = [line["error"] for line in lines if "error" in line]
    if done.returncode or errors or not any("over" in line for line in lines):
        print(done.stdout[-6000:], done.stderr[-2000:])
        raise AssertionError(f"status {done.returncode}; {' '.join(errors)[:500]}; {' '.join(said[:30])[:2000]}")
    return {"cases": sum("end" in line for line in lines), "said": said[-3:]}
