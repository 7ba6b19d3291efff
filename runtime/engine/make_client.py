"""From a model's name to a client of its engine, in a process of its own or in this one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runtime.engine.checks import check_seconds
from runtime.engine.errors import RequestError
from runtime.engine.process.client import EngineClient, ThreadEngineClient
from runtime.engine.process.supervisor import ProcessEngineClient, Supervision


def start_client(
    model: str | Path | None = None,
    *,
    in_process: bool = False,
    hang_timeout_s: float | None = None,
    **options: Any,
) -> EngineClient:
    """A client of a new engine.

    in_process      no process of its own; for debugging: what breaks the engine breaks its server, too
    hang_timeout_s  see ``Supervision``, whose default is None's meaning; positive
    options         ``build_engine``'s

    Raises what ``build_engine`` raises, ``EngineDeadError``, and ``RequestError`` for a wrong ``hang_timeout_s``.
    """
    if hang_timeout_s is not None:
        check_seconds("hang_timeout_s", hang_timeout_s)
    if not in_process:
        supervision = None if hang_timeout_s is None else Supervision(hang_timeout_s=hang_timeout_s)
        return ProcessEngineClient(model, supervision=supervision, **options)
    if hang_timeout_s is not None:
        raise RequestError("hang_timeout_s needs an engine in a process of its own", param="hang_timeout_s")
    from runtime.engine.make_engine import build_engine  # wakes numba

    return ThreadEngineClient(build_engine(model, **options))
