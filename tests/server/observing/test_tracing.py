"""Spans: one for every request that reached the engine, with what it took; nothing is imported unless it is wanted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from server.observing.tracing import Tracing
from tests.server.conftest import serving
from tests.server.fake_engine import FakeEngineClient
from tests.waiting import TIMEOUT_S, wait_until
from tokenizer import Tokenizer

HELLO: dict[str, Any] = {"model": "fake-model", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0.5}
CHAT = "/v1/chat/completions"


def test_spans(tokenizer: Tokenizer, fake_engine: FakeEngineClient) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.trace import SpanKind, StatusCode

    exporter = InMemorySpanExporter()
    tracing = Tracing(SimpleSpanProcessor(exporter), "fake-model")
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with serving(fake_engine, tokenizer, tracing=tracing) as served:
        usage = served.http.post(CHAT, json={**HELLO, "n": 2, "max_tokens": 7}, headers={"traceparent": parent}).json()[
            "usage"
        ]
        served.http.post(CHAT, json={**HELLO, "stream": True}, headers={"X-Request-Id": "mine"})
        served.http.post(CHAT, json={**HELLO, "n": 0})
        served.http.get("/v1/models")
        fake_engine.failing = {2}
        assert served.http.post(CHAT, json=HELLO).status_code == 500
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
    found = dict(whole.attributes or {})
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
