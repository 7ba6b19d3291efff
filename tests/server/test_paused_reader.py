"""A client that does not read: the engine holds its request still, and when it reads, it gets the whole answer."""

from __future__ import annotations

import json
import re
import socket
from collections import defaultdict
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from server.config import ServerConfig
from tests.server.real_server import Real, serving_real, write_tiny_model
from tests.waiting import wait_until

ASKED = {
    "messages": [{"role": "user", "content": "Hello"}], "n": 8, "seed": 3, "temperature": 1.0, "ignore_eos": True,
    "max_tokens": 500, "logprobs": True, "top_logprobs": 20,
}  # fmt: skip


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder)
    config = ServerConfig(write_buffer_bytes=4096, max_kept_output_bytes=200_000, slow_reader_timeout_s=60.0)
    options = {"load_format": "dummy", "device": "cpu", "max_model_len": 1024, "num_blocks": 600}
    with serving_real(folder, config=config, **options) as real:
        yield real


def stalled(real: Real) -> socket.socket:
    """A connection that has asked for a large stream and reads nothing of it; its request is paused."""
    address = urlsplit(real.url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(60)
    connection.connect((address.hostname, address.port))
    body = json.dumps({**ASKED, "stream": True}).encode()
    head = b"POST /v1/chat/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
    connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    wait_until(lambda: real.client.stats().num_paused == 1)
    wait_until(lambda: not real.client.has_work)
    return connection


def paused_by_metrics(real: Real) -> float:
    """The gauge of paused requests at `/metrics`."""
    (line,) = re.findall(rb"^xserv:num_requests_paused\{.*\} (\S+)$", real.http.get("/metrics").content, re.M)
    return float(line)


def test_a_reader_that_stalls_finds_the_whole_answer_later(real: Real) -> None:
    expected = real.http.post("/v1/chat/completions", json=ASKED).json()["choices"]
    with stalled(real) as connection:
        assert real.num_used_blocks == 0
        wait_until(lambda: paused_by_metrics(real) == 1.0)  # it runs for a moment whenever the socket takes more
        other = real.http.post("/v1/chat/completions", json={**ASKED, "n": 1, "max_tokens": 20}).json()
        assert other["choices"][0]["message"]["content"]
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        received = b"".join(iter(lambda: connection.recv(1 << 20), b""))
    assert received.endswith(b"data: [DONE]\n\n")
    content: defaultdict[int, str] = defaultdict(str)
    logprobs: defaultdict[int, list[Any]] = defaultdict(list)
    for line in received.split(b"\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                content[choice["index"]] += choice["delta"].get("content") or ""
                logprobs[choice["index"]] += (choice["logprobs"] or {"content": []})["content"]
    for choice in expected:
        assert content[choice["index"]] == choice["message"]["content"]
        assert logprobs[choice["index"]] == choice["logprobs"]["content"]
    assert real.client.stats().num_paused == 0


def test_a_paused_request_ends_with_its_connection(real: Real) -> None:
    stalled(real).close()
    wait_until(lambda: real.client.stats().num_paused == 0 and not real.client.has_work)
    wait_until(lambda: real.num_used_blocks == 0)  # it may have gone on for a step before it was cancelled
