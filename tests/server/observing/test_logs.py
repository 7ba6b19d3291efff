"""What the log says and what it keeps to itself, and that it never costs a request. A span for every request that
reached the engine, with what it took; nothing is imported unless it is wanted."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from runtime.engine.messages import PrefixMiss, ProposalCounts
from runtime.progress import is_redirected, say_on_stderr
from server.config import ServerConfig, ServerConfigError
from server.observing import logs
from server.observing.logs import FIELDS, JsonFormatter, LogWriter, TextFormatter, close_log, open_log
from server.observing.tracing import Tracing
from tests.server.conftest import Served, serving
from tests.server.fake_engine import FakeEngineClient
from tests.waiting import TIMEOUT_S, wait_until
from tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
SECRET = "the password is swordfish"
HELLO: dict[str, Any] = {"model": "fake-model", "messages": [{"role": "user", "content": SECRET}]}


@contextmanager
def logging_to(config: ServerConfig) -> Iterator[LogWriter]:
    """The program's log as `serve` opens it; as before after the block."""
    loggers = [logging.getLogger(name) for name in ("xserv", "uvicorn")]
    levels = [logger.level for logger in loggers]
    writer = open_log(config)
    try:
        yield writer
    finally:
        close_log(writer)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@contextmanager
def served_with_log(
    tokenizer: Tokenizer, engine: FakeEngineClient, file: Path, **settings: Any
) -> Iterator[tuple[Served, LogWriter]]:
    config = ServerConfig(log_format="json", log_file=str(file), **settings)
    with logging_to(config) as writer, serving(engine, tokenizer, config=config, log_writer=writer) as served:
        yield served, writer


def test_progress_is_a_record_where_lines_are_json(tmp_path: Path) -> None:
    file = tmp_path / "log"
    with logging_to(ServerConfig(log_format="json", log_file=str(file))):
        say_on_stderr("loading weights, 3 s")
        assert is_redirected(), "of which the engine's process is told"
    assert [line["message"] for line in lines_of(file)] == ["loading weights, 3 s"]
    with logging_to(ServerConfig(log_file=str(file))):
        assert not is_redirected()


def test_an_answer_is_one_line(tokenizer: Tokenizer, fake_engine: FakeEngineClient, tmp_path: Path) -> None:
    file = tmp_path / "log"
    with served_with_log(tokenizer, fake_engine, file) as (served, _):
        whole = served.http.post(CHAT, json=HELLO, headers={"X-Request-Id": "mine/1"})
        streamed = served.http.post(CHAT, json={**HELLO, "stream": True})
        refused = served.http.post(CHAT, json={**HELLO, "n": 0})
        served.http.get("/v1/nothing?token=geheim")
        served.http.get("/health")
    lines = [line for line in lines_of(file) if line["logger"] == "xserv.access"]
    assert [line["status"] for line in lines] == [200, 200, 400, 404], "probes are not worth a line"
    first, second, third, _ = lines
    assert first["request_id"] == "mine/1" == whole.headers["x-request-id"]
    assert first["generation_id"] == whole.json()["id"]
    assert first["method"] == "POST"
    assert first["path"] == CHAT
    assert first["client"] == "127.0.0.1"
    assert first["level"] == "info"
    usage = whole.json()["usage"]
    assert (first["prompt_tokens"], first["completion_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert first["finish_reasons"] == "stop"
    assert 0 < first["ttft_s"] <= first["duration_s"] < 20
    assert second["request_id"] == streamed.headers["x-request-id"] == second["generation_id"]
    assert second["completion_tokens"] == first["completion_tokens"]
    assert third["request_id"] == refused.headers["x-request-id"]
    assert "prompt_tokens" not in third
    text = file.read_text(encoding="utf-8")
    assert SECRET not in text
    assert "swordfish" not in text
    assert "geheim" not in text


def test_a_line_says_how_many_proposals_were_kept(
    tokenizer: Tokenizer, fake_engine: FakeEngineClient, tmp_path: Path
) -> None:
    file = tmp_path / "log"
    with served_with_log(tokenizer, fake_engine, file) as (served, _):
        served.http.post(CHAT, json=HELLO)
        fake_engine.proposals = ProposalCounts(9, 7, 0, 0)
        served.http.post(CHAT, json={**HELLO, "n": 2})
    without, line = (each for each in lines_of(file) if each["logger"] == "xserv.access")
    assert (line["proposed_tokens"], line["accepted_tokens"]) == (18, 14), "of both choices"
    assert "proposed_tokens" not in without


def test_a_line_and_usage_say_why_a_prefix_missed(
    tokenizer: Tokenizer, fake_engine: FakeEngineClient, tmp_path: Path
) -> None:
    file = tmp_path / "log"
    with served_with_log(tokenizer, fake_engine, file) as (served, _):
        found = served.http.post(CHAT, json={**HELLO, "max_tokens": 1}).json()["usage"]["prompt_tokens_details"]
        fake_engine.prefix_miss = PrefixMiss("no_checkpoint", 32, 16)
        missed = served.http.post(CHAT, json={**HELLO, "max_tokens": 1}).json()["usage"]["prompt_tokens_details"]
    assert found == {"cached_tokens": 0}
    assert missed == {"cached_tokens": 16, "miss_reason": "no_checkpoint", "first_difference": 32}
    without, line = (each for each in lines_of(file) if each["logger"] == "xserv.access")
    assert (line["prefix_miss"], line["first_difference"]) == ("no_checkpoint", 32)
    assert "prefix_miss" not in without


def test_both_texts_at_the_difference_where_prompts_are_logged(
    tokenizer: Tokenizer, fake_engine: FakeEngineClient, tmp_path: Path
) -> None:
    """And no text of the cache without the option, even if the engine sent some."""
    shown, hidden = tmp_path / "shown", tmp_path / "hidden"
    cached = tokenizer.encode("Another text")
    fake_engine.prefix_miss, fake_engine.cached_ids = PrefixMiss("unseen", 3, 2), [*cached, -5, -5]
    for file, log_prompts in ((shown, True), (hidden, False)):
        with served_with_log(tokenizer, fake_engine, file, log_prompts=log_prompts) as (served, _):
            served.http.post(CHAT, json={**HELLO, "max_tokens": 1})
        assert fake_engine.requests[-1].shows_difference is log_prompts
    (line,) = [line for line in lines_of(shown) if "cache_has" in line]
    prompt = fake_engine.requests[-1].prompt_token_ids
    assert line["cache_has"] == repr("Another text[picture]")
    assert line["before"] == repr(tokenizer.decode(prompt[:3]))
    assert line["prompt_has"] == repr(tokenizer.decode(prompt[3:27]))
    assert line["message"] == f"reused 2 of {len(prompt)} tokens"
    assert "Another" not in hidden.read_text()


def test_prompts_where_they_are_asked_for(tokenizer: Tokenizer, fake_engine: FakeEngineClient, tmp_path: Path) -> None:
    file = tmp_path / "log"
    with served_with_log(tokenizer, fake_engine, file, log_prompts=True) as (served, _):
        generation_id = served.http.post(CHAT, json=HELLO).json()["id"]
    (line,) = [line for line in lines_of(file) if "prompt" in line]
    assert SECRET in line["prompt"]
    assert line["generation_id"] == generation_id


@pytest.mark.parametrize(
    ("given", "is_taken"),
    [("a" * 128, True), ("a" * 129, False), ("a b", False), ('"><script>', False), ("", False), ("ä", False),
     ("0af7651916cd43dd-8448:eb/211.c80319c=", True)],
)  # fmt: skip
def test_request_ids_of_clients(served: Served, given: str, is_taken: bool) -> None:
    headers = {b"x-request-id": given.encode()}
    for path in ("/v1/models", "/nothing", "/health"):
        answered = served.http.get(path, headers=headers).headers.get_list("x-request-id")
        assert len(answered) == 1
        assert (answered[0] == given) is is_taken
        assert answered[0]


def test_a_path_cannot_forge_lines(tokenizer: Tokenizer, fake_engine: FakeEngineClient, tmp_path: Path) -> None:
    file = tmp_path / "log"
    config = ServerConfig(log_file=str(file))
    with logging_to(config) as writer, serving(fake_engine, tokenizer, config=config, log_writer=writer) as served:
        served.http.get("/a%0A2026-01-01 ERROR forged%1b[31m%E2%80%A8" + "x" * 1000)
    (line,) = [line for line in file.read_text(encoding="utf-8").split("\n")[:-1] if "answers are read" not in line]
    assert "\\n2026-01-01 ERROR forged\\x1b[31m" in line
    assert len(line) < 900
    assert "\u2028" not in line


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_full_disk_costs_lines_alone(tokenizer: Tokenizer, fake_engine: FakeEngineClient) -> None:
    with served_with_log(tokenizer, fake_engine, Path("/dev/full")) as (served, writer):
        for _ in range(5):
            assert served.http.post(CHAT, json=HELLO).status_code == 200
        wait_until(lambda: writer.num_lost >= 5)
        assert "\nxserv:lost_log_lines{" in served.http.get("/metrics").text
        assert served.http.get("/ready").status_code == 200


def test_a_reader_that_stands_still_costs_lines_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a terminal that was paused: the queue fills, and whoever logs goes on."""
    monkeypatch.setattr(logs, "MAX_QUEUED_LINES", 500)

    class Stuck(io.StringIO):
        gate, stands = threading.Event(), threading.Event()

        def write(self, text: str) -> int:
            self.stands.set()
            self.gate.wait(TIMEOUT_S)
            return super().write(text)

    stream = Stuck()
    writer = LogWriter(stream, TextFormatter())
    logger = logging.getLogger("xserv.test")
    logger.addHandler(writer)
    try:
        for number in range(1000):
            logger.error("line %d", number)
            assert stream.stands.wait(TIMEOUT_S)
        assert writer.num_lost == 499, "one is being written, 500 wait"
        stream.gate.set()
    finally:
        logger.removeHandler(writer)
        writer.close()
    assert stream.getvalue().count("\n") + writer.num_lost == 1000


def test_both_formats() -> None:
    record = logging.LogRecord("xserv.x", logging.WARNING, "f", 1, "%s is wrong", ("this",), None)
    setattr(record, FIELDS, {"request_id": "r1", "status": 500})
    text = TextFormatter().format(record)
    assert text.endswith("Z WARNING xserv.x: this is wrong request_id=r1 status=500")
    line = json.loads(JsonFormatter().format(record))
    assert line.pop("time").endswith("Z")
    assert line.pop("message") == "this is wrong"
    assert line == {"level": "warning", "logger": "xserv.x", "request_id": "r1", "status": 500}
    try:
        raise ValueError("why")
    except ValueError as error:
        record.exc_info = (ValueError, error, error.__traceback__)
    assert "ValueError: why" in json.loads(JsonFormatter().format(record))["exception"]
    assert TextFormatter().format(record).endswith("ValueError: why")


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ServerConfigError, match="cannot be written"):
        open_log(ServerConfig(log_file=str(tmp_path / "no" / "log")))


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_a_traceback_from_the_engines_process(formatter: logging.Formatter) -> None:
    """It comes as text: the exception itself stayed there."""
    record = logging.LogRecord("xserv.engine", logging.ERROR, __file__, 1, "a step failed", None, None)
    record.exc_text = "Traceback (most recent call last):\nRuntimeError: planted"
    assert "RuntimeError: planted" in formatter.format(record)
    record.exc_text = None
    assert "exception" not in formatter.format(record)
    assert "\n" not in formatter.format(record)


WARM: dict[str, Any] = {"model": "fake-model", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0.5}


def test_spans(tokenizer: Tokenizer, fake_engine: FakeEngineClient) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.trace import SpanKind, StatusCode

    exporter = InMemorySpanExporter()
    tracing = Tracing(SimpleSpanProcessor(exporter), "fake-model")
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with serving(fake_engine, tokenizer, tracing=tracing) as served:
        usage = served.http.post(CHAT, json={**WARM, "n": 2, "max_tokens": 7}, headers={"traceparent": parent}).json()[
            "usage"
        ]
        fake_engine.prefix_miss = PrefixMiss("no_checkpoint", 32, 16)
        served.http.post(CHAT, json={**WARM, "stream": True}, headers={"X-Request-Id": "mine"})
        fake_engine.prefix_miss = None
        served.http.post(CHAT, json={**WARM, "n": 0})
        served.http.get("/v1/models")
        fake_engine.failing = {2}
        assert served.http.post(CHAT, json=WARM).status_code == 500
        wait_until(lambda: len(exporter.get_finished_spans()) == 3)
    tracing.close()
    whole, streamed, failed = exporter.get_finished_spans()
    assert {span.name for span in (whole, streamed, failed)} == {"llm_request"}
    assert whole.kind is SpanKind.SERVER
    assert whole.parent is not None
    assert whole.context is not None
    assert f"{whole.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert f"{whole.parent.span_id:016x}" == "b7ad6b7169203331"
    assert whole.resource.attributes["service.name"] == "xserv"
    found = dict(streamed.attributes or {})
    assert [found[f"xserv.prefix_cache.{name}"] for name in ("cached_tokens", "miss_reason", "first_difference")] == [
        16, "no_checkpoint", 32,
    ]  # fmt: skip
    found = dict(whole.attributes or {})
    assert "xserv.prefix_cache.miss_reason" not in found
    assert found["gen_ai.usage.prompt_tokens"] == usage["prompt_tokens"]
    assert found["gen_ai.usage.completion_tokens"] == usage["completion_tokens"] == 14
    assert found["gen_ai.usage.num_sequences"] == 2
    assert found["gen_ai.request.n"] == 2
    assert found["gen_ai.request.max_tokens"] == 7
    assert found["gen_ai.request.temperature"] == 0.5
    assert found["gen_ai.response.model"] == "fake-model"
    assert found["gen_ai.response.finish_reasons"] == ("length",)
    assert found["http.route"] == CHAT
    e2e, first = found["gen_ai.latency.e2e"], found["gen_ai.latency.time_to_first_token"]
    assert isinstance(e2e, float)
    assert isinstance(first, float)
    assert 0 < first <= e2e
    assert whole.end_time is not None
    assert whole.start_time is not None
    assert whole.end_time - whole.start_time == pytest.approx(e2e * 1e9, rel=1e-3)
    assert streamed.attributes is not None
    assert streamed.attributes["gen_ai.request.id"] == "mine"
    assert streamed.status.status_code is StatusCode.UNSET
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.attributes is not None
    assert failed.attributes["gen_ai.response.finish_reasons"] == ("error",)


def test_nothing_is_imported_unless_it_is_wanted() -> None:
    program = "import sys, server.serve; print([name for name in sys.modules if name.startswith('opentelemetry')])"
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=TIMEOUT_S,
        cwd=Path(__file__).parents[3],
    ).stdout  # fmt: skip
    assert output == "[]\n"
