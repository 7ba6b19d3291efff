"""Requests whose bodies are not whole begin a few at a time; those that are whole do not stand behind them."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import ExitStack
from urllib.parse import urlsplit

import httpx

from server.config import ServerConfig
from server.transport.admission import PER_TICK, TICK_S, Turns
from server.transport.protocol import RESERVED_CONNECTIONS
from tests.server.conftest import serving
from tests.server.fake_engine import FakeEngineClient
from tests.waiting import TIMEOUT_S
from tokenizer import Tokenizer

HALF = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def test_a_few_begin_at_a_time_in_their_order_and_who_is_released_at_once() -> None:
    begun: list[int] = []

    async def one(turns: Turns[int], number: int) -> None:
        await turns.wait(number)
        begun.append(number)

    async def all_of_them() -> None:
        turns: Turns[int] = Turns()
        tasks = [asyncio.create_task(one(turns, number)) for number in range(10 * PER_TICK)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert begun == [0]  # who comes first begins, and starts the clock
        turns.release(9 * PER_TICK)
        tasks[5].cancel()
        await asyncio.sleep(0)
        assert begun == [0, 9 * PER_TICK]
        for _ in range(3):
            num_begun = len(begun)
            start = time.monotonic()
            await asyncio.sleep(TICK_S)
            num_ticks = 1 + (time.monotonic() - start) // TICK_S
            assert num_begun < len(begun) <= num_begun + PER_TICK * num_ticks
        await asyncio.gather(*tasks, return_exceptions=True)
        turns.release(3)  # who has begun waits no longer

    asyncio.run(all_of_them())
    assert begun[2:] == [number for number in range(1, 10 * PER_TICK) if number not in (5, 9 * PER_TICK)]


def test_half_bodies_give_way_before_they_begin(tokenizer: Tokenizer, fake_engine: FakeEngineClient) -> None:
    """All places are taken within a second by clients that have sent half a body."""
    with serving(fake_engine, tokenizer, config=ServerConfig(max_connections=64)) as served, ExitStack() as stack:
        address = urlsplit(served.url)
        for _ in range(4 * (64 + RESERVED_CONNECTIONS)):
            one = stack.enter_context(socket.create_connection((address.hostname, address.port)))
            one.sendall(HALF + b'Content-Length: 100\r\n\r\n{"messages"')
        for path in ("/health", "/v1/models"):
            assert httpx.get(f"{served.url}{path}", timeout=TIMEOUT_S).status_code == 200
