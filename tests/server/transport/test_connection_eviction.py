"""Who gives way when there are too many connections: the order of the queues, and silent ones before a whole server."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack
from urllib.parse import urlsplit

import httpx
import pytest

from server.config import ServerConfig
from server.transport.admission import PATIENCE_S, Crowd, Wait
from server.transport.protocol import RESERVED_CONNECTIONS
from tests.server.conftest import serving
from tests.server.fake_engine import FakeEngineClient
from tests.waiting import TIMEOUT_S
from tokenizer import Tokenizer


class One:
    """A connection that notes its end."""

    is_closed = False

    def give_way(self) -> None:
        self.is_closed = True


def crowd_of(*waits: Wait | None) -> tuple[Crowd, list[One]]:
    crowd, ones = Crowd(), [One() for _ in waits]
    for one, wait in zip(ones, waits, strict=True):
        crowd.put(one, wait)
    return crowd, ones


def test_those_out_of_patience_give_way_in_order_and_the_oldest_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd, ones = crowd_of(Wait.READER, Wait.BODY, Wait.HEAD, Wait.IDLE, Wait.SILENT, Wait.SILENT, None)
    now = time.monotonic() + max(PATIENCE_S.values())
    monkeypatch.setattr(time, "monotonic", lambda: now)
    expected = [ones[4], ones[5], ones[3], ones[2], ones[1], ones[0], None]
    assert [crowd.evict() for _ in range(7)] == expected
    assert [one.is_closed for one in ones] == [True] * 6 + [False]


def test_a_new_connection_stays_while_an_older_one_has_not_sent_its_head() -> None:
    crowd, ones = crowd_of(Wait.HEAD, Wait.SILENT, Wait.HEAD, Wait.IDLE)
    assert [crowd.evict() for _ in range(5)] == [ones[3], ones[0], ones[1], ones[2], None]


def test_work_that_has_begun_is_given_time() -> None:
    crowd, ones = crowd_of(Wait.BODY, Wait.READER)
    assert crowd.evict() is None
    crowd.put(ones[0], None)
    crowd.put(ones[1], Wait.IDLE)
    assert crowd.evict() is ones[1]
    assert not ones[0].is_closed


def test_connections_that_never_speak_do_not_take_the_server_away(
    tokenizer: Tokenizer, fake_engine: FakeEngineClient
) -> None:
    with serving(fake_engine, tokenizer, config=ServerConfig(max_connections=4)) as served, ExitStack() as stack:
        address = urlsplit(served.url)
        for beginning in (b"", b"GET /v1/mod"):
            for _ in range(4 + RESERVED_CONNECTIONS + 20):
                one = stack.enter_context(socket.create_connection((address.hostname, address.port)))
                one.sendall(beginning)
            for path in ("/health", "/v1/models"):
                assert httpx.get(f"{served.url}{path}", timeout=TIMEOUT_S).status_code == 200
