"""The engine's process, which ``ProcessEngineClient`` starts and talks to over a socket.

    python -m runtime.engine.process.main --fd N

It reads commands from the inherited socket N and writes outputs, those of a step in one message. While the server does
not read them the engine waits, so that it buffers at most a step's outputs. The process ends on command, when the
socket is closed (so with its server, however that ends), when the engine's loop has died, and when the engine has work
but finishes no step for too long. Signals from the terminal are for the server.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime import collector
from runtime.engine.errors import EngineDeadError
from runtime.engine.messages import EngineOutput, EngineRequest, Source, StepView
from runtime.engine.process.client import EngineClient, OutputSink
from runtime.engine.process.spawning import begin, die_with_parent
from runtime.engine.process.wire import (
    Answer,
    Call,
    CallFailed,
    Cancel,
    CancelCall,
    Close,
    DropPages,
    Expect,
    FrameReader,
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
    ToEngine,
    WaitingWriter,
    Watch,
    WireError,
    frame,
    problem_of,
)
from runtime.engine.scheduling.block_events import BlockChanges
from runtime.engine.scheduling.step_limit import StepLimit
from runtime.engine.scheduling.step_model import LinearStepModel
from runtime.errors import XservError
from runtime.later import later
from runtime.progress import SILENT, Reporter, redirect

_ahead = later("runtime.engine.process.compile_ahead")
_clients = later("runtime.engine.process.thread_client")
_engines = later("runtime.engine.make_engine")
_joining = later("runtime.engine.transfer.joining")
"""They import numba, which has to be compiled ahead of; a process whose server is gone ends before that."""

logger = logging.getLogger("xserv.engine")

PULSE_IDLE_S = 1.0
PULSE_BUSY_S = 0.1
"""Seconds between two pulses."""
MOST_TOKENS_HERE = 128
"""The longest prompt to embed that the reader's thread computes: meanwhile it reads nothing."""

EXIT_CLOSED = 0
EXIT_START_FAILED = 1
EXIT_LOOP_DIED = 70
EXIT_STUCK = 71
EXIT_SERVER_GONE = 72


class RunningClient(EngineClient, Protocol):
    """See `ThreadEngineClient`, whose module imports the engine."""

    @property
    def has_work(self) -> bool: ...

    @property
    def is_changing(self) -> bool: ...

    @property
    def waiting(self) -> tuple[int, int]: ...

    def submit_prepared(self, request: EngineRequest, sink: OutputSink) -> None: ...

    def take_block_changes(self) -> BlockChanges | None: ...

    def expect(self, source: Source, request: EngineRequest | None) -> None: ...

    def drop_pages(self, lease: str) -> None: ...

    def limit_steps(self, limit: StepLimit) -> None: ...

    def start_logits(self, token_ids: Sequence[int]) -> Future[NDArray[np.float32]]: ...


class ProcessServer:
    """One engine and the socket to its server."""

    def __init__(self, connection: socket.socket) -> None:
        self._reader = FrameReader(connection)
        self._writer = WaitingWriter(connection)
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        self._client: RunningClient | None = None
        self._has_died = threading.Event()
        # The reader's:
        self._num_received = self._num_received_tokens = 0
        self._calls: dict[int, Future[NDArray[np.float32]]] = {}
        self._stop_watching: Callable[[], None] = _do_nothing
        # The engine thread's:
        self._outputs: list[EngineOutput] = []
        self._reported = (0, 0, 0, 0)
        self._last_pulse_s = 0.0
        self._was_busy = False
        self._waits_for_server = False
        self._progress_s = time.monotonic()

    def run(self) -> NoReturn:
        """Serve until one of the ends listed in the module's docstring. To be called on the main thread."""
        start = self._read_start()
        _send_log(self, start.log_level)
        if not start.draws_bars:
            redirect(logger.info)
        threading.Thread(target=self._listen, name="xserv-engine-reader", daemon=True).start()
        try:
            engine = self.make_engine(start)
        except BaseException as error:
            if not isinstance(error, (XservError, OSError)):
                logger.exception("the engine could not be started")
            self.send(StartFailed(problem_of(error)))
            _exit(EXIT_START_FAILED)
        self._serve(engine, start.hang_timeout_s)

    def make_engine(self, start: Start) -> Any:
        """See ``engine_of``, whose errors it raises. CPU kernels are compiled first, in other processes."""
        if start.cores:
            os.sched_setaffinity(0, start.cores)  # before threads are started, and counted
        reporter = Reporter(logger.info) if logger.isEnabledFor(logging.INFO) else SILENT
        _ahead.compile_ahead(start.model, start.config, reporter)
        engine_of = _engines.engine_of  # imported here
        collector.keep()
        engine = engine_of(start.model, start.config, reporter, remote_ranks=start.remote_ranks)
        if start.routing_secret is not None:
            engine.publish_blocks(start.routing_secret)
        if start.transfer is not None:
            _joining.join_others(engine, start.config, start.transfer)
        if start.weights is not None:
            engine.start_with(start.weights, start.weight_version)
        return engine

    def send(self, message: FromEngine) -> None:
        """Waits while the server does not read. Without a server the process ends."""
        try:
            self._writer.send(frame(message))
        except OSError:
            _exit(EXIT_SERVER_GONE)

    def _read_start(self) -> Start:
        messages = self._reader.read()
        if not messages:
            _exit(EXIT_SERVER_GONE)
        start = self._decoder.decode(messages[0])
        if len(messages) != 1 or not isinstance(start, Start):
            raise WireError("the first message is not the only one, or is not Start")
        return start

    def _serve(self, engine: Any, hang_timeout_s: float) -> NoReturn:
        collector.resume(collects=True)
        self._client = client = _clients.ThreadEngineClient(engine, after_delivery=self._report)
        self._pulse(time.monotonic())
        self.send(Started(client.info))
        while not self._has_died.wait(PULSE_IDLE_S) and client.state != "down":
            now = time.monotonic()
            if not client.has_work or self._waits_for_server or client.is_changing:
                self._progress_s = now
            elif now - self._progress_s > hang_timeout_s:
                logger.critical("the engine has got nowhere for %.0f s; its process ends", now - self._progress_s)
                faulthandler.dump_traceback()
                _exit(EXIT_STUCK)
            if now - self._last_pulse_s >= PULSE_IDLE_S:
                self._pulse(now)
        client.close()  # returns when every output has been sent
        _exit(EXIT_LOOP_DIED)

    # On the engine's thread

    def _report(self) -> None:
        """Send what has gathered since the last report."""
        assert self._client is not None
        client, outputs = self._client, self._outputs
        received = self._num_received, self._num_received_tokens  # before the queue: a request in between counts twice
        report = (*received, *client.waiting)
        changes = client.take_block_changes()
        if outputs or changes is not None or report != self._reported:
            self._outputs, self._reported = [], report
            blocks = () if changes is None else (changes.stored.tobytes(), changes.removed.tobytes())
            self._waits_for_server = True
            self.send(Outputs(outputs, *report, *blocks))
            self._waits_for_server = False
        self._progress_s = now = time.monotonic()
        is_busy = client.has_work
        if now - self._last_pulse_s >= PULSE_BUSY_S or (self._was_busy and not is_busy):
            self._pulse(now)
        self._was_busy = is_busy
        if client.state == "down":
            self._has_died.set()

    def _pulse(self, now: float) -> None:
        assert self._client is not None
        self._last_pulse_s = now
        num_received = self._num_received
        try:
            self.send(Pulse(self._client.stats(), num_received))
        except XservError:  # the loop has died: the process will end
            return

    def _answer(self, call_id: int, future: Future[NDArray[np.float32]]) -> None:
        self._calls.pop(call_id, None)
        error = EngineDeadError("cancelled") if future.cancelled() else future.exception()
        if error is None:
            result = future.result()
            try:
                self.send(Answer(call_id, list(result.shape), bytearray(result.tobytes())))
            except WireError as too_long:
                error = too_long
        if error is not None:
            self.send(CallFailed(call_id, problem_of(error)))

    # On the reader's thread

    def _listen(self) -> NoReturn:
        try:
            while messages := self._reader.read():
                for number, message in enumerate(messages, 1):
                    self._obey(self._decoder.decode(message), is_last=number == len(messages))
        except OSError:
            pass
        except BaseException:
            logger.exception("the engine's process cannot go on")
        _exit(EXIT_SERVER_GONE)

    def _obey(self, message: ToEngine, *, is_last: bool) -> None:
        """``is_last``: no further message was read with it."""
        client = self._client
        if client is None:
            raise WireError(f"{type(message).__name__} came before the engine was started")
        match message:
            case EngineRequest():
                self._submit(client, message)
            case Expect(source, request):
                client.expect(source, request)
            case DropPages(lease):
                client.drop_pages(lease)
            case LimitSteps(max_tokens, seconds, coefficients, most_saved_s):
                client.limit_steps(StepLimit(max_tokens, seconds, LinearStepModel(coefficients), most_saved_s))
            case Cancel(request_id, index):
                client.cancel(request_id, index)
            case Pause(request_id, is_paused):
                (client.pause if is_paused else client.resume)(request_id)
            case Call():
                self._call(client, message, is_last=is_last)
            case Order(call_id, command):
                self._answer_when_done(call_id, partial(client.order, command))
            case CancelCall(call_id):
                future = self._calls.get(call_id)
                if future is not None:
                    future.cancel()
            case Watch(is_wanted):
                self._stop_watching()
                self._stop_watching = client.watch(self._show) if is_wanted else _do_nothing
            case Close(drain):
                threading.Thread(target=self._close, args=(client, drain), daemon=True).start()
            case Start():
                raise WireError("Start came twice")

    def _submit(self, client: RunningClient, request: EngineRequest) -> None:
        try:
            client.submit_prepared(request, self._receive)
        except XservError as error:
            self.send(Refused(request.request_id, problem_of(error)))
        self._num_received += 1
        self._num_received_tokens += len(request.prompt_token_ids)

    def _receive(self, output: EngineOutput) -> None:
        self._outputs.append(output)

    def _call(self, client: RunningClient, call: Call, *, is_last: bool) -> None:
        def embed() -> Future[Any]:
            assert call.pooled is not None
            is_lone = is_last and len(call.pooled.token_ids) <= MOST_TOKENS_HERE
            found = client.embed_here(call.pooled) if is_lone else None
            if found is None:
                return client.embed(call.pooled)
            self._progress_s = time.monotonic()  # `_report` is not called
            future: Future[Any] = Future()
            future.set_result(found)
            return future

        computations: dict[str, Callable[..., Future[Any]]] = {
            "logits": client.start_logits,
            "embed": embed,
            "load_adapter": client.load_adapter,
            "reset_prefix_cache": client.reset_prefix_cache,
        }
        self._answer_when_done(call.call_id, partial(computations[call.name], *call.arguments))

    def _answer_when_done(self, call_id: int, start: Callable[[], Future[Any]]) -> None:
        try:
            future = start()
        except XservError as error:
            self.send(CallFailed(call_id, problem_of(error)))
            return
        self._calls[call_id] = future
        future.add_done_callback(partial(self._answer, call_id))

    def _show(self, view: StepView) -> None:
        self.send(view)

    def _close(self, client: RunningClient, drain: bool) -> None:
        client.close(drain)
        _exit(EXIT_CLOSED)


class _LogSender(logging.Handler):
    """Sends log records to the server, which has the handlers that its operator chose."""

    def __init__(self, server: ProcessServer) -> None:
        super().__init__()
        self._server = server

    def emit(self, record: logging.LogRecord) -> None:
        traceback = None
        if record.exc_info:
            traceback = logging.Formatter().formatException(record.exc_info)
        try:
            message = record.getMessage()
        except Exception:
            self.handleError(record)
            return
        self._server.send(LogLine(record.name, record.levelno, message, record.created, traceback))


def _send_log(server: ProcessServer, level: int) -> None:
    logging.getLogger().addHandler(_LogSender(server))
    logging.getLogger("xserv").setLevel(level)


def _do_nothing() -> None:
    """The sink without watchers."""


def _exit(status: int) -> NoReturn:
    """Exit at once: nothing outlives the process, and the next one needs its memory."""
    with suppress(Exception):  # a full disk, a closed pipe
        sys.stderr.flush()
    os._exit(status)


def main(server_type: type[ProcessServer] = ProcessServer) -> NoReturn:
    collector.hold_off()
    descriptor = begin("An engine's own process; started by a server.").fd
    die_with_parent()
    server_type(socket.socket(fileno=descriptor)).run()


if __name__ == "__main__":
    main()
