"""The load and its numbers against a small server of the test's own, which can misbehave on purpose."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from runtime.bench.load.http_client import Origin, ask_json
from runtime.bench.load.samples import Sample, as_text, file_samples, random_samples, trace_samples
from runtime.bench.load.serving import arrivals, bench_serve, check_load
from runtime.bench.metrics import BenchmarkError
from runtime.bench.options import Load


class FakeServer:
    """Answers /v1/models, and completions and chats with one chunk a token; `fault` says what goes wrong with the
    requests after the first `num_good`."""

    def __init__(self, fault: str | None = None, num_good: int = 0) -> None:
        self.will_fail = fault
        self.num_good = num_good
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
            await self.complete(writer, json.loads(body), is_chat="/chat/" in head)
            self.num_open -= 1

    def send(self, writer: asyncio.StreamWriter, body: bytes, *, status: str = "200 OK", length: bool) -> None:
        size = f"content-length: {len(body)}\r\n" if length else "transfer-encoding: chunked\r\n"
        writer.write(f"HTTP/1.1 {status}\r\n{size}\r\n".encode() + (body if length else b""))

    async def complete(self, writer: asyncio.StreamWriter, payload: dict[str, Any], is_chat: bool) -> None:
        self.payloads.append(payload)
        fault = self.will_fail if len(self.payloads) > self.num_good else None
        if fault == "refuse":
            self.send(writer, b'{"error": {"message": "too\\nlong"}}', status="400 Bad Request", length=True)
            return
        self.send(writer, b"", length=False)
        if is_chat:
            role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
            self.chunk(writer, f"data: {json.dumps(role)}\n\n".encode())
        num_tokens = payload["max_tokens"] - (fault == "short")
        for index in range(num_tokens):
            await asyncio.sleep(0.01)
            said = {"delta": {"content": "é"}} if is_chat else {"text": "é"}
            event: dict[str, Any] = {"choices": [{"index": 0, **said}], "usage": None}
            if fault == "error" and index == 1:
                event = {"error": {"message": "lost"}}
            # The event is cut in two chunks in the middle of a character.
            data = f"data: {json.dumps(event, ensure_ascii=False)}\r\n\r\n".encode()
            cut = data.find(b"\xa9")
            for piece in (data[:cut], data[cut:]):
                self.chunk(writer, piece)
        prompt = payload["messages"][0]["content"].split() if is_chat else payload["prompt"]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": num_tokens}
        tail = f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode()
        if fault != "cut":
            tail += b"data: [DONE]\n\n"
        if fault != "broken":
            self.chunk(writer, tail)
            writer.write(b"0\r\n\r\n")

    def chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self.handle, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
            if self.num_connections:
                await self.all_closed.wait()


SAMPLES = random_samples(4, input_len=5, output_len=4, vocab_size=100)


async def test_report_has_the_known_keys_and_plausible_times() -> None:
    fake = FakeServer()
    async with fake.running() as url:
        report = await bench_serve(url, Load(max_concurrency=2), SAMPLES[:3], SAMPLES[3:], api_key="k")
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


FAULTS = [
    ("refuse", "answered 400: .*too.*long"),
    ("short", "gave 3 tokens where 4 were asked for"),
    ("error", "broke off: .*lost"),
    ("cut", r"ended without \[DONE\]"),
    ("broken", "ended before the answer did"),
]


@pytest.mark.parametrize(("fault", "words"), FAULTS)
async def test_what_is_not_whole_is_not_timed(fault: str, words: str) -> None:
    async with FakeServer(fault).running() as url:
        with pytest.raises(BenchmarkError, match=words):
            await bench_serve(url, Load(), SAMPLES[:3], SAMPLES[3:])


@pytest.mark.parametrize(("fault", "words"), FAULTS)
async def test_requests_that_fail_are_counted_and_not_timed(fault: str, words: str) -> None:
    async with FakeServer(fault, num_good=2).running() as url:
        report = await bench_serve(
            url, Load(max_concurrency=1), SAMPLES[:3], SAMPLES[3:], save_detailed=True, goodput={"ttft": 1e6}
        )
    assert (report["completed"], report["failed"]) == (1, 2)
    assert (report["total_input_tokens"], report["total_output_tokens"]) == (5, 4)
    assert report["request_goodput"] == pytest.approx(1 / report["duration"])
    ((message, times),) = report["error_counts"].items()
    assert times == 2
    assert re.search(words, message)
    assert report["errors"] == ["", message, message]
    assert report["p99_ttft_ms"] == pytest.approx(report["ttfts"][0] * 1e3)
    assert len(report["itls"][0]) == 3
    json.dumps(report, allow_nan=False)


async def test_an_answer_that_takes_too_long() -> None:
    async with FakeServer().running() as url:
        slow = [*SAMPLES[:1], Sample([1], 400)]
        report = await bench_serve(url, Load(timeout_s=2.0), slow)
    assert report["completed"] == 1
    assert list(report["error_counts"].values()) == [1]
    assert "within 2 s" in next(iter(report["error_counts"]))


async def test_a_chats_first_token_comes_after_its_role() -> None:
    fake = FakeServer()
    async with fake.running() as url:
        report = await bench_serve(url, Load(endpoint="chat"), as_text(SAMPLES[:3]), goodput={"ttft": 1.0, "e2el": 1e6})
        for samples, words in ((SAMPLES, "text, not of token ids"), ([Sample("x", 1, 0.5)], "--trace-rate")):
            with pytest.raises(BenchmarkError, match=words):
                await bench_serve(url, Load(endpoint="chat", request_rate=5.0), samples)
    assert report["backend"] == "openai-chat"
    assert report["total_input_tokens"] == 15
    assert report["mean_ttft_ms"] >= 9  # the first chunk comes at once
    assert report["request_goodput"] == 0.0
    assert report["max_concurrent_requests"] == 3
    assert report["total_events"] == 3 * 6


async def test_without_ignore_eos_a_short_answer_is_fine() -> None:
    fake = FakeServer("short")
    async with fake.running() as url:
        report = await bench_serve(url, Load(ignore_eos=False), SAMPLES[:3], percentile_metrics=("ttft",))
    assert report["total_output_tokens"] == 9
    assert "ignore_eos" not in fake.payloads[0]
    assert "mean_tpot_ms" not in report


async def test_nobody_there() -> None:
    async with FakeServer().running() as url:
        pass
    with pytest.raises(BenchmarkError, match="cannot connect"):
        await ask_json(Origin.parse(url), "/v1/models", None, None)


def test_origins() -> None:
    assert str(Origin.parse("localhost:8000/v1/")) == "http://localhost:8000"
    assert str(Origin.parse("https://host/api/v1")) == "https://host:443/api"
    for wrong in ("ftp://host", "http://", "http://host:port"):
        with pytest.raises(BenchmarkError, match="--base-url"):
            Origin.parse(wrong)


def test_arrivals_keep_the_rate() -> None:
    assert arrivals(Load(), SAMPLES) == [0.0] * 4
    many = SAMPLES * 250
    times = arrivals(Load(request_rate=50.0), many)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.01)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert deviation == pytest.approx(mean, rel=0.15)  # a Poisson process: as large as the mean
    steady = arrivals(Load(request_rate=50.0, burstiness=100.0), many)
    spread = [later - earlier for earlier, later in pairwise(steady)]
    assert max(spread) < 2 * mean


@pytest.mark.parametrize(
    ("field", "value"),
    [("endpoint", "chats"), ("request_rate", 0.0), ("request_rate", math.nan), ("max_concurrency", 0)],
)
def test_loads_that_make_no_sense(field: str, value: Any) -> None:
    with pytest.raises(BenchmarkError, match=field.replace("_", "-")):
        check_load(Load(**{field: value}))


@pytest.mark.parametrize(
    ("options", "words"),
    [({"percentile_metrics": ("tbt",)}, "'tbt' is none of ttft"), ({"goodput": {"itl": 5.0}}, "itl:5 is not ttft")],
)
async def test_unknown_metrics(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BenchmarkError, match=words):
        await bench_serve("http://x", Load(), SAMPLES, **options)


def test_random_samples_with_prefixes() -> None:
    samples = random_samples(
        9, input_len=10, output_len=6, range_ratio=0.5, prefix_len=4, num_prefixes=3, vocab_size=50
    )
    prompts = [tuple(sample.prompt) for sample in samples]
    assert len(set(prompts)) == 9
    assert len({prompt[:4] for prompt in prompts}) == 3
    assert prompts[0][:4] == prompts[3][:4] != prompts[1][:4]
    assert all(9 <= len(prompt) <= 19 and all(0 <= i < 50 for i in prompt) for prompt in prompts)
    assert all(3 <= sample.output_len <= 9 and sample.arrival_s is None for sample in samples)
    texts = [sample.prompt for sample in as_text(samples)]
    assert [len(text.split()) for text in texts] == [len(prompt) for prompt in prompts]
    assert texts[0].split()[:4] == texts[3].split()[:4]
    with pytest.raises(BenchmarkError, match="--num-prefixes 0"):
        random_samples(9, input_len=1, output_len=1, num_prefixes=0, vocab_size=50)


def test_samples_of_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [(0, 600, 9, [1, 2]), (2000, 1000, 5, [1, 3])]
    path.write_text(
        "".join(
            json.dumps({"timestamp": at, "input_length": i, "output_length": o, "hash_ids": ids}) + "\n"
            for at, i, o, ids in rows
        )
    )
    samples = trace_samples(path, 5, rate=2.0, vocab_size=1000, seed=3)
    assert [(len(each.prompt), each.output_len, each.arrival_s) for each in samples] == [(600, 9, 0.0), (1000, 5, 1.0)]
    assert samples[0].prompt[:512] == samples[1].prompt[:512]
    assert samples[0].prompt[512:600] != samples[1].prompt[512:600]


def test_samples_of_a_file(tmp_path: Path) -> None:
    text, lines = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    text.write_text("one\n\ntwo\n")
    assert file_samples(text, 3, 7) == [Sample("one", 7), Sample("two", 7), Sample("one", 7)]
    lines.write_text('{"prompt": [1, 2], "output_tokens": 3}\n{"prompt": "x"}\n')
    assert file_samples(lines, 2, 7) == [Sample([1, 2], 3), Sample("x", 7)]
    for content, words in (
        ("[]", r"jsonl:1: prompt is neither"),
        ("{", "1: not JSON"),
        ('{"prompt": "x", "output_tokens": 0}', "output_tokens 0 is"),
        ("", "no prompt in it"),
    ):
        lines.write_text(content)
        with pytest.raises(BenchmarkError, match=words):
            file_samples(lines, 2, 7)
    for path in (tmp_path / "none.txt", tmp_path / "prompts.csv"):
        with pytest.raises(BenchmarkError, match=path.name):
            file_samples(path, 2, 7)
