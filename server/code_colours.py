"""`POST /page/render`: the colours of code, for the page.

    {"code": [{"language": "python", "text": "x = 1"}]}
    → {"code": [["", 4, "m", 1]]}

An entry is null if the code has no colours: an unknown language, or a timeout. A process of its own makes them
(`server.code_worker`), since a model wrote its input; it starts with the first request and is replaced if it takes too
long or ends. The queue and the cache are bounded."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from runtime.engine.process.wire import WireError
from server.errors import ApiError
from server.transport.body import decode_body, read_body
from server.transport.exchange import Exchange
from server.transport.json_answer import JsonAnswer
from server.worker_process import WorkerProcess

logger = logging.getLogger("xserv.server")

JOB_TIMEOUT_S = 2.0

MAX_ANSWER_BYTES = 1 << 24

MAX_KEPT_BYTES = 8 << 20
MAX_WAITING = 8
"""Requests beside the one that is being rendered; beyond it the page is asked to come again."""

NOTHING = msgspec.Raw(b"null")

Job = tuple[str, str]
"""The language and the text of a block of code."""


MAX_ENTRIES = 64
MAX_CHARACTERS = 40_000


class Code(msgspec.Struct, forbid_unknown_fields=True):
    language: Annotated[str, msgspec.Meta(max_length=40)]
    text: Annotated[str, msgspec.Meta(max_length=MAX_CHARACTERS)]


class RenderRequest(msgspec.Struct, forbid_unknown_fields=True):
    code: Annotated[list[Code], msgspec.Meta(max_length=MAX_ENTRIES)] = []


class Rendered(msgspec.Struct):
    """In the request's order, class, length, class, length, … of each text."""

    code: list[list[str | int] | None]


class RendererBusyError(Exception):
    """`MAX_WAITING` requests wait already."""


class Renderer:
    def __init__(self, *, job_timeout_s: float = JOB_TIMEOUT_S) -> None:
        self._job_timeout_s = job_timeout_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="xserv-render")
        self._process: WorkerProcess | None = None
        self._kept: OrderedDict[tuple[str | None, Job], msgspec.Raw] = OrderedDict()
        self._num_kept_bytes = 0
        self._num_waiting = 0
        self._is_closed = False

    async def render(self, jobs: Sequence[Job], tenant: str | None = None) -> list[msgspec.Raw]:
        """The answer to each job as JSON; "null" leaves the code without colours. The cache is per tenant. Raises
        `RendererBusyError`."""
        keys = [(tenant, job) for job in jobs]
        missing = [key for key in dict.fromkeys(keys) if key not in self._kept]
        found = {key: self._kept[key] for key in keys if key in self._kept}
        if missing:
            if self._num_waiting > MAX_WAITING:
                raise RendererBusyError
            self._num_waiting += 1
            try:
                loop = asyncio.get_running_loop()
                answers = await loop.run_in_executor(self._thread, self._ask_all, [job for _, job in missing])
            finally:
                self._num_waiting -= 1
            for key, answer in zip(missing, answers, strict=True):
                found[key] = answer
                self._keep(key, answer)
        for key in found:
            if key in self._kept:
                self._kept.move_to_end(key)
        return [found[key] for key in keys]

    def close(self) -> None:
        """Ends the process; waiting jobs get no answer."""
        self._is_closed = True
        self._end()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._end()

    def _keep(self, key: tuple[str | None, Job], answer: msgspec.Raw) -> None:
        before = self._kept.pop(key, None)
        if before is not None:
            self._num_kept_bytes -= _size(key, before)
        self._kept[key] = answer
        self._num_kept_bytes += _size(key, answer)
        while self._num_kept_bytes > MAX_KEPT_BYTES:
            self._num_kept_bytes -= _size(*self._kept.popitem(last=False))

    def _ask_all(self, jobs: Sequence[Job]) -> list[msgspec.Raw]:
        return [self._ask(job) for job in jobs]

    def _ask(self, job: Job) -> msgspec.Raw:
        for _ in range(2):  # a process that ended since the last job is replaced
            if self._is_closed:
                return NOTHING
            if self._process is None:
                self._process = WorkerProcess("server.code_worker", most_bytes=MAX_ANSWER_BYTES)
            try:
                return msgspec.Raw(bytes(self._process.ask(msgspec.Raw(msgspec.json.encode(job)), self._job_timeout_s)))
            except TimeoutError:
                logger.warning("colouring %d characters of %s took too long", len(job[1]), job[0])
                self._end()
                return NOTHING
            except (EOFError, OSError, WireError):
                self._end()
        return NOTHING

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end()


def _size(key: tuple[str | None, Job], answer: msgspec.Raw) -> int:
    return 200 + sum(map(len, key[1])) + len(memoryview(answer))


async def render(request: Request) -> Response:
    """Renders the entries; 429 while too many wait; 400 names the field that is too long."""
    renderer, config = request.app.state.shared.renderer, request.app.config
    asked = decode_body(await read_body(request, config), RenderRequest, config)
    try:
        answers = await renderer.render(
            [(each.language, each.text) for each in asked.code], Exchange.of(request).tenant
        )
    except RendererBusyError:
        message = "Too many answers are being rendered."
        raise ApiError(429, message, code="renderer_busy", retry_after_s=1) from None
    return JsonAnswer({"code": answers}, {"Cache-Control": "no-store"})
