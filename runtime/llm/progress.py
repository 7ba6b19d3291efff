"""How many prompts, or tokens, of a call are done."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator

from runtime.progress import SILENT, Reporter


@contextlib.contextmanager
def progress(label: str, total: int, is_wanted: bool) -> Iterator[Callable[[], None]]:
    """A bar on the terminal that each call advances by one; nothing where there is one step or no terminal."""
    is_shown = is_wanted and total >= 2 and sys.stderr is not None and sys.stderr.isatty()
    with (Reporter(lambda line: None) if is_shown else SILENT).shown(label, is_kept=False) as show:
        counter = itertools.count(1)
        show(0, total)
        yield lambda: show(next(counter), total)
