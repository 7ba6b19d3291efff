"""What a client can do around its requests, and how much one request may hold; each limit at its edge."""

from __future__ import annotations

import json
import re
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from runtime.commands.serve import ServerOptions
from runtime.engine.admission import check_room
from runtime.engine.errors import QueueFullError
from runtime.engine.messages import EngineRequest
from server.config import OPTIONS, ServerConfig, ServerConfigError
from server.transport.protocol import RESERVED_CONNECTIONS
from server.transport.typed import is_deeper, kinds_of
from tests.server.conftest import ANSWER, Served, answer_of, faked, serving
from tests.server.fake_engine import FakeEngineClient
from tests.waiting import TIMEOUT_S, wait_until
from tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "fake-model", "messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture(scope="module")
def narrow(tokenizer: Tokenizer) -> Iterator[Served]:
    config = ServerConfig(
        max_header_bytes=2000,
        allowed_origins=("https://chat.example",),
        max_headers=20,
        max_messages=3,
        max_tools=2,
        max_stop_strings=2,
        max_logit_bias=3,
        max_choices=4,
        max_prompts=3,
        max_json_depth=20,
        max_schema_depth=8,
    )
    with faked(tokenizer, config=config) as served:
        yield served


@pytest.fixture(scope="module")
def hurried(tokenizer: Tokenizer) -> Iterator[Served]:
    """One that gives little time, for tests that let it pass: in others a busy machine might."""
    config = ServerConfig(
        max_header_bytes=2000, header_timeout_s=0.5, keep_alive_timeout_s=0.5, body_start_timeout_s=0.5
    )
    with faked(tokenizer, config=config) as served:
        yield served


@pytest.fixture(autouse=True)
def _goes_on(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in {"narrow", "hurried"} & set(request.fixturenames):
        served: Served = request.getfixturevalue(name)
        answer = httpx.post(f"{served.url}{CHAT}", json=HELLO, timeout=TIMEOUT_S).json()
        assert answer["choices"][0]["message"]["content"] == ANSWER


def connect(url: str) -> socket.socket:
    address = urlsplit(url)
    assert address.hostname is not None
    return socket.create_connection((address.hostname, address.port), timeout=TIMEOUT_S)


def read_all(connection: socket.socket) -> bytes:
    received = b""
    while data := connection.recv(65536):
        received += data
    return received


def exchange(url: str, *parts: bytes) -> bytes:
    """All that the server sends until it closes the connection."""
    with connect(url) as connection:
        try:
            for part in parts:
                connection.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            pass
        try:
            return read_all(connection)
        except ConnectionResetError:
            return b""


def check_refusal(received: bytes, status: int, code: str) -> None:
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), head
    assert b"connection: close" in head.lower()
    assert b"x-request-id: " in head.lower()
    assert json.loads(body)["error"]["code"] == code


def padded(size: int) -> bytes:
    """A request whose line and headers have this size, as the limit counts it: name, value and four bytes a field."""
    begin = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Pad: "
    counted = len(b"/health") + len(b"hostx") + 4 + len(b"connectionclose") + 4 + len(b"x-pad") + 4
    return begin + b"p" * (size - counted) + b"\r\n\r\n"


def test_headers_at_their_limit(narrow: Served) -> None:
    assert exchange(narrow.url, padded(2000)).startswith(b"HTTP/1.1 200 ")
    check_refusal(exchange(narrow.url, padded(2001)), 431, "headers_too_large")


def test_one_endless_header(narrow: Served) -> None:
    """Nothing of it reaches the parser's callbacks, so that only the bytes on the wire tell."""
    begin = b"GET / HTTP/1.1\r\nX: "
    check_refusal(exchange(narrow.url, begin, b"y" * 3000), 431, "headers_too_large")
    check_refusal(exchange(narrow.url, b"GET /" + b"y" * 3000), 431, "headers_too_large")


def test_many_small_headers(narrow: Served) -> None:
    def ask(number: int) -> bytes:
        lines = b"".join(b"a: b\r\n" for _ in range(number - 2))
        return exchange(narrow.url, b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + lines + b"\r\n")

    assert ask(20).startswith(b"HTTP/1.1 200 ")
    check_refusal(ask(21), 431, "headers_too_large")


def test_a_page_may_read_why_its_request_was_refused(narrow: Served) -> None:
    """As far as the Origin header had come."""
    begin = b"GET / HTTP/1.1\r\nHost: x\r\nOrigin: %s\r\nAccept: */*\r\n"
    endings = {431: b"a: b\r\n" * 21, 400: b"no header\r\n\r\n"}
    for status, ending in endings.items():
        head = exchange(narrow.url, begin % b"https://chat.example" + ending).partition(b"\r\n\r\n")[0].lower()
        assert head.startswith(b"http/1.1 %d " % status)
        assert b"\r\naccess-control-allow-origin: https://chat.example\r\n" in head
        assert b"\r\naccess-control-expose-headers: x-request-id" in head
        head = exchange(narrow.url, begin % b"https://other.example" + ending).partition(b"\r\n\r\n")[0].lower()
        assert head.startswith(b"http/1.1 %d " % status)
        assert b"access-control-allow-origin" not in head


def test_headers_that_do_not_end(hurried: Served) -> None:
    check_refusal(exchange(hurried.url, b"GET / HTTP/1.1\r\nHost: x\r\n"), 408, "header_timeout")


def test_a_drop_at_a_time_wins_no_time(hurried: Served) -> None:
    """The answer comes before the last of a thousand drops, each of which comes within the time for all."""
    with connect(hurried.url) as connection:
        received = b""
        connection.settimeout(0.05)
        for letter in b"GET / HTTP/1.1\r\n" + b"a" * 1000:
            try:
                connection.sendall(bytes([letter]))
                received += connection.recv(1000)
            except TimeoutError:
                continue
            except OSError:
                break
            if received:
                break
    assert received.startswith(b"HTTP/1.1 408 ")


def test_a_connection_that_says_nothing_is_closed(hurried: Served) -> None:
    assert exchange(hurried.url) == b""


def test_an_idle_connection_is_closed(hurried: Served) -> None:
    received = exchange(hurried.url, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert received.startswith(b"HTTP/1.1 200 ")
    assert received.count(b"HTTP/1.1") == 1


def test_the_next_request_has_limits_too(narrow: Served, tokenizer: Tokenizer, fake_engine: FakeEngineClient) -> None:
    first = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    config = ServerConfig(header_timeout_s=2.0)
    with serving(fake_engine, tokenizer, config=config) as served, connect(served.url) as connection:
        connection.sendall(first)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"GET / HTTP/1.1\r\nHost")
        check_refusal(read_all(connection), 408, "header_timeout")
    with connect(narrow.url) as connection:
        connection.sendall(first)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"GET / HTTP/1.1\r\nX: " + b"y" * 3000)
        check_refusal(read_all(connection), 431, "headers_too_large")


def test_pipelined_requests_are_answered_in_order(narrow: Served) -> None:
    one = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    last = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    received = exchange(narrow.url, one * 3 + last)
    assert received.count(b"HTTP/1.1 200 OK") == 4
    assert received.index(b'"object":"list"') > received.rindex(b'{"status":"ok"}')


@pytest.mark.parametrize("data", [b"\x16\x03\x01\x00\x05hello", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x00" * 50,
                                  b"GET / HTTP/1.1\r\nA B: c\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"])  # fmt: skip
def test_what_is_no_http(narrow: Served, data: bytes) -> None:
    check_refusal(exchange(narrow.url, data), 400, "invalid_http")


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("num_parts", [1, 2, 200])
def test_an_offer_of_http2_is_passed_over(narrow: Served, num_parts: int, is_chunked: bool) -> None:
    """As Java's client makes it with every request, body and all; and the connection goes on."""
    body = json.dumps(HELLO).encode()
    length = b"Transfer-Encoding: chunked" if is_chunked else b"Content-Length: %d" % len(body)
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" + offer
    if is_chunked:
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    request = head + length + b"\r\n\r\n" + body
    without_body = b"GET /health HTTP/1.1\r\nHost: x\r\n" + offer + b"\r\n"
    last = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    data = request + without_body + last
    size = -(-len(data) // num_parts)
    received = exchange(narrow.url, *(data[i : i + size] for i in range(0, len(data), size)))
    assert received.count(b"HTTP/1.1 200 OK") == 3, received
    answer = json.loads(received.split(b"\r\n\r\n")[1].partition(b"HTTP/1.1")[0])
    assert answer["choices"][0]["message"]["content"] == ANSWER


def test_a_body_that_does_not_begin(hurried: Served) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    received = exchange(hurried.url, head + b"Content-Length: 9\r\n\r\n")
    check_refusal(received, 408, "body_timeout")
    assert b"begin to arrive within 0.5 s" in received


def tool(schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


def nested(depth: int) -> Any:
    """That many objects within each other."""
    return {} if depth == 1 else {"a": nested(depth - 1)}


@pytest.mark.parametrize(
    ("field", "allowed", "refused"),
    [
        ("messages", HELLO["messages"] * 3, HELLO["messages"] * 4),
        ("tools", [tool({})] * 2, [tool({})] * 3),
        ("tools", [tool(nested(5))], [tool(nested(6))]),
        ("stop", ["a", "b"], ["a", "b", "c"]),
        ("logit_bias", {"1": 0, "2": 0, "3": 0}, {"1": 0, "2": 0, "3": 0, "4": 0}),
        ("n", 4, 5),
    ],
)
def test_fields_at_their_limits(narrow: Served, field: str, allowed: Any, refused: Any) -> None:
    assert narrow.http.post(CHAT, json={**HELLO, field: allowed}).status_code == 200
    response = narrow.http.post(CHAT, json={**HELLO, field: refused})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == field
    assert any(character.isdigit() for character in error["message"]), "the limit is told"


def test_prompts_and_choices_at_their_limits(narrow: Served) -> None:
    body: dict[str, Any] = {"model": "fake-model", "max_tokens": 3}

    def ask(prompt: Any, n: int = 1) -> int:
        return narrow.http.post("/v1/completions", json={**body, "prompt": prompt, "n": n}).status_code

    assert ask(["a"] * 3) == 200
    assert ask(["a"] * 4) == 400
    assert ask(["a"] * 2, n=2) == 200
    assert ask(["a"] * 3, n=2) == 400


def test_nesting_at_its_limit(narrow: Served) -> None:
    """The body itself is one level, its chat_template_kwargs the next."""
    assert narrow.http.post(CHAT, json={**HELLO, "chat_template_kwargs": nested(19)}).status_code == 200
    assert narrow.http.post(CHAT, json={**HELLO, "chat_template_kwargs": nested(20)}).status_code == 400
    deep = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    response = narrow.http.post(CHAT, content=deep, headers={"content-type": "application/json"})
    assert response.json()["error"]["code"] == "invalid_json"


def test_more_connections_than_allowed(tokenizer: Tokenizer, fake_engine: FakeEngineClient) -> None:
    """While all are being answered, further requests are told so, and probes get through; then all is as before."""
    config = ServerConfig(max_connections=4)
    fake_engine.step_gate.clear()
    with serving(fake_engine, tokenizer, config=config) as served:
        held = [ask_for_a_stream(served.url) for _ in range(4)]
        wait_until(lambda: b"503" in exchange(served.url, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")[:20])
        received = exchange(served.url, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        check_refusal(received, 503, "overloaded")
        assert b"retry-after: 1" in received.lower()
        for path in (b"/health", b"/ready", b"/metrics"):
            request = b"GET %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % path
            assert exchange(served.url, request).startswith(b"HTTP/1.1 200 ")
        held += [connect(served.url) for _ in range(2 * RESERVED_CONNECTIONS)]
        assert exchange(served.url, request).startswith(b"HTTP/1.1 200 "), "those that are silent give way"
        for connection in held:
            connection.close()
        fake_engine.step_gate.set()
        wait_until(lambda: served.http.get("/v1/models").status_code == 200)


def test_idle_connections_make_room(tokenizer: Tokenizer, fake_engine: FakeEngineClient) -> None:
    with serving(fake_engine, tokenizer, config=ServerConfig(max_connections=4)) as served:
        idle = [connect(served.url) for _ in range(4)]
        for connection in idle:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        for _ in range(3):
            received = exchange(served.url, b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert received.startswith(b"HTTP/1.1 200 ")
        for connection in idle:
            connection.close()


def endless(request: EngineRequest, index: int) -> list[int]:
    return [120] * 200_000


def ask_for_a_stream(url: str) -> socket.socket:
    """A connection that has asked for an endless answer, and takes as little of it as it can."""
    address = urlsplit(url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(20)
    connection.connect((address.hostname, address.port))
    asked = {**HELLO, "stream": True, "max_tokens": 190_000, "logprobs": True, "top_logprobs": 20}  # large events
    body = json.dumps(asked).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    return connection


def test_a_client_that_does_not_read_is_dropped(tokenizer: Tokenizer) -> None:
    """And with it what was kept for it: the request is cancelled, the connection cut."""
    config = ServerConfig(slow_reader_timeout_s=0.5, write_buffer_bytes=4096)
    with (
        faked(tokenizer, endless, max_model_len=200_000, config=config) as served,
        ask_for_a_stream(served.url) as connection,
    ):
        wait_until(lambda: len(served.engine.requests) == 1)
        wait_until(lambda: served.engine.num_open == 0)
        assert served.engine.cancelled == [served.engine.requests[0].request_id]
        received = read_all(connection)
        assert received.startswith(b"HTTP/1.1 200 ")
        assert b"[DONE]" not in received
        served.engine.reset(answer_of)
        assert served.http.post(CHAT, json=HELLO).status_code == 200


def test_a_slow_client_that_reads_is_kept(tokenizer: Tokenizer) -> None:
    """Its answer pauses and goes on; nothing of it is lost."""
    config = ServerConfig(slow_reader_timeout_s=20.0, write_buffer_bytes=4096)
    with (
        faked(tokenizer, lambda request, index: [120] * 1500, max_model_len=1500, config=config) as served,
        ask_for_a_stream(served.url) as connection,
    ):
        time.sleep(0.5)
        received = b""
        while b"data: [DONE]" not in received[-200:]:
            data = connection.recv(65536)
            assert data, "the connection was cut"
            received += data
        text = "".join(
            json.loads(line[6:])["choices"][0]["delta"].get("content", "")
            for line in received.split(b"\n")
            if line.startswith(b"data: {")
        )
        assert set(text) == {"x"}
        num_tokens = served.engine.requests[0].params.max_tokens
        assert num_tokens is not None
        assert len(text) == min(num_tokens, 1500 - len(served.engine.requests[0].prompt_token_ids))


def test_clients_that_vanish_leave_nothing(tokenizer: Tokenizer) -> None:
    """In the midst of their headers, of their bodies, of a stream, and at once, some with a reset: every request is
    cancelled, every descriptor closed."""
    engine = FakeEngineClient(endless, max_model_len=200_000)
    engine.step_s = 0.01
    body = json.dumps({**HELLO, "stream": True, "max_tokens": 190_000}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with serving(engine, tokenizer) as served:
        served.http.get("/health")
        process = psutil.Process()
        num_fds, num_threads = process.num_fds(), process.num_threads()
        for number in range(200):
            connection = connect(served.url)
            if number % 2:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            size = (0, 30, len(request) - 10, len(request))[number // 2 % 4]
            connection.sendall(request[:size])
            if size == len(request):
                assert connection.recv(1).startswith(b"H")
            connection.close()
        wait_until(lambda: engine.num_open == 0)
        wait_until(lambda: re.search(r"xserv:open_requests\{.*\} 0.0", served.http.get("/metrics").text) is not None)
        wait_until(lambda: process.num_fds() <= num_fds)
        assert process.num_threads() <= num_threads + ServerConfig.num_tokenizer_threads
        assert len(engine.requests) == 50
    engine.close()


def test_a_silent_stream_is_pinged(tokenizer: Tokenizer, fake_engine: FakeEngineClient) -> None:
    """With comments, which no client sees."""
    config = ServerConfig(ping_interval_s=0.1)
    fake_engine.step_gate.clear()
    with serving(fake_engine, tokenizer, config=config) as served:
        with served.http.stream("POST", CHAT, json={**HELLO, "stream": True}) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: {")
            assert [next(lines) for _ in range(5)] == ["", ": ping", "", ": ping", ""]
            fake_engine.step_gate.set()
            assert "data: [DONE]" in list(lines)
        fake_engine.step_gate.clear()
        chunks = served.openai.chat.completions.create(**HELLO, stream=True)
        first = next(iter(chunks))
        assert first.choices[0].delta.role == "assistant"
        time.sleep(0.5)
        fake_engine.step_gate.set()
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER


def test_the_queue_has_a_limit_of_tokens(fake_engine: FakeEngineClient) -> None:
    import msgspec

    info = msgspec.structs.replace(fake_engine.info, max_waiting=3, max_waiting_tokens=100)
    check_room(info, 0, 0, 1000)  # alone, a request may be as long as it likes
    check_room(info, 2, 60, 40)
    with pytest.raises(QueueFullError, match="100 tokens"):
        check_room(info, 2, 60, 41)
    with pytest.raises(QueueFullError, match="3 requests"):
        check_room(info, 3, 3, 1)


def test_a_full_queue_says_when_to_come_again(tokenizer: Tokenizer) -> None:
    engine = FakeEngineClient(answer_of, max_waiting=0)
    with serving(engine, tokenizer) as served:
        response = served.http.post(CHAT, json=HELLO)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
    engine.close()


def default_of(text: str) -> object:
    """A default as the operators' page has it."""
    if number := re.fullmatch(r"([\d.,]+)( KiB| MiB| GiB| s| days)?", text):
        unit = {" KiB": 1 << 10, " MiB": 1 << 20, " GiB": 1 << 30, " days": 86_400}.get(number[2], 1)
        return float(number[1].replace(",", "")) * unit
    return {"on": True, "off": False, "any": (), "none": ""}.get(text, text)


def test_every_option_is_in_the_operators_page_with_its_default() -> None:
    page = (Path(__file__).parents[3] / "docs" / "server.md").read_text(encoding="utf-8")
    limits, shown = page.partition("\n## Limits\n")[2].partition("\n## ")[0], dict[str, object]()
    for flags, defaults in re.findall(r"^\| (`--[^|]+`) \| ([^|]+) \|", limits, re.M):
        names, texts = flags.split(", "), defaults.split(", ")
        shown |= zip(names, map(default_of, texts if len(texts) > 1 else texts * len(names)), strict=True)
    for each in OPTIONS:
        name = each.option.flag.name or each.name
        flag = (each.option.flag.declarations or ("--" + name.replace("_", "-"),))[0]
        assert f"`{flag}" in page, f"{flag} is not described"
        assert shown.get(f"`{flag}`", each.default) == each.default, flag
    assert len(shown) > len(OPTIONS) / 2


def test_every_setting_has_an_option_with_its_default() -> None:
    options = ServerOptions()
    names = {each.option.flag.name or each.name for each in OPTIONS}
    assert {field.name for field in fields(ServerOptions)} == names
    assert {each.name for each in OPTIONS} == {field.name for field in fields(ServerConfig)}
    assert options.config() == ServerConfig()
    assert ServerOptions(drain_timeout_s=0.0).config().drain_timeout_s == 0.0
    assert ServerOptions(max_tools=3, allowed_hosts=["a"]).config() == ServerConfig(max_tools=3, allowed_hosts=("a",))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_tools": 0}, "max_tools must be at least 1, got 0"),
        ({"header_timeout_s": 0.0}, "header_timeout_s must be above 0"),
        ({"header_timeout_s": float("nan")}, "header_timeout_s must be above 0"),
        ({"max_tools": "3"}, "max_tools must be at least 1, got '3'"),
        ({"header_timeout_s": "3"}, "header_timeout_s must be above 0"),
        ({"body_timeout_s": 1e6}, "body_timeout_s must be above 0 and below 1,000,000 seconds, got 1000000.0"),
        ({"drain_timeout_s": -1.0}, "drain_timeout_s must be at least 0 and below 1,000,000 seconds"),
        ({"share_prefix_cache": 1}, "share_prefix_cache must be True or False, got 1"),
        ({"tool_call_parser": "nope"}, "tool_call_parser must be one of auto, none, .*, got 'nope'"),
        ({"reasoning_parser": "nope"}, "reasoning_parser must be one of auto, think, none, got 'nope'"),
        ({"log_format": "xml"}, "log_format must be one of"),
        ({"log_level": "loud"}, "log_level must be one of"),
        ({"allowed_origins": ("chat.example",)}, "must be an origin"),
    ],
)
def test_settings_that_mean_nothing(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ServerConfigError, match=message):
        ServerConfig(**setting)


def test_kinds_of_items_beyond_a_stretch() -> None:
    """The types are looked at a stretch at a time: none is passed over, wherever it stands."""
    for length in (0, 1, 8191, 8192, 8193, 20_000):
        items: list[object] = [7] * length
        assert kinds_of(items) == ({int} if length else set())
        for place in {0, length // 2, length - 1} if length else ():
            changed = [*items[:place], "text", *items[place + 1 :]]
            assert kinds_of(changed) == ({str} if length == 1 else {int, str})
    assert is_deeper({"prompt": [7] * 8192 + [[[1]]]}, 3)
