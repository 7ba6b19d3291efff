"""The load and its numbers against a small server of the test's own, which can misbehave on purpose."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest

from runtime.bench.http_client import Origin, get_json
from runtime.bench.metrics import BenchmarkError
from runtime.bench.serving import Load, _arrivals, bench_serve


class FakeServer:
    """Answers /v1/models, and /v1/completions with one chunk a token; `fault` says what goes wrong."""

    def __init__(self, fault: str | None = None) -> None:
        self.fault = fault
        self.payloads: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.num_open = 0
        self.most_open = 0
        self.num_connections = 0
        self.all_closed = asyncio.Event()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.all_closed.clear()
        with contextlib.suppress(OSError):  # the client may go away
            try:
                await self.answer(reader, writer)
            finally:
                writer.close()
                await writer.wait_closed()
        self.num_connections -= 1
        if self.num_connections == 0:
            self.all_closed.set()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
        self.keys.append(headers.get("authorization"))
        body = await reader.readexactly(int(headers["content-length"]))
        if head.startswith("GET /v1/models "):
            self.send(writer, json.dumps({"data": [{"id": "fake"}]}).encode(), length=True)
        else:
            self.num_open += 1
            self.most_open = max(self.most_open, self.num_open)
            await self.complete(writer, json.loads(body))
            self.num_open -= 1

    def send(
        self, writer: asyncio.StreamWriter, body: bytes, *, status: str = "200 OK", length: bool
    ) -> None:
        size = f"content-length: {len(body)}\r\n" if length else "transfer-encoding: chunked\r\n"
        writer.write(f"HTTP/1.1 {status}\r\n{size}\r\n".encode() + (body if length else b""))

    async def complete(self, writer: asyncio.StreamWriter, payload: dict[str, Any]) -> None:
        self.payloads.append(payload)
        if self.fault == "refuse":
            self.send(writer, b'{"error": {"message": "too\\nlong"}}', status="400 Bad Request", length=True)
            return
        self.send(writer, b"", length=False)
        num_tokens = payload["max_tokens"] - (self.fault == "short")
        for index in range(num_tokens):
            await asyncio.sleep(0.01)
            event = {"choices": [{"index": 0, "text": "é"}], "usage": None}
            if self.fault == "error" and index == 1:
                event = {"error": {"message": "lost"}}
            # The event is cut in two chunks in the middle of a character.
            data = f"data: {json.dumps(event, ensure_ascii=False)}\r\n\r\n".encode()
            cut = data.find(b"\xa9")
            for piece in (data[:cut], data[cut:]):
                writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        usage = {"prompt_tokens": len(payload["prompt"]), "completion_tokens": num_tokens}
        tail = f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode()
        if self.fault != "cut":
            tail += b"data: [DONE]\n\n"
        if self.fault != "broken":
            writer.write(f"{len(tail):x}\r\n".encode() + tail + b"\r\n0\r\n\r\n")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self.handle, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
            if self.num_connections:
                await self.all_closed.wait()


def load(**fields: Any) -> Load:
    return Load(**{"num_prompts": 3, "random_input_len": 5, "random_output_len": 4, **fields})


async def test_report_has_the_known_keys_and_plausible_times() -> None:
    fake = FakeServer()
    async with fake.running() as url:
        report = await bench_serve(url, load(max_concurrency=2), vocab_size=100, api_key="k")
    assert len(fake.payloads) == 4  # a warm-up, three timed ones
    assert fake.most_open == 2
    assert fake.payloads[0]["model"] == report["model_id"] == "fake"
    assert fake.payloads[0]["ignore_eos"] is True
    assert set(fake.keys) == {"Bearer k"}
    assert (report["completed"], report["total_input_tokens"], report["total_output_tokens"]) == (3, 15, 12)
    assert report["request_rate"] == "inf"
    assert report["request_throughput"] == pytest.approx(3 / report["duration"])
    assert report["output_throughput"] == pytest.approx(12 / report["duration"])
    assert report["total_token_throughput"] == pytest.approx(27 / report["duration"])
    for name in ("ttft", "tpot", "itl", "e2el"):
        for kind in ("mean", "median", "std", "p99"):
            assert math.isfinite(report[f"{kind}_{name}_ms"])
    # Four chunks, at least ten milliseconds apart; e2el = ttft + 3 * tpot, in the mean too.
    assert report["mean_ttft_ms"] >= 9
    assert report["mean_itl_ms"] >= 9
    assert report["mean_e2el_ms"] == pytest.approx(report["mean_ttft_ms"] + 3 * report["mean_tpot_ms"])
    json.dumps(report, allow_nan=False)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("refuse", "answered 400: .*too.*long"),
        ("short", "gave 3 tokens where 4 were asked for"),
        ("error", "broke off: .*lost"),
        ("cut", r"ended without \[DONE\]"),
        ("broken", "ended before the answer did"),
    ],
)
async def test_what_is_not_whole_is_not_timed(fault: str, words: str) -> None:
    async with FakeServer(fault).running() as url:
        with pytest.raises(BenchmarkError, match=words):
            await bench_serve(url, load(), vocab_size=100)


async def test_without_ignore_eos_a_short_answer_is_fine() -> None:
    fake = FakeServer("short")
    async with fake.running() as url:
        report = await bench_serve(url, load(ignore_eos=False), vocab_size=100, percentile_metrics=("ttft",))
    assert report["total_output_tokens"] == 9
    assert "ignore_eos" not in fake.payloads[0]
    assert "mean_tpot_ms" not in report


async def test_nobody_there() -> None:
    async with FakeServer().running() as url:
        pass
    with pytest.raises(BenchmarkError, match="cannot connect"):
        await get_json(Origin.parse(url), "/v1/models", None)


def test_origins() -> None:
    assert str(Origin.parse("localhost:8000/v1/")) == "http://localhost:8000"
    assert str(Origin.parse("https://host/api/v1")) == "https://host:443/api"
    for wrong in ("ftp://host", "http://", "http://host:port"):
        with pytest.raises(BenchmarkError, match="--base-url"):
            Origin.parse(wrong)


def test_arrivals_keep_the_rate() -> None:
    assert list(_arrivals(load())) == [0.0, 0.0, 0.0]
    times = list(_arrivals(load(num_prompts=1000, request_rate=50.0)))
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.01)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert deviation == pytest.approx(mean, rel=0.15)  # a Poisson process: as large as the mean
    steady = list(_arrivals(load(num_prompts=1000, request_rate=50.0, burstiness=100.0)))
    spread = [later - earlier for earlier, later in pairwise(steady)]
    assert max(spread) < 2 * mean


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_prompts", 0), ("request_rate", 0.0), ("request_rate", math.nan), ("max_concurrency", 0)],
)
def test_loads_that_make_no_sense(field: str, value: float) -> None:
    with pytest.raises(BenchmarkError, match=field.replace("_", "-")):
        load(**{field: value})


async def test_unknown_metric() -> None:
    with pytest.raises(BenchmarkError, match="'tbt' is none of ttft"):
        await bench_serve("http://x", load(), vocab_size=9, percentile_metrics=("tbt",))
