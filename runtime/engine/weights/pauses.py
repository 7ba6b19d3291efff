"""Pauses, sleeps and changes of weights of a running engine.

Each is a change that happens when no step is open, one after another. Until then, as its mode says, the open requests
are finished, end, or are held: a held request keeps its output and nothing else. Requests that come while a change is
pending, or while the engine is paused or asleep, are held as well. So a step sees one version of the weights, and a
request that has an output when they change is not continued: it ends, or begins anew from its prompt.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.engine.errors import EngineDeadError, RequestError
from runtime.engine.messages import EngineOutput
from runtime.engine.open_requests import OpenRequests
from runtime.engine.scheduling.scheduler import Scheduler
from runtime.engine.scheduling.sequence import Request
from runtime.engine.steps.executor import ExecutorLostError
from runtime.engine.weights.commands import (
    Command,
    DropWeights,
    EngineCondition,
    GivenArrays,
    LoadWeights,
    PauseAll,
    ResumeAll,
    Sleep,
    TellState,
    UseWeights,
    WakeUp,
    WeightSource,
    check_command,
)

logger = logging.getLogger("xserv.engine")

_Mode = Literal["now", "between", "wait", "abort", "keep", "restart"]

_QUIET_MODES = ("wait", "abort", "keep", "restart")
"""In these modes a change is made when nothing is computed any more."""


class Parts(Protocol):
    """The engine's part in a change. All but ``finish_steps`` and ``load_weights`` are called when no step is open
    and no request is computed."""

    def finish_steps(self, outputs: list[EngineOutput]) -> None:
        """Wait for the open steps."""

    def finish_embeddings(self) -> None:
        """Compute the prompts that are being embedded."""

    def load_weights(self, source: WeightSource) -> None:
        """Read weights beside those that serve; between two steps."""

    def use_weights(self) -> None:
        """Serve those that were read last; what was computed with others is forgotten."""

    def drop_loaded(self) -> None:
        """Forget weights that were read and do not serve."""

    def drop_prefixes(self) -> None:
        """Empty the prefix cache."""

    def free_weights(self, *, keeps_copy: bool) -> None:
        """Let go of the weights, and of all copies of them, unless one is to be kept in the host's memory."""

    def free_pages(self) -> None:
        """Let go of the KV cache."""

    def reload_weights(self) -> None:
        """Read the weights again."""

    def allocate_pages(self) -> None:
        """Take memory for the KV cache again."""

    def begin_again(self, request: Request) -> list[EngineOutput]:
        """Replace an open request by one that has computed nothing; returns what its client is told."""

    @property
    def holds_weights_on_host(self) -> bool:
        """Whether the weights lie in the host's memory, where level 1 leaves them."""


@dataclass(slots=True)
class _Change:
    """mode  what becomes of open requests before the ``work`` is done; with "now" it is done at once, with "between"
    once no step is open
    """

    mode: _Mode
    work: Callable[[list[EngineOutput]], EngineCondition]
    future: Future[NDArray[np.float32]]
    has_begun: bool = False


class Pauses:
    """Belongs to the engine's loop.

    sleep_level  0 while the engine is awake
    is_changing  a change is being made, which may take as long as loading a model
    """

    def __init__(self, parts: Parts, opened: OpenRequests, scheduler: Scheduler) -> None:
        self._parts, self._opened, self._scheduler = parts, opened, scheduler
        self.is_paused = self.is_changing = False
        self.sleep_level = 0
        self.has_weights = self.has_pages = True
        self._has_loaded = False
        self._changes: deque[_Change] = deque()
        self._held: set[Request] = set()
        self._unread: set[Request] = set()
        self._num_ended = self._num_restarted = 0
        opened.on_request_end += [self._held.discard, self._unread.discard]

    @property
    def version(self) -> str:
        """The version of the weights that serve."""
        return self._opened.weight_version

    @property
    def is_held(self) -> bool:
        """Whether new requests are held."""
        return bool(self._changes) or self.is_stopped

    @property
    def is_stopped(self) -> bool:
        """Whether nothing may be computed: it is paused, or has no weights or no pages."""
        return self.is_paused or not (self.has_weights and self.has_pages)

    @property
    def blocks(self) -> bool:
        """Whether no step may be started, and no change is pending."""
        return self.is_stopped and not self._changes

    @property
    def can_advance(self) -> bool:
        """Whether the next change has something to do now."""
        return bool(self._changes) and (not self._changes[0].has_begun or self._is_quiet)

    @property
    def condition(self) -> EngineCondition:
        return EngineCondition(self.is_paused, self.sleep_level, self.has_weights, self.has_pages)

    def order(self, command: Command | GivenArrays) -> Future[NDArray[np.float32]]:
        """Do this as soon as its mode allows; arrays are weights to load. The future's numbers are an
        `EngineCondition`. Raises ``RequestError``, as the future does."""
        future: Future[NDArray[np.float32]] = Future()
        if isinstance(command, GivenArrays):
            self._add("between", lambda _: self._load(command), future)
            return future
        check_command(command)
        match command:
            case PauseAll(mode, clears_cache):
                self._add(mode, lambda _: self._pause(clears_cache), future)
            case ResumeAll():
                self._add("now", lambda _: self._resume(), future)
            case Sleep(0, mode):
                self._add(mode, lambda _: self._pause(False), future)
            case Sleep(level, mode):
                self._add(mode, lambda _: self._sleep(level), future)
            case WakeUp(tags):
                self._add("now", lambda _: self._wake_up(tags), future)
            case LoadWeights(source):
                self._add("between", lambda _: self._load(source), future)
            case UseWeights(version, mode):
                self._add(mode, lambda outputs: self._use(version, outputs), future)
            case DropWeights():
                self._add("now", lambda _: self._drop(), future)
            case TellState():
                self._add("now", lambda _: self.condition, future)
        return future

    def take_in(self, request: Request) -> None:
        """Hold a request that has just been admitted, if it must wait."""
        if self.is_held:
            self._hold(request)

    def pause_unread(self, request_id: str) -> None:
        """Hold a request whose outputs are not read."""
        if (request := self._opened.by_id.get(request_id)) is not None:
            self._unread.add(request)
            self._opened.pause(request_id)

    def resume_read(self, request_id: str) -> bool:
        """Let it go on, unless it is held for another reason; returns whether it does."""
        request = self._opened.by_id.get(request_id)
        if request is None:
            return False
        self._unread.discard(request)
        if request in self._held:
            return False
        self._opened.resume(request_id)
        return True

    def advance(self, outputs: list[EngineOutput], go_on: Callable[[Request], None]) -> bool:
        """Do the changes that can be done; ``go_on`` is called with each request that is held no longer. Returns
        whether steps may be planned, some of which the next change may wait for."""
        while self._changes:
            change = self._changes[0]
            if not change.has_begun:
                change.has_begun = True
                self._begin(change, outputs)
            if change.mode in _QUIET_MODES:
                if not self._is_quiet:
                    return True
                if not self.is_stopped:  # else none has begun
                    self._parts.finish_embeddings()
            self._changes.popleft()
            self.is_changing = True
            try:
                found = change.work(outputs)
            except ExecutorLostError as error:
                change.future.set_exception(error)
                raise
            except Exception as error:
                change.future.set_exception(error)
            else:
                found = found._replace(num_ended=self._num_ended, num_restarted=self._num_restarted)
                change.future.set_result(found.numbers)
            finally:
                self.is_changing = False
        if self.is_stopped:
            return False
        self._release(go_on)
        return True

    def close(self) -> None:
        """End all changes that are pending."""
        while self._changes:
            change = self._changes.popleft()
            if not change.future.done():
                change.future.set_exception(EngineDeadError("the engine was closed before this was done"))

    def _add(
        self, mode: _Mode, work: Callable[[list[EngineOutput]], EngineCondition], future: Future[NDArray[np.float32]]
    ) -> None:
        future.set_running_or_notify_cancel()
        self._changes.append(_Change(mode, work, future))

    def _begin(self, change: _Change, outputs: list[EngineOutput]) -> None:
        """Hold the open requests, or end them, as the change's mode says."""
        self._num_ended = self._num_restarted = 0
        if change.mode != "now":
            self._parts.finish_steps(outputs)
        if change.mode not in _QUIET_MODES:
            return
        for request in list(self._opened.by_id.values()):
            came_while_held = request in self._held and not request.was_scheduled
            if change.mode == "abort" and not came_while_held:
                outputs += self._opened.end(request, "abort", "the engine was told to end the requests")
                self._num_ended += 1
            elif change.mode != "wait" or not request.was_scheduled:
                self._hold(request)
        self._scheduler.hold_paused()

    @property
    def _is_quiet(self) -> bool:
        """Whether nothing is computed any more: all open requests are held, and in no step."""
        scheduler = self._scheduler
        return (
            not scheduler.open_steps
            and not scheduler.running
            and all(sequence.request in self._held for sequence in scheduler.waiting)
            and all(request in self._held for request in self._opened.by_id.values())
        )

    def _hold(self, request: Request) -> None:
        self._held.add(request)
        self._scheduler.paused.add(request)

    def _release(self, go_on: Callable[[Request], None]) -> None:
        held = sorted(self._held, key=lambda each: each.number)
        self._held.clear()
        for request in held:
            if request not in self._unread:
                self._opened.resume(request.request_id)
                go_on(request)

    # The changes

    def _pause(self, clears_cache: bool) -> EngineCondition:
        self.is_paused = True
        if clears_cache and self.has_pages:
            self._parts.drop_prefixes()
        return self.condition

    def _resume(self) -> EngineCondition:
        self.is_paused = False
        return self.condition

    def _sleep(self, level: int) -> EngineCondition:
        if self.has_pages:
            self._parts.drop_prefixes()
        if self.has_weights and (level > 1 or not self._parts.holds_weights_on_host):
            self._parts.free_weights(keeps_copy=level == 1)
            self.has_weights = False
        if self.has_pages:
            self._parts.free_pages()
            self.has_pages = False
        self.sleep_level = max(level, self.sleep_level)
        return self.condition

    def _wake_up(self, tags: tuple[str, ...]) -> EngineCondition:
        if "scheduling" in tags or not tags:
            self.is_paused = False
        if not self.has_weights and (not tags or "weights" in tags):
            self._parts.reload_weights()
            self.has_weights = True
        if not self.has_pages and (not tags or "kv_cache" in tags):
            self._parts.allocate_pages()
            self.has_pages = True
        if self.has_weights and self.has_pages:
            self.sleep_level = 0
        return self.condition

    def _load(self, source: WeightSource) -> EngineCondition:
        self._has_loaded = False
        self._parts.load_weights(source)
        self._has_loaded = True
        return self.condition

    def _drop(self) -> EngineCondition:
        self._parts.drop_loaded()
        self._has_loaded = False
        return self.condition

    def _use(self, version: str, outputs: list[EngineOutput]) -> EngineCondition:
        if not self._has_loaded:
            raise RequestError("no weights were read that could be used", param="weights")
        for request in list(self._opened.by_id.values()):
            if request.asked is None or (_has_output(request) and not request.asked.restarts):
                outputs += self._opened.end(request, "abort", "the weights have changed")
                self._num_ended += 1
        if self.has_pages:
            self._parts.drop_prefixes()
        try:
            self._parts.use_weights()
        except Exception as error:
            raise ExecutorLostError(f"some parts have the new weights, others the old: {error}") from error
        self._has_loaded, self.has_weights = False, True
        old, self._opened.weight_version = self.version, version
        if self.has_pages:
            self.sleep_level = 0
        for request in list(self._opened.by_id.values()):
            self._begin_again(request, outputs)
        logger.info("the weights are version %s now, after %s", version, old)
        return self.condition

    def _begin_again(self, request: Request, outputs: list[EngineOutput]) -> None:
        is_unread = request in self._unread
        self._num_restarted += _has_output(request)
        outputs += self._parts.begin_again(request)
        again = self._opened.by_id.get(request.request_id)
        if again is not None:
            self._hold(again)
            if is_unread:
                self._unread.add(again)


def _has_output(request: Request) -> bool:
    """Whether an open choice has sampled tokens."""
    return any(sequence.num_output_tokens for sequence in request.open_sequences)
