"""Progress of long work: a bar on stderr if that is a terminal, else a line now and then.

    with reporter.shown("loading weights", is_bytes=True) as show:
        show(done, total)

Work of less than a second is not shown. Nothing goes to stdout. If the log has a format of its own (JSON), `redirect`
makes log records of the lines.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

BAR_CELLS, NAME_CHARACTERS = 24, 48
FIRST_S = 1.0
BAR_S, LINE_S, MOST_LINE_S = 0.25, 10.0, 60.0
"""Seconds until anything is shown, between two redraws of a bar, and between the first two lines; then twice as many
each time, up to a minute."""


class Show(Protocol):
    """``done`` of the total (None while unknown), most recently ``name``. Thread-safe."""

    def __call__(self, done: int, total: int | None, name: str = "") -> None: ...


@dataclass(frozen=True, slots=True)
class Reporter:
    """``say`` receives the lines if there is no terminal; with None nothing is shown anywhere."""

    say: Callable[[str], None] | None
    first_s: float = FIRST_S
    bar_s: float = BAR_S
    line_s: float = LINE_S

    @contextmanager
    def shown(self, label: str, *, is_bytes: bool = False, is_kept: bool = True) -> Iterator[Show]:
        """With ``is_kept`` the bar's last state stays on the terminal."""
        if self.say is None:
            yield _nothing
            return
        is_terminal = sys.stderr is not None and sys.stderr.isatty() and not is_redirected()
        view = _View(self, label, is_bytes, is_kept, is_terminal)
        ticker = threading.Thread(target=view.run, name="xserv-progress", daemon=True)
        ticker.start()
        try:
            yield view.show
        finally:
            view.is_over.set()
            ticker.join()
            view.end()


_taker: Callable[[str], None] | None = None


def redirect(taker: Callable[[str], None] | None) -> None:
    """In this process, give lines that would go to stderr to `taker`, and draw no bars; None restores the default."""
    global _taker
    _taker = taker


def is_redirected() -> bool:
    return _taker is not None


def say_on_stderr(line: str) -> None:
    if _taker is not None:
        _taker(line)
    else:
        print(line, file=sys.stderr, flush=True)


ON_STDERR = Reporter(say_on_stderr)
SILENT = Reporter(None)


class _View:
    """One progress display; a separate thread redraws it, even without new calls."""

    def __init__(self, reporter: Reporter, label: str, is_bytes: bool, is_kept: bool, is_terminal: bool) -> None:
        self.reporter, self.label, self.is_bytes, self.is_kept = reporter, label, is_bytes, is_kept
        self.is_terminal = is_terminal
        self.is_over = threading.Event()
        self._start_s = time.monotonic()
        self._state: tuple[int, int | None, str] = (0, None, "")
        self._told: tuple[int, int | None, str] | None = None

    def show(self, done: int, total: int | None, name: str = "") -> None:
        self._state = (done, total, name)

    def run(self) -> None:
        wait_s, line_s = self.reporter.first_s, self.reporter.line_s
        while not self.is_over.wait(wait_s):
            self._tell()
            wait_s = self.reporter.bar_s
            if not self.is_terminal:
                wait_s, line_s = line_s, min(2 * line_s, MOST_LINE_S)

    def end(self) -> None:
        if self._told is None:
            return
        if not self.is_terminal:
            if self._told != self._state:
                self._tell()
        elif self.is_kept:
            self._tell()
            sys.stderr.write("\n")
        else:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _tell(self) -> None:
        self._told = done, total, name = self._state
        passed_s = time.monotonic() - self._start_s
        count = "" if total is None else self._count(done, total)
        if not self.is_terminal:
            assert self.reporter.say is not None
            self.reporter.say(f"{self.label}{count and f': {count}'}, {passed_s:.0f} s")
            return
        bar = ""
        if total is not None:
            cells = BAR_CELLS * done // max(1, total)
            bar = f" [{'#' * cells}{'.' * (BAR_CELLS - cells)}] {count}"
        left_s = passed_s * (total - done) / done if total is not None and done else 0.0
        left = f", about {left_s:.0f} s left" if left_s >= 1.0 else ""
        words = f" {name[:NAME_CHARACTERS]}" if name else ""
        sys.stderr.write(f"\r\x1b[K{self.label}:{bar}{words}, {passed_s:.0f} s{left}")
        sys.stderr.flush()

    def _count(self, done: int, total: int) -> str:
        if not self.is_bytes:
            return f"{done} of {total}"
        unit, size = ("GB", 1e9) if total >= 1e9 else ("MB", 1e6)
        return f"{done / size:.1f} of {total / size:.1f} {unit}"


def _nothing(done: int, total: int | None, name: str = "") -> None:
    """Shows nothing."""
