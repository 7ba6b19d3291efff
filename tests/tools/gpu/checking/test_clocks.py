"""Clocks beside a timed case, as a program that stands for nvidia-smi tells them."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from tools.gpu.checking.clocks import clocks


def program(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    file = folder / "nvidia-smi"
    file.write_text(f"#!{sys.executable}\nimport sys, time\n{code}\n")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_samples_are_summed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "assert sys.argv[1] == '--id=1' and sys.argv[-1] == '--loop-ms=500', sys.argv\n"
    code += (
        "print('1980, 3201, 700.5, 60\\n1755, 3201, 690, 61\\n[N/A], 3201, 1, 1\\n1830, 3201, 695, 62\\n19', end='')\n"
    )
    code += f"sys.stdout.flush()\nopen({str(tmp_path / 'said')!r}, 'w').close()\ntime.sleep(60)"
    program(tmp_path, monkeypatch, code)
    with clocks("cuda:1") as found:
        while not (tmp_path / "said").exists():
            time.sleep(0.01)
        assert found == {}
    assert found == {
        "samples": 3, "sm_mhz": [1755, 1830, 1980], "memory_mhz": [3201, 3201, 3201], "watts": [690, 695, 700.5],
        "celsius": [60, 61, 62],
    }  # fmt: skip


def test_a_missing_program_and_one_that_fails_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with clocks("cuda:0") as found:
        pass
    assert found == {"missing": "nvidia-smi is not there"}
    said = tmp_path / "said"
    program(tmp_path, monkeypatch, f"print('no devices', flush=True)\nopen({str(said)!r}, 'w').close()")
    with clocks("cuda:0") as found:
        while not said.exists():
            time.sleep(0.01)
    assert found == {"missing": "nvidia-smi said ['no devices']"}
