"""Runs a file of tests, each test a case: of `tests/gpu`, or tests written for emulated devices. All run in one session
of pytest in this process, and are reported one by one. Warnings do not fail tests: most come from the machine's own
packages."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import tomllib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from runtime.later import later
from tools.gpu.sections import EMULATED_TESTS, ROOT, Options


def session(options: Options, file: str, known: Collection[str], report: Callable[..., None]) -> None:
    """Runs the tests of a file below `tests` that are not `known`; see `worker.Lines.write` for `report`."""
    if importlib.util.find_spec("pytest") is None:
        report(begin=file)
        report(end=file, seconds=0.0, result={"skipped": "pytest is not installed"})
        return
    import pytest

    os.environ["XSERV_TEST_DEVICE"] = options.device
    os.environ["XSERV_TEST_CASES"] = "first" if options.is_quick else "all"
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "pytest.ini"
        settings.write_text(_settings(), encoding="utf-8")
        path = ROOT / "tests" / file
        plugins: list[object] = [_Reporter(known, report)]
        marks = "gpu"  # emulated devices' tests run in full: a GPU has time for exhaustive ones
        if file in EMULATED_TESTS:
            plugins.append(later("tools.gpu.checking.stand_in").StandIn(options))
            marks = ""
        arguments = ["-c", str(settings), "--rootdir", str(ROOT), "-p", "no:cacheprovider", "-q", "--tb=short"]
        arguments += ["--assert=plain"] * options.is_dry  # leaves assertions to `make_lenient`
        status = pytest.main([*arguments, "-m", marks, str(path)], plugins=plugins)
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise AssertionError(f"pytest ended with {status!r}")


class _Reporter:
    """A plugin of pytest that deselects known tests and reports the others."""

    def __init__(self, known: Collection[str], report: Callable[..., None]) -> None:
        self._known, self._report = known, report
        self._parts: list[Any] = []

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        left_out = [item for item in items if _case_of(item.nodeid) in self._known]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._parts.clear()
        self._report(begin=_case_of(nodeid))

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._parts.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        found: dict[str, Any] = {"result": {}}
        if failed := [part for part in self._parts if part.failed]:
            crash = getattr(failed[0].longrepr, "reprcrash", None)
            reason = crash.message.split("\n")[0] if crash is not None else "no traceback"
            found = {"error": f"{failed[0].when}: {reason}\n{failed[0].longreprtext[-3000:]}"}
        elif skipped := [part for part in self._parts if part.skipped]:
            found = {"result": {"skipped": str(skipped[0].longrepr[-1])[:500]}}
        self._report(end=_case_of(nodeid), seconds=round(sum(part.duration for part in self._parts), 2), **found)


def _case_of(nodeid: str) -> str:
    return nodeid.partition("::")[2]


def _settings() -> str:
    """Only pyproject's markers: its filters turn warnings into errors."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    return "\n".join(["[pytest]", "markers =", *(f"    {line}" for line in options["markers"])]) + "\n"
