"""A name that selects no test is an error, wherever tests are named."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import selection

ROOT = Path(__file__).resolve().parents[1]
FILE = "tests/test_selection.py"
MARKS = ["exhaustive: what another test shows", "parametrize(names, values): of pytest"]


def run_of(*arguments: str, marks: str = "", words: str = "") -> Any:
    """The parts of a run's config that the checks read."""
    option = SimpleNamespace(markexpr=marks, keyword=words, deselect=None, ignore=None, ignore_glob=None)
    place = SimpleNamespace(dir=ROOT)
    return SimpleNamespace(
        args=list(arguments), option=option, rootpath=ROOT, invocation_params=place, getini=lambda name: MARKS
    )


class Item:
    """A test that was collected; its marks name the test that bears them."""

    def __init__(self, name: str, *marks: pytest.Mark) -> None:
        self.nodeid, self.marks = f"{FILE}::{name}", list(marks)

    def iter_markers_with_node(self, name: str) -> list[tuple[Any, pytest.Mark]]:
        return [(SimpleNamespace(nodeid=self.nodeid), mark) for mark in self.marks if mark.name == name]

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, mark: Any) -> None:
        self.marks.append(mark.mark)


def cases(*names: str, patterns: tuple[str, ...] = ("1",)) -> list[Any]:
    return [Item(name, pytest.mark.exhaustive_cases(*patterns).mark) for name in names]


def exhaustive(items: list[Any]) -> list[str]:
    return [item.nodeid.partition("::")[2] for item in items if item.get_closest_marker("exhaustive")]


def test_patterns_select_cases_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "TELLING", {"avx2": (f"{FILE}::test_a[2]",)})
    items = cases("test_a[1]", "test_a[2]", "test_a[3-1]")
    selection.mark_cases(items, run_of("tests"))
    assert exhaustive(items) == ["test_a[1]", "test_a[3-1]"]
    for arguments in (["tests"], [FILE], ["tests/gpu", "tests/../tests"]):
        with pytest.raises(pytest.UsageError, match=r"exhaustive_cases: no test answers to .*::test_a\[9\]"):
            selection.mark_cases(cases("test_a[1]", "test_a[2]", patterns=("1", "9")), run_of(*arguments))
    for arguments in (["tests/gpu"], [f"{FILE}::test_a"]):  # the file's other tests were not asked for
        selection.mark_cases(cases("test_a[2]"), run_of(*arguments))


@pytest.mark.parametrize("telling", ["test_a[1]", "test_a", "test_b"])
def test_telling_cases_are_of_the_default_run(monkeypatch: pytest.MonkeyPatch, telling: str) -> None:
    monkeypatch.setattr(selection, "TELLING", {"avx2": (f"{FILE}::{telling}",)})
    with pytest.raises(pytest.UsageError, match=r"TELLING .*: no test answers to tests/test_selection.py::test_"):
        selection.mark_cases(cases("test_a[1]", "test_a[2]"), run_of("tests"))


def test_a_file_that_is_gone_is_an_error_in_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "TELLING", {"avx2": ("tests/test_gone.py::test_a",)})
    with pytest.raises(pytest.UsageError, match=r"tests/test_gone.py::test_a"):
        selection.mark_cases([], run_of("tests/gpu"))


def test_a_name_of_the_command_line_that_marks_leave_nothing_of() -> None:
    config = run_of(f"{FILE}::test_a", f"{FILE}::test_b[1]", "tests/gpu", marks="not exhaustive")
    items: list[Any] = [Item("test_a[1]"), Item("test_b[1]")]
    selection.refuse_empty_names(items, config)
    with pytest.raises(pytest.UsageError, match=r"test_b\[1\] names no test that -m 'not exhaustive' -k '' leaves"):
        selection.refuse_empty_names(items[:1], config)


def test_an_expression_of_marks_has_marks_that_there_are() -> None:
    selection.refuse_unregistered_marks(run_of(marks="not exhaustive and (parametrize or exhaustive)"))
    with pytest.raises(pytest.UsageError, match="'not exhuastive': no mark is called exhuastive"):
        selection.refuse_unregistered_marks(run_of(marks="not exhuastive"))
