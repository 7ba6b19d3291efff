"""The HTTP/1.1 protocol: uvicorn's on httptools, with limits for clients.

httptools accepts headers of any size, for any time, and uvicorn waits forever for a client to read. Here every
connection has limits:

- its request line and headers together are limited in bytes, fields and seconds;
- the unread part of an answer is bounded: beyond it the answer pauses (its sender waits), and after a timeout the
  connection is closed, which cancels the request;
- the number of connections is limited; a further one replaces one that the server waits for (`crowd`), else it gets a
  503, except for probes, or beyond a few more is not read at all;
- requests with incomplete bodies start a few at a time (`turns`);
- the rest of a body whose request is answered is read, within limits, before the connection closes: a client that is
  still sending would not see the answer, but a reset connection.

This replaces methods of uvicorn's protocol and reads its private fields, so it knows a range of uvicorn's versions and
refuses others. To make it unnecessary, uvicorn would have to take limits of a head and of an unread answer.

The alternative, uvicorn on h11 with its limit of incomplete events, was also measured: see docs/server.md."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from types import SimpleNamespace
from typing import Any

import httptools
import msgspec
import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from server.config import ServerConfig, ServerConfigError
from server.errors import ApiError
from server.transport.admission import Crowd, Turns, Wait
from server.transport.body import ARRIVED
from server.transport.exchange import new_request_id
from server.transport.gate import SURPLUS
from server.transport.origins import Cors

logger = logging.getLogger("xserv.server")

RESERVED_CONNECTIONS = 64
"""Connections beyond the limit that are still heard, so that the probes get through."""


BACKLOG = 4096
"""Connections that the system keeps until the server takes them; more, and clients try again after a second."""


UVICORN_VERSIONS = (0, 34), (0, 55)
"""The versions whose private parts are known: from the first to below the second, as in pyproject.toml."""


def check_uvicorn(version: str) -> None:
    """Raises `ServerConfigError` for another version: without this protocol no limit for clients would hold."""
    least, below = (".".join(map(str, each)) for each in UVICORN_VERSIONS)
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or not UVICORN_VERSIONS[0] <= (int(numbers[1]), int(numbers[2])) < UVICORN_VERSIONS[1]:
        raise ServerConfigError(
            f"uvicorn {version} is not known: with it the limits of headers, connections and unread answers might not "
            f"hold; install uvicorn>={least},<{below}"
        )


class _HeadersTooLarge(Exception):
    """Ends the parsing; the protocol has the answer."""


class _Unbounded(int):
    """A body of unknown length: there is always room for more, and nothing is missing."""

    def __lt__(self, other: object) -> bool:
        return False

    def __sub__(self, other: object) -> _Unbounded:
        return self


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection. `limits`, `crowd`, `turns` and `cors` belong to the class that `limited` makes.

    A head is a request's line and headers. Reading it starts with the connection or at the end of the previous request,
    and ends with the headers."""

    limits: ServerConfig
    crowd: Crowd
    turns: Turns[LimitedHttpProtocol]
    cors: Cors | None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._whole_app, self.app = self.app, self._begin_in_turn
        self._is_reading_head = True
        self._num_head_bytes = 0  # received for this head, in chunks that may reach past it
        self._num_parsed_bytes = 0  # of its line and fields
        self._head_timer: asyncio.TimerHandle | None = None
        self._slow_timer: asyncio.TimerHandle | None = None
        self._rest_timer: asyncio.TimerHandle | None = None  # runs while the body of an answered request arrives
        self._num_body_bytes = 0  # received of the current body, in chunks that may begin before it
        self._body_end_s = 0.0  # when it has to be there
        self._refusal: ApiError | None = None
        self._is_refused = False
        self._chunk = b""
        self._is_repeating = False  # a new parser reads a head that was read before

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self.crowd.evict()
        if len(self.connections) > self.limits.max_connections + RESERVED_CONNECTIONS:
            transport.abort()
            return
        self.crowd.put(self, Wait.SILENT)
        transport.set_write_buffer_limits(high=self.limits.write_buffer_bytes)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_slow_timer()
        self._stop_rest_timer()
        self.crowd.put(self, None)
        super().connection_lost(exc)
        self.turns.release(self)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        is_rest = self._rest_timer is not None
        self._num_body_bytes += len(data)
        if is_rest and self._num_body_bytes > self.limits.max_discarded_bytes:
            self._close()
            return
        if self._is_reading_head:
            self._num_head_bytes += len(data)
            if self.crowd.wait_of(self) in (Wait.SILENT, Wait.IDLE):
                self.crowd.put(self, Wait.HEAD)
        elif self.crowd.wait_of(self) is Wait.BODY:
            self.crowd.put(self, Wait.BODY)  # it waits anew
        self._chunk = data
        super().data_received(data)
        self._chunk = b""
        if is_rest and self._rest_timer is None and not (self._is_answering or self.transport.is_closing()):
            self.crowd.put(self, Wait.IDLE)
            idle = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
            self.timeout_keep_alive_task = idle
        if self._is_reading_head and self._num_head_bytes and not self._is_refused:  # a head that is not whole
            if self._num_head_bytes > self.limits.max_header_bytes:
                self._refuse(self._too_large())
            elif self._head_timer is None:
                self._start_head_timer()

    def on_message_begin(self) -> None:
        if not self._is_repeating:
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._is_repeating:
            return
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_repeating:
            return
        self._count(len(name) + len(value) + 4)
        if len(self.headers) >= self.limits.max_headers:
            self._refusal = ApiError(
                431, f"The request has more than {self.limits.max_headers} header fields.", code="headers_too_large"
            )
            raise _HeadersTooLarge
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_repeating:
            self._is_repeating = False
            return
        self._is_reading_head = False
        self._num_parsed_bytes, self._num_body_bytes = 0, len(self._chunk)
        self._body_end_s = self.loop.time() + self.limits.body_timeout_s
        self._stop_head_timer()
        if self.transport.is_closing():
            return  # the answer before was the last
        if len(self.connections) > self.limits.max_connections:
            self.scope[SURPLUS] = True  # type: ignore[literal-required]
        super().on_headers_complete()
        own = self.transport
        seen = SimpleNamespace(write=own.write, is_closing=own.is_closing, close=self.close_after_body)
        self.cycle.transport = seen  # type: ignore[assignment]
        if self.scope["http_version"] == "1.0" and self.cycle is not None:
            self.cycle.chunked_encoding = False  # chunks need HTTP/1.1: in 1.0 a body ends with its connection
            self.cycle.expected_content_length = _Unbounded()

    async def _begin_in_turn(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Starts the application after the received part of the request has been parsed."""
        if self.cycle.scope is scope and not self.cycle.more_body:
            scope[ARRIVED] = True  # type: ignore[literal-required]
        elif self.cycle.scope is scope:
            self.crowd.put(self, Wait.HEAD)  # not processed yet, so it may still give way
            await self.turns.wait(self)
            if self.crowd.wait_of(self) is Wait.HEAD:
                self.crowd.put(self, Wait.BODY)
        await self._whole_app(scope, receive, send)

    def _may_begin(self) -> bool:
        """Whether to start a request with an incomplete body. When all places are taken, as many wait for their turn as
        have started, and can still give way."""
        is_full = len(self.connections) >= self.limits.max_connections
        return not is_full or self.crowd.num_of(Wait.BODY) < self.crowd.num_of(Wait.HEAD)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.turns.release(self)
        if self._rest_timer is not None and not self.cycle.keep_alive:
            self._close()
        self._stop_rest_timer()
        self._is_reading_head = True
        self._num_head_bytes = 0
        if self.crowd.wait_of(self) in (Wait.HEAD, Wait.BODY, Wait.IDLE):
            self.crowd.put(self, None)

    def close_after_body(self) -> None:
        """Called when an answer is complete, or fails, and ends the connection."""
        if not (self.cycle.more_body and self.cycle.response_complete) or self._is_refused:
            self.transport.close()
        elif self.transport.can_write_eof():
            self.transport.write_eof()

    def on_response_complete(self) -> None:
        if self.cycle.more_body and self.cycle.response_complete and not self.transport.is_closing():
            self._rest_timer = self.loop.call_at(self._body_end_s, self._close)
        super().on_response_complete()
        if self.transport.is_closing() and self.transport.get_write_buffer_size() > 0:
            self._start_slow_timer()  # closing waits until the client has read the rest
        elif self.timeout_keep_alive_task is not None:
            self.crowd.put(self, Wait.IDLE)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_slow_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_slow_timer()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size() > 0:
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls it when the parser fails."""
        if self._rest_timer is not None:
            self._close()
            return
        self._refuse(self._refusal or ApiError(400, "This is no valid HTTP/1.1 request.", code="invalid_http"))

    def _unsupported_upgrade_warning(self) -> None:
        """Ignores a client's offer to change the protocol, as Java's makes with every request.

        httptools treats the data after the headers as the other protocol's and stops. A new parser continues: it gets
        the headers of the body's length again, and the data after them."""
        upgrade = sys.exception()
        assert isinstance(upgrade, httptools.HttpParserUpgrade)
        rest = self._chunk[upgrade.args[0] :]
        framing = [header for header in self.headers if header[0] in (b"content-length", b"transfer-encoding")]
        if framing:
            self.cycle.more_body = True
            self._is_reading_head = False
        self.parser = httptools.HttpRequestParser(self)
        self._is_repeating = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(b"%b: %b\r\n" % header for header in framing))
        self._chunk = rest
        super().data_received(rest)

    def give_way(self) -> None:
        """Gives the connection's place to another one at once."""
        self.connections.discard(self)  # the end itself is reported later
        if self.transport.get_write_buffer_size() > 0:
            self.transport.abort()
        else:
            self.transport.close()

    def _count(self, num_bytes: int) -> None:
        self._num_parsed_bytes += num_bytes
        if self._num_parsed_bytes > self.limits.max_header_bytes:
            self._refusal = self._too_large()
            raise _HeadersTooLarge

    def _too_large(self) -> ApiError:
        return ApiError(
            431, f"The headers are larger than {self.limits.max_header_bytes} bytes.", code="headers_too_large"
        )

    def _refuse(self, error: ApiError) -> None:
        """Answers without a request, or instead of one whose body is broken, and closes. If an earlier request's answer
        is still being sent, only waits for that."""
        self._is_refused = True
        self._stop_head_timer()
        if self._is_answering and self.cycle.more_body and not self.cycle.response_started and not self.pipeline:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        elif self._is_answering:
            self.cycle.keep_alive = False
            self.flow.pause_reading()
            return
        request_id = new_request_id()
        body = msgspec.json.encode(error.body())
        asked = Headers(raw=self.headers or [])
        lines = [
            STATUS_LINE[error.status],
            *(b"%b: %b\r\n" % header for header in self.server_state.default_headers),
            *(b"%b: %b\r\n" % header for header in (() if self.cors is None else self.cors.answer_headers(asked))),
            b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body),
            b"x-request-id: %b\r\nconnection: close\r\n\r\n" % request_id.encode(),
            body,
        ]
        logger.info("request %s was refused before it was whole: %d %s", request_id, error.status, error.code)
        self.transport.write(b"".join(lines))
        self._close()

    def _close(self) -> None:
        """Closes the connection once the client has read what is written, within limits."""
        self.transport.close()
        self._start_slow_timer()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.limits.header_timeout_s, self._end_head)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_head(self) -> None:
        """Ends the connection at the headers' timeout."""
        if self._is_answering:  # they belong to the next request
            self._start_head_timer()
        elif self._num_head_bytes == 0:
            self.transport.close()
        else:
            message = f"The headers did not arrive within {self.limits.header_timeout_s:g} seconds."
            self._refuse(ApiError(408, message, code="header_timeout"))

    def _start_slow_timer(self) -> None:
        if self._slow_timer is None:
            self.crowd.put(self, Wait.READER)
            self._slow_timer = self.loop.call_later(self.limits.slow_reader_timeout_s, self._drop)

    def _stop_slow_timer(self) -> None:
        if self._slow_timer is not None:
            self._slow_timer.cancel()
            self._slow_timer = None
            if self.crowd.wait_of(self) is Wait.READER:
                self.crowd.put(self, None)

    def _stop_rest_timer(self) -> None:
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None

    def _drop(self) -> None:
        """Closes a connection whose client has not read for too long."""
        logger.info("a client did not read its answer for %g s and is dropped", self.limits.slow_reader_timeout_s)
        self.transport.abort()


def limited(app: ASGIApp, config: ServerConfig) -> type[LimitedHttpProtocol]:
    """The protocol with these limits."""

    class Protocol(LimitedHttpProtocol):
        limits = config
        crowd = Crowd()
        turns = Turns(LimitedHttpProtocol._may_begin)
        cors = Cors(app, config.allowed_origins) if config.allowed_origins else None

    return Protocol


def uvicorn_config(app: ASGIApp, config: ServerConfig, *, graceful_timeout_s: int = 5) -> uvicorn.Config:
    """uvicorn's settings for the application: its own log, headers of proxies, websockets and environment variables are
    left out. Raises `ServerConfigError` for a version of uvicorn that is not known."""
    check_uvicorn(uvicorn.__version__)
    return uvicorn.Config(
        app,
        http=limited(app, config),
        ws="none",
        lifespan="on",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        workers=1,
        backlog=BACKLOG,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
        timeout_keep_alive=config.keep_alive_timeout_s,  # type: ignore[arg-type]  # only ever given to call_later
        timeout_graceful_shutdown=graceful_timeout_s,
    )
