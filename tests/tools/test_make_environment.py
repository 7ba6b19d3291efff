"""tools/make_environment.sh, with a Python and a pip that only say what pip says."""

from __future__ import annotations

import os
import pty
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "make_environment.sh"

PYTHON = """#!/bin/sh
case "$*" in
    *"--version"*) echo "Python 3.12.0" ;;
    *"pip install"*)
        echo "Obtaining file:///somewhere"
        echo "  Preparing editable metadata (pyproject.toml): finished with status 'done'"
        echo "Collecting numpy>=2.1"
        echo "  Downloading numpy-2.4.0.whl (16.0 MB)"
        echo "Collecting numba"
        [ -z "$PIP_PAUSES" ] || sleep "$PIP_PAUSES"
        [ -z "$PIP_FAILS" ] || { echo "ERROR: No matching distribution found for numba" >&2; exit 1; }
        echo "Installing collected packages: numpy, numba, xserv" ;;
esac
"""


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    python = tmp_path / "venv" / "bin" / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    tools = tmp_path / "tools"  # no uv among them
    tools.mkdir()
    for name in ("grep", "mktemp", "rm", "sleep", "tr", "wc"):
        found = next(Path(folder, name) for folder in ("/usr/bin", "/bin") if Path(folder, name).exists())
        (tools / name).symlink_to(found)
    return tmp_path / "venv"


def install(venv: Path, **options: object) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(venv.parent / "tools"), "TMPDIR": str(venv.parent), **options.pop("env", {})}  # type: ignore[dict-item]
    words = ["/bin/sh", str(SCRIPT), str(venv / "bin" / "python"), str(venv), "."]
    return subprocess.run(words, env=environment, text=True, timeout=60, check=False, **options)  # type: ignore[call-overload, no-any-return]


def test_it_says_what_it_does(venv: Path) -> None:
    done = install(venv, capture_output=True)
    assert (done.returncode, done.stdout) == (0, "")
    lines = done.stderr.splitlines()
    assert lines[0].startswith("xserv: installing . into")
    assert lines[1:] == ["xserv: installing 3 packages", "xserv: installed"]
    assert [path.name for path in venv.parent.iterdir() if path.name.startswith("tmp")] == []


def test_a_failure_is_shown_in_whole(venv: Path) -> None:
    done = install(venv, capture_output=True, env={"PIP_FAILS": "1"})
    assert (done.returncode, done.stdout) == (1, "")
    assert "ERROR: No matching distribution found for numba" in done.stderr
    assert "xserv: installing . into" in done.stderr.splitlines()[-1]
    assert "xserv-failed" not in done.stderr


def test_on_a_terminal_one_line_changes(venv: Path) -> None:
    ours, theirs = pty.openpty()
    done = install(venv, stdout=subprocess.DEVNULL, stderr=theirs, env={"PIP_PAUSES": "2.5"})
    os.close(theirs)
    shown = b""
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        while True:
            try:
                piece = terminal.read(4096)
            except OSError:  # the other end is closed
                break
            shown += piece
            if not piece:
                break
    assert done.returncode == 0
    assert shown.count(b"\n") == 2  # the first words, and the last
    said = (b"building xserv", b"1 packages found: numpy>=2.1", b"installing 3 packages", b"xserv: installed", b", 2 s")
    for words in said:
        assert words in shown
