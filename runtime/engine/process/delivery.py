"""Delivers outputs to the sink of each request, until each of its choices has had its last one, and views of steps to
observers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from runtime.engine.errors import RequestError
from runtime.engine.messages import EngineOutput, EngineRequest, ErrorCode, FinishReason, StepView

logger = logging.getLogger("xserv.engine")

OutputSink = Callable[[EngineOutput], None]
"""Receives a request's outputs, in order. Called on the engine's thread: it must not block (use a queue or
``loop.call_soon_threadsafe``). An exception is logged and cancels this request alone.
"""


@dataclass(slots=True)
class _Open:
    sink: OutputSink
    num_prompt_tokens: int
    choices: set[int]  # without a last output yet


class Delivery:
    """The open requests and their sinks.

    lock    guards the requests; callers of ``open``, ``check_free`` and ``in`` must hold it, the others take it
    cancel  called, without the lock, with the id of a request whose sink has failed; its last outputs are dropped
    """

    def __init__(self, lock: threading.Lock | threading.Condition, cancel: Callable[[str], None]) -> None:
        self._lock = lock
        self._cancel = cancel
        self._open: dict[str, _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def check_free(self, request_id: str) -> None:
        """Raises ``RequestError`` if the id is in use."""
        if request_id in self._open:
            raise RequestError(f"request_id {request_id!r} is in use", param="request_id")

    def open(self, request: EngineRequest, sink: OutputSink) -> None:
        """From now on the request's outputs go to this sink."""
        self._open[request.request_id] = _Open(sink, len(request.prompt_token_ids), set(range(request.params.n)))

    def deliver(self, output: EngineOutput) -> None:
        """Give an output to its sink; outputs of ended requests are dropped. To be called on one thread."""
        request = self._open.get(output.request_id)
        if request is None:
            return
        if output.finish_reason is not None:
            with self._lock:
                request.choices.discard(output.index)
                if not request.choices:
                    del self._open[output.request_id]
        try:
            request.sink(output)
        except BaseException:
            logger.exception("the sink of request %s failed; the request is cancelled", output.request_id)
            request.sink = _drop
            self._cancel(output.request_id)

    def end(
        self,
        request_id: str,
        reason: FinishReason,
        error: str | None,
        *,
        engine_died: bool = False,
        error_code: ErrorCode | None = None,
    ) -> None:
        """Give a last output to every choice of a request that has none."""
        with self._lock:
            request = self._open.get(request_id)
            choices = [] if request is None else sorted(request.choices)
        for index in choices:
            assert request is not None
            self.deliver(
                EngineOutput(
                    request_id=request_id,
                    index=index,
                    new_token_ids=[],
                    num_prompt_tokens=request.num_prompt_tokens,
                    finish_reason=reason,
                    error=error,
                    engine_died=engine_died,
                    error_code=error_code,
                )
            )

    def end_all(self, reason: FinishReason, error: str | None) -> None:
        """``end`` every request; "error" means that the engine has died."""
        with self._lock:
            request_ids = list(self._open)
        for request_id in request_ids:
            self.end(request_id, reason, error, engine_died=reason == "error")


def _drop(output: EngineOutput) -> None:
    """Replaces a sink that has failed."""


ViewSink = Callable[[StepView], None]
"""Receives the view of each step, on any thread; it must not block. One that raises is logged and removed."""


class Watchers:
    """The sinks of step views. ``add`` is thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sinks: tuple[ViewSink, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._sinks)

    def add(self, sink: ViewSink) -> Callable[[], None]:
        """Returns an idempotent function that removes it."""

        def watch(view: StepView) -> None:  # a new function, so that one sink may be added twice
            sink(view)

        with self._lock:
            self._sinks = (*self._sinks, watch)
        return lambda: self._remove(watch)

    def show(self, view: StepView) -> None:
        """Give the view to every sink."""
        for sink in self._sinks:
            try:
                sink(view)
            except Exception:
                logger.exception("a sink that watches the steps failed; it is removed")
                self._remove(sink)

    def _remove(self, removed: ViewSink) -> None:
        with self._lock:
            self._sinks = tuple(sink for sink in self._sinks if sink is not removed)
