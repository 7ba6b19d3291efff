"""``EngineClient``: the only way to the engine, whether it runs in this process or in another.

client.submit(request, sink)   # typed errors here, before admission; then outputs go to the sink
client.cancel(request_id)
client.stats(), client.info
client.close()
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec

from runtime.engine.errors import EngineDeadError, QueueFullError, RequestError
from runtime.engine.messages import EngineInfo, EngineOutput, EngineRequest, EngineStats, FinishReason

if TYPE_CHECKING:  # so that a user of the interface wakes neither numpy nor numba
    import numpy as np
    from numpy.typing import NDArray

    from runtime.engine.engine import Engine
    from runtime.engine.sequence import Request

logger = logging.getLogger("xserv.engine")

RETRY_AFTER_S = 1.0
"""What a refused user is told to wait: about the time in which a busy engine starts several requests."""

BURST_PAUSE_S = 0.3e-3
BURST_MOST_S = 2e-3
"""An idle engine that gets a request waits until no other has come for the first of these, at most for the second, so
that a burst shares its first forward pass."""

OutputSink = Callable[[EngineOutput], None]
"""Receives a request's outputs, in order. Called on the engine's thread: it must not block (hand over to a
queue or ``loop.call_soon_threadsafe``). What it raises is logged and cancels its own request; nobody else
notices."""


class EngineClient(Protocol):
    """What the server, the commands and ``LLM`` know of the engine. All methods are thread-safe."""

    @property
    def info(self) -> EngineInfo:
        """Fixed facts about the model and the limits."""
        ...

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        """Admit a request to the waiting queue; returns at once.

        Each of its ``params.n`` choices ends with exactly one output that has a ``finish_reason``; after the
        last of them the sink is not called again.

        Raises, before anything is admitted: ``ContextLengthExceededError`` (the prompt leaves no room for one
        token), ``RequestError`` (any other wrong field; an id that is in use), ``QueueFullError``,
        ``EngineDeadError``.
        """
        ...

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one choice of it: the blocks are free within one step, each open choice that this
        ends gets a last output with ``finish_reason="abort"``. Unknown and finished ones are ignored."""
        ...

    def stats(self) -> EngineStats:
        """A snapshot; never waits for a step. Raises ``EngineDeadError`` when the engine's loop has died."""
        ...

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """The raw logits after each of these tokens, ``[num_tokens, vocab_size]`` float32; waits for them.

        Raises ``RequestError``, ``ContextLengthExceededError``, ``EngineDeadError``.
        """
        ...

    def close(self, drain: bool = False) -> None:
        """Stop the engine; with ``drain``, after the open requests have finished, else these end with
        "abort". New requests are refused at once. Returns when the engine has stopped; may be called
        again."""
        ...


@dataclass(slots=True)
class _OpenRequest:
    sink: OutputSink
    num_prompt_tokens: int
    choices: set[int] = field(default_factory=set)  # without a last output yet


class ThreadEngineClient:
    """An engine in a daemon thread of this process, which owns it from now on.

    The thread sleeps on a condition while there is nothing to do. If the loop itself fails (a bug: requests'
    own failures never get there), every open request ends with "error" and ``EngineDeadError`` answers all
    calls.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._condition = threading.Condition()
        # Guarded by the condition:
        self._commands: deque[Callable[[], list[EngineOutput]]] = deque()
        self._open: dict[str, _OpenRequest] = {}
        self._logits_futures: set[Future[NDArray[np.float32]]] = set()
        self._num_submitted = 0  # requests among the commands
        self._is_closing = False
        self._drains = False
        self._has_died = False
        self._thread = threading.Thread(target=self._run, name="xserv-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        """See ``EngineClient.submit``."""
        prepared = self._engine.prepare(request)
        max_waiting = self._engine.limits.max_waiting
        with self._condition:
            self._check_alive()
            if request.request_id in self._open:
                raise RequestError(f"request_id {request.request_id!r} is in use", param="request_id")
            if self._engine.num_unscheduled + self._num_submitted >= max_waiting:
                raise QueueFullError(max_waiting, RETRY_AFTER_S)
            self._open[request.request_id] = _OpenRequest(
                sink, prepared.num_prompt_tokens, set(range(request.params.n))
            )
            self._num_submitted += 1
            self._enqueue(partial(self._admit, prepared))

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """See ``EngineClient.cancel``."""
        with self._condition:
            if request_id in self._open:
                self._enqueue(partial(self._engine.cancel, request_id, index))

    def stats(self) -> EngineStats:
        """See ``EngineClient.stats``."""
        if self._has_died:
            raise EngineDeadError("the engine's loop has died; see the log")
        stats = self._engine.stats()
        return msgspec.structs.replace(stats, num_waiting=stats.num_waiting + self._num_submitted)

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """See ``EngineClient.logits``; runs between two steps."""
        future: Future[NDArray[np.float32]] = Future()
        with self._condition:
            self._check_alive()
            self._logits_futures.add(future)
            self._enqueue(partial(self._compute_logits, token_ids, future))
        return future.result()

    def close(self, drain: bool = False) -> None:
        """See ``EngineClient.close``. From a sink (on the engine's thread) it returns before the engine
        stops."""
        with self._condition:
            if not self._is_closing:
                self._is_closing = True
                self._drains = drain
            elif not drain:
                self._drains = False  # a second, impatient call
            self._condition.notify()
        atexit.unregister(self.close)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _check_alive(self) -> None:
        if self._has_died:
            raise EngineDeadError("the engine's loop has died; see the log")
        if self._is_closing:
            raise EngineDeadError("the engine is closed or closing")

    def _enqueue(self, command: Callable[[], list[EngineOutput]]) -> None:
        self._commands.append(command)
        self._condition.notify()

    # Everything below runs on the engine's thread.

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._deliver(self._obey())
                if self._engine.has_work:
                    self._deliver(self._engine.step(self._obey))
                    self._engine.rest()
            self._deliver(self._engine.cancel_all())
            self._engine.close()
        except BaseException:
            logger.exception("the engine's loop has died")
            self._has_died = True
            self._engine.runner.close()
        with self._condition:
            self._is_closing = True
        self._end_all("error" if self._has_died else "abort")

    def _wait_for_work(self) -> bool:
        """Sleep while there is nothing to do; False: stop."""
        with self._condition:
            was_idle = not (self._commands or self._engine.has_work)
            while not (self._commands or self._engine.has_work or self._is_closing):
                self._condition.wait()
            if self._is_closing and (not self._drains or not (self._commands or self._engine.has_work)):
                return False
        if was_idle:
            self._await_burst()
        return True

    def _await_burst(self) -> None:
        end = time.monotonic() + BURST_MOST_S
        while (count := self._num_submitted) and time.monotonic() < end:
            time.sleep(BURST_PAUSE_S)
            if self._num_submitted == count:
                return

    def _obey(self) -> list[EngineOutput]:
        """Do what users have asked for since the last time."""
        with self._condition:
            commands = list(self._commands)
            self._commands.clear()
        return [output for command in commands for output in command()]

    def _admit(self, request: Request) -> list[EngineOutput]:
        with self._condition:  # one count goes down as the other goes up
            self._num_submitted -= 1
            self._engine.admit(request)
        return []

    def _compute_logits(
        self, token_ids: Sequence[int], future: Future[NDArray[np.float32]]
    ) -> list[EngineOutput]:
        self._logits_futures.discard(future)
        try:
            future.set_result(self._engine.logits(token_ids))
        except Exception as error:  # the caller's, not the loop's
            future.set_exception(error)
        return []

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            request = self._open.get(output.request_id)
            if request is None:
                continue  # its sink has failed
            if output.finish_reason is not None:
                with self._condition:
                    request.choices.discard(output.index)
                    if not request.choices:
                        del self._open[output.request_id]
            try:
                request.sink(output)
            except BaseException:
                logger.exception("the sink of request %s failed; the request is cancelled", output.request_id)
                with self._condition:
                    self._open.pop(output.request_id, None)
                self._engine.cancel(output.request_id)

    def _end_all(self, reason: FinishReason) -> None:
        """Give a last output to every choice that has none: requests that never reached the engine, or all of
        them when the loop has died."""
        with self._condition:
            left, futures = list(self._open.items()), list(self._logits_futures)
        for future in futures:
            future.set_exception(EngineDeadError("the engine was closed before the logits were computed"))
        error = "the engine's loop has died" if reason == "error" else None
        for request_id, request in left:
            for index in sorted(request.choices):
                output = EngineOutput(
                    request_id=request_id,
                    index=index,
                    new_token_ids=[],
                    num_prompt_tokens=request.num_prompt_tokens,
                    finish_reason=reason,
                    error=error,
                )
                self._deliver([output])
