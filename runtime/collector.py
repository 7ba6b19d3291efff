"""Holds off Python's cycle collector while a process starts: nearly all objects made then stay alive.

Imports and loading make some 150,000 objects; at Python's usual threshold the collector scans them again and again,
which takes a fifth of the start. Work whose finalisers may call a device's driver pauses it (`NO_COLLECTION`).
"""

from __future__ import annotations

import gc
import threading

_USUAL = gc.get_threshold()
_MOST_NEW = 200_000
"""An allocation threshold higher than a start reaches."""


def hold_off() -> None:
    """Collect rarely until `resume`."""
    gc.set_threshold(_MOST_NEW, *_USUAL[1:])


def keep() -> None:
    """Have later collections skip all objects that exist now. Called after imports, so that `resume` collects only what
    loading has made: for an encoder 2,000 objects instead of 150,000, 0.5 ms instead of 70."""
    gc.freeze()


def resume(*, collects: bool = False) -> None:
    """End the hold and freeze the objects that exist now (Numba's are many), so that no later collection scans them.

    `collects` first frees the cycles that were made since `keep`, for long-lived processes.
    """
    if collects:
        gc.collect()
    gc.freeze()
    gc.set_threshold(*_USUAL)


def collect_idle() -> None:
    """Collect the younger objects now, if there are many: in an idle moment, for a millisecond, which a step would
    wait for otherwise."""
    if gc.isenabled() and gc.get_count()[0] > _USUAL[0] // 4:
        gc.collect(1)


class _Pause:
    """Python collects no garbage inside, as its finalisers may call the driver. May be entered again, and by several
    threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a collection in here may enter it, too
        self._num_inside = 0
        self._was_enabled = False

    def __enter__(self) -> None:
        with self._lock:
            if self._num_inside == 0:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._num_inside += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if self._num_inside == 0 and self._was_enabled:
                gc.enable()


NO_COLLECTION = _Pause()
"""``with NO_COLLECTION:``"""
