"""Times at which Python must collect no garbage: a collection's finalisers may call the driver."""

from __future__ import annotations

import gc
import threading


class _Pause:
    """Python collects no garbage inside; may be entered again, and by several threads."""

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
