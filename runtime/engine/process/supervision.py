"""Settings for the supervision of an engine's process, and for an engine that is one of several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from runtime.engine.process.child import COMMAND, RunningEngine
from runtime.engine.process.wire import Start
from runtime.engine.scheduling.block_events import BlockChanges


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """How an engine process is monitored and restarted.

    first_delay_s, most_delay_s  before the first restart after a death, and before any; each is twice the previous one
    healthy_s                    after serving so long, an engine is restarted after the first delay again
    hang_timeout_s               an engine with work is ended if it finishes no step for so long, and so is a silent
                                 process
    close_timeout_s              how long it may take to close without a drain; then the process is killed
    command                      Python's command line; for tests
    """

    first_delay_s: float = 1.0
    most_delay_s: float = 30.0
    healthy_s: float = 60.0
    hang_timeout_s: float = 600.0
    close_timeout_s: float = 15.0
    command: tuple[str, ...] = COMMAND


Launch = Callable[[Start], RunningEngine]
"""Starts an engine's process somewhere. Called on the supervisor's thread, which lives as long as the process. Raises
``OSError`` and ``XservError`` if it cannot be started."""


@dataclass(frozen=True, kw_only=True)
class Membership:
    """Settings of an engine that is one of several.

    name            in the log
    launch          starts the process, or None for one on this machine
    cores           its processors; all if empty
    routing_secret  keys the digests of ``on_blocks``
    on_blocks       called with changes of its block contents, on the supervisor's thread, before the outputs of
                    the step that made them, and with None when it has ended and they are gone
    """

    name: str = "the engine"
    launch: Launch | None = None
    cores: tuple[int, ...] = ()
    routing_secret: bytes | None = None
    on_blocks: Callable[[BlockChanges | None], None] | None = None
