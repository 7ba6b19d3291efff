"""Keeps an engine's process running: starts it again when it dies, and renews, unloads or reloads it when told to.

One thread, the supervisor, starts the process and hands its messages to an owner; when the process ends, it has the
owner end the open requests, waits a moment and starts the next one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Protocol

import msgspec

from runtime.engine.errors import EngineDeadError
from runtime.engine.messages import EngineInfo, EngineState
from runtime.engine.process.child import READ_TIMEOUT_S, EngineProcess, Membership, RunningEngine, Supervision
from runtime.engine.process.wire import (
    Close,
    FromEngine,
    Start,
    Started,
    StartFailed,
    error_of,
    frame,
)
from runtime.errors import XservError

logger = logging.getLogger("xserv.engine")


class Owner(Protocol):
    """Is told what becomes of the process, on the supervisor's thread."""

    def begin(self, info: EngineInfo) -> None:
        """The process is ready. The caller holds the lock."""

    def take(self, message: FromEngine) -> None:
        """A message of the process, other than those of its start."""

    def let_go(self) -> None:
        """The process has ended or is about to. The caller holds the lock."""

    def end_all(self) -> None:
        """End all open requests and calls."""


class Supervisor:
    """The thread that keeps a process running, and the state of the engine in it."""

    def __init__(self, owner: Owner, start: Start, supervision: Supervision, membership: Membership) -> None:
        self._owner, self._supervision, self._membership = owner, supervision, membership
        self._name = membership.name
        self.lock = threading.Lock()
        self._closing = threading.Event()
        # Guarded by the lock:
        self.start = start  # what the next process is told
        self.process: RunningEngine | None = None
        self.state: EngineState = "starting"
        self._renewed: Future[None] | None = None  # of a renewal in progress
        self._unloaded: Future[None] | None = None  # of an unloading in progress
        self._reloaded: Future[None] | None = None  # of a reloading in progress
        self._ready_s = 0.0  # since when it is ready, or when it is likely to be again
        self._start_duration_s = 0.0
        # The thread's:
        self._delay_s = supervision.first_delay_s  # before the next start
        self._is_drained = False  # for a renewal, which now waits for the new process
        self._wakes = threading.Event()  # set to end the wait of an unloaded engine

        self._started: Future[None] = Future()
        self.thread = threading.Thread(
            target=self._supervise, args=(self._started,), name="xserv-engine-supervisor", daemon=True
        )

    def wait_until_started(self) -> None:
        """Returns when requests are first accepted. Raises what the first start raised."""
        self._started.result()

    @property
    def is_closing(self) -> bool:
        """Whether `close` was called."""
        return self._closing.is_set()

    def renew(self, drain_timeout_s: float) -> None:
        """Drain the engine and start it anew; returns when it is ready again. Meanwhile it refuses new requests. Those
        still open after ``drain_timeout_s`` end with "error" and ``engine_died``.

        Raises ``EngineDeadError`` unless it is ready, and the error of a failed restart, which is retried as after a
        death.
        """
        renewed: Future[None] = Future()
        with self.lock:
            process, self._renewed = self._drained_process(), renewed
        _wait_or_kill(renewed, process, drain_timeout_s)

    def unload(self, drain_timeout_s: float) -> None:
        """Drain the engine and end its process, until ``reload``; returns when its memory is free. Requests still open
        after ``drain_timeout_s`` end with "error" and ``engine_died``. Raises ``EngineDeadError`` unless it is ready.
        """
        unloaded: Future[None] = Future()
        with self.lock:
            process, self._unloaded = self._drained_process(), unloaded
        _wait_or_kill(unloaded, process, drain_timeout_s)

    def reload(self) -> None:
        """Start an unloaded engine; returns when it is ready. Raises ``EngineDeadError`` unless it is unloaded, and the
        error of a failed start, after which it is still unloaded."""
        reloaded: Future[None] = Future()
        with self.lock:
            if self.state != "unloaded":
                raise EngineDeadError(f"{self._name} is not unloaded but {self.state}")
            self.state, self._reloaded = "starting", reloaded
        self._wakes.set()
        reloaded.result()

    def close(self, drain: bool = False) -> None:
        """See ``EngineClient.close``. On the thread itself it returns before the engine stops."""
        with self.lock:
            is_first = not self._closing.is_set()
            process, was_ready = self.process, self.state in ("ready", "draining") or not is_first
            self._closing.set()
            self.state = "closing"
            self._wakes.set()
            if process is not None and was_ready and (is_first or not drain):
                process.send(frame(Close(drain)))
        if process is not None and not was_ready:
            process.kill()
        if threading.current_thread() is self.thread:
            return
        if not drain:
            self.thread.join(self._supervision.close_timeout_s)
            if self.thread.is_alive() and process is not None:
                timeout_s = self._supervision.close_timeout_s
                logger.error("%s did not close within %g s; it is killed", self._name, timeout_s)
                process.kill()
        self.thread.join()

    def _drained_process(self) -> RunningEngine:
        """The process, from now on drained. The caller holds the lock."""
        process = self.live_process()
        self.state = "draining"
        process.send(frame(Close(drain=True)))
        return process

    def live_process(self) -> RunningEngine:
        """The process that serves requests. The caller holds the lock. Raises ``EngineDeadError`` if there is none."""
        if self.state != "ready":
            raise self.dead()
        assert self.process is not None
        return self.process

    @property
    def ready_in_s(self) -> float | None:
        """The estimated time in seconds until it accepts requests again, or None if it never will."""
        if self.state in ("closing", "unloaded") or not self.thread.is_alive():
            return None
        if self._renewed is not None:
            return max(1.0, self._start_duration_s)
        return max(1.0, self._ready_s - time.monotonic())

    def dead(self) -> EngineDeadError:
        """The error of a call while no engine is ready."""
        left_s = self.ready_in_s
        if self.state == "closing":
            return EngineDeadError("the engine is closed or closing")
        if self.state == "unloaded" or self._unloaded is not None:
            return EngineDeadError("the model is unloaded")
        if left_s is None:
            return EngineDeadError("the engine has died; see the log")
        if self._renewed is not None:
            return EngineDeadError("the engine ends its requests and is started again", left_s)
        return EngineDeadError(f"the engine has died and is started again, in about {left_s:.0f} s", left_s)

    # Everything below runs on the supervisor's thread.

    def _supervise(self, started: Future[None]) -> None:
        try:
            while not self._closing.is_set():
                failure = self._run_process(started)
                if not started.done():
                    raise failure
                if self._is_reloaded(failure) or self._is_renewed():
                    continue
                if not self._closing.is_set():
                    logger.error("%s has died (%s); it is started again in %g s", self._name, failure, self._delay_s)
                if not self._closing.wait(self._delay_s):
                    self._set_state("starting")
                self._delay_s = min(2 * self._delay_s, self._supervision.most_delay_s)
        except BaseException as error:
            self._set_state("down")
            if started.done():
                logger.exception("%s is not started any more", self._name)
            else:
                started.set_exception(error)
        finally:
            self._owner.end_all()
            closed = EngineDeadError("the engine was closed before it was started")
            if not started.done():
                started.set_exception(closed)
            with self.lock:
                waited_for = self._renewed, self._unloaded, self._reloaded
                self._renewed = self._unloaded = self._reloaded = None
            for future in waited_for:
                if future is not None:
                    future.set_exception(closed)

    def _run_process(self, started: Future[None]) -> Exception:
        """Start a process and deliver its outputs until it ends. Returns the reason."""
        begun_s = time.monotonic()
        process: RunningEngine | None = None
        failure: Exception | None = None
        how = "could not be made"
        try:
            launch = self._membership.launch
            process = EngineProcess(self.start, self._supervision.command) if launch is None else launch(self.start)
            with self.lock:
                self.process = process
            if self._closing.is_set():
                process.kill()
            for message in self._messages(process):
                if isinstance(message, Started):
                    self._take_up(message.info, begun_s)
                    if not started.done():
                        started.set_result(None)
                elif isinstance(message, StartFailed):
                    failure = error_of(message.problem)
                else:
                    self._owner.take(message)
        except (OSError, XservError, msgspec.DecodeError) as error:
            failure = error
        finally:
            self._let_go()
            if process is not None:
                how = process.end()
        return failure or EngineDeadError(f"the engine's process {how}")

    def _take_up(self, info: EngineInfo, begun_s: float) -> None:
        """Serve requests with the engine that is now ready."""
        with self.lock:
            self._owner.begin(info)  # before the state, which is read without the lock
            self._ready_s = time.monotonic()
            self._start_duration_s = self._ready_s - begun_s
            if self.state != "closing":
                self.state = "ready"
            waited_for = self._renewed, self._reloaded
            self._renewed = self._reloaded = None
        self._is_drained = False
        for future in waited_for:
            if future is not None:
                future.set_result(None)

    def _let_go(self) -> None:
        """Clean up after a process that has ended or is about to: end the open requests and calls."""
        now = time.monotonic()
        if self.state == "ready" and now - self._ready_s >= self._supervision.healthy_s:
            self._delay_s = self._supervision.first_delay_s
        with self.lock:
            if self.state != "closing":
                self.state = "down"
            self.process = None
            self._owner.let_go()
            self._ready_s = now + self._delay_s + self._start_duration_s
        if self._membership.on_blocks is not None:
            self._membership.on_blocks(None)
        self._owner.end_all()

    def _is_reloaded(self, failure: Exception) -> bool:
        """Called when a process has ended. If that was to unload the engine, or if it was reloaded and failed, waits
        until it is told to start again, or is closed. False if neither was the case."""
        with self.lock:
            unloaded, reloaded = self._unloaded, self._reloaded
            if (unloaded is None and reloaded is None) or self.state == "closing":
                return False
            self._unloaded = self._reloaded = None
            self._wakes.clear()
            self.state = "unloaded"
        if unloaded is not None:
            logger.info("%s is unloaded", self._name)
            unloaded.set_result(None)
        if reloaded is not None:
            reloaded.set_exception(failure)
        self._wakes.wait()
        return True

    def _is_renewed(self) -> bool:
        """Called when a process has ended: whether it was drained for a renewal, so that a new one starts at once. If
        the new one has ended as well, the renewal fails."""
        with self.lock:
            renewed, is_drained = self._renewed, self._is_drained
            self._is_drained = renewed is not None and not is_drained
            if renewed is None or self.state == "closing":
                return False
            if is_drained:
                self._renewed = None
            else:
                self.state = "starting"
        if is_drained:
            renewed.set_exception(EngineDeadError(f"{self._name} did not start again; see the log"))
            return False
        logger.info("%s is started again, as it was told to", self._name)
        return True

    def _set_state(self, state: EngineState) -> None:
        with self.lock:
            if self.state != "closing":
                self.state = state

    def _messages(self, process: RunningEngine) -> Iterator[FromEngine]:
        num_silent_s = 0.0
        while (messages := process.receive()) is not None:
            num_silent_s = 0.0 if messages or self.state == "starting" else num_silent_s + READ_TIMEOUT_S
            if num_silent_s >= self._supervision.hang_timeout_s:
                logger.error("nothing was heard of %s for %.0f s; its process is killed", self._name, num_silent_s)
                process.kill()
            yield from messages


def _wait_or_kill(ended: Future[None], process: RunningEngine, timeout_s: float) -> None:
    """Waits for the future; kills the process after the timeout."""
    timer = threading.Timer(timeout_s, process.kill)
    timer.daemon = True
    timer.start()
    try:
        ended.result()
    finally:
        timer.cancel()
