"""A file of requests, answered in order: OpenAI's batch format, without a port.

Each line of the input is `{"custom_id", "method": "POST", "url": "/v1/chat/completions", "body"}`; each of the output
`{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}`. Requests go through the server's own
application, so an answer is the server's. A line is written once its answer and all before it are there, so that a run
that was killed goes on after the last whole line.
"""

from __future__ import annotations

import asyncio
import codecs
import fcntl
import json
import os
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import msgspec

from models.checkpoints.hub import model_name
from runtime.engine.make_client import StartingClient
from runtime.errors import InvalidArgumentError, XservError
from runtime.later import later
from runtime.progress import Reporter, Show
from runtime.text.load import read_chat_template
from server.app import Application, ServerApplication
from server.config import ServerConfig
from server.loading import load
from server.names import served_names
from server.serve import check_adapters, told_apart

_hosting = later("server.hosting.application")

URLS = (
    "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions", "/v1/responses", "/v1/messages",
    "/v1/embeddings", "/v1/decisions", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/classify",
    "/pooling", "/similarity",
)  # fmt: skip
AHEAD = 8
"""Answers that wait for an earlier one are kept, up to so many times the requests that run at once."""

_RETRIED = frozenset({429, 503})
RETRY_WAITS_S = (0.1, 0.5, 2.0, 5.0, 10.0, 30.0, 60.0)
"""A full queue, and an engine that is being started again, are waited for; an engine that stays away stops the run."""


class BatchFileError(InvalidArgumentError):
    """The input or the output cannot be used."""


class BatchStoppedError(XservError):
    """The engine does not come back. The answers that are written stay, and the same command goes on after them."""


class Line(msgspec.Struct):
    custom_id: str
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


class Answered(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class Unreadable(msgspec.Struct):
    code: str
    message: str


class OutputLine(msgspec.Struct):
    """error: of a line that is no request; an HTTP error is a response."""

    id: str
    custom_id: str | None
    response: Answered | None = None
    error: Unreadable | None = None


@dataclass(frozen=True, slots=True)
class _Request:
    """A line of the input. number: among those that are not empty; place: in the file; problem: why it is none."""

    number: int
    place: int
    custom_id: str | None
    line: Line | None
    problem: str = ""


def run_batch(
    input_file: Path,
    output_file: Path,
    model: str | Path | None = None,
    *,
    reporter: Reporter,
    concurrency: int = 256,
    config: ServerConfig | None = None,
    served_model_name: str | None = None,
    in_process: bool = False,
    chat_template: str | None = None,
    **engine_options: Any,
) -> tuple[int, int]:
    """Answers all lines that the output does not have yet, by one model or those of `config.models_config`. Returns how
    many it wrote, and how many of these are errors.

    Raises `BatchFileError` for files that do not fit each other, `BatchStoppedError` where the engine stays away, and
    the errors of `StartingClient`.
    """
    config = replace(config or ServerConfig(), api_keys=(), api_key_files=())
    check_adapters(config, is_enabled=bool(engine_options.get("enable_lora")))
    with ExitStack() as stack:
        if not input_file.is_file():
            raise BatchFileError(f"{input_file} is no file", param="input_file")
        output = stack.enter_context(closing(_Output(output_file)))
        num_done = output.resume(input_file)
        total = sum(1 for _ in _lines(input_file))
        if num_done >= total:
            return 0, 0
        names, template = served_names(served_model_name), read_chat_template(chat_template)
        engine_options.setdefault("max_waiting", max(concurrency, config.max_connections))
        only, several = told_apart(model, config, names, template, engine_options, in_process=in_process)
        app: ServerApplication
        if several:
            app = hosting = _hosting.HostApplication(several, config)
            stack.enter_context(closing(hosting.hosted.pool))
        else:
            app = one = Application(names or [model_name(only)], config)
            engine = stack.enter_context(closing(StartingClient(only, in_process=in_process, **engine_options)))
            one.take_up(load(engine, app.model_names, config, template))
        with reporter.shown("answering") as show:
            return asyncio.run(_answer(app, input_file, output, num_done, total, concurrency, show))


async def _answer(
    app: ServerApplication, path: Path, output: _Output, num_done: int, total: int, concurrency: int, show: Show
) -> tuple[int, int]:
    """Answers the lines after the first `num_done`, several at once, and writes them in order."""
    room = asyncio.Semaphore(concurrency)
    running: deque[asyncio.Task[OutputLine]] = deque()
    num_written = num_errors = 0

    async def write_first() -> None:
        nonlocal num_written, num_errors
        line = await running[0]
        running.popleft()
        output.write(line)
        num_written += 1
        num_errors += line.response is None or line.response.status_code >= 400
        show(num_done + num_written, total)

    async with app.router.lifespan_context(app):
        try:
            for request in _requests(path):
                if request.number <= num_done:
                    continue
                while len(running) >= AHEAD * concurrency or (running and running[0].done()):
                    await write_first()
                await room.acquire()
                task = asyncio.create_task(_answer_one(app, request))
                task.add_done_callback(lambda _: room.release())
                running.append(task)
            while running:
                await write_first()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
    return num_written, num_errors


async def _answer_one(app: ServerApplication, request: _Request) -> OutputLine:
    answer_id = f"batch_req_{request.number}"
    if request.line is None:
        error = Unreadable("invalid_line", f"line {request.place}: {request.problem}")
        return OutputLine(answer_id, request.custom_id, error=error)
    body = msgspec.json.encode(request.line.body)
    for wait_s in (*RETRY_WAITS_S, None):
        status, request_id, content = await _post(app, request.line.url, body)
        if status not in _RETRIED:
            return OutputLine(answer_id, request.custom_id, Answered(status, request_id, msgspec.Raw(content)))
        if wait_s is not None:
            await asyncio.sleep(wait_s)
    raise BatchStoppedError(
        f"line {request.place} is still answered with {status} after {sum(RETRY_WAITS_S):.0f} s: "
        f"{content.decode(errors='replace')[:200]}; run the same command again to go on from this line"
    )


async def _post(app: ServerApplication, path: str, body: bytes) -> tuple[int, str, bytes]:
    """The application's answer: its status, its id, its body."""
    headers = [
        (b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()),
    ]  # fmt: skip
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "headers": headers, "client": ("127.0.0.1", 0), "server": ("localhost", 0), "state": {},
    }  # fmt: skip
    is_over = asyncio.Event()
    is_read = False
    status, request_id, content = 0, "", bytearray()

    async def receive() -> dict[str, Any]:
        nonlocal is_read
        if not is_read:
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}
        await is_over.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal status, request_id
        if message["type"] == "http.response.start":
            status = message["status"]
            request_id = next((value.decode() for name, value in message["headers"] if name == b"x-request-id"), "")
        else:
            content.extend(message.get("body", b""))

    try:
        await app(scope, receive, send)
    finally:
        is_over.set()
    return status, request_id, bytes(content)


def _requests(path: Path) -> Iterator[_Request]:
    """The requests of the input, numbered from 1."""
    seen: set[str] = set()
    for number, (place, text) in enumerate(_lines(path), 1):
        yield _request(number, place, text, seen)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of the input that are not empty, without the mark that editors on Windows write before UTF-8, and their
    numbers in the file."""
    with path.open("rb") as lines:
        for place, line in enumerate(lines, 1):
            text = line if place > 1 else line.removeprefix(codecs.BOM_UTF8)
            if text.strip():
                yield place, text


def _request(number: int, place: int, text: bytes, seen: set[str]) -> _Request:
    custom_id = None
    try:
        fields = msgspec.json.decode(text)
        if isinstance(fields, dict) and isinstance(fields.get("custom_id"), str):
            custom_id = fields["custom_id"]
        line = msgspec.convert(fields, Line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return _Request(number, place, custom_id, None, f"it is no request: {error}")
    problem = ""
    if line.url not in URLS:
        problem = f"url must be one of {', '.join(URLS)}, got {line.url[:100]!r}"
    elif line.body.get("stream"):
        problem = "body.stream must be false: an answer is one line"
    elif line.custom_id in seen:
        problem = f"custom_id {line.custom_id[:100]!r} is an earlier line's"
    seen.add(line.custom_id)
    return _Request(number, place, custom_id, None if problem else line, problem)


class _Output:
    """The output, locked for this process. Raises `BatchFileError` if it cannot be written, or another writes it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.exists() and not path.is_file():  # it is read, and /dev/full has no end
            raise BatchFileError(f"{path} is no file", param="output_file")
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise BatchFileError(f"{path} cannot be written: {error}", param="output_file") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise BatchFileError(f"{path} is being written by another run", param="output_file") from None

    def resume(self, input_file: Path) -> int:
        """How many lines of the input are answered. Cuts a line off that was not written to its end. Raises
        `BatchFileError` if the answers are not this input's."""
        num_done = end = 0
        with os.fdopen(os.dup(self._file), "rb") as answers:
            for text, request in zip_longest(answers, _requests(input_file)):
                if text is None:
                    break
                if not text.endswith(b"\n"):
                    start = b'{"id":"batch_req_%d",' % (num_done + 1)
                    if request is None or text[: len(start)] != start[: len(text)]:
                        self._check(b"", request, num_done + 1, input_file)
                    break
                self._check(text, request, num_done + 1, input_file)
                num_done, end = num_done + 1, end + len(text)
        os.ftruncate(self._file, end)
        os.lseek(self._file, end, os.SEEK_SET)
        return num_done

    def _check(self, text: bytes, request: _Request | None, number: int, input_file: Path) -> None:
        try:
            fields = json.loads(text)
            found = (fields["id"], fields["custom_id"])
        except (ValueError, TypeError, KeyError, RecursionError):
            raise BatchFileError(
                f"{self._path}: line {number} is no answer; name another file", param="output_file"
            ) from None
        expected = None if request is None else (f"batch_req_{number}", request.custom_id)
        if found != expected:
            wanted = (
                f"{input_file} has only {number - 1} lines"
                if request is None
                else f"in line {request.place} of {input_file} got {request.custom_id!r:.100}"
            )
            raise BatchFileError(
                f"{self._path}: line {number} answers {found[1]!r:.100}, and {wanted}; name another file",
                param="output_file",
            )

    def write(self, line: OutputLine) -> None:
        text = memoryview(msgspec.json.encode(line) + b"\n")
        while text:
            text = text[os.write(self._file, text) :]

    def close(self) -> None:
        os.close(self._file)
