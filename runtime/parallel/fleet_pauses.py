"""``FleetPauses``: pauses, sleeps and new weights of a fleet whose engines hand requests over.

An engine obeys when it has no request. Until then the fleet lets open requests end, ends them, or takes them back, as
the command's mode says; new ones wait. The fleet has what clients have got, so a request that was taken back goes on
later on any engine, with the same bits, or begins again if the weights have changed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from runtime.engine.errors import EngineDeadError
from runtime.engine.weights.commands import (
    Command,
    EngineCondition,
    PauseAll,
    PauseMode,
    ResumeAll,
    Sleep,
    UpdateMode,
    UseWeights,
    WakeUp,
)
from runtime.parallel.lives import Life


class Parts(Protocol):
    """The fleet's part in a change. A life's lock is held when it is given."""

    @property
    def is_closing(self) -> bool: ...

    def open_lives(self) -> list[Life]: ...

    def recall(self, life: Life) -> None:
        """Take a request back from its engine, then hold it."""

    def end_for_good(self, life: Life, why: str) -> None:
        """End a request with "abort"."""

    def set_going(self, life: Life) -> None:
        """Give a request to an engine."""

    def begin_again(self, life: Life, version: str) -> None:
        """Have a request forget its output, or end."""

    def with_ready(self, command: Command) -> EngineCondition: ...

    def with_all(self, command: Command) -> EngineCondition: ...

    def use_weights(self, version: str) -> EngineCondition: ...


class FleetPauses:
    """See the module.

    condition  is notified when a request ends, or the fleet closes
    is_paused, is_asleep  why requests are held, beside a change that is being made
    num_held, num_held_tokens  requests without output that are held, and their prompts' tokens
    """

    def __init__(self, parts: Parts, condition: threading.Condition) -> None:
        self._parts, self._condition = parts, condition
        self._turn = threading.Lock()  # of the one who makes a change
        self._mode: PauseMode | UpdateMode | None = None
        self.is_paused = self.is_asleep = False
        self.num_held = self.num_held_tokens = 0

    @property
    def is_stopped(self) -> bool:
        return self.is_paused or self.is_asleep

    def takes(self, life: Life) -> bool:
        """Hold a request that would go to an engine, if it must wait. Its lock is held."""
        with self._condition:
            if life.is_held:
                return True
            if self._mode is None and not self.is_stopped:
                return False
            if self._mode == "wait" and life.has_output:
                return False  # the change waits for its end
            self._count(life, 1)
            self._condition.notify_all()
            return True

    def forget(self, life: Life) -> None:
        """A request has ended."""
        with self._condition:
            if life.is_held:
                self._count(life, -1)
            self._condition.notify_all()

    def _count(self, life: Life, by: int) -> None:
        life.is_held = by > 0
        if not life.is_accepted:
            self.num_held += by
            self.num_held_tokens += by * life.prepared.num_prompt_tokens

    def obey(self, command: Command) -> EngineCondition:
        """Do this with all engines. Raises as `EngineClient.order`'s future."""
        match command:
            case PauseAll(mode, clears_cache):
                return self._change(mode, lambda: self._pause(clears_cache))
            case Sleep(level, mode):
                return self._change(mode, lambda: self._sleep(level))
            case UseWeights(version, mode):
                return self._change(mode, lambda: self._use(version))
            case WakeUp():
                return self._change(None, lambda: self._wake_up(command))
            case ResumeAll():
                return self._change(None, self._resume)
            case _:
                return self._told(self._parts.with_ready(command))

    def _told(self, found: EngineCondition) -> EngineCondition:
        return found._replace(is_paused=self.is_paused)

    def _pause(self, clears_cache: bool) -> EngineCondition:
        found = self._parts.with_ready(PauseAll("abort", clears_cache))
        self.is_paused = True
        return self._told(found)

    def _resume(self) -> EngineCondition:
        found = self._parts.with_ready(ResumeAll())
        self.is_paused = False
        return self._told(found)

    def _sleep(self, level: int) -> EngineCondition:
        self.is_asleep = self.is_asleep or level > 0
        found = self._parts.with_all(Sleep(level, "abort"))
        self.is_paused = self.is_paused or level == 0
        return self._told(found)

    def _wake_up(self, command: WakeUp) -> EngineCondition:
        found = self._parts.with_all(command)
        self.is_asleep = not (found.has_weights and found.has_pages)
        self.is_paused = self.is_paused and bool(command.tags) and "scheduling" not in command.tags
        return self._told(found)

    def _use(self, version: str) -> EngineCondition:
        found = self._parts.use_weights(version)
        self.is_asleep = self.is_asleep and not (found.has_weights and found.has_pages)
        num_ended = num_restarted = 0
        for life in self._parts.open_lives():
            with life.lock:
                before = life.num_restarts
                self._parts.begin_again(life, version)
                num_restarted += life.num_restarts - before
                num_ended += not life.open_choices
        return self._told(found)._replace(num_ended=num_ended, num_restarted=num_restarted)

    def _change(self, mode: PauseMode | UpdateMode | None, work: Callable[[], EngineCondition]) -> EngineCondition:
        """Run the work once no engine has a request (at once if the mode is None), then resume what need not wait.
        Raises ``EngineDeadError`` if the fleet is closed first, and as ``work`` does."""
        with self._turn:
            num_ended = 0
            try:
                if mode is not None:
                    num_ended = self._empty(mode)
                found = work()
                return found._replace(num_ended=found.num_ended + num_ended)
            finally:
                with self._condition:
                    self._mode = None
                if not self.is_stopped:
                    self._release()

    def _empty(self, mode: PauseMode | UpdateMode) -> int:
        """Until no engine has a request. Returns how many were ended."""
        with self._condition:
            self._mode = mode
        num_ended = 0
        for life in self._parts.open_lives():
            with life.lock:
                if life.is_held or not life.open_choices:
                    continue
                if mode == "abort":
                    num_ended += 1
                    self._parts.end_for_good(life, "the engine was told to end the requests")
                elif mode != "wait" or not life.has_output:
                    self._parts.recall(life)
        with self._condition:
            self._condition.wait_for(lambda: self.is_empty or self._parts.is_closing)
        if self._parts.is_closing:
            raise EngineDeadError("the engine was closed before this was done")
        return num_ended

    @property
    def is_empty(self) -> bool:
        """Whether no engine has a request."""
        return all(life.is_held for life in self._parts.open_lives())

    def _release(self) -> None:
        for life in self._parts.open_lives():
            with life.lock:
                with self._condition:
                    was_held = life.is_held
                    if was_held:
                        self._count(life, -1)
                if was_held and life.open_choices:
                    self._parts.set_going(life)
