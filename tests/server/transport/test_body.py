"""Bodies beyond the limits, however they are sent: the answer is 413, and the server goes on."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from server.config import ServerConfig
from tests.server.conftest import ANSWER, Served, faked
from tests.server.openapi import DESCRIPTION, check_answer
from tests.server.running import raw_exchange
from tests.waiting import TIMEOUT_S
from tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
MEGABYTE = 1 << 20
BODY = json.dumps({"model": "fake-model", "messages": [{"role": "user", "content": "Hello"}]}).encode()


@pytest.fixture(scope="module")
def small(tokenizer: Tokenizer) -> Iterator[Served]:
    """A server with narrow limits."""
    with faked(tokenizer, config=ServerConfig(max_body_bytes=1000, max_discarded_bytes=100_000)) as served:
        yield served


@pytest.fixture(scope="module")
def hurried(tokenizer: Tokenizer) -> Iterator[Served]:
    """One that also gives little time, for bodies that do not come: others may be late on a busy machine."""
    config = ServerConfig(max_body_bytes=1000, max_discarded_bytes=100_000, body_timeout_s=0.4)
    with faked(tokenizer, config=config) as served:
        yield served


@pytest.fixture(autouse=True)
def _goes_on(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in {"small", "hurried"} & set(request.fixturenames):
        received = raw_exchange(
            request.getfixturevalue(name).url, head(f"Content-Length: {len(BODY)}", "Connection: close") + BODY
        )
        assert json.loads(received.partition(b"\r\n\r\n")[2])["choices"][0]["message"]["content"] == ANSWER


def whole_answer(client: socket.socket) -> int:
    """Reads an answer, which may come in several pieces, to its end. Returns its status."""
    with http.client.HTTPResponse(client) as response:
        response.begin()
        response.read()
        return response.status


def check_too_large(response: httpx.Response) -> None:
    assert response.status_code == 413
    error = response.json()["error"]
    assert error["code"] == "body_too_large"
    if DESCRIPTION.is_file():
        check_answer("ErrorResponse", response.json())


def head(*lines: str) -> bytes:
    return "\r\n".join([f"POST {CHAT} HTTP/1.1", "Host: x", "Content-Type: application/json", *lines, "", ""]).encode()


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b'{"model": "\xff"}', "is not UTF-8"), (b'{"\xe2\x82": 1}', "is not UTF-8"),
        (b'{"model": "a', "is not valid JSON: it ends too early"), (b"\xff", "is not valid JSON (at byte 0)"),
    ],
)  # fmt: skip
def test_a_body_that_is_no_json(served: Served, body: bytes, problem: str) -> None:
    response = served.http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["message"]) == ("invalid_json", f"The body {problem}.")


def test_a_hundred_megabytes(served: Served) -> None:
    headers = {"content-type": "application/json"}
    check_too_large(served.http.post(CHAT, content=bytes(100 * MEGABYTE), headers=headers))
    assert served.http.post(CHAT, content=BODY, headers=headers).status_code == 200


def test_through_the_sdk(small: Served) -> None:
    with pytest.raises(openai.APIStatusError) as raised:
        small.openai.completions.create(model="fake-model", prompt="x" * 2000)
    assert raised.value.status_code == 413


def test_a_chunked_body_has_no_length_to_believe(small: Served) -> None:
    chunks = (b"x" * 400 for _ in range(5))
    check_too_large(small.http.post(CHAT, content=chunks, headers={"content-type": "application/json"}))


def test_the_limit_itself_is_allowed(small: Served) -> None:
    headers = {"content-type": "application/json"}
    padded = BODY + b" " * (1000 - len(BODY))
    assert small.http.post(CHAT, content=padded, headers=headers).status_code == 200
    check_too_large(small.http.post(CHAT, content=padded + b" ", headers=headers))


def test_a_declared_length_is_refused_before_it_is_sent(small: Served) -> None:
    """A client that waits for leave to send gets the answer instead."""
    received = raw_exchange(small.url, head("Content-Length: 5000", "Expect: 100-continue"))
    assert received.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in received.lower()


def test_an_endless_body_is_cut_off(small: Served) -> None:
    chunk = b"4000\r\n" + b"x" * 0x4000 + b"\r\n"
    try:
        received = raw_exchange(small.url, head("Transfer-Encoding: chunked"), *[chunk] * 2000)
    except (BrokenPipeError, ConnectionResetError):
        return  # the server has closed while we were sending
    assert received.startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
@pytest.mark.parametrize(
    ("path", "kind", "status"), [("/nope", "application/json", 404), (CHAT, "text/plain", 415), ("/health", "", 405)]
)
def test_an_answer_before_the_body_is_seen(served: Served, path: str, kind: str, status: int, connection: str) -> None:
    """Also where the connection ends with it: a client that still sends would see that it is reset."""
    address = urlsplit(served.url)
    for _ in range(3):
        client = http.client.HTTPConnection(str(address.hostname), address.port, timeout=TIMEOUT_S)
        client.request("POST", path, bytes(8 * MEGABYTE), {"Content-Type": kind, "Connection": connection})
        answer = client.getresponse()
        assert (answer.status, bool(answer.read())) == (status, True)
        client.close()


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
def test_the_rest_of_a_body_is_bounded(small: Served, connection: str) -> None:
    begin = head("Transfer-Encoding: chunked", f"Connection: {connection}").replace(CHAT.encode(), b"/nope")
    with socket.create_connection((urlsplit(small.url).hostname, urlsplit(small.url).port), TIMEOUT_S) as client:
        client.sendall(begin)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 404 ")
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            client.sendall((b"4000\r\n" + b"x" * 0x4000 + b"\r\n") * 2000)


@pytest.mark.parametrize("rest", [b"", b"zz\r\n"])
def test_the_rest_of_a_body_may_not_come(hurried: Served, rest: bytes) -> None:
    begin = head("Transfer-Encoding: chunked", "Connection: close").replace(CHAT.encode(), b"/nope")
    with socket.create_connection((urlsplit(hurried.url).hostname, urlsplit(hurried.url).port), TIMEOUT_S) as client:
        client.sendall(begin)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 404 ")
        client.sendall(rest)
        while received := client.recv(1 << 16):
            assert b"HTTP/1.1" not in received


@pytest.mark.parametrize("next_head", [b"", b"POST /nope HTTP/1.1\r\n"])
def test_a_connection_that_is_kept_after_the_rest_of_a_body_may_not_idle(
    tokenizer: Tokenizer, next_head: bytes
) -> None:
    begin = head("Transfer-Encoding: chunked").replace(CHAT.encode(), b"/nope")
    with faked(tokenizer, config=ServerConfig(keep_alive_timeout_s=1)) as served:
        address = urlsplit(served.url)
        with socket.create_connection((address.hostname, address.port), TIMEOUT_S) as client:
            client.sendall(begin)
            assert whole_answer(client) == 404
            client.sendall(b"0\r\n\r\n" + head(f"Content-Length: {len(BODY)}") + BODY)
            assert whole_answer(client) == 200
            client.sendall(begin)
            assert whole_answer(client) == 404
            client.sendall(b"0\r\n\r\n" + next_head)
            assert client.recv(1 << 16) == b""


def test_nothing_is_served_after_the_last_answer(served: Served) -> None:
    begin = head("Transfer-Encoding: chunked", "Connection: close").replace(CHAT.encode(), b"/nope")
    address = urlsplit(served.url)
    with socket.create_connection((address.hostname, address.port), TIMEOUT_S) as client:
        client.sendall(begin)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 404 ")
        client.sendall(b"0\r\n\r\n" + head(f"Content-Length: {len(BODY)}") + BODY)
        while received := client.recv(1 << 16):
            assert b"HTTP/1.1" not in received
    assert httpx.get(f"{served.url}/health").status_code == 200
    assert not served.engine.requests


def test_the_rest_of_a_discarded_body_counts_with_it(small: Served) -> None:
    address = urlsplit(small.url)
    with socket.create_connection((address.hostname, address.port), TIMEOUT_S) as client:
        client.sendall(head("Transfer-Encoding: chunked") + (b"4000\r\n" + b"x" * 0x4000 + b"\r\n") * 8)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 413 ")
        num_sent = 0
        with suppress(BrokenPipeError, ConnectionResetError):
            while num_sent < 50:
                client.sendall(b"400\r\n" + b"x" * 0x400 + b"\r\n")
                num_sent += 1
                time.sleep(0.02)
        assert num_sent < 50


def test_a_body_that_does_not_arrive(hurried: Served) -> None:
    received = raw_exchange(hurried.url, head("Content-Length: 500") + b'{"model"')
    assert received.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"body_timeout"' in received


@pytest.mark.parametrize("size", [b"zz", b"-1", b"5 x", b""])
@pytest.mark.parametrize("first", [b"", b"2\r\n{}\r\n"])
def test_a_broken_chunk_is_told_at_once(small: Served, size: bytes, first: bytes) -> None:
    """Not after the seconds that a body has to arrive."""
    began = time.monotonic()
    received = raw_exchange(small.url, head("Transfer-Encoding: chunked"), first, size + b"\r\n{}\r\n0\r\n\r\n")
    assert received.startswith(b"HTTP/1.1 400 ")
    assert b'"code":"invalid_http"' in received
    assert time.monotonic() - began < ServerConfig().body_start_timeout_s / 2


def test_a_compressed_transfer_is_refused(small: Served) -> None:
    chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    received = raw_exchange(small.url, head("Transfer-Encoding: gzip, chunked", "Connection: close") + chunk)
    assert received.startswith(b"HTTP/1.1 415 ")
    assert b"(Transfer-Encoding: gzip, chunked)" in received


@pytest.mark.parametrize("first", [b"x", b""])
def test_two_names_of_the_server_are_refused(small: Served, first: bytes) -> None:
    request = head("Host: y", f"Content-Length: {len(BODY)}", "Connection: close") + BODY
    received = raw_exchange(small.url, request.replace(b"Host: x", b"Host: %b" % first, 1))
    assert received.startswith(b"HTTP/1.1 400 ")
    assert b"more than one Host header" in received


def test_a_client_that_leaves_while_sending(small: Served) -> None:
    address = urlsplit(small.url)
    assert address.hostname is not None
    with socket.create_connection((address.hostname, address.port), timeout=TIMEOUT_S) as connection:
        connection.sendall(head("Content-Length: 500") + b'{"model"')


@pytest.mark.parametrize("length", ["-1", "x", "9" * 40])
def test_lengths_that_are_none(hurried: Served, length: str) -> None:
    received = raw_exchange(hurried.url, head(f"Content-Length: {length}", "Connection: close"))
    assert received[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 413", b"HTTP/1.1 408")
