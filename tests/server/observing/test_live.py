"""`GET /live`: steps reach every watcher, together and merged; nothing is made while nobody looks; it ends in time."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from runtime.engine.messages import ChunkView, StepView
from server.app import create_app
from server.config import ServerConfig
from server.errors import ApiError
from server.observing.live import (
    MAX_CHUNKS,
    MAX_GATHERED_STEPS,
    MAX_PENDING_MESSAGES,
    MAX_WATCHERS,
    MERGED_S,
    LiveFeed,
    merge,
)
from tests.server.conftest import Served, serving
from tests.server.fake_engine import FakeEngineClient
from tests.server.running import running
from tests.waiting import TIMEOUT_S, wait_until
from tokenizer import Tokenizer


def step(number: int, *chunks: ChunkView, start_s: float | None = None, **fields: Any) -> StepView:
    values: dict[str, Any] = {
        "step": number,
        "start_s": number * 0.01 if start_s is None else start_s,
        "duration_s": 0.01,
        "chunks": list(chunks),
        "num_running": 2,
        "num_waiting": 1,
        "num_blocks": 100,
        "num_free_blocks": 90,
        "num_cached_blocks": 5,
        "preempted": [],
    }
    return StepView(**values | fields)


def decode(name: str, start: int, count: int = 1) -> ChunkView:
    return ChunkView(name, 0, start, count, 10, 0.0)


def prefill(name: str, start: int, count: int) -> ChunkView:
    return ChunkView(name, 0, start, count, 10, 0.0)


def messages(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


# What is merged


def test_decodes_that_follow_each_other_are_one_step() -> None:
    first = step(0, decode("a", 10), decode("b", 40), block_map="10u90f")
    second = step(1, decode("a", 11), num_waiting=7)
    (merged,) = merge([first, second])
    assert merged.chunks == [decode("a", 10, 2), decode("b", 40)]
    assert (merged.step, merged.start_s, merged.num_waiting) == (1, 0.0, 7)
    assert merged.duration_s == pytest.approx(0.02)
    assert merged.block_map == "10u90f"


def test_pieces_of_prompts_and_preemptions_stay_by_themselves() -> None:
    steps = [
        step(0, decode("a", 10)),
        step(1, decode("a", 11), prefill("b", 0, 4)),
        step(2, decode("a", 12), prefill("b", 4, 6)),
        step(3, decode("a", 13), preempted=["b"]),
        step(4, decode("a", 14)),
    ]
    assert merge(steps) == steps


def test_a_merged_step_is_short_and_loses_no_token() -> None:
    steps = [step(number, decode("a", 10 + number)) for number in range(100)]
    merged = merge(steps)
    assert len(merged) < 60
    assert all(each.duration_s <= MERGED_S + 1e-9 for each in merged)
    assert sum(each.chunks[0].count for each in merged) == 100
    positions = [each.chunks[0].start for each in merged]
    assert positions == sorted(positions)


# The feed


class Watched:
    """A feed on a loop of this thread."""

    def __init__(self, engine: FakeEngineClient) -> None:
        self.closing = asyncio.Event()
        self.feed = LiveFeed(engine, self.closing)


async def next_with_steps(stream: Any) -> dict[str, Any]:
    while True:
        message: dict[str, Any] = msgspec.json.decode((await anext(stream)).removeprefix(b"data: "))
        if message["steps"] or message["num_missed"]:
            return message


async def test_the_engine_is_watched_once_and_only_while_somebody_looks(fake_engine: FakeEngineClient) -> None:
    feed = Watched(fake_engine).feed
    assert not fake_engine.watchers
    first, second = feed.join(), feed.join()
    await asyncio.sleep(0.01)
    assert fake_engine.watchers
    assert len(fake_engine.watchers._sinks) == 1
    fake_engine.watchers.show(step(1, decode("a", 10)))
    for watcher in (first, second):
        message = await asyncio.wait_for(next_with_steps(watcher.messages()), TIMEOUT_S)
        assert message["steps"][0]["chunks"][0]["request_id"] == "a"
    first.close()
    assert fake_engine.watchers
    second.leave()
    async with asyncio.timeout(TIMEOUT_S):
        while fake_engine.watchers:
            await asyncio.sleep(0.001)


async def test_messages_come_at_most_ten_times_a_second_however_many_steps(fake_engine: FakeEngineClient) -> None:
    feed = Watched(fake_engine).feed
    watcher = feed.join()
    done = threading.Event()

    def work() -> None:
        for number in range(2000):
            fake_engine.watchers.show(step(number, decode("a", 10 + number), start_s=number * 0.0005))
            time.sleep(0.0002)
        done.set()

    stream = watcher.messages()
    await anext(stream)
    await asyncio.sleep(0.01)
    begun = time.monotonic()
    thread = threading.Thread(target=work)
    thread.start()
    num_tokens = num_messages = num_missed = 0
    while num_tokens + num_missed < 2000:
        message = await asyncio.wait_for(next_with_steps(stream), TIMEOUT_S)
        num_messages += 1
        num_missed += message["num_missed"]
        num_tokens += sum(chunk["count"] for each in message["steps"] for chunk in each["chunks"])
    assert num_messages <= (time.monotonic() - begun) / 0.1 + 2
    thread.join()
    watcher.close()


async def test_what_has_no_room_is_counted(fake_engine: FakeEngineClient) -> None:
    feed = Watched(fake_engine).feed
    watcher = feed.join()
    stream = watcher.messages()
    await anext(stream)
    await asyncio.sleep(0.01)
    for number in range(MAX_GATHERED_STEPS + 7):
        fake_engine.watchers.show(step(number, prefill("a", 0, 5), preempted=[], start_s=number))
    message = await asyncio.wait_for(next_with_steps(stream), TIMEOUT_S)
    assert message["num_missed"] == 7
    assert message["steps"][-1]["step"] == MAX_GATHERED_STEPS + 6
    chunks = [prefill(str(number), 0, 5) for number in range(MAX_CHUNKS // 2)]
    for number in range(5):
        fake_engine.watchers.show(step(number, *chunks))
    message = await asyncio.wait_for(next_with_steps(stream), TIMEOUT_S)
    assert [each["step"] for each in message["steps"]] == [3, 4]
    assert message["num_missed"] == 3
    watcher.close()


async def test_a_watcher_that_does_not_read_misses_the_oldest(fake_engine: FakeEngineClient) -> None:
    watcher = Watched(fake_engine).feed.join()
    for number in range(100):
        watcher.put(b"%d" % number)
    watcher.close()
    assert len(watcher._pending) == MAX_PENDING_MESSAGES
    assert watcher._pending[-1] == b"99"


async def test_watchers_are_limited(fake_engine: FakeEngineClient) -> None:
    feed = Watched(fake_engine).feed
    watchers = [feed.join() for _ in range(MAX_WATCHERS)]
    with pytest.raises(ApiError) as error:
        feed.join()
    assert (error.value.status, error.value.code) == (429, "too_many_watchers")
    watchers.pop().close()
    watchers.append(feed.join())
    for watcher in watchers:
        watcher.close()


async def test_the_streams_end_when_the_server_does(fake_engine: FakeEngineClient) -> None:
    watched = Watched(fake_engine)
    watcher = watched.feed.join()
    reading = asyncio.ensure_future(collect(watcher.messages()))
    await asyncio.sleep(0.01)
    watched.closing.set()
    assert await asyncio.wait_for(reading, TIMEOUT_S) >= 1
    assert not fake_engine.watchers


async def collect(stream: Any) -> int:
    return len([message async for message in stream])


# The route


def test_the_stream_says_how_the_engine_is(served: Served) -> None:
    with served.http.stream("GET", "/live") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        read = messages(response.iter_lines())
        first = next(read)
        assert first["info"]["num_blocks"] == 100
        assert first["info"]["group_windows"] == [None]
        assert first["stats"]["num_free_blocks"] == 100
        assert (first["state"], first["steps"]) == ("ready", [])
        wait_until(lambda: bool(served.engine.watchers))
        served.engine.watchers.show(step(3, prefill("a", 0, 10), decode("b", 12), block_map="3u97f"))
        shown = next(message for message in read if message["steps"])
        assert shown["steps"][0]["block_map"] == "3u97f"
        assert shown["steps"][0]["chunks"][0] == {
            "request_id": "a", "index": 0, "start": 0, "count": 10, "num_prompt_tokens": 10, "arrival_s": 0.0
        }  # fmt: skip
        served.engine.die()
        down = next(message for message in read if message["state"] == "down")
        assert down["stats"] is None
    wait_until(lambda: not served.engine.watchers)
    served.engine.revive()


def test_it_wants_the_key_like_every_route(fake_engine: FakeEngineClient, tokenizer: Tokenizer) -> None:
    with serving(fake_engine, tokenizer, config=ServerConfig(api_keys=("secret",))) as served:
        assert served.http.get("/live").status_code == 401
        with served.http.stream("GET", "/live", headers={"Authorization": "Bearer secret"}) as response:
            assert response.status_code == 200
            assert next(messages(response.iter_lines()))["state"] == "ready"


def test_an_open_view_does_not_keep_the_server_from_ending(fake_engine: FakeEngineClient, tokenizer: Tokenizer) -> None:
    app = create_app(fake_engine, tokenizer)
    with (
        running(app) as url,
        httpx.Client(base_url=url, timeout=TIMEOUT_S) as client,
        client.stream("GET", "/live") as response,
    ):
        read = messages(response.iter_lines())
        assert next(read)["state"] == "ready"
        assert app.lifecycle.num_open == 0  # nobody waits for it
        app.state.service.bridge._loop.call_soon_threadsafe(app.lifecycle.closing.set)
        assert len(list(read)) <= 5  # to its end
    assert not fake_engine.watchers
