"""A child that answers, fails, dies, or cannot be started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from runtime.bench.metrics import BenchmarkError
from runtime.bench.peers.child_process import ChildProcess

SCRIPT = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    if request["op"] == "die":
        sys.exit("no reason at all")
    reply = {"error": "cannot"} if request["op"] == "fail" else {"twice": request["value"] * 2}
    print(json.dumps(reply), flush=True)
"""


def test_answers_failures_and_death(tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text(SCRIPT)
    with ChildProcess([sys.executable, str(script)], "the child") as child:
        assert child.ask("double", value=21) == {"twice": 42}
        with pytest.raises(BenchmarkError, match="the child failed at 'fail': cannot"):
            child.ask("fail")
        with pytest.raises(BenchmarkError, match="status 1 at 'die': no reason at all"):
            child.ask("die")
        with pytest.raises(BenchmarkError, match="the child ended with status 1"):
            child.ask("double", value=1)


def test_a_silent_child_is_not_waited_for_for_ever() -> None:
    sleeper = "import sys; sys.stdin.read()"
    with (
        ChildProcess([sys.executable, "-c", sleeper], "the child") as child,
        pytest.raises(BenchmarkError, match=r"within 0\.1 s"),
    ):
        child.ask("anything", timeout_s=0.1)


def test_a_missing_program_is_named() -> None:
    with pytest.raises(BenchmarkError, match="cannot run /nowhere/python for the child"):
        ChildProcess(["/nowhere/python"], "the child")
