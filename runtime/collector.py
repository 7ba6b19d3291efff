"""When Python's collector looks for cycles: hardly while a process starts, whose many objects all stay.

A start's imports and loading make some 150,000 objects; with Python's usual threshold the collector goes over them
again and again, which takes a fifth of the start.
"""

from __future__ import annotations

import gc

_USUAL = gc.get_threshold()
_MOST_NEW = 200_000
"""Objects, more than a start makes."""


def hold_off() -> None:
    """Until `resume`, cycles are looked for after many objects alone."""
    gc.set_threshold(_MOST_NEW, *_USUAL[1:])


def resume(*, collects: bool = False) -> None:
    """The start is over. What there is now (Numba's objects are many) is gone through no more.

    `collects`: cycles that the start has left are freed first, which takes a tenth of a second: for a process that
    lives long.
    """
    if collects:
        gc.collect()
    gc.freeze()
    gc.set_threshold(*_USUAL)
