"""How an engine's process is watched, and what it has beside others where it is one of several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from runtime.engine.process.child import COMMAND, RunningEngine
from runtime.engine.process.wire import Start
from runtime.engine.scheduling.block_events import BlockChanges


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """How an engine process is watched and started again.

    first_delay_s, most_delay_s  before the first new start after a death, and before any; each is twice the one before
    healthy_s                    an engine that has served so long is started again after the first delay
    hang_timeout_s               an engine is ended that has work and finishes no step for so long, and a process of
                                 which nothing is heard
    close_timeout_s              how long it may take to close without a drain; then the process is killed
    command                      what Python runs; for tests
    """

    first_delay_s: float = 1.0
    most_delay_s: float = 30.0
    healthy_s: float = 60.0
    hang_timeout_s: float = 600.0
    close_timeout_s: float = 15.0
    command: tuple[str, ...] = COMMAND


Launch = Callable[[Start], RunningEngine]
"""Has a process start an engine somewhere. Called on the supervisor's thread, which lives as long as the process.
Raises ``OSError`` and ``XservError`` when there is none to be had."""


@dataclass(frozen=True, kw_only=True)
class Membership:
    """What an engine that is one of several has beside the others.

    name            in the log
    launch          None: a process of this machine
    cores           the processors that it keeps to; none: all
    routing_secret  keys the digests of ``on_blocks``
    on_blocks       told which contents its blocks hold, on the supervisor's thread, before the outputs of the step that
                    changed them; None: it has ended, and they are gone
    """

    name: str = "the engine"
    launch: Launch | None = None
    cores: tuple[int, ...] = ()
    routing_secret: bytes | None = None
    on_blocks: Callable[[BlockChanges | None], None] | None = None
