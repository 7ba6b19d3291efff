"""Holds off Python's cycle collector while a process starts: nearly all objects made then stay alive.

Imports and loading make some 150,000 objects; at Python's usual threshold the collector scans them again and again,
which takes a fifth of the start.
"""

from __future__ import annotations

import gc

_USUAL = gc.get_threshold()
_MOST_NEW = 200_000
"""An allocation threshold higher than a start reaches."""


def hold_off() -> None:
    """Collect rarely until `resume`."""
    gc.set_threshold(_MOST_NEW, *_USUAL[1:])


def resume(*, collects: bool = False) -> None:
    """End the hold and freeze the objects that exist now (Numba's are many), so that no later collection scans them.

    `collects` frees the cycles left by the start first, which takes a tenth of a second; for long-lived processes.
    """
    if collects:
        gc.collect()
    gc.freeze()
    gc.set_threshold(*_USUAL)
