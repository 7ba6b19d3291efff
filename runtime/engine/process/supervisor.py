"""``EngineClient`` over a socket: the engine runs in a process of its own, which is restarted when it dies.

    client = ProcessEngineClient(model, device="cpu", max_num_seqs=64)   # ``build_engine``'s arguments, and its errors

One thread, the supervisor, starts the process and delivers its outputs; when the process ends, it ends the open
requests, waits a moment and starts the next one.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime import progress
from runtime.engine.admission import RETRY_AFTER_S, as_token_ids, check_room, prepare
from runtime.engine.config import EngineConfig
from runtime.engine.errors import EngineDeadError, QueueFullError, RequestError
from runtime.engine.messages import EngineInfo, EngineRequest, EngineState, EngineStats, ImageItem, Source, StepView
from runtime.engine.process.child import READ_TIMEOUT_S, EngineProcess, Membership, RunningEngine, Supervision
from runtime.engine.process.client import Delivery, EngineClient, Origin, OutputSink, Watchers
from runtime.engine.process.wire import (
    Answer,
    Call,
    CallFailed,
    CallName,
    Cancel,
    CancelCall,
    Close,
    DropPages,
    Expect,
    FromEngine,
    LimitSteps,
    LogLine,
    Order,
    Outputs,
    Pause,
    Pulse,
    Refused,
    Start,
    Started,
    StartFailed,
    Watch,
    error_of,
    frame,
)
from runtime.engine.scheduling.block_events import BlockChanges
from runtime.engine.scheduling.sequence import Request
from runtime.engine.scheduling.step_limit import StepLimit
from runtime.engine.weights.commands import (
    FIRST_VERSION,
    Command,
    FolderWeights,
    GivenArrays,
    LoadWeights,
    SentWeights,
    UseWeights,
    check_command,
)
from runtime.errors import XservError
from runtime.pooling import PoolingTask

logger = logging.getLogger("xserv.engine")


@dataclass(slots=True)
class _Queue:
    """An estimate of the waiting queue: the engine's last report, and the requests sent since."""

    num_sent: int = 0
    num_sent_tokens: int = 0
    num_older: int = 0  # reported as waiting, less all that were sent until then
    num_older_tokens: int = 0

    def report(self, message: Outputs) -> None:
        self.num_older = message.num_waiting - message.num_received
        self.num_older_tokens = message.num_waiting_tokens - message.num_received_tokens

    @property
    def num_waiting(self) -> int:
        return self.num_older + self.num_sent

    @property
    def num_waiting_tokens(self) -> int:
        return self.num_older_tokens + self.num_sent_tokens


class ProcessEngineClient(EngineClient):
    """An engine in a process of its own.

    Sinks are called on the supervisor's thread, with all outputs of a step at once. If the process ends, is killed or
    falls silent, every open choice gets a last output with "error" and ``engine_died``; until the next one is ready
    calls raise ``EngineDeadError`` with the seconds to wait. The process ends with this one, however that ends.

    The arguments are ``build_engine``'s, and so are the errors if the engine cannot be started the first time; in
    addition ``EngineDeadError`` if its process ends meanwhile. With ``waits=False`` these are raised by
    ``wait_until_started``, before which there is no ``info``, and only ``state`` and ``close`` may be used.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        supervision: Supervision | None = None,
        membership: Membership | None = None,
        waits: bool = True,
        **settings: Any,
    ) -> None:
        self._origin = Origin()
        self._supervision = supervision or Supervision()
        self._membership = membership or Membership()
        self._name = self._membership.name
        self._start = Start(
            model=None if model is None else str(model),
            config=EngineConfig(**settings).for_processes(),
            log_level=logging.getLogger("xserv").getEffectiveLevel(),
            hang_timeout_s=self._supervision.hang_timeout_s,
            cores=list(self._membership.cores),
            routing_secret=self._membership.routing_secret,
            draws_bars=not progress.is_redirected(),
            transfer=self._membership.transfer,
        )
        self._lock, self.update_lock = threading.Lock(), threading.Lock()
        self._closing = threading.Event()
        self._watchers = Watchers()
        self._delivery = Delivery(self._lock, self.cancel)
        # Guarded by the lock:
        self._process: RunningEngine | None = None
        self._state: EngineState = "starting"
        self._renewed: Future[None] | None = None  # of a renewal in progress
        self._unloaded: Future[None] | None = None  # of an unloading in progress
        self._reloaded: Future[None] | None = None  # of a reloading in progress
        self._info: EngineInfo | None = None
        self._pulse: Pulse | None = None
        self._queue = _Queue()
        self._calls: dict[int, Future[NDArray[np.float32]]] = {}
        self._num_calls = 0
        self._read: SentWeights | None = None  # weights that were loaded last
        self._weight_version = FIRST_VERSION
        self._is_watched = False  # as the process knows it
        self._ready_s = 0.0  # since when it is ready, or when it is likely to be again
        self._start_duration_s = 0.0
        # The supervisor's:
        self._delay_s = self._supervision.first_delay_s  # before the next start
        self._is_drained = False  # for a renewal, which now waits for the new process
        self._wakes = threading.Event()  # set to end the wait of an unloaded engine

        self._started: Future[None] = Future()
        self._supervisor = threading.Thread(
            target=self._supervise, args=(self._started,), name="xserv-engine-supervisor", daemon=True
        )
        self._supervisor.start()
        atexit.register(self.close)
        if waits:
            self.wait_until_started()

    def wait_until_started(self) -> None:
        """Returns when requests are first accepted. Raises as the constructor does."""
        try:
            self._started.result()
        except BaseException:
            self.close()
            raise

    @property
    def info(self) -> EngineInfo:
        """The latest process's; a new one may have found less memory for its KV cache."""
        assert self._info is not None
        return self._info

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def pid(self) -> int | None:
        """The id of the engine's process; None while there is none."""
        process = self._process
        return None if process is None else process.pid

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        """See ``EngineClient.submit``; the queue counts as full a little early, since a request counts as waiting until
        the step with the first chunk of its prompt is over."""
        self._origin.check()
        self.admit(request, prepare(request, self.info), sink)

    def admit(self, request: EngineRequest, prepared: Request, sink: OutputSink) -> None:
        """``submit`` for a request that is ``prepared`` already."""
        if not isinstance(request.prompt_token_ids, list):
            request = msgspec.structs.replace(request, prompt_token_ids=prepared.prompt_ids.tolist())
        offset_s = self._clock_offset_s
        if not request.arrival_time_s or offset_s:
            request = msgspec.structs.replace(request, arrival_time_s=prepared.arrival_s + offset_s)
        data, num_tokens = frame(request), prepared.num_prompt_tokens
        with self._lock:
            process, queue = self._live_process(), self._queue
            self._delivery.check_free(request.request_id)
            if not request.begun:  # else it was accepted before
                check_room(self.info, queue.num_waiting, queue.num_waiting_tokens, num_tokens)
            process.send(data)
            self._delivery.open(request, sink)
            queue.num_sent += 1
            queue.num_sent_tokens += num_tokens

    def cancel(self, request_id: str, index: int | None = None) -> None:
        self._tell(request_id, Cancel(request_id, index))

    def pause(self, request_id: str) -> None:
        self._tell(request_id, Pause(request_id, True))

    def resume(self, request_id: str) -> None:
        self._tell(request_id, Pause(request_id, False))

    def _tell(self, request_id: str, message: Cancel | Pause) -> None:
        if not self._origin.is_here:
            return
        with self._lock:
            if request_id in self._delivery and self._process is not None:
                self._process.send(frame(message))

    def stats(self) -> EngineStats:
        """See ``EngineClient.stats``: the latest report, at most a second old unless the engine is stuck."""
        self._origin.check()
        with self._lock:
            pulse = self._pulse
            if pulse is None or self._state == "starting":
                raise self._dead()
            num_sent = self._queue.num_sent - pulse.num_received
        return msgspec.structs.replace(pulse.stats, num_waiting=pulse.stats.num_waiting + num_sent)

    def watch(self, sink: Callable[[StepView], None]) -> Callable[[], None]:
        """See ``EngineClient.watch``; the sink is called on the supervisor's thread."""
        remove = self._watchers.add(sink)

        def stop() -> None:
            remove()
            self._tell_watched()

        self._tell_watched()
        return stop

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        return self._call("logits", token_ids).result()

    def embed(
        self,
        token_ids: Sequence[int],
        pooling: str | None = None,
        images: Sequence[ImageItem] = (),
        cache_salt: str | None = None,
        task: PoolingTask = "embed",
        second_from: int | None = None,
        num_unpooled: int = 0,
    ) -> Future[NDArray[np.float32]]:
        """See ``EngineClient.embed``; errors raised there may come from the future here."""
        return self._call("embed", token_ids, pooling, cache_salt, task, second_from, num_unpooled, images=images)

    def load_adapter(self, name: str, path: str) -> Future[NDArray[np.float32]]:
        return self._send_call("load_adapter", [name, path])

    def reset_prefix_cache(self) -> Future[NDArray[np.float32]]:
        return self._send_call("reset_prefix_cache", [])

    def expect(self, source: Source) -> None:
        """Have the engine take the pages of a request that will come. Without effect unless it is ready."""
        self._send_if_ready(Expect(source))

    def drop_pages(self, lease: str) -> None:
        """Have the engine forget the pages of a lease, offered or taken."""
        self._send_if_ready(DropPages(lease))

    def limit_steps(self, limit: StepLimit) -> None:
        """Limit the engine's next steps. Without effect unless it is ready."""
        self._send_if_ready(LimitSteps(limit.max_tokens, limit.seconds, limit.steps.coefficients))

    def _send_if_ready(self, message: Expect | DropPages | LimitSteps) -> None:
        if self._origin.is_here:
            with self._lock:
                if self._state in ("ready", "draining") and self._process is not None:
                    self._process.send(frame(message))

    def order(self, command: Command | GivenArrays) -> Future[NDArray[np.float32]]:
        """See ``EngineClient.order``. An engine that is started anew begins with the folder that was served last; with
        its own weights and their version if the last came from memory."""
        if isinstance(command, GivenArrays):
            raise RequestError(
                "arrays cannot be sent to an engine's process: share them (shared_weights)", param="weights"
            )
        check_command(command)
        sent = self._begin_call(lambda call_id: Order(call_id, command))
        if not isinstance(command, LoadWeights | UseWeights):
            return sent
        told: Future[NDArray[np.float32]] = Future()
        told.set_running_or_notify_cancel()
        sent.add_done_callback(partial(self._note_order, command, told))
        return told

    def _note_order(
        self, command: LoadWeights | UseWeights, told: Future[NDArray[np.float32]], done: Future[NDArray[np.float32]]
    ) -> None:
        """Remember the weights that the engine serves; then its caller is told."""
        if (error := done.exception()) is not None:
            told.set_exception(error)
            return
        with self._lock:
            if isinstance(command, LoadWeights):
                self._read = command.source
            else:
                source = self._read
                folder = source if isinstance(source, FolderWeights) else None
                version = command.version if folder is not None else FIRST_VERSION
                self._start = msgspec.structs.replace(self._start, weights=folder, weight_version=version)
                self._weight_version = command.version
        told.set_result(done.result())

    @property
    def weight_version(self) -> str:
        return self._weight_version

    @property
    def waiting(self) -> tuple[int, int]:
        """Requests in the waiting queue, as far as is known, and their prompts' tokens."""
        queue = self._queue
        return queue.num_waiting, queue.num_waiting_tokens

    @property
    def num_calls(self) -> int:
        """Unanswered computations other than requests."""
        return len(self._calls)

    def renew(self, drain_timeout_s: float) -> None:
        """Drain the engine and start it anew; returns when it is ready again. Meanwhile it refuses new requests. Those
        still open after ``drain_timeout_s`` end with "error" and ``engine_died``.

        Raises ``EngineDeadError`` unless it is ready, and the error of a failed restart, which is retried as after a
        death.
        """
        renewed: Future[None] = Future()
        with self._lock:
            process, self._renewed = self._drained_process(), renewed
        _wait_or_kill(renewed, process, drain_timeout_s)

    def unload(self, drain_timeout_s: float) -> None:
        """Drain the engine and end its process, until ``reload``; returns when its memory is free. Requests still open
        after ``drain_timeout_s`` end with "error" and ``engine_died``. Raises ``EngineDeadError`` unless it is ready.
        """
        unloaded: Future[None] = Future()
        with self._lock:
            process, self._unloaded = self._drained_process(), unloaded
        _wait_or_kill(unloaded, process, drain_timeout_s)

    def reload(self) -> None:
        """Start an unloaded engine; returns when it is ready. Raises ``EngineDeadError`` unless it is unloaded, and the
        error of a failed start, after which it is still unloaded."""
        reloaded: Future[None] = Future()
        with self._lock:
            if self._state != "unloaded":
                raise EngineDeadError(f"{self._name} is not unloaded but {self._state}")
            self._state, self._reloaded = "starting", reloaded
        self._wakes.set()
        reloaded.result()

    def close(self, drain: bool = False) -> None:
        """See ``EngineClient.close``. From a sink it returns before the engine stops."""
        if not self._origin.is_here:
            return
        with self._lock:
            is_first = not self._closing.is_set()
            process, was_ready = self._process, self._state in ("ready", "draining") or not is_first
            self._closing.set()
            self._state = "closing"
            self._wakes.set()
            if process is not None and was_ready and (is_first or not drain):
                process.send(frame(Close(drain)))
        atexit.unregister(self.close)
        if process is not None and not was_ready:
            process.kill()
        if threading.current_thread() is self._supervisor:
            return
        if not drain:
            self._supervisor.join(self._supervision.close_timeout_s)
            if self._supervisor.is_alive() and process is not None:
                timeout_s = self._supervision.close_timeout_s
                logger.error("%s did not close within %g s; it is killed", self._name, timeout_s)
                process.kill()
        self._supervisor.join()

    def _call(
        self, name: CallName, token_ids: Sequence[int], *arguments: str | int | None, images: Sequence[ImageItem] = ()
    ) -> Future[NDArray[np.float32]]:
        ids: list[int] = as_token_ids("token_ids", token_ids, self.info.vocab_size).tolist()
        return self._send_call(name, [ids, *arguments], tuple(images))

    def _send_call(
        self, name: CallName, arguments: list[list[int] | str | int | None], images: tuple[ImageItem, ...] = ()
    ) -> Future[NDArray[np.float32]]:
        return self._begin_call(lambda call_id: Call(call_id, name, arguments, images))

    def _begin_call(self, message: Callable[[int], Call | Order]) -> Future[NDArray[np.float32]]:
        self._origin.check()
        future: Future[NDArray[np.float32]] = Future()
        with self._lock:
            process = self._live_process()
            if len(self._calls) >= self.info.max_waiting:
                raise QueueFullError(self.info.max_waiting, RETRY_AFTER_S)
            self._num_calls = call_id = self._num_calls + 1
            self._calls[call_id] = future
            process.send(frame(message(call_id)))
        future.add_done_callback(partial(self._cancel_call, call_id))
        return future

    def _cancel_call(self, call_id: int, future: Future[NDArray[np.float32]]) -> None:
        """Called when the future is done. If it was cancelled, the process is notified; the call counts until the
        process has replied."""
        with self._lock:
            if future.cancelled() and call_id in self._calls and self._process is not None:
                self._process.send(frame(CancelCall(call_id)))

    @property
    def _clock_offset_s(self) -> float:
        process = self._process
        return 0.0 if process is None else process.clock_offset_s

    def _tell_watched(self) -> None:
        with self._lock:
            is_watched = bool(self._watchers)
            if is_watched != self._is_watched and self._state == "ready" and self._process is not None:
                self._is_watched = is_watched
                self._process.send(frame(Watch(is_watched)))

    def _drained_process(self) -> RunningEngine:
        """The process, from now on drained. The caller holds the lock."""
        process = self._live_process()
        self._state = "draining"
        process.send(frame(Close(drain=True)))
        return process

    def _live_process(self) -> RunningEngine:
        if self._state != "ready":
            raise self._dead()
        assert self._process is not None
        return self._process

    @property
    def ready_in_s(self) -> float | None:
        """The estimated time in seconds until it accepts requests again, or None if it never will."""
        if self._state in ("closing", "unloaded") or not self._supervisor.is_alive():
            return None
        if self._renewed is not None:
            return max(1.0, self._start_duration_s)
        return max(1.0, self._ready_s - time.monotonic())

    def _dead(self) -> EngineDeadError:
        left_s = self.ready_in_s
        if self._state == "closing":
            return EngineDeadError("the engine is closed or closing")
        if self._state == "unloaded" or self._unloaded is not None:
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
            self._end_all()
            closed = EngineDeadError("the engine was closed before it was started")
            if not started.done():
                started.set_exception(closed)
            with self._lock:
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
            process = EngineProcess(self._start, self._supervision.command) if launch is None else launch(self._start)
            with self._lock:
                self._process = process
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
                    self._take(message)
        except (OSError, XservError, msgspec.DecodeError) as error:
            failure = error
        finally:
            self._let_go()
            if process is not None:
                how = process.end()
        return failure or EngineDeadError(f"the engine's process {how}")

    def _take_up(self, info: EngineInfo, begun_s: float) -> None:
        """Serve requests with the engine that is now ready."""
        with self._lock:
            self._info = info
            self._weight_version = self._start.weight_version or FIRST_VERSION
            self._ready_s = time.monotonic()
            self._start_duration_s = self._ready_s - begun_s
            if self._state != "closing":
                self._state = "ready"
            waited_for = self._renewed, self._reloaded
            self._renewed = self._reloaded = None
        self._is_drained = False
        for future in waited_for:
            if future is not None:
                future.set_result(None)
        self._tell_watched()

    def _let_go(self) -> None:
        """Clean up after a process that has ended or is about to: end the open requests and calls."""
        now = time.monotonic()
        if self._state == "ready" and now - self._ready_s >= self._supervision.healthy_s:
            self._delay_s = self._supervision.first_delay_s
        with self._lock:
            if self._state != "closing":
                self._state = "down"
            self._process = self._pulse = None
            self._queue, self._is_watched = _Queue(), False
            self._ready_s = now + self._delay_s + self._start_duration_s
        if self._membership.on_blocks is not None:
            self._membership.on_blocks(None)
        self._end_all()

    def _is_reloaded(self, failure: Exception) -> bool:
        """Called when a process has ended. If that was to unload the engine, or if it was reloaded and failed, waits
        until it is told to start again, or is closed. False if neither was the case."""
        with self._lock:
            unloaded, reloaded = self._unloaded, self._reloaded
            if (unloaded is None and reloaded is None) or self._state == "closing":
                return False
            self._unloaded = self._reloaded = None
            self._wakes.clear()
            self._state = "unloaded"
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
        with self._lock:
            renewed, is_drained = self._renewed, self._is_drained
            self._is_drained = renewed is not None and not is_drained
            if renewed is None or self._state == "closing":
                return False
            if is_drained:
                self._renewed = None
            else:
                self._state = "starting"
        if is_drained:
            renewed.set_exception(EngineDeadError(f"{self._name} did not start again; see the log"))
            return False
        logger.info("%s is started again, as it was told to", self._name)
        return True

    def _end_all(self) -> None:
        """End all open requests and calls."""
        with self._lock:
            futures = list(self._calls.values())
            self._calls.clear()
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(self._dead())
        if self._closing.is_set():
            self._delivery.end_all("abort", None)
        else:
            self._delivery.end_all("error", "the engine has died")

    def _set_state(self, state: EngineState) -> None:
        with self._lock:
            if self._state != "closing":
                self._state = state

    def _messages(self, process: RunningEngine) -> Iterator[FromEngine]:
        num_silent_s = 0.0
        while (messages := process.receive()) is not None:
            num_silent_s = 0.0 if messages or self._state == "starting" else num_silent_s + READ_TIMEOUT_S
            if num_silent_s >= self._supervision.hang_timeout_s:
                logger.error("nothing was heard of %s for %.0f s; its process is killed", self._name, num_silent_s)
                process.kill()
            yield from messages

    def _take(self, message: FromEngine) -> None:
        match message:
            case Outputs(outputs):
                with self._lock:
                    self._queue.report(message)
                if self._membership.on_blocks is not None and (message.stored_blocks or message.removed_blocks):
                    stored, removed = message.stored_blocks, message.removed_blocks
                    changes = BlockChanges(np.frombuffer(stored, np.uint64), np.frombuffer(removed, np.uint64))
                    self._membership.on_blocks(changes)
                for output in outputs:
                    self._delivery.deliver(output)
            case Pulse():
                self._pulse = message
            case StepView():
                self._watchers.show(message)
                self._tell_watched()
            case Refused(request_id, problem):
                error = error_of(problem)
                self._delivery.end(
                    request_id,
                    "error",
                    str(error),
                    engine_died=isinstance(error, EngineDeadError),
                    error_code="unsatisfiable_request" if isinstance(error, RequestError) else None,
                )
            case Answer(call_id, shape, data):
                self._settle(call_id, np.frombuffer(data, np.float32).reshape(shape))
            case CallFailed(call_id, problem):
                self._settle(call_id, error_of(problem))
            case LogLine():
                _log(message)

    def _settle(self, call_id: int, result: NDArray[np.float32] | Exception) -> None:
        with self._lock:
            future = self._calls.pop(call_id, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)


def _wait_or_kill(ended: Future[None], process: RunningEngine, timeout_s: float) -> None:
    """Waits for the future; kills the process after the timeout."""
    timer = threading.Timer(timeout_s, process.kill)
    timer.daemon = True
    timer.start()
    try:
        ended.result()
    finally:
        timer.cancel()


def _log(line: LogLine) -> None:
    """Give a line of the engine's log to the handlers of this process."""
    target = logging.getLogger(line.name)
    if target.isEnabledFor(line.level):
        record = logging.LogRecord(line.name, line.level, "", 0, line.message, None, None)
        record.created, record.msecs = line.created_s, line.created_s % 1.0 * 1000.0
        record.exc_text = line.traceback
        target.handle(record)
