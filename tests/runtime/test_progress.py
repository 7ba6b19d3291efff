"""A bar on a terminal, lines elsewhere, and nothing for what is quick."""

from __future__ import annotations

import io
import re
import sys
import time

import pytest

from runtime import progress
from runtime.progress import SILENT, Reporter
from tests.waiting import wait_until


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """No fixture: pytest puts its own stream there between setup and call."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def refuse(line: str) -> None:
    raise AssertionError(line)


def test_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_a_terminal(monkeypatch)
    reporter = Reporter(refuse, first_s=0.01, bar_s=0.01)
    with reporter.shown("compiling") as show:
        wait_until(lambda: "compiling:, " in terminal.getvalue())  # while nobody has told anything
        show(0, 20)
        wait_until(lambda: f"[{24 * '.'}] 0 of 20, " in terminal.getvalue())
        show(10, 20, "gemv")
        wait_until(lambda: f"[{12 * '#'}{12 * '.'}] 10 of 20 gemv, " in terminal.getvalue())
        show(20, 20, "rope")
    assert re.search(r"\r\x1b\[Kcompiling: \[#{24}\] 20 of 20 rope, \d+ s\n$", terminal.getvalue())
    with reporter.shown("Prompts", is_kept=False) as show:
        show(1, 4)
        wait_until(lambda: "1 of 4" in terminal.getvalue())
    assert terminal.getvalue().endswith("\r\x1b[K")
    with reporter.shown("loading weights", is_bytes=True) as show:
        show(1_500_000_000, 3_200_000_000)
        wait_until(lambda: "1.5 of 3.2 GB" in terminal.getvalue())
        show(1_500_000, 2_000_000)
        wait_until(lambda: "1.5 of 2.0 MB" in terminal.getvalue())


def test_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, said = io.StringIO(), list[str]()
    monkeypatch.setattr(sys, "stderr", stream)
    with Reporter(said.append, first_s=0.01, line_s=0.01).shown("compiling") as show:
        wait_until(lambda: said != [])
        assert re.fullmatch(r"compiling, \d+ s", said[0])
        show(3, 4, "gemv")
        wait_until(lambda: said[-1].startswith("compiling: 3 of 4, "))
        show(4, 4)
    assert re.fullmatch(r"compiling: 4 of 4, \d+ s", said[-1])
    assert stream.getvalue() == ""


def test_lines_that_are_redirected(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, said = on_a_terminal(monkeypatch), list[str]()
    progress.redirect(said.append)
    try:
        with Reporter(progress.say_on_stderr, first_s=0.01, line_s=0.01).shown("compiling"):
            wait_until(lambda: said != [])
    finally:
        progress.redirect(None)
    assert re.fullmatch(r"compiling, \d+ s", said[0])
    assert terminal.getvalue() == ""


def test_the_end_is_told_of_what_was_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_a_terminal(monkeypatch)

    def fail() -> None:
        with Reporter(refuse, first_s=0.01).shown("compiling") as show:
            show(1, 2)
            wait_until(lambda: "1 of 2" in terminal.getvalue())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert terminal.getvalue().endswith("\n")


def test_what_is_quick_or_not_wanted_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_a_terminal(monkeypatch)
    with Reporter(refuse, first_s=60.0).shown("loading") as show:
        show(1, 2)
    with SILENT.shown("loading") as show:
        show(1, 2)
        time.sleep(0.01)
    assert terminal.getvalue() == ""
