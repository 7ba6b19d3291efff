"""Recipes of docs/adding.md that are applied to a copy of the code."""

from __future__ import annotations

import os
import re
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


def apply(title: str, root: Path) -> None:
    """Copies the code to a folder and applies the block below a heading of the page: below a file's name, lines
    ("-", " ") become others ("+", " ")."""
    for room in ROOMS:
        shutil.copytree(ROOT / room, root / room, ignore=shutil.ignore_patterns("__pycache__"))
    page = (ROOT / "docs" / "adding.md").read_text(encoding="utf-8")
    (section,) = (part for part in page.split("\n## ") if part.startswith(f"{title}\n"))
    (recipe,) = re.findall(r"```diff\n(.*?)```", section, re.S)
    for hunk in recipe.rstrip("\n").split("\n\n"):
        name, *lines = hunk.split("\n")
        old, new = ("".join(f"{line[1:]}\n" for line in lines if line[0] in kinds) for kinds in ("- ", "+ "))
        text = (root / name).read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{name} has this {text.count(old)} times:\n{old}"
        (root / name).write_text(text.replace(old, new), encoding="utf-8")


def run(root: Path, code: str) -> None:
    """Runs a script on the copy."""
    environment = {**os.environ, "PYTHONPATH": str(root)}
    script = PRELUDE.format(root=str(root)) + code
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, env=environment, capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
