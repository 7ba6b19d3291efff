"""A small HTTP/1.1 client for measuring: one request a connection, the body handed out as it arrives.

Made of asyncio's streams and httptools (the server's own parser), so that the benchmark needs no dependency
that serving does not need. It knows no redirects, no proxies and no compression.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httptools

from runtime.bench.metrics import BenchmarkError


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a server is; `prefix` is the path before `/v1`."""

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


class _Response:
    """What httptools' parser calls: collects the status and the body's pieces."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.pieces: list[bytes] = []
        self.is_complete = False

    def on_body(self, body: bytes) -> None:
        self.pieces.append(body)

    def on_message_complete(self) -> None:
        self.is_complete = True

    def feed(self, data: bytes) -> bytes:
        """Parses what came from the socket and returns the body's part of it."""
        self.parser.feed_data(data)
        body, self.pieces = b"".join(self.pieces), []
        return body


async def request(
    origin: Origin, method: str, path: str, payload: dict[str, Any] | None, api_key: str | None
) -> AsyncGenerator[bytes, None]:
    """Sends one request and yields the body's bytes as they come.

    Raises `BenchmarkError` when the connection fails, ends early, or the status is not 200 (with the body's
    start).
    """
    body = b"" if payload is None else json.dumps(payload).encode()
    headers = [
        f"{method} {origin.prefix}{path} HTTP/1.1",
        f"host: {origin.host}:{origin.port}",
        "connection: close",
        "accept: */*",
        f"content-length: {len(body)}",
        "content-type: application/json",
    ]
    if api_key:
        headers.append(f"authorization: Bearer {api_key}")
    try:
        reader, writer = await asyncio.open_connection(origin.host, origin.port, ssl=origin.is_tls or None)
    except OSError as error:
        raise BenchmarkError(f"cannot connect to {origin}: {error.strerror or error}") from error
    response = _Response()
    try:
        writer.write("\r\n".join([*headers, "", ""]).encode("latin-1") + body)
        await writer.drain()
        failed = b""
        while not response.is_complete:
            data = await reader.read(65536)
            if not data:
                raise BenchmarkError(f"{origin}{path}: the connection ended before the answer did")
            piece = response.feed(data)
            if piece and response.parser.get_status_code() != 200:
                failed += piece
            elif piece:
                yield piece
        status = response.parser.get_status_code()
        if status != 200:
            words = " ".join(failed[:300].decode(errors="replace").split())
            raise BenchmarkError(f"{origin}{path} answered {status}: {words}")
    except (OSError, httptools.HttpParserError) as error:
        raise BenchmarkError(f"{origin}{path}: {error}") from error
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def get_json(origin: Origin, path: str, api_key: str | None) -> dict[str, Any]:
    """The whole answer of a GET, as JSON."""
    body = b"".join([piece async for piece in request(origin, "GET", path, None, api_key)])
    try:
        answer: dict[str, Any] = json.loads(body)
    except ValueError as error:
        raise BenchmarkError(f"{origin}{path} answered no JSON") from error
    return answer


async def stream_events(
    origin: Origin, path: str, payload: dict[str, Any], api_key: str | None
) -> AsyncGenerator[dict[str, Any], None]:
    """The `data:` events of a server-sent stream, as JSON, until `[DONE]`.

    Raises `BenchmarkError` when the stream ends without `[DONE]` or carries an error.
    """
    rest = b""
    pieces = request(origin, "POST", path, payload, api_key)
    async with contextlib.aclosing(pieces):
        async for piece in pieces:
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event: dict[str, Any] = json.loads(data)
                if "error" in event:
                    raise BenchmarkError(f"{origin}{path} broke off: {event['error']}")
                yield event
    raise BenchmarkError(f"{origin}{path}: the stream ended without [DONE]")
