"""Who begins and who gives way when there is more than the server holds; and uvicorn's private parts that the protocol
replaces or reads: an upgrade that changes them fails here."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import socket
import time
import tomllib
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn
from uvicorn.protocols.http import httptools_impl

from server.config import ServerConfig, ServerConfigError
from server.transport import protocol
from server.transport.admission import PATIENCE_S, PER_TICK, TICK_S, Crowd, Turns, Wait
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


ROOT = Path(__file__).parents[3]


def test_the_installed_version_is_known_and_others_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    protocol.check_uvicorn(uvicorn.__version__)
    for version in ("0.33.9", "0.55.0", "1.0", "unknown"):
        with pytest.raises(ServerConfigError, match=f"uvicorn {version} is not known: .*limits of headers"):
            protocol.check_uvicorn(version)
    monkeypatch.setattr(uvicorn, "__version__", "0.99.0")
    with pytest.raises(ServerConfigError, match=r"uvicorn 0\.99\.0 is not known"):
        protocol.uvicorn_config(lambda scope, receive, send: None, ServerConfig())  # type: ignore[arg-type,return-value]


def test_the_package_asks_for_the_known_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (asked,) = (each for each in project["dependencies"] if each.startswith("uvicorn"))
    bounds = [tuple(map(int, pair)) for pair in re.findall(r"(\d+)\.(\d+)", asked)]
    assert tuple(bounds) == protocol.UVICORN_VERSIONS


def test_what_is_replaced_or_read_is_there() -> None:
    """Each method that ours calls by `super()` is uvicorn's, and each field that it reads is set there or by ours."""
    theirs = httptools_impl.HttpToolsProtocol
    (ours,) = (
        node
        for node in ast.parse(inspect.getsource(protocol)).body
        if isinstance(node, ast.ClassDef) and node.name == "LimitedHttpProtocol"
    )
    text = ast.unparse(ours)
    replaced = set(re.findall(r"super\(\)\.(\w+)", text)) | {"send_400_response", "_unsupported_upgrade_warning"}
    for name in replaced:
        assert callable(getattr(theirs, name, None)), name
    source = inspect.getsource(httptools_impl)
    own = {node.name for node in ours.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    own |= {
        node.target.id for node in ours.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    own |= set(re.findall(r"self\.(_\w+)(?:: [^=]+)? = ", text)) | {"_whole_app"}
    for name in set(re.findall(r"self\.(\w+)", text)) - own:
        assert re.search(rf"self\.{name}\b", source) or hasattr(theirs, name), name
    for name in set(re.findall(r"self\.(?:cycle|flow)\.(\w+)", text)):
        assert re.search(rf"\b{name}\b", source), name
