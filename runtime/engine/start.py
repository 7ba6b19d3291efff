"""From a model's name to a client of its engine, in a process of its own or in this one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runtime.engine.client import EngineClient, ThreadEngineClient
from runtime.engine.process_client import ProcessEngineClient


def start_client(model: str | Path | None = None, *, in_process: bool = False, **options: Any) -> EngineClient:
    """``options`` are ``build_engine``'s; it raises what that raises, and ``EngineDeadError``. ``in_process`` is for
    debugging: what breaks the engine breaks its server, too."""
    if not in_process:
        return ProcessEngineClient(model, **options)
    from runtime.engine.build import build_engine  # wakes numba

    return ThreadEngineClient(build_engine(model, **options))
