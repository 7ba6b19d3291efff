"""How tests wait: for what must happen, however long a busy machine takes."""

from __future__ import annotations

import time
from collections.abc import Callable

TIMEOUT_S = 300.0  # after which a test that waits has failed


def wait_until(condition: Callable[[], bool]) -> None:
    """Returns as soon as `condition` holds; fails after TIMEOUT_S."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"did not happen within {TIMEOUT_S} s"
        time.sleep(0.005)
