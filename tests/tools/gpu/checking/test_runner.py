"""A section's process that hangs, crashes or loses the device costs the case at hand, and the rest is gone on with."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.gpu.checking import runner
from tools.gpu.checking.runner import Launcher, Outcome, run_section
from tools.gpu.sections import Options, Section

SECTION = Section("planted", "nowhere:cases", limit_s=60, case_limit_s=20)
WORKER = """
import json, os, sys, time
results, known = (sys.argv[sys.argv.index(name) + 1] for name in ("--results", "--known"))
known = json.load(open(known))
def write(**line):
    with open(results, "a") as file:
        file.write(json.dumps(line) + "\\n")
def done(name, **found):
    if name not in known:
        write(begin=name)
        write(end=name, seconds=0.5, **found)
"""


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LEAST_S", 0.0)
    monkeypatch.setattr(runner, "POLL_S", 0.01)


def run(tmp_path: Path, code: str, *, section: Section = SECTION, left_s: float = 60, **more: Any) -> Outcome:
    """The section by a worker that is a script."""
    script = tmp_path / "planted.py"
    script.write_text(f"{WORKER}{code}\n")
    launcher = Launcher(os.environ, (sys.executable, str(script)))
    options, earlier = more.pop("options", Options("cuda:0")), more.pop("earlier", None)
    return run_section(section, options, launcher, left_s, earlier, more.pop("report", lambda _: None))


def test_all_cases_of_a_section(tmp_path: Path) -> None:
    reported: list[int] = []
    found = run(
        tmp_path, "done('one', result={'x': 1})\ndone('two', result={})\nwrite(over=True)",
        report=lambda outcome: reported.append(len(outcome["cases"])),
    )  # fmt: skip
    assert found["status"] == "ok"
    assert found["cases"] == {"one": {"seconds": 0.5, "result": {"x": 1}}, "two": {"seconds": 0.5, "result": {}}}
    assert reported == [2]
    assert "log" not in found


def test_a_crash_costs_one_case(tmp_path: Path) -> None:
    code = "done('one', result={})\nif 'two' not in known:\n    write(begin='two')\n    print('so far', flush=True)\n"
    code += "    os.kill(os.getpid(), 9)\ndone('three', result={})\nwrite(over=True)"
    found = run(tmp_path, code)
    assert found["status"] == "failed"
    assert [name for name, case in found["cases"].items() if "result" in case] == ["one", "three"]
    assert found["cases"]["two"]["error"] == "the process ended with status -9"
    assert "so far" in found["log"]


def test_a_hang_is_ended_and_the_rest_is_gone_on_with(tmp_path: Path) -> None:
    code = "if 'one' not in known:\n    write(begin='one')\n    time.sleep(1000)\n"
    code += "done('two', result={})\nwrite(over=True)"
    found = run(tmp_path, code, section=Section("planted", "nowhere:cases", limit_s=300, case_limit_s=2))
    assert found["cases"]["one"]["error"] == "not done after 2 s"
    assert found["cases"]["two"]["result"] == {}


def test_what_there_was_no_time_for_is_left_for_the_next_run(tmp_path: Path) -> None:
    code = "done('one', result={})\ndone('two', error='E: it is wrong')\nwrite(begin='three')\ntime.sleep(1000)"
    found = run(tmp_path, code, left_s=5)
    assert found["status"] == "failed, unfinished"
    assert list(found["cases"]) == ["one", "two"]
    assert "the section's time is up" in found["log"]
    again = run(tmp_path, "assert known == ['one', 'two']\ndone('three', result={})\nwrite(over=True)", earlier=found)
    assert again["status"] == "failed"
    assert list(again["cases"]) == ["one", "two", "three"]
    assert again["seconds"] >= found["seconds"]


def test_a_process_that_does_not_begin_is_not_started_again(tmp_path: Path) -> None:
    (tmp_path / "count").touch()
    code = f"open({str(tmp_path / 'count')!r}, 'a').write('x')\nraise ImportError('no such thing')"
    found = run(tmp_path, code)
    assert (found["status"], found["why"]) == ("unfinished", "[status 1]")
    assert "ImportError: no such thing" in found["log"]
    assert (tmp_path / "count").read_text() == "x"


def test_a_device_that_is_lost_again_and_again_ends_the_section(tmp_path: Path) -> None:
    code = "name = str(len(known))\nwrite(begin=name)\n"
    code += "write(end=name, seconds=0.1, error='LaunchError: lost')\nsys.exit(3)"
    found = run(tmp_path, code)
    assert found["status"] == "failed, unfinished"
    assert len(found["cases"]) == runner.MOST_PROCESSES


def test_long_results_arrive_whole(tmp_path: Path) -> None:
    found = run(tmp_path, "done('one', result={'text': 'x' * 3_000_000})\nwrite(over=True)")
    assert len(found["cases"]["one"]["result"]["text"]) == 3_000_000


def test_what_needs_a_gpu_is_skipped_without_one(tmp_path: Path) -> None:
    section = Section("planted", "nowhere:cases", 60, needs_hardware=True)
    found = run(tmp_path, "", section=section, options=Options("emulated:sm_90a"))
    assert (found["status"], found["why"]) == ("skipped", "needs a GPU")
