"""``EngineClient`` over a socket: the engine runs in a process of its own, which is restarted when it dies.

    client = ProcessEngineClient(model, device="cpu", max_num_seqs=64)   # ``build_engine``'s arguments, and its errors

Its supervisor's thread delivers the outputs, and ends the open requests when the process ends.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime import progress
from runtime.engine.admission import RETRY_AFTER_S, as_token_ids, check_room, prepare
from runtime.engine.config import EngineConfig
from runtime.engine.errors import EngineDeadError, QueueFullError, RequestError
from runtime.engine.messages import (
    EngineInfo,
    EngineRequest,
    EngineState,
    EngineStats,
    PoolingRequest,
    Source,
    StepView,
)
from runtime.engine.process.child import Membership, Supervision
from runtime.engine.process.client import Delivery, EngineClient, Origin, OutputSink, Watchers
from runtime.engine.process.supervisor import Supervisor
from runtime.engine.process.wire import (
    Answer,
    Call,
    CallFailed,
    CallName,
    Cancel,
    CancelCall,
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
    EngineCondition,
    FolderWeights,
    GivenArrays,
    LoadWeights,
    PauseAll,
    ResumeAll,
    SentWeights,
    Sleep,
    TellState,
    UseWeights,
    WakeTag,
    WakeUp,
    check_command,
)

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
        self._origin, self.update_lock = Origin(), threading.Lock()
        supervision, membership = supervision or Supervision(), membership or Membership()
        start = Start(
            model=None if model is None else str(model),
            config=EngineConfig(**settings).for_processes(),
            log_level=logging.getLogger("xserv").getEffectiveLevel(),
            hang_timeout_s=supervision.hang_timeout_s,
            cores=list(membership.cores),
            routing_secret=membership.routing_secret,
            draws_bars=not progress.is_redirected(),
            transfer=membership.transfer,
        )
        self._on_blocks = membership.on_blocks
        self._supervisor = Supervisor(self, start, supervision, membership)
        self._lock = self._supervisor.lock
        self._watchers = Watchers()
        self._delivery = Delivery(self._lock, self.cancel)
        # Guarded by the lock:
        self._info: EngineInfo | None = None
        self._pulse: Pulse | None = None
        self._queue = _Queue()
        self._calls: dict[int, Future[NDArray[np.float32]]] = {}
        self._num_calls = 0
        self._read: SentWeights | None = None  # weights that were loaded last
        self.has_read = False  # by this process, and not used yet
        self._weight_version = FIRST_VERSION
        self._rest: EngineCondition | None = None  # the engine's condition if it sleeps or is paused
        self._is_watched = False  # as the process knows it
        self._supervisor.thread.start()
        atexit.register(self.close)
        if waits:
            self.wait_until_started()

    def wait_until_started(self) -> None:
        """Returns when requests are first accepted. Raises as the constructor does."""
        try:
            self._supervisor.wait_until_started()
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
        return self._supervisor.state

    @property
    def pid(self) -> int | None:
        """The id of the engine's process; None while there is none."""
        process = self._supervisor.process
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
            process, queue = self._supervisor.live_process(), self._queue
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
            if request_id in self._delivery and self._supervisor.process is not None:
                self._supervisor.process.send(frame(message))

    def stats(self) -> EngineStats:
        """See ``EngineClient.stats``: the latest report, at most a second old unless the engine is stuck."""
        self._origin.check()
        with self._lock:
            pulse = self._pulse
            if pulse is None or self._supervisor.state == "starting":
                raise self._supervisor.dead()
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
        return self._send_call("logits", self._ids(token_ids)).result()

    def embed(self, request: PoolingRequest) -> Future[NDArray[np.float32]]:
        """See ``EngineClient.embed``; errors raised there may come from the future here."""
        return self._send_call("embed", pooled=msgspec.structs.replace(request, token_ids=self._ids(request.token_ids)))

    def load_adapter(self, name: str, path: str) -> Future[NDArray[np.float32]]:
        return self._send_call("load_adapter", name, path)

    def reset_prefix_cache(self) -> Future[NDArray[np.float32]]:
        return self._send_call("reset_prefix_cache")

    def expect(self, source: Source, request: EngineRequest | None) -> None:
        """Have the engine take the pages of a request that will come. Without effect unless it is ready."""
        self._send_if_ready(Expect(source, request))

    def drop_pages(self, lease: str) -> None:
        """Have the engine forget the pages of a lease, offered or taken."""
        self._send_if_ready(DropPages(lease))

    def limit_steps(self, limit: StepLimit) -> None:
        """Limit the engine's next steps. Without effect unless it is ready."""
        coefficients = limit.steps.coefficients
        self._send_if_ready(LimitSteps(limit.max_tokens, limit.seconds, coefficients, limit.most_saved_s))

    def _send_if_ready(self, message: Expect | DropPages | LimitSteps) -> None:
        if self._origin.is_here:
            with self._lock:
                if self._supervisor.state in ("ready", "draining") and self._supervisor.process is not None:
                    self._supervisor.process.send(frame(message))

    def order(self, command: Command | GivenArrays) -> Future[NDArray[np.float32]]:
        """See ``EngineClient.order``. An engine that is started anew begins with the folder that was served last; with
        its own weights and their version if the last came from memory. One that slept sleeps again; one that was paused
        is paused."""
        if isinstance(command, GivenArrays):
            raise RequestError(
                "arrays cannot be sent to an engine's process: share them (shared_weights)", param="weights"
            )
        check_command(command)
        if isinstance(command, ResumeAll):  # an engine that is starting cannot be told
            with self._lock:
                self._rest = self._rest and self._rest._replace(is_paused=False)
        sent = self._begin_call(lambda call_id: Order(call_id, command))
        if isinstance(command, TellState):
            return sent
        told: Future[NDArray[np.float32]] = Future()
        told.set_running_or_notify_cancel()
        sent.add_done_callback(partial(self._note_order, command, told))
        return told

    def _note_order(
        self, command: Command, told: Future[NDArray[np.float32]], done: Future[NDArray[np.float32]]
    ) -> None:
        """Remember the weights that the engine serves, and whether it sleeps or pauses; then its caller is told."""
        if (error := done.exception()) is not None:
            told.set_exception(error)
            return
        with self._lock:
            if isinstance(command, LoadWeights):
                self._read, self.has_read = command.source, True
            else:
                found = EngineCondition.of(done.result())
                self._rest = found if found.is_sleeping or found.is_paused else None
            if isinstance(command, UseWeights):
                self._weight_version, self.has_read = command.version, False
                self._start_with_read(command.version, lasts=False)
        told.set_result(done.result())

    def start_with_read(self, version: str, *, lasts: bool) -> None:
        """Have an engine that is started anew begin with the weights that were read last; ``lasts``: also with those of
        a memory, which its owner keeps meanwhile."""
        with self._lock:
            self._start_with_read(version, lasts=lasts)

    def _start_with_read(self, version: str, *, lasts: bool) -> None:
        source = self._read if lasts or isinstance(self._read, FolderWeights) else None
        self._supervisor.start = msgspec.structs.replace(
            self._supervisor.start, weights=source, weight_version=FIRST_VERSION if source is None else version
        )

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

    def _ids(self, token_ids: Sequence[int]) -> list[int]:
        ids: list[int] = as_token_ids("token_ids", token_ids, self.info.vocab_size).tolist()
        return ids

    def _send_call(
        self, name: CallName, *arguments: list[int] | str, pooled: PoolingRequest | None = None
    ) -> Future[NDArray[np.float32]]:
        return self._begin_call(lambda call_id: Call(call_id, name, arguments, pooled))

    def _begin_call(self, message: Callable[[int], Call | Order]) -> Future[NDArray[np.float32]]:
        self._origin.check()
        future: Future[NDArray[np.float32]] = Future()
        with self._lock:
            process = self._supervisor.live_process()
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
            if future.cancelled() and call_id in self._calls and self._supervisor.process is not None:
                self._supervisor.process.send(frame(CancelCall(call_id)))

    @property
    def _clock_offset_s(self) -> float:
        process = self._supervisor.process
        return 0.0 if process is None else process.clock_offset_s

    def _tell_watched(self) -> None:
        with self._lock:
            if self._supervisor.state == "ready":
                self._send_watched()

    def _send_watched(self) -> None:
        """Have the process, which is ready, send views if anybody watches. The caller holds the lock."""
        is_watched, process = bool(self._watchers), self._supervisor.process
        if is_watched != self._is_watched and process is not None:
            self._is_watched = is_watched
            process.send(frame(Watch(is_watched)))

    @property
    def ready_in_s(self) -> float | None:
        """The estimated time in seconds until it accepts requests again, or None if it never will."""
        return self._supervisor.ready_in_s

    def renew(self, drain_timeout_s: float) -> None:
        """See `Supervisor.renew`."""
        self._supervisor.renew(drain_timeout_s)

    def unload(self, drain_timeout_s: float) -> None:
        """See ``EngineClient.unload``."""
        self._supervisor.unload(drain_timeout_s)
        with self._lock:
            self._rest = None

    def reload(self) -> None:
        """See ``EngineClient.reload``."""
        self._supervisor.reload()

    def close(self, drain: bool = False) -> None:
        """See ``EngineClient.close``. From a sink it returns before the engine stops."""
        if self._origin.is_here:
            atexit.unregister(self.close)
            self._supervisor.close(drain)

    # Everything below runs on the supervisor's thread: this is its `Owner`.

    def begin(self, info: EngineInfo) -> None:
        """See `Owner.begin`."""
        self._info = info
        self._weight_version = self._supervisor.start.weight_version or FIRST_VERSION
        self._send_watched()
        self._send_to_rest()

    def _send_to_rest(self) -> None:
        """Have a process that is started anew sleep, or pause, as the one before it did. The lock is held."""
        rest, process = self._rest, self._supervisor.process
        if rest is None or process is None:
            return
        commands: list[Command] = []
        if rest.is_sleeping:
            has = {"weights": rest.has_weights, "kv_cache": rest.has_pages}
            tags = cast("tuple[WakeTag, ...]", tuple(tag for tag, is_there in has.items() if is_there))
            commands += [Sleep(rest.sleep_level, "abort"), *([WakeUp(tags)] if tags else [])]
        if rest.is_paused:
            commands.append(PauseAll("abort"))
        for command in commands:
            self._num_calls += 1
            self._calls[self._num_calls] = future = Future[NDArray[np.float32]]()
            future.add_done_callback(_log_error)
            process.send(frame(Order(self._num_calls, command)))

    def let_go(self) -> None:
        """See `Owner.let_go`."""
        self._pulse, self._queue, self._is_watched, self.has_read = None, _Queue(), False, False

    def end_all(self) -> None:
        """See `Owner.end_all`."""
        with self._lock:
            futures = list(self._calls.values())
            self._calls.clear()
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(self._supervisor.dead())
        if self._supervisor.is_closing:
            self._delivery.end_all("abort", None)
        else:
            self._delivery.end_all("error", "the engine has died")

    def take(self, message: FromEngine) -> None:
        """See `Owner.take`."""
        match message:
            case Outputs(outputs):
                with self._lock:
                    self._queue.report(message)
                if self._on_blocks is not None and (message.stored_blocks or message.removed_blocks):
                    stored, removed = message.stored_blocks, message.removed_blocks
                    changes = BlockChanges(np.frombuffer(stored, np.uint64), np.frombuffer(removed, np.uint64))
                    self._on_blocks(changes)
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


def _log_error(future: Future[NDArray[np.float32]]) -> None:
    if (error := future.exception()) is not None:
        logger.error("an engine slept or was paused before it was started anew, and is not now: %s", error)


def _log(line: LogLine) -> None:
    """Give a line of the engine's log to the handlers of this process."""
    target = logging.getLogger(line.name)
    if target.isEnabledFor(line.level):
        record = logging.LogRecord(line.name, line.level, "", 0, line.message, None, None)
        record.created, record.msecs = line.created_s, line.created_s % 1.0 * 1000.0
        record.exc_text = line.traceback
        target.handle(record)
