"""The process that made a client: a child forked from it has the client's memory, but no thread to serve it."""

from __future__ import annotations

import os

from runtime.engine.errors import EngineDeadError


class Origin:
    """Detects use in a forked child. Checked before any lock is taken, which might be held for ever in the child."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raises ``EngineDeadError`` in a forked child."""
        if not self.is_here:
            raise EngineDeadError(
                f"this engine belongs to process {self._pid}; process {os.getpid()} was forked from that, and a fork "
                "has no engine: make an LLM in the child, or start the child with multiprocessing's 'spawn' method"
            )
