"""The process in which a client was made: a child forked from it has the client's memory, and no thread to serve it."""

from __future__ import annotations

import os

from runtime.engine.errors import EngineDeadError


class Origin:
    """Tells a client whether it is used where it was made. Asked before any lock, which the child may have for ever."""

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
