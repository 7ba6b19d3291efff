"""Recipes of docs/examples that are applied to a copy of the code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("models", "numba_kernels", "runtime", "server", "tokenizer")

PRELUDE = """
import json
import numpy as np
import runtime
assert runtime.__path__[0].startswith({root!r}), runtime.__path__
"""


def apply(name: str, root: Path) -> None:
    """Copies the code to a folder and applies a file of examples: below a file's name, lines ("-", " ") become others
    ("+", " ")."""
    for room in ROOMS:  # with the bytecode, which goes by size and time, but not what others are writing
        shutil.copytree(ROOT / room, root / room, ignore=shutil.ignore_patterns("*.pyc.*"))
    recipe = (ROOT / "docs" / "examples" / name).read_text(encoding="utf-8")
    for hunk in recipe.rstrip("\n").split("\n\n"):
        changed, *lines = hunk.split("\n")
        old, new = ("".join(f"{line[1:]}\n" for line in lines if line[0] in kinds) for kinds in ("- ", "+ "))
        text = (root / changed).read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{changed} has this {text.count(old)} times:\n{old}"
        (root / changed).write_text(text.replace(old, new), encoding="utf-8")


def run(root: Path, code: str) -> None:
    """Runs a script on the copy."""
    environment = {**os.environ, "PYTHONPATH": str(root)}
    script = PRELUDE.format(root=str(root)) + code
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, env=environment, capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
