"""The log: lines of text or JSON, written by a thread of their own.

Logging only puts a record into a queue. A full disk, or a terminal or pipe that is not read, costs lines, never a
request; `LogWriter.num_lost` counts them. No line holds a prompt or an answer unless `log_prompts` asks for it:
messages are constants, and their fields are numbers, ids and names of routes."""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from typing import Any, TextIO

import msgspec
from starlette.types import Scope

from runtime.progress import redirect
from server.config import ServerConfig, ServerConfigError
from server.transport.exchange import PROBES, Exchange

QUIET = PROBES | {"/page/render"}
"""Paths that are asked for all the time."""

MAX_QUEUED_LINES = 10_000
MAX_SHOWN_PATH = 200

access = logging.getLogger("xserv.access")

FIELDS = "xserv_fields"
"""The attribute of a record that holds its fields: what JSON gets as members, and text as name=value."""


class LogWriter(logging.Handler):
    """Formats and writes records in a thread of its own, from a bounded queue. `close` waits until all is written, at
    most two seconds."""

    def __init__(self, stream: TextIO, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.num_lost = 0
        self._stream = stream
        self._queue: queue.SimpleQueue[logging.LogRecord | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="xserv-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._queue.qsize() >= MAX_QUEUED_LINES:
            self.num_lost += 1
        else:
            self._queue.put(record)

    def close(self) -> None:
        super().close()
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(2.0)

    def _write(self) -> None:
        while (record := self._queue.get()) is not None:
            try:
                self._stream.write(self.format(record) + "\n")
                self._stream.flush()
            except Exception:  # a full disk, a closed pipe, a record that cannot be formatted
                self.num_lost += 1


class TextFormatter(logging.Formatter):
    """`2026-11-21T20:51:07.123Z INFO xserv.access: POST /v1/completions 200 request_id=… duration_s=0.41`"""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={value}" for name, value in getattr(record, FIELDS, {}).items())
        line = f"{_time(record)} {record.levelname} {record.name}: {record.getMessage()}{fields}"
        traceback = _traceback(self, record)
        return f"{line}\n{traceback}" if traceback else line


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, the record's fields, and `exception` with its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if traceback := _traceback(self, record):
            line["exception"] = traceback
        return msgspec.json.encode(line).decode()


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str | None:
    """The traceback of the exception that came with a record; one from the engine's process comes as text."""
    return formatter.formatException(record.exc_info) if record.exc_info else record.exc_text


def _time(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def open_log(config: ServerConfig) -> LogWriter:
    """Sends the program's log records, and uvicorn's, to the target in `config`. Raises `ServerConfigError`.

    The caller closes the writer with `close_log`."""
    stream: TextIO = sys.stderr
    if config.log_file is not None:
        try:
            stream = open(config.log_file, "a", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        except OSError as error:
            raise ServerConfigError(f"log_file {config.log_file} cannot be written: {error.strerror}") from None
    writer = LogWriter(stream, JsonFormatter() if config.log_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.addHandler(writer)
    if config.log_format == "json":
        redirect(logging.getLogger("xserv.server").info)
    logging.getLogger("xserv").setLevel(config.log_level.upper())
    logging.getLogger("uvicorn").setLevel("DEBUG" if config.log_level == "debug" else "ERROR")
    return writer


def close_log(writer: LogWriter) -> None:
    """Writes the rest, and removes the writer."""
    logging.getLogger().removeHandler(writer)
    redirect(None)
    writer.close()
    if writer._stream is not sys.stderr:
        try:
            writer._stream.close()
        except OSError:  # a full disk: the rest of the buffer is lost
            writer.num_lost += 1


def log_access(exchange: Exchange, scope: Scope, route: str, duration_s: float) -> None:
    """One line per answer; probes and the page's rendering requests are logged at debug level."""
    level = logging.DEBUG if scope["path"] in QUIET else logging.INFO
    if not access.isEnabledFor(level):
        return
    path = scope["path"][:MAX_SHOWN_PATH]
    if not path.isprintable():
        path = ascii(path)[1:-1]
    client = scope.get("client")
    fields: dict[str, Any] = {
        "request_id": exchange.answered_id,
        "method": scope["method"],
        "path": path,
        "status": exchange.status,
        "client": client[0] if client else None,
        "duration_s": round(duration_s, 6),
        **({"model": exchange.model} if exchange.model else {}),
        **_generation_fields(exchange),
    }
    access.log(level, "%s %s %d", scope["method"], path, exchange.status, extra={FIELDS: fields})


def _generation_fields(exchange: Exchange) -> dict[str, Any]:
    generation, meter = exchange.generation, exchange.meter
    if generation is None or meter is None:
        return {}
    fields: dict[str, Any] = {
        "generation_id": generation.request_id,
        "prompt_tokens": generation.num_prompt_tokens,
        "cached_tokens": generation.num_cached_tokens,
        "completion_tokens": generation.num_completion_tokens,
        "finish_reasons": ",".join(sorted(meter.reasons)) or ("abort" if generation.has_left else ""),
    }
    if (miss := generation.prefix_miss) is not None:
        fields["prefix_miss"], fields["first_difference"] = miss.reason, miss.first_difference
    if generation.proposals.num_tried:
        fields["proposed_tokens"] = generation.proposals.num_tried
        fields["accepted_tokens"] = generation.proposals.num_kept
    if meter.first_token_s is not None:
        fields["ttft_s"] = round(meter.first_token_s - meter.arrival_s, 6)
    if meter.times is not None and meter.times.first_scheduled_s is not None:
        fields["queue_s"] = round(meter.times.first_scheduled_s - meter.times.arrival_s, 6)
    return fields
