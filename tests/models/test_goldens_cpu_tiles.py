"""The golden models with each kind of register tile that this processor runs, forced in processes of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from numba_kernels.cpu.target import TILES, VARIABLE, available_tiles

ROOT = Path(__file__).resolve().parents[2]
TOLERANCES = {"F32-none": 1e-5, "F32-int8": 3e-2, "BF16-none": 1e-5, "BF16-int8": 3e-2}
ROUNDED = 2e-2  # of bfloat16, where activations are rounded to it, too

# Of one kind that is not in force here some is shown each time; compiling for it takes most of the time.
EACH_TIME = next((tiles for tiles in ("avx2", "portable") if tiles in available_tiles() and tiles != TILES), None)


def forced(tiles: str, *arguments: str) -> str:
    """What `python -m arguments` prints with these tiles."""
    run = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, env={**os.environ, VARIABLE: tiles},
        capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def check(tiles: str, *numbers: str) -> None:
    report = json.loads(forced(tiles, "tests.models.forced_tiles", *numbers))
    assert report["tiles"] == tiles
    assert tuple(report["errors"]) == numbers
    for name, error in report["errors"].items():
        assert error <= (ROUNDED if (tiles, name) == ("avx512_bf16", "BF16-none") else TOLERANCES[name]), name


@pytest.mark.skipif(EACH_TIME is None, reason="this processor runs one kind of tile")
def test_a_golden_model_with_other_tiles() -> None:
    assert EACH_TIME is not None
    check(EACH_TIME, "F32-none", "F32-int8")


@pytest.mark.exhaustive
@pytest.mark.parametrize("tiles", available_tiles())
def test_a_golden_model_with_any_tiles(tiles: str) -> None:
    check(tiles, *TOLERANCES)


@pytest.mark.exhaustive
@pytest.mark.parametrize("tiles", available_tiles())
def test_all_golden_models(tiles: str) -> None:
    printed = forced(tiles, "pytest", "tests/models/test_goldens.py", "tests/models/test_int8.py")
    (passed,) = re.findall(r"(\d+) passed", printed)
    assert int(passed) > 140
    assert "skipped" not in printed
