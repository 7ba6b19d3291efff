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
    """A test that was collected."""

    def __init__(self, name: str, *marks: str) -> None:
        self.nodeid, self.marks = f"{FILE}::{name}", set(marks)

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None

    def add_marker(self, mark: Any) -> None:
        self.marks.add(mark.name)


def check_tables(
    monkeypatch: pytest.MonkeyPatch, items: list[Any], *arguments: str, telling: str = "test_a[2]"
) -> None:
    monkeypatch.setattr(selection, "LONG", ((FILE, "test_a", ("1",)),))
    monkeypatch.setattr(selection, "TELLING", {"avx2": (f"{FILE}::{telling}",)})
    selection.mark_long(items, run_of(*arguments))


def test_a_table_names_tests_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [Item("test_a[1]"), Item("test_a[2]")]
    check_tables(monkeypatch, items, "tests")
    assert [item.marks for item in items] == [{"exhaustive"}, set()]
    for arguments in (["tests"], [FILE], ["tests/gpu", "tests/../tests"]):
        with pytest.raises(pytest.UsageError, match=r"LONG: no test answers to tests/test_selection.py::test_a\['1'\]"):
            check_tables(monkeypatch, [Item("test_a[2]")], *arguments)
    for arguments in (["tests/gpu"], [f"{FILE}::test_a"]):  # the file's other tests were not asked for
        check_tables(monkeypatch, [Item("test_a[2]")], *arguments)


@pytest.mark.parametrize("telling", ["test_a[1]", "test_a", "test_b"])
def test_telling_cases_are_of_the_default_run(monkeypatch: pytest.MonkeyPatch, telling: str) -> None:
    with pytest.raises(pytest.UsageError, match=r"TELLING .*: no test answers to tests/test_selection.py::test_"):
        check_tables(monkeypatch, [Item("test_a[1]"), Item("test_a[2]")], "tests", telling=telling)


def test_a_file_that_is_gone_is_an_error_in_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "TELLING", {})
    monkeypatch.setattr(selection, "LONG", (("tests/test_gone.py", "test_a", ()),))
    with pytest.raises(pytest.UsageError, match=r"tests/test_gone.py::test_a"):
        selection.mark_long([], run_of("tests/gpu"))


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
