"""Ends a process with its parent, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading


def die_with_parent() -> None:
    """Have Linux kill this process with the thread that started it. A closed socket is noticed only by a Python that
    still runs."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def end_with_parent() -> None:
    """From now on the process ends when its stdin is closed, a pipe that the parent holds."""
    threading.Thread(target=_wait_for_the_end, daemon=True).start()


def _wait_for_the_end() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)
