"""A whole server, its engine in a process of its own, and all that can happen to them: each ends as it should, nobody
waits for ever, and afterwards nothing is held that was not held before.

A few of each in every run, the issue's numbers as `exhaustive`."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.server.planted_engine import LOADING, SAMPLING
from tests.waiting import TIMEOUT_S
from tools.serving.soaking.server_process import Holdings, ServerProcess, growth

PLANTED = "tests.server.planted_engine"
SMALL = ("--device", "cpu", "--kv-cache-memory-bytes", "33554432", "--max-num-seqs", "32", "--log-level", "warning")
MODEL = "xserv-demo"
MOST_GROWTH = 16 << 20
COUNTED = ("server_fds", "server_threads", "engine_fds", "engine_threads", "num_processes")


def few_and(many: int, few: int) -> Any:
    return pytest.mark.parametrize("count", [few, pytest.param(many, marks=pytest.mark.exhaustive)])


def body(max_tokens: int = 8, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Once", "max_tokens": max_tokens, "ignore_eos": True, **fields}


def client(server: ServerProcess) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S, limits=limits)


async def ask(http: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await http.post("/v1/completions", json=body(**fields))


async def stream(http: httpx.AsyncClient, begun: asyncio.Event | None = None, **fields: Any) -> list[str]:
    """The events of a stream, to its end; `begun` is set with the first."""
    events = []
    async with http.stream("POST", "/v1/completions", json=body(stream=True, **fields)) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                events.append(line.removeprefix("data: "))
                if begun is not None:
                    begun.set()
    return events


def error_of(events: list[str]) -> dict[str, Any]:
    """Of a stream that broke off: its last event, and the only one that is an error."""
    assert all('"error"' not in event for event in events[:-1])
    error: dict[str, Any] = json.loads(events[-1])["error"]
    return error


@pytest.fixture(scope="module")
def shared_server() -> Iterator[ServerProcess]:
    arguments = ("--slow-reader-timeout-s", "2", "--max-waiting", "100", "--max-connections", "3000")
    with ServerProcess(*SMALL, *arguments, module=PLANTED) as server:
        warm_up(server)
        yield server


def warm_up(server: ServerProcess) -> None:
    """What is made once: threads, buffers for as many connections as a test has, and the pages of the KV cache, each
    when it is first written."""

    async def main() -> None:
        async with client(server) as http:
            await ask(http, n=8, max_tokens=1000)
            for _ in range(2):
                await asyncio.gather(*(ask(http, n=2, prompt=f"warm {i}") for i in range(40)))
                await asyncio.gather(*(stream(http, prompt=f"warm {i}") for i in range(20)))

    asyncio.run(main())


@pytest.fixture
def server(shared_server: ServerProcess) -> Iterator[ServerProcess]:
    """After each test both processes hold what they held before it, to 16 MiB."""
    shared_server.baseline = shared_server.settle()
    yield shared_server
    before = shared_server.baseline
    check_same(before, shared_server.settle(before.server_fds))


def check_same(before: Holdings, after: Holdings) -> None:
    assert after.is_idle
    assert growth(before, after, COUNTED) == {}
    grown = growth(before, after, ("server_rss", "engine_rss"))
    assert all(size <= MOST_GROWTH for size in grown.values()), grown


async def test_an_exception_in_one_requests_sampling(server: ServerProcess) -> None:
    """A request that cannot be set up, or whose parameters fail later, fails alone."""
    async with client(server) as http:
        begun = asyncio.Event()
        other = asyncio.create_task(stream(http, begun, max_tokens=300))
        await begun.wait()
        pid = server.engine.pid
        alone = await ask(http, seed=LOADING)
        assert (alone.status_code, alone.json()["error"]["code"]) == (500, "internal_error")
        events = await other
        assert events[-1] == "[DONE]"
        begun.clear()
        other = asyncio.create_task(stream(http, begun, max_tokens=1500))
        await begun.wait()
        bias = {"65": 0.5}  # which no recorded step holds: it is drawn for by the sampler that fails
        broken = await ask(http, seed=SAMPLING, temperature=1.0, logit_bias=bias)
        assert (broken.status_code, broken.json()["error"]["code"]) == (500, "internal_error")
        assert "planted" not in broken.text
        events = await other
        assert events[-1] == "[DONE]"
        for answer in await asyncio.gather(*(ask(http, seed=i) for i in range(5))):
            assert answer.status_code == 200
            assert answer.json()["usage"]["completion_tokens"] == 8
    assert server.engine.pid == pid
    assert "RuntimeError: planted: no token for this request" in server.log, server.log


@few_and(20, 2)
async def test_clients_that_never_read(server: ServerProcess, count: int) -> None:
    """They are dropped, and their requests with them; others are served meanwhile."""
    for _ in range(2):  # the second time no more is held than after the first
        server.baseline = await asyncio.to_thread(server.settle)
        lost = [connect(server, small=True) for _ in range(count)]
        for index, each in enumerate(lost):
            send(each, body(1500, n=8, logprobs=20, stream=True, prompt=f"long {index}"))
        async with client(server) as http:
            assert (await ask(http)).status_code == 200
        await asyncio.to_thread(server.settle)
        for each in lost:
            with each:
                received = drain(each)
            assert not received.endswith(b"[DONE]\n\n")
            assert b"\r\n0\r\n\r\n" not in received[-200:]


@few_and(500, 60)
async def test_clients_that_vanish(server: ServerProcess, count: int) -> None:
    """Before the answer, in its midst, with a reset or without."""
    generator = random.Random(count)
    connections = []
    for index in range(count):
        connection = connect(server)
        is_stream = bool(index % 2)
        send(connection, body(1500, stream=is_stream, n=1 + index % 3, prompt=f"gone {index}"))
        connections.append(connection)
    await asyncio.sleep(0.5)
    for connection in connections:
        if generator.random() < 0.5:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    async with client(server) as http:
        await asyncio.to_thread(server.settle)
        assert (await ask(http)).status_code == 200


@few_and(2000, 200)
async def test_more_requests_than_the_queue_takes(server: ServerProcess, count: int) -> None:
    """Each is answered: served, or told to come again."""
    for _ in range(2):  # the second time no more is held than after the first
        server.baseline = await asyncio.to_thread(server.settle)
        async with client(server) as http:
            asked = (ask(http, max_tokens=100, prompt=f"queued {i}") for i in range(count))  # faster than answered
            answers = await asyncio.gather(*asked)
        statuses = Counter(answer.status_code for answer in answers)
        assert set(statuses) <= {200, 429}, statuses
        assert statuses[200] >= 100
        assert statuses[429] > 0
        for answer in answers:
            if answer.status_code == 429:
                assert int(answer.headers["Retry-After"]) >= 1
            else:
                assert answer.json()["usage"]["completion_tokens"] == 100


@few_and(10, 2)
async def test_the_engine_is_killed_in_mid_stream(server: ServerProcess, count: int) -> None:
    """Streams end with an error, whoever waits gets a 503; the server says when to come again, and serves on."""
    async with client(server) as http:
        for _ in range(count):
            begun = [asyncio.Event() for _ in range(6)]
            streams = [
                asyncio.create_task(stream(http, event, max_tokens=1500, n=1 + i % 2, prompt=f"stream {i}"))
                for i, event in enumerate(begun)
            ]
            waiting = [asyncio.create_task(ask(http, max_tokens=1500, prompt=f"whole {i}")) for i in range(3)]
            await asyncio.gather(*(event.wait() for event in begun))
            engine = server.engine
            engine.kill()
            for events in await asyncio.gather(*streams):
                assert error_of(events)["code"] == "engine_unavailable"
            for answer in await asyncio.gather(*waiting):
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == "engine_unavailable"
            refused = await ask(http)
            if refused.status_code != 200:  # 200: it is back already
                assert refused.status_code == 503
                assert int(refused.headers["Retry-After"]) >= 1
            assert (await http.get("/health")).status_code == 200
            await asyncio.to_thread(server.wait, server.is_ready, "a new engine", TIMEOUT_S)
            assert server.engine.pid != engine.pid
            assert (await ask(http)).status_code == 200


@pytest.mark.exhaustive
async def test_sigterm_under_load() -> None:
    """Who is done in time gets everything, the others an error; the process ends with 0, and its engine with it."""
    with ServerProcess(*SMALL, "--drain-timeout-s", "4") as server:
        engine = server.engine
        async with client(server) as http:
            begun = [asyncio.Event() for _ in range(20)]
            short = [
                asyncio.create_task(stream(http, event, max_tokens=5, prompt=f"s {i}"))
                for i, event in enumerate(begun[:10])
            ]
            long = [
                asyncio.create_task(stream(http, event, max_tokens=1900, n=4, prompt=f"l {i}"))
                for i, event in enumerate(begun[10:])
            ]
            await asyncio.gather(*(event.wait() for event in begun))
            server.child.send_signal(signal.SIGTERM)
            await asyncio.to_thread(server.wait, lambda: not server.is_ready(), "not ready")
            for events in await asyncio.gather(*short):
                assert events[-1] == "[DONE]"
            num_errors = 0
            for events in await asyncio.gather(*long):
                if events[-1] != "[DONE]":
                    assert error_of(events)["code"] == "engine_unavailable"
                    num_errors += 1
            assert num_errors > 0
        assert await asyncio.to_thread(server.child.wait, TIMEOUT_S) == 0
        assert not engine.is_running()


async def test_a_full_disk_and_a_killed_server() -> None:
    """Lines of the log are lost, requests are not. The engine does not outlive its server."""
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    arguments = ("--log-file", "/dev/full", "--log-format", "json", "--log-level", "debug")
    with ServerProcess(*SMALL[:-2], *arguments) as server:
        async with client(server) as http:
            for answer in await asyncio.gather(*(ask(http, prompt=f"p {i}") for i in range(40))):
                assert answer.status_code == 200
            assert (await ask(http, max_tokens=-2)).status_code == 400
            begun = asyncio.Event()
            held = server.settle()
            assert held.used_blocks == 0
            running = asyncio.create_task(stream(http, begun, max_tokens=1900))
            await begun.wait()
            engine = server.engine
            server.child.kill()
            with pytest.raises(httpx.HTTPError):
                await running
        gone, alive = await asyncio.to_thread(psutil.wait_procs, [engine], TIMEOUT_S)
        assert (len(gone), alive) == (1, [])


def connect(server: ServerProcess, *, small: bool = False) -> socket.socket:
    connection = socket.socket()
    if small:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(60)
    connection.connect(("127.0.0.1", server.port))
    return connection


def send(connection: socket.socket, payload: dict[str, Any]) -> None:
    data = json.dumps(payload).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)


def drain(connection: socket.socket) -> bytes:
    """What still comes, to the end or the reset."""
    received = b""
    try:
        while data := connection.recv(1 << 16):
            received += data
    except ConnectionResetError:
        pass
    return received
