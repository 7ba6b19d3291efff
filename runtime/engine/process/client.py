"""``EngineClient``: the only interface to the engine, in this process or in another.

client.submit(request, sink)   # raises before admission; then outputs go to the sink
client.cancel(request_id)
client.stats(), client.info
client.close()

`Delivery` gives outputs to the sink of each request, until each of its choices has had its last one.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.engine.errors import EngineDeadError, RequestError
from runtime.engine.messages import (
    EngineInfo,
    EngineOutput,
    EngineRequest,
    EngineState,
    EngineStats,
    ErrorCode,
    FinishReason,
    PoolingRequest,
    RoutingStats,
    StepView,
)
from runtime.engine.weights.commands import (
    Command,
    DropWeights,
    EngineCondition,
    GivenArrays,
    LoadWeights,
    TellState,
    UpdateMode,
    UseWeights,
    WeightSource,
    check_command,
    next_version,
)
from runtime.errors import XservError

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
        choices = {i for i in range(request.params.n) if not (request.begun and request.begun[i].has_ended)}
        self._open[request.request_id] = _Open(sink, len(request.prompt_token_ids), choices)

    def deliver(self, output: EngineOutput) -> None:
        """Give an output to its sink; outputs of ended requests are dropped. To be called on one thread."""
        request = self._open.get(output.request_id)
        if request is None:
            return
        if output.is_last:
            with self._lock:
                request.choices.discard(output.index)
                if not request.choices:
                    del self._open[output.request_id]
        if not call_sink(request.sink, output):
            request.sink = ignore
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


def call_sink(sink: OutputSink, output: EngineOutput) -> bool:
    """Give an output to a sink. False if it raised, which is logged: the caller cancels the request."""
    try:
        sink(output)
    except BaseException:
        logger.exception("the sink of request %s failed; the request is cancelled", output.request_id)
        return False
    return True


def ignore(output: EngineOutput) -> None:
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


class EngineClient(Protocol):
    """The interface that the server, the commands and ``LLM`` have to the engine, or to several. All methods are
    thread-safe.

    update_lock  held by ``update_weights`` alone"""

    update_lock: threading.Lock

    @property
    def info(self) -> EngineInfo:
        """Static facts about the model and the limits."""
        ...

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        """Admit a request to the waiting queue; returns at once.

        Each of its ``params.n`` choices ends with exactly one output that has a ``finish_reason``; after the
        last of them the sink is not called again.

        Raises, before admission: ``ContextLengthExceededError`` (the prompt leaves no room for one token),
        ``RequestError`` (any other wrong field; an id that is in use), ``QueueFullError``, ``EngineDeadError``.
        """
        ...

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one choice of it. Its blocks are free within one step, and each open choice that this ends
        gets a last output with ``finish_reason="abort"``. Unknown and finished ones are ignored."""
        ...

    def pause(self, request_id: str) -> None:
        """Pause a request whose outputs are not being read: within a step or two no more come, and its blocks are
        freed. It can still be cancelled. Unknown and finished ones are ignored."""
        ...

    def resume(self, request_id: str) -> None:
        """Resume a paused request; its outputs are the same as without the pause."""
        ...

    @property
    def state(self) -> EngineState:
        """Whether requests are accepted."""
        ...

    @property
    def engines(self) -> Sequence[EngineClient]:
        """The engines that share the requests, in the order of their numbers; a single engine is its own."""
        return (self,)

    @property
    def routing(self) -> RoutingStats | None:
        """Counters of the router of several engines; None for one engine."""
        return None

    def stats(self) -> EngineStats:
        """A snapshot, at most about a second old; never waits for a step. Raises ``EngineDeadError`` if the engine has
        died."""
        ...

    def watch(self, sink: Callable[[StepView], None]) -> Callable[[], None]:
        """Call the sink with every step from now on, on any thread; it must not block. Returns an idempotent function
        that stops it. Costs nothing without watchers."""
        ...

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """The raw logits after each of these tokens, ``[num_tokens, vocab_size]`` float32; waits for them.

        Raises ``RequestError``, ``ContextLengthExceededError``, ``EngineDeadError``.
        """
        ...

    def embed(self, request: PoolingRequest) -> Future[NDArray[np.float32]]:
        """Compute what the request asks for of its prompt's hidden states.

        Returns at once; a cancelled future costs no further forward pass. Raises ``RequestError``,
        ``QueueFullError``, ``EngineDeadError``; the future, ``EmbeddingError`` and ``EngineDeadError``.
        """
        ...

    def embed_here(self, request: PoolingRequest) -> NDArray[np.float32] | None:
        """The result of ``embed`` for a caller that has nothing else to do: an idle engine in this process lends itself
        to the caller's thread for one pass. To wake the engine's thread, and to be woken by it, would take a tenth of a
        short text's time. None if the engine has other work or one pass does not do: then ``embed`` takes the request.
        Raises as ``embed`` and its future do."""
        return None

    def load_adapter(self, name: str, path: str) -> Future[NDArray[np.float32]]:
        """Read the adapter in a folder, check it against the model, and keep it in host memory. Returns at once; the
        future's numbers are the 32 bytes of its content's digest. Raises ``EngineDeadError``, as the future does, and
        ``RequestError``: no adapters are taken, or the folder holds none for this model."""
        ...

    def reset_prefix_cache(self) -> Future[NDArray[np.float32]]:
        """Drop the prefixes that no running request holds, in the host's memory as well; held ones remain cached.
        Returns at once; the future's numbers are the blocks that were dropped and those that are held. Raises
        ``EngineDeadError``, as the future does, and ``QueueFullError``."""
        ...

    def unload(self, drain_timeout_s: float) -> None:
        """Drain the engine and free its memory, until ``reload``; returns when that is done. Raises
        ``EngineDeadError`` unless it is ready in a process of its own."""
        raise EngineDeadError("the engine has no process of its own that could end")

    def reload(self) -> None:
        """Start an unloaded engine; returns when it is ready. Raises ``EngineDeadError`` unless it is unloaded, and the
        error of a failed start, after which it is still unloaded."""
        raise EngineDeadError("the engine is not unloaded")

    def order(self, command: Command | GivenArrays) -> Future[NDArray[np.float32]]:
        """Pause, sleep, wake up or change weights: see ``runtime.engine.weights``. Returns at once; the future's
        numbers are an `EngineCondition`. Raises ``RequestError`` and ``EngineDeadError``, as the future does, which
        also raises ``ModelLoadError`` and ``OutOfMemoryError``; then nothing has changed."""
        ...

    @property
    def weight_version(self) -> str:
        """The version of the weights that serve; of several engines that differ, all of them, with commas."""
        ...

    def condition(self) -> EngineCondition:
        """Whether it is paused or asleep. Waits for an answer. Raises ``EngineDeadError``."""
        return EngineCondition.of(self.order(TellState()).result())

    def update_weights(self, source: WeightSource, version: str | None, mode: UpdateMode = "wait") -> EngineCondition:
        """Serve other weights of the same model under this version, by default the current number plus 1; waits until
        it does, and for other updates before. Raises as ``order``, and the old weights serve on then."""
        with self.update_lock:  # else the weights of one update would serve under the version of another
            use = UseWeights(next_version(self.weight_version) if version is None else version, mode)
            check_command(use)
            self.order(source if isinstance(source, GivenArrays) else LoadWeights(source)).result()
            try:
                return EngineCondition.of(self.order(use).result())._replace(weight_version=use.version)
            except XservError:
                with suppress(XservError):
                    self.order(DropWeights())
                raise

    def wait_until_started(self) -> None:
        """Returns when requests are first accepted; before that only ``state`` and ``close`` may be used. Raises the
        errors of the engine's start."""
        return

    def close(self, drain: bool = False) -> None:
        """Stop the engine. With ``drain`` the open requests finish first, paused ones included, otherwise they end with
        "abort". New requests are refused at once. Returns when the engine has stopped. Idempotent."""
        ...


class Origin:
    """Detects use in a forked child. Checked before any lock is taken, which might be held for ever in the child."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raises ``EngineDeadError`` in a forked child."""
        if not self.is_here:
            raise EngineDeadError(
                f"this engine belongs to process {self._pid}; process {os.getpid()} was forked from that, and a fork "
                "has no engine: make an LLM in the child, or start the child with multiprocessing's 'spawn' method"
            )
