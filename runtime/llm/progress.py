"""Progress of a call in prompts or tokens."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator

from runtime.progress import SILENT, Reporter


@contextlib.contextmanager
def progress(label: str, total: int, is_wanted: bool) -> Iterator[Callable[[], None]]:
    """A bar on the terminal that each call advances by one; does nothing for one step or without a terminal."""
    is_shown = is_wanted and total >= 2 and sys.stderr is not None and sys.stderr.isatty()
    with (Reporter(lambda line: None) if is_shown else SILENT).shown(label, is_kept=False) as show:
        counter = itertools.count(1)
        show(0, total)
        yield lambda: show(next(counter), total)
