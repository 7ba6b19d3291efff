"""The port is open while the model is loaded: what answers, what is told to come again, and how a start ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from models.errors import ModelLoadError
from server.config import ServerConfig
from server.serve import serve
from tests.server.fake_engine import FakeEngineClient
from tests.server.starting import StartingServer, starting_server
from tests.waiting import TIMEOUT_S, wait_until

MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]
WITHOUT_THE_MODEL = {"/", "/api/version", "/health", "/ready", "/metrics", "/version", "/page/{name:path}"}
"""What answers while the model is loaded; `/ready` with its own 503."""


def client_of(starting: StartingServer) -> httpx.Client:
    return httpx.Client(base_url=starting.url, timeout=TIMEOUT_S)


def test_probes_and_the_page_answer_and_the_sdks_read_why_nothing_else_does(
    tmp_path: Path, fake_engine: FakeEngineClient
) -> None:
    with (
        starting_server(tmp_path, fake_engine) as starting,
        client_of(starting) as http,
        openai.OpenAI(base_url=f"{starting.url}/v1", api_key="none", max_retries=0) as client,
        anthropic.Anthropic(base_url=starting.url, api_key="none", max_retries=0) as claude,
        ollama.Client(starting.url, trust_env=False) as llama,
    ):
        assert http.get("/health").json() == {"status": "ok"}
        ready = http.get("/ready")
        assert (ready.status_code, ready.json()) == (503, {"ready": False, "state": "starting"})
        assert int(ready.headers["Retry-After"]) >= 1
        assert http.get("/").headers["content-type"].startswith("text/html")
        assert http.get("/page/app.js").status_code == 200
        samples = {
            sample.name: sample.value
            for family in text_string_to_metric_families(http.get("/metrics").text)
            for sample in family.samples
        }
        assert samples["xserv:engine_up"] == 0.0
        assert samples["process_resident_memory_bytes"] > 0

        with pytest.raises(openai.InternalServerError) as told:
            client.chat.completions.create(model="slow", messages=MESSAGES)
        assert (told.value.status_code, told.value.code, told.value.type) == (503, "starting", "server_error")
        assert int(told.value.response.headers["Retry-After"]) >= 1
        with pytest.raises(anthropic.APIStatusError) as told_claude:
            claude.messages.create(model="slow", messages=MESSAGES, max_tokens=5)
        assert told_claude.value.status_code == 503
        body: Any = told_claude.value.body
        assert body["type"] == "error"
        assert "loaded" in body["error"]["message"]
        with pytest.raises(ollama.ResponseError, match="is starting") as told_ollama:
            llama.chat(model="slow", messages=MESSAGES)
        assert told_ollama.value.status_code == 503

        starting.start.loaded.set()
        patient = client.with_options(max_retries=5)
        answer = patient.chat.completions.create(model="slow", messages=MESSAGES, max_tokens=3)
        assert answer.choices[0].finish_reason == "length"
        assert http.get("/ready").json() == {"ready": True, "state": "ready"}
        assert 'vllm:num_requests_running{engine="0",model_name="slow"} 0.0' in http.get("/metrics").text


def test_every_other_route_says_503(tmp_path: Path, fake_engine: FakeEngineClient) -> None:
    with starting_server(tmp_path, fake_engine) as starting, client_of(starting) as http:
        checked = 0
        for route in starting.server.app.routes:
            path, methods = route.path, route.methods  # type: ignore[attr-defined]
            if path in WITHOUT_THE_MODEL:
                continue
            method = "POST" if "POST" in methods else min(methods - {"HEAD"})
            for name in ("response_id", "request_id:path", "model_id:path"):
                path = path.replace(f"{{{name}}}", "x")
            answer = http.request(method, path, json={} if method == "POST" else None)
            assert (answer.status_code, answer.headers.get("Retry-After")) == (503, "2"), (method, path, answer.text)
            checked += 1
        assert checked > 30
        assert http.get("/nowhere").status_code == 404
        assert http.get("/v1/completions").status_code == 405


def test_a_key_is_asked_for_before_anything_is_told(tmp_path: Path, fake_engine: FakeEngineClient) -> None:
    config = ServerConfig(api_keys=("secret",))
    with starting_server(tmp_path, fake_engine, config) as starting, client_of(starting) as http:
        assert http.get("/ready").status_code == 503
        assert http.get("/v1/models").status_code == 401
        assert http.get("/metrics").status_code == 401
        assert http.get("/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 503


def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_error(
    tmp_path: Path, fake_engine: FakeEngineClient
) -> None:
    with starting_server(tmp_path, fake_engine) as starting:
        starting.start.failure = ModelLoadError("model.safetensors is torn")
        starting.start.loaded.set()
        starting.thread.join(TIMEOUT_S)
        assert [str(error) for error in starting.error] == ["model.safetensors is torn"]
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{starting.url}/health", timeout=TIMEOUT_S)


def test_a_server_that_starts_can_be_told_to_end(tmp_path: Path, fake_engine: FakeEngineClient) -> None:
    with starting_server(tmp_path, fake_engine) as starting, client_of(starting) as http:
        assert http.get("/health").status_code == 200
        starting.server.handle_exit(15, None)
        starting.thread.join(TIMEOUT_S)
        assert not starting.thread.is_alive()
        assert starting.error == []  # serve closes the engine, whose failure is none of the server's
        starting.start.close()
        wait_until(lambda: starting.start.is_closed)


@pytest.mark.parametrize("options", [{"max_num_seqs": 0}, {"hang_timeout_s": -1.0}, {"device": "cpu", "dtype": "int4"}])
@pytest.mark.parametrize("in_process", [False, True])
def test_wrong_options_are_refused(options: dict[str, Any], in_process: bool) -> None:
    (name,) = [name for name in options if name != "device"]
    with pytest.raises(ValueError, match=name):
        serve(port=0, in_process=in_process, **options)
