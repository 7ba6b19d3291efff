"""Many at once, clients that go away, one that does not read, and an engine's process that is killed: nobody gets
another's tokens, and nothing is done for nobody."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from runtime.engine.messages import EngineRequest
from runtime.engine.process.child import Supervision
from runtime.engine.process.process_client import ProcessEngineClient
from runtime.own_packages import python_module
from server.app import create_app
from server.config import ServerConfig
from tests.runtime.engine.light_engine import EXITS
from tests.server.conftest import Served, say
from tests.server.real_server import Real, serving_real, write_tiny_model
from tests.server.running import running
from tests.waiting import TIMEOUT_S, wait_until
from tokenizer import Tokenizer

MODEL = "fake-model"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
CHAT = "/v1/chat/completions"


def endless(request: EngineRequest, index: int) -> list[int]:
    return [120] * 300


async def test_sixty_four_streams_each_get_their_own(served: Served) -> None:
    """Each is told its own prompt in reverse."""
    served.engine.script = lambda request, index: say(bytes(request.prompt_token_ids[::-1]).decode())
    served.engine.step_s = 0.001
    prompts = [f"stream {number} " * (1 + number % 5) for number in range(64)]
    limits = httpx.Limits(max_connections=64)
    async with (
        httpx.AsyncClient(limits=limits, timeout=TIMEOUT_S) as http,
        openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", http_client=http) as client,
    ):

        async def ask(prompt: str, stream: bool) -> str:
            if not stream:
                answer = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=200)
                return answer.choices[0].text
            chunks = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=200, stream=True)
            return "".join([chunk.choices[0].text async for chunk in chunks])

        answers = await asyncio.gather(*(ask(p, stream=number % 8 != 0) for number, p in enumerate(prompts)))
    assert answers == [prompt[::-1] for prompt in prompts]


@pytest.mark.parametrize("route", [CHAT, "/v1/completions"])
def test_a_client_that_leaves_a_stream_frees_its_request(served: Served, route: str) -> None:
    served.engine.script = endless
    served.engine.step_s = 0.02
    body = {"model": MODEL, "messages": HELLO} if route == CHAT else {"model": MODEL, "prompt": "x", "max_tokens": 250}
    with served.http.stream("POST", route, json={**body, "stream": True}) as response:
        lines = response.iter_lines()
        while "x" not in next(lines):
            pass
        assert served.engine.num_open == 1
    wait_until(lambda: served.engine.num_open == 0)
    assert served.engine.cancelled == [served.engine.requests[0].request_id]


def test_a_client_that_leaves_before_the_first_token(served: Served) -> None:
    served.engine.step_gate.clear()
    with served.http.stream("POST", CHAT, json={"model": MODEL, "messages": HELLO, "stream": True}):
        assert served.engine.num_open == 1
    wait_until(lambda: served.engine.num_open == 0)


def test_a_client_that_leaves_while_waiting_for_a_whole_answer(served: Served) -> None:
    served.engine.script = endless
    served.engine.step_s = 0.02
    body = json.dumps({"model": MODEL, "messages": HELLO, "n": 2}).encode()
    address = urlsplit(served.url)
    assert address.hostname is not None
    with socket.create_connection((address.hostname, address.port), timeout=TIMEOUT_S) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        wait_until(lambda: served.engine.num_open == 1)
    wait_until(lambda: served.engine.num_open == 0)
    assert served.engine.cancelled == [served.engine.requests[0].request_id]


def test_every_prompt_of_a_request_is_freed(served: Served) -> None:
    served.engine.script = endless
    served.engine.step_s = 0.02
    body = {"model": MODEL, "prompt": ["a", "b", "c"], "stream": True, "max_tokens": 250, "n": 2}
    with served.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        assert served.engine.num_open == 3
    wait_until(lambda: served.engine.num_open == 0)
    assert len(served.engine.cancelled) == 3


def test_a_long_prompt_does_not_stall_the_others(
    served: Served, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is encoded in a thread: health checks are answered before it has been."""
    begun, may_go_on = threading.Event(), threading.Event()
    encode = tokenizer.encode

    def slow(text: str, **options: Any) -> list[int]:
        begun.set()
        assert may_go_on.wait(TIMEOUT_S)
        return encode(text[:10], **options)

    monkeypatch.setattr(tokenizer, "encode", slow)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(served.openai.completions.create, model=MODEL, prompt="x" * 100_000, max_tokens=1)
        assert begun.wait(TIMEOUT_S)
        assert served.http.get("/health").status_code == 200
        assert not asked.done()
        may_go_on.set()
        assert asked.result(TIMEOUT_S).choices[0].finish_reason == "length"


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


BODY = {"model": "light", "prompt": [1, 2, 3], "max_tokens": 50_000, "ignore_eos": True}


def test_a_server_outlives_its_engine(tmp_path: Path) -> None:
    obstacle = tmp_path / "obstacle"  # while it is there, no engine starts
    supervision = Supervision(
        command=python_module("tests.runtime.engine.light_engine"), first_delay_s=0.1, most_delay_s=0.1
    )
    engine = ProcessEngineClient(obstacle, supervision=supervision)
    try:
        check(engine, obstacle)
    finally:
        engine.close()


def check(engine: ProcessEngineClient, obstacle: Path) -> None:
    app = create_app(engine, None, default_sampling={})
    with running(app) as url, httpx.Client(base_url=url, timeout=TIMEOUT_S) as http:
        assert http.get("/ready").status_code == 200
        with http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
            lines = (line for line in response.iter_lines() if line)
            assert "error" not in next(lines)
            obstacle.touch()
            os.kill(engine.pid or 0, signal.SIGKILL)
            assert '"code":"engine_unavailable"' in list(lines)[-1]
        wait_until(lambda: engine.state != "ready")
        assert http.get("/health").status_code == 200
        assert http.get("/ready").status_code == 503
        refused = http.post("/v1/completions", json=BODY)
        assert refused.status_code == 503
        assert int(refused.headers["Retry-After"]) >= 1
        obstacle.unlink()
        wait_until(lambda: engine.state == "ready")
        assert http.get("/ready").status_code == 200
        answers: list[httpx.Response] = []

        def ask() -> None:
            answers.append(httpx.post(f"{url}/v1/completions", json=BODY, timeout=TIMEOUT_S))

        thread = threading.Thread(target=ask)
        thread.start()
        wait_until(lambda: len(engine._delivery) == 1)
        bad = http.post("/v1/completions", json={**BODY, "prompt": [EXITS], "max_tokens": 2})
        thread.join()
        assert [bad.status_code, answers[0].status_code] == [503, 503]
        wait_until(lambda: engine.state == "ready")
        good = http.post("/v1/completions", json={**BODY, "max_tokens": 2})
        assert good.json()["usage"]["completion_tokens"] == 2
