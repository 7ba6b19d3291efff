"""The client of an engine in a thread of this process."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.engine.admission import RETRY_AFTER_S, check_room, record_of
from runtime.engine.engine import Engine
from runtime.engine.errors import EngineDeadError, QueueFullError
from runtime.engine.messages import (
    EngineInfo,
    EngineOutput,
    EngineRequest,
    EngineState,
    EngineStats,
    FinishReason,
    PoolingRequest,
    Source,
    StepView,
)
from runtime.engine.process.client import Delivery, EngineClient, Origin, OutputSink, Watchers
from runtime.engine.scheduling.block_events import BlockChanges
from runtime.engine.scheduling.sequence import Request
from runtime.engine.scheduling.step_limit import StepLimit
from runtime.engine.steps.embedder import Embedding
from runtime.engine.timeline import StepViews
from runtime.engine.weights.commands import Command, GivenArrays
from runtime.errors import XservError

T = TypeVar("T")

logger = logging.getLogger("xserv.engine")

BURST_PAUSE_S = 0.3e-3
BURST_MOST_S = 2e-3
"""An idle engine with a new request waits until no other has come for the first of these, at most for the second, so
that a burst shares its first forward pass."""
REST_S = 0.1
"""Seconds between two rests of an idle engine, which write prefixes to the disk, or read an earlier engine's back."""


class ThreadEngineClient(EngineClient):
    """An engine in a daemon thread of this process, which owns it from now on.

    The thread sleeps on a condition while idle. If the loop itself fails (a bug: requests' own failures never get
    there), every open request ends with "error", and all calls raise ``EngineDeadError``.


    after_delivery  called on the engine's thread after the outputs of a step, or of commands, were given to their
                    sinks; it may block the engine
    """

    def __init__(self, engine: Engine, after_delivery: Callable[[], None] | None = None) -> None:
        self._origin = Origin()
        self._engine = engine
        self._after_delivery = after_delivery
        self._watchers = Watchers()
        self._views = StepViews(engine.timeline, engine.pool, engine.executor)
        self._condition, self.update_lock = threading.Condition(), threading.Lock()
        self._delivery = Delivery(self._condition, self._drop)
        # Guarded by the condition:
        self._commands: deque[Callable[[], list[EngineOutput]]] = deque()
        self._futures: set[Future[Any]] = set()  # of computations among the commands
        self._embeddings: set[Future[NDArray[np.float32]]] = set()
        self._orders: set[Future[NDArray[np.float32]]] = set()
        self._num_submitted = 0  # requests among the commands
        self._num_submitted_tokens = 0  # in their prompts
        self._has_begun = False  # another engine has begun one of these
        self._is_closing = False
        self._drains = False
        self._has_died = False
        self._is_idle = False  # its thread sleeps
        self._is_called = True  # it has work, or something has come since it went to sleep
        self._borrower: threading.Thread | None = None  # runs the engine meanwhile
        if engine.hand_overs is not None:
            engine.hand_overs.tell = lambda output: self._deliver([output])
            engine.hand_overs.arrivals.on_arrival = self._wake
            engine.hand_overs.may_wait = not engine.overlaps and engine.executor.depth == 1
        self._thread = threading.Thread(target=self._run, name="xserv-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        self._origin.check()
        self._submit(request, sink, self._engine.prepare(request))

    def submit_prepared(self, request: EngineRequest, sink: OutputSink) -> None:
        """``submit`` for a request that another process has checked."""
        self._submit(request, sink, self._engine.prepare(request, is_prepared=True))

    def _submit(self, request: EngineRequest, sink: OutputSink, prepared: Request) -> None:
        num_tokens = prepared.num_prompt_tokens
        with self._condition:
            self._check_alive()
            self._delivery.check_free(request.request_id)
            if not request.begun:  # else it was accepted before
                check_room(self.info, *self.waiting, num_tokens)
            self._delivery.open(request, sink)
            self._num_submitted += 1
            self._num_submitted_tokens += num_tokens
            self._has_begun = self._has_begun or bool(request.begun)
            self._enqueue(partial(self._admit, prepared))

    def cancel(self, request_id: str, index: int | None = None) -> None:
        if not self._origin.is_here:
            return
        with self._condition:
            if request_id in self._delivery:
                self._enqueue(partial(self._engine.cancel, request_id, index))

    def pause(self, request_id: str) -> None:
        self._tell(self._engine.pause, request_id)

    def resume(self, request_id: str) -> None:
        self._tell(self._engine.resume, request_id)

    def stats(self) -> EngineStats:
        self._origin.check()
        if self._has_died:
            raise EngineDeadError("the engine's loop has died; see the log")
        stats = self._engine.stats()
        return msgspec.structs.replace(
            stats,
            num_waiting=stats.num_waiting + self._num_submitted,
            num_waiting_tokens=stats.num_waiting_tokens + self._num_submitted_tokens,
        )

    @property
    def state(self) -> EngineState:
        """See ``EngineClient.state``: never "starting"."""
        if self._has_died:
            return "down"
        return "closing" if self._is_closing else "ready"

    @property
    def waiting(self) -> tuple[int, int]:
        """Requests of which nothing has been scheduled, and their prompts' tokens."""
        with self._condition:
            engine = self._engine
            return (
                engine.num_unscheduled + self._num_submitted,
                engine.num_unscheduled_tokens + self._num_submitted_tokens,
            )

    @property
    def has_work(self) -> bool:
        """Whether work is pending or running."""
        return bool(self._commands) or self._engine.has_work or self._engine.has_embeddings

    def take_block_changes(self) -> BlockChanges | None:
        """See ``Engine.take_block_changes``. To be called on the engine's thread."""
        return self._engine.take_block_changes()

    def expect(self, source: Source, request: EngineRequest | None) -> None:
        """Take the pages of a request that will come, and reserve blocks for it if it is given."""
        if (hand_overs := self._engine.hand_overs) is not None:
            hand_overs.arrivals.expect(source)
            with suppress(XservError):  # the request will be refused when it comes
                if request is not None:
                    self._command(partial(hand_overs.reserve, record_of(request, self.info)))

    def drop_pages(self, lease: str) -> None:
        """Drop offers and pages of this lease."""
        if (hand_overs := self._engine.hand_overs) is not None:
            hand_overs.drop(lease)
            self._command(partial(hand_overs.reserved.drop, lease))

    def limit_steps(self, limit: StepLimit) -> None:
        """See ``Scheduler.limit_steps``."""
        self._command(partial(self._engine.scheduler.limit_steps, limit))

    def _command(self, work: Callable[[], object]) -> None:
        """Queue work without outputs for the engine's thread between two steps."""

        def run() -> list[EngineOutput]:
            work()
            return []

        with self._condition:
            self._enqueue(run)

    def watch(self, sink: Callable[[StepView], None]) -> Callable[[], None]:
        """See ``EngineClient.watch``; the sink is called on the engine's thread, after the outputs' sinks."""
        return self._watchers.add(sink)

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        return self.start_logits(token_ids).result()

    def start_logits(self, token_ids: Sequence[int]) -> Future[NDArray[np.float32]]:
        """``logits`` that does not wait; computed between two steps. Raises ``EngineDeadError``."""
        return self._compute(partial(self._engine.logits, token_ids))

    def embed_here(self, request: PoolingRequest) -> NDArray[np.float32] | None:
        self._origin.check()
        engine = self._engine
        if not engine.executor.takes_any_thread or request.images:
            return None
        embedding = engine.embedder.prepare(request)
        if len(embedding.token_ids) > engine.limits.max_num_batched_tokens:
            return None
        with self._condition:
            self._check_alive()
            if not self._is_idle or self._is_called or self._borrower is not None or engine.pauses.is_stopped:
                return None
            self._borrower = threading.current_thread()
        try:
            return engine.embedder.run_alone(embedding)
        finally:
            with self._condition:
                self._borrower = None
                if self._is_called or self._is_closing:
                    self._condition.notify()

    def embed(self, request: PoolingRequest) -> Future[NDArray[np.float32]]:
        self._origin.check()
        embedding = self._engine.embedder.prepare(request)
        max_waiting = self._engine.limits.max_waiting
        with self._condition:
            self._check_alive()
            if len(self._embeddings) >= max_waiting:
                raise QueueFullError(max_waiting, RETRY_AFTER_S)
            self._embeddings.add(embedding.future)
            self._enqueue(partial(self._add_embedding, embedding))
        embedding.future.add_done_callback(self._embeddings.discard)
        return embedding.future

    def load_adapter(self, name: str, path: str) -> Future[NDArray[np.float32]]:
        self._origin.check()
        with self._condition:
            self._check_alive()
            return self._engine.load_adapter(name, path)

    def reset_prefix_cache(self) -> Future[NDArray[np.float32]]:
        return self._compute(self._engine.reset_prefix_cache)

    def order(self, command: Command | GivenArrays) -> Future[NDArray[np.float32]]:
        self._origin.check()
        found: Future[NDArray[np.float32]] = Future()
        found.set_running_or_notify_cancel()

        def run() -> list[EngineOutput]:
            try:
                ordered = self._engine.order(command)
            except XservError as error:
                found.set_exception(error)
            else:
                ordered.add_done_callback(partial(_hand_on, found))
            return []

        with self._condition:
            self._check_alive()
            self._orders.add(found)
            self._enqueue(run)
        found.add_done_callback(self._orders.discard)
        return found

    @property
    def is_changing(self) -> bool:
        """Whether weights are being loaded, or the like: that no step ends meanwhile is no fault."""
        return self._engine.pauses.is_changing

    @property
    def weight_version(self) -> str:
        return self._engine.pauses.version

    def close(self, drain: bool = False) -> None:
        """See ``EngineClient.close``. It returns before the engine stops where the caller's own work is waited for:
        from a sink (on the engine's thread), and from a signal handler during ``embed_here``."""
        if not self._origin.is_here:
            return
        with self._condition:
            if not self._is_closing:
                self._is_closing = True
                self._drains = drain
            elif not drain:
                self._drains = False  # a second, impatient call
            self._condition.notify()
        atexit.unregister(self.close)
        if threading.current_thread() not in (self._thread, self._borrower):
            self._thread.join()

    def _tell(self, command: Callable[[str], None], request_id: str) -> None:
        """Queue a call for the engine's thread between two steps, if the request is open."""

        if not self._origin.is_here:
            return
        with self._condition:
            if request_id in self._delivery:
                self._command(partial(command, request_id))

    def _compute(self, work: Callable[[], T]) -> Future[T]:
        """Queue work for the engine's thread between two steps. Raises ``EngineDeadError``."""
        self._origin.check()
        future: Future[T] = Future()

        def run() -> list[EngineOutput]:
            self._futures.discard(future)
            if not future.set_running_or_notify_cancel():
                return []
            try:
                future.set_result(work())
            except Exception as error:  # the caller's, not the loop's
                future.set_exception(error)
            return []

        with self._condition:
            self._check_alive()
            self._futures.add(future)
            self._enqueue(run)
        return future

    def _check_alive(self) -> None:
        if self._has_died:
            raise EngineDeadError("the engine's loop has died; see the log")
        if self._is_closing:
            raise EngineDeadError("the engine is closed or closing")

    def _wake(self) -> None:
        with self._condition:
            self._is_called = True
            self._condition.notify()

    def _enqueue(self, command: Callable[[], list[EngineOutput]]) -> None:
        self._commands.append(command)
        self._is_called = True
        self._condition.notify()

    # Everything below runs on the engine's thread.

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._deliver(self._obey())
                self._engine.advance_embeddings()
                if self._engine.has_work:
                    self._deliver(self._engine.step(self._obey))
                    self._show_steps()
                    self._engine.rest()
            self._deliver(self._engine.cancel_all())
            self._engine.close()
        except BaseException:
            logger.exception("the engine's loop has died")
            self._has_died = True
            self._engine.executor.close()
        with self._condition:
            self._is_closing = True
        self._end_all("error" if self._has_died else "abort")

    def _wait_for_work(self) -> bool:
        """Sleep while idle; False means stop."""
        with self._condition:
            was_idle = not self.has_work
            while self._borrower is not None or not (self.has_work or (self._is_closing and not self._awaits_readers)):
                if self._sleep(REST_S if self._engine.wants_rest else None) or self._borrower is not None:
                    continue
                self._condition.release()
                try:
                    self._engine.rest_long()
                finally:
                    self._condition.acquire()
            if self._is_closing and not (self._drains and self.has_work):
                return False
        if was_idle:
            self._await_burst()
        return True

    def _sleep(self, seconds: float | None) -> bool:
        """Waits for a notice, with the condition's lock; False if the time is over."""
        self._is_idle, self._is_called = True, self.has_work
        try:
            return self._condition.wait(seconds)
        finally:
            self._is_idle = False

    @property
    def _awaits_readers(self) -> bool:
        """Whether a drain waits for paused requests to be resumed or cancelled."""
        return self._drains and bool(self._delivery) and not self._engine.pauses.blocks

    def _await_burst(self) -> None:
        end = time.monotonic() + BURST_MOST_S
        while (count := self._num_submitted) and not self._has_begun and time.monotonic() < end:
            time.sleep(BURST_PAUSE_S)
            if self._num_submitted == count:
                return

    def _obey(self) -> list[EngineOutput]:
        """Run the queued commands."""
        with self._condition:
            commands = list(self._commands)
            self._commands.clear()
            self._has_begun = False
        return [output for command in commands for output in command()]

    def _admit(self, request: Request) -> list[EngineOutput]:
        with self._condition:  # one count goes down as the other goes up
            self._num_submitted -= 1
            self._num_submitted_tokens -= request.num_prompt_tokens
            self._engine.admit(request)
        return []

    def _add_embedding(self, embedding: Embedding) -> list[EngineOutput]:
        self._engine.embed(embedding)
        return []

    def _show_steps(self) -> None:
        if self._watchers:
            for view in self._views.take():
                self._watchers.show(view)
        else:
            self._views.skip()

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            self._delivery.deliver(output)
        if self._after_delivery is not None:
            self._after_delivery()

    def _drop(self, request_id: str) -> None:
        """Cancel a request whose outputs are not read."""
        for output in self._engine.cancel(request_id):
            self._delivery.deliver(output)

    def _end_all(self, reason: FinishReason) -> None:
        """Give a last output to every choice that has none: to requests that never reached the engine, or to all of
        them after the loop has died."""
        with self._condition:
            futures = [*self._futures, *self._embeddings]
            orders = [*self._orders]
        for future in orders:
            if not future.done():
                future.set_exception(EngineDeadError("the engine was closed before this was done"))
        for future in futures:
            if not future.done() and future.set_running_or_notify_cancel():
                future.set_exception(EngineDeadError("the engine was closed before this was computed"))
        self._delivery.end_all(reason, "the engine's loop has died" if reason == "error" else None)
        self._deliver([])


def _hand_on(found: Future[NDArray[np.float32]], done: Future[NDArray[np.float32]]) -> None:
    if found.done():
        return
    if (error := done.exception()) is not None:
        found.set_exception(error)
    else:
        found.set_result(done.result())
