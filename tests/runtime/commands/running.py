"""The program `xserv`, run in a process of its own or in this one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from runtime.cli import app

ROOT = Path(__file__).resolve().parents[3]
STORIES = ROOT.parent / "shared" / "data" / "models" / "stories260K"
needs_stories = pytest.mark.skipif(not STORIES.is_dir(), reason="../shared/data/models/stories260K is not there")


def run(*arguments: str, stdin: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "runtime.cli", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        **options,
    )


def invoke(*arguments: str, stdin: str | None = None) -> tuple[int, str, str]:
    """In this process: status, stdout, stderr."""
    result = CliRunner().invoke(app, list(arguments), input=stdin)
    return result.exit_code, result.stdout, result.stderr
