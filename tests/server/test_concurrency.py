"""Many at once, and clients that go away: nobody gets another's tokens, and nothing is done for nobody."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from runtime.engine.messages import EngineRequest
from tests.server.conftest import Served, say
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
