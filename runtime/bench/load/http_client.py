"""A small HTTP/1.1 client for measuring: one request per connection, the body passed on as it arrives.

Made of asyncio's protocols and httptools (the server's own parser), so that the benchmark needs no dependency that
serving does not need, and that two hundred streams cost little beside the server's own work. It does not support
redirects, proxies or compression.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from runtime.bench.metrics import BenchmarkError


@dataclass(frozen=True, slots=True)
class Origin:
    """A server's address; `prefix` is the path before `/v1`."""

    host: str
    port: int
    is_tls: bool
    prefix: str

    @classmethod
    def parse(cls, url: str) -> Origin:
        """From `http://host:port[/prefix][/v1]`; raises `BenchmarkError` for anything else."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BenchmarkError(f"--base-url {url!r} is no http:// or https:// address")
        is_tls = parts.scheme == "https"
        try:
            port = parts.port or (443 if is_tls else 80)
        except ValueError as error:
            raise BenchmarkError(f"--base-url {url!r}: {error}") from error
        return cls(parts.hostname, port, is_tls, parts.path.rstrip("/").removesuffix("/v1"))

    def __str__(self) -> str:
        return f"{'https' if self.is_tls else 'http'}://{self.host}:{self.port}{self.prefix}"


class Delta(msgspec.Struct):
    """A chat chunk's addition to its choice."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class Choice(msgspec.Struct):
    """A choice of a chunk: `text` in completions, `delta` in chats."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def has_output(self) -> bool:
        """Whether it has output of the model; a chat's first chunk, with the role, has none."""
        delta = self.delta
        if delta is None:
            return bool(self.text)
        return bool(delta.content or delta.reasoning_content or delta.tool_calls)


class Usage(msgspec.Struct):
    """Tokens as the server counts them."""

    prompt_tokens: int
    completion_tokens: int = 0


class Event(msgspec.Struct):
    """A chunk of a stream, with the fields for measuring."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(Event).decode


class _Exchange(asyncio.Protocol):
    """One request and its answer: `take` gets the body's bytes of a 200 as they arrive; `ended` gets a result at the
    answer's end, or an exception."""

    def __init__(self, request: bytes, take: Callable[[bytes], None]) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._take = take
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._is_complete = False
        self._refusal = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(self._request)

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self._is_complete = True

    def data_received(self, data: bytes) -> None:
        if self.ended.done():
            return
        try:
            self._parser.feed_data(data)
            body, self._pieces = b"".join(self._pieces), []
            if body and self._parser.get_status_code() == 200:
                self._take(body)
            else:
                self._refusal += body
        except (httptools.HttpParserError, BenchmarkError) as error:
            self.ended.set_exception(BenchmarkError(str(error)))
            return
        if self._is_complete:
            status = self._parser.get_status_code()
            if status == 200:
                self.ended.set_result(None)
            else:
                words = " ".join(self._refusal[:300].decode(errors="replace").split())
                self.ended.set_exception(BenchmarkError(f"answered {status}: {words}"))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            reason = f": {error}" if error else ""
            self.ended.set_exception(BenchmarkError(f"the connection ended before the answer did{reason}"))


async def request(
    origin: Origin, path: str, payload: dict[str, Any] | None, api_key: str | None, take: Callable[[bytes], None]
) -> None:
    """Sends a POST, or without a payload a GET, and passes the body's bytes to `take` as they arrive; `take` may raise
    `BenchmarkError`.

    Raises `BenchmarkError` when the connection fails, ends early, or the status is not 200 (with the body's start).
    """
    body = b"" if payload is None else json.dumps(payload).encode()
    headers = [
        f"{'GET' if payload is None else 'POST'} {origin.prefix}{path} HTTP/1.1",
        f"host: {origin.host}:{origin.port}",
        "connection: close",
        "accept: */*",
        f"content-length: {len(body)}",
        "content-type: application/json",
    ]
    if api_key:
        headers.append(f"authorization: Bearer {api_key}")
    head = "\r\n".join([*headers, "", ""]).encode("latin-1")
    try:
        transport, exchange = await asyncio.get_running_loop().create_connection(
            lambda: _Exchange(head + body, take), origin.host, origin.port, ssl=origin.is_tls or None
        )
    except OSError as error:
        raise BenchmarkError(f"cannot connect to {origin}: {error.strerror or error}") from error
    try:
        await exchange.ended
    except BenchmarkError as error:
        raise BenchmarkError(f"{origin}{path} {error}") from None
    finally:
        transport.close()


async def ask_json(origin: Origin, path: str, payload: dict[str, Any] | None, api_key: str | None) -> dict[str, Any]:
    """The whole answer of a POST, or without a payload of a GET, as JSON."""
    pieces: list[bytes] = []
    await request(origin, path, payload, api_key, pieces.append)
    try:
        answer = json.loads(b"".join(pieces))
    except ValueError as error:
        raise BenchmarkError(f"{origin}{path} answered no JSON") from error
    if not isinstance(answer, dict):
        raise BenchmarkError(f"{origin}{path} answered no JSON object")
    return answer


async def first_model(origin: Origin, api_key: str | None) -> str:
    """The first model that the server lists."""
    models = (await ask_json(origin, "/v1/models", None, api_key)).get("data") or []
    if not models:
        raise BenchmarkError(f"{origin}/v1/models lists no model: name one with --model")
    return str(models[0]["id"])


async def stream_events(
    origin: Origin, path: str, payload: dict[str, Any], api_key: str | None, take: Callable[[Event], None]
) -> None:
    """Passes each `data:` event of a server-sent stream to `take` as it arrives, until `[DONE]`.

    Raises `BenchmarkError` when the stream ends without `[DONE]` or carries an error.
    """
    rest = b""
    is_done = False

    def read(piece: bytes) -> None:
        nonlocal rest, is_done
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if is_done or not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                is_done = True
                continue
            try:
                event = _decode_event(data)
            except msgspec.DecodeError as error:
                raise BenchmarkError(f"sent an event that is none: {error}") from None
            if event.error is not None:
                raise BenchmarkError(f"broke off: {event.error}")
            take(event)

    await request(origin, path, payload, api_key, read)
    if not is_done:
        raise BenchmarkError(f"{origin}{path}: the stream ended without [DONE]")
