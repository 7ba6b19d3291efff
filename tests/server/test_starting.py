"""A server's life as a process: the port is open while the model is loaded, what answers then, and how a start ends;
`serve` ready, in use, drained, forced; and a drain under load: nobody new is let in, whoever is inside finishes, and
the process ends with 0."""

from __future__ import annotations

import json
import logging
import re
import signal
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import ollama
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

import server.app
import server.http_server
import tokenizer.warm_up
from models.checkpoints.hub import BUNDLED_MODEL
from models.errors import ModelLoadError
from runtime.cli import app
from runtime.later import later
from runtime.text.load import read_tokenizer
from server.config import ServerConfig, ServerConfigError
from server.loading import ServerStartError, TokenizerAhead, warm_up
from server.names import served_names
from server.serve import check_files, listen, serve
from tests.models.encoder_cases import write_encoder
from tests.server.fake_engine import FakeEngineClient
from tests.server.running import serving_process
from tests.server.starting import StartingServer, starting_server
from tests.waiting import TIMEOUT_S, wait_until
from tokenizer.errors import TokenizerFileError

anthropic = later("anthropic")  # takes a second to import

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
        checked = num_off = 0
        for route in starting.server.app.routes:
            path, methods = route.path, route.methods  # type: ignore[attr-defined]
            if path in WITHOUT_THE_MODEL:
                continue
            method = "POST" if "POST" in methods else min(methods - {"HEAD"})
            for name in ("response_id", "request_id:path", "model_id:path"):
                path = path.replace(f"{{{name}}}", "x")
            answer = http.request(method, path, json={} if method == "POST" else None)
            if answer.status_code == 403:  # for those with an admin key alone, which this server has not
                assert answer.json()["error"]["code"] == "weight_changes_off"
                num_off += 1
                continue
            assert (answer.status_code, answer.headers.get("Retry-After")) == (503, "2"), (method, path, answer.text)
            checked += 1
        assert num_off > 5
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


RUNNING = re.compile(r"^vllm:num_requests_running\{.*\} [1-9]", re.MULTILINE)


def ask(url: str, http: httpx.Client, max_tokens: int) -> httpx.Response:
    body = {"model": "tiny", "prompt": "x", "max_tokens": max_tokens, "ignore_eos": True}
    return http.post(f"{url}/v1/completions", json=body)


@pytest.mark.parametrize(
    ("drain_timeout_s", "signals", "stream"),
    [(0.5, [signal.SIGTERM], True), (1000.0, [signal.SIGINT, signal.SIGINT], False)],
)
def test_the_drain_has_an_end(
    tiny_folder: Path, drain_timeout_s: float, signals: list[signal.Signals], stream: bool
) -> None:
    """When the time is up, or at a second signal: a stream is told, a whole answer is a 503."""
    body = {"model": "tiny", "prompt": "x", "n": 100, "max_tokens": 500, "ignore_eos": True, "stream": stream}
    serving = serving_process(tiny_folder, {"num_blocks": 64}, drain_timeout_s=drain_timeout_s)
    with serving as (child, url), httpx.Client(timeout=TIMEOUT_S) as http:

        def interrupt() -> None:
            with httpx.Client(base_url=url, timeout=TIMEOUT_S) as other:
                wait_until(lambda: re.search(RUNNING, other.get("/metrics").text) is not None)
                child.send_signal(signals[0])
                for number in signals[1:]:  # of the last one the server may end before it answers anything
                    wait_until(lambda: other.get("/ready").status_code == 503)
                    child.send_signal(number)

        thread = threading.Thread(target=interrupt)
        thread.start()
        response = http.post(f"{url}/v1/completions", json=body)
        thread.join()
        if stream:
            assert response.text.endswith("\n\n")
            assert '"code":"engine_unavailable"' in response.text.split("data: ")[-1]
        else:
            assert response.status_code == 503
        output, errors = child.communicate(timeout=TIMEOUT_S)
        assert output == "ended\n"
        assert "Traceback" not in errors
        assert child.returncode == 0


@pytest.mark.parametrize(
    ("kind", "device", "is_compiled", "is_ahead"),
    [
        ("BPE", "cpu", True, True), ("BPE", "cpu", False, False), ("BPE", "emulated", False, True),
        ("WordPiece", "cpu", False, True), ("none", "cpu", False, True),
    ],
)  # fmt: skip
def test_the_tokenizer_is_read_while_the_engine_starts_unless_that_compiles_its_loops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, device: str, is_compiled: bool, is_ahead: bool
) -> None:
    folder = BUNDLED_MODEL if kind == "BPE" else write_encoder(tmp_path, "bert")
    if kind == "none":
        (folder / "tokenizer.json").unlink()
    monkeypatch.setattr(tokenizer.warm_up, "is_compiled", lambda: is_compiled)
    ahead = TokenizerAhead(folder, None, device)
    assert (ahead._read.result(TIMEOUT_S) is not None) == is_ahead
    found = ahead.tokenizer(folder)
    assert (found is None) == (kind == "none")
    if found is not None:
        assert found.encode("a text") == read_tokenizer(folder).encode("a text")


def test_a_model_to_be_downloaded_and_a_tokenizer_that_is_not_readable(tmp_path: Path) -> None:
    later = TokenizerAhead(None, "{{ 1 }}", "cpu").tokenizer(BUNDLED_MODEL)
    assert later is not None
    assert later.chat_templates == {"default": "{{ 1 }}"}
    (write_encoder(tmp_path, "bert") / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(TokenizerFileError, match=r"tokenizer\.json"):
        TokenizerAhead(tmp_path, None, "cpu").tokenizer(tmp_path)


def test_a_port_in_use_is_said_before_the_model_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerStartError, match=f"port {port} of 127.0.0.1 is in use"):
            serve(tmp_path / "nothing", port=port)
    with pytest.raises(ModelLoadError):
        serve(tmp_path / "nothing", port=0)


@pytest.mark.parametrize("host", ["no such host", "192.0.2.1"])
def test_an_address_that_is_not_ours(host: str) -> None:
    with pytest.raises(ServerStartError, match=host):
        listen(host, 0)


def test_listening_on_any_port() -> None:
    with listen("127.0.0.1", 0) as listener:
        assert listener.getsockname()[1] > 0


def test_a_model_that_fails_on_its_first_request_is_not_served() -> None:
    engine = FakeEngineClient(lambda request, index: [1] * 10)
    warm_up(engine)
    assert [len(request.prompt_token_ids) for request in engine.requests] == [4]
    engine.reset(engine.script)
    engine.failing = {0}
    with pytest.raises(ServerStartError, match="failed"):
        warm_up(engine)
    engine.close()


@pytest.mark.parametrize(("kind", "route"), [("bert", "embeddings"), ("bert_pairs", "score")])
def test_a_model_that_writes_no_text_is_served(tmp_path: Path, kind: str, route: str) -> None:
    """Its first request is an embedding, or a text's labels."""
    body = {"embeddings": {"input": "one"}, "score": {"text_1": "one", "text_2": "two"}}[route]
    folder = write_encoder(tmp_path, kind)
    with serving_process(folder, {"load_format": "auto"}) as (_, url), httpx.Client(timeout=TIMEOUT_S) as http:
        wait_until(lambda: http.get(f"{url}/ready").status_code == 200)
        answer = http.post(f"{url}/v1/{route}", json={"model": "tiny", **body})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("given", "names"),
    [(None, []), ("a", ["a"]), ("a,b", ["a", "b"]), (["a", "b, c", "a"], ["a", "b", "c"]), ("org/a:7b", ["org/a:7b"])],
)
def test_served_names(given: str | list[str] | None, names: list[str]) -> None:
    assert served_names(given) == names


def test_a_folder_of_prefixes_that_keys_do_not_share_is_refused() -> None:
    check_files(ServerConfig(api_keys=("sk-one",), share_prefix_cache=True), "prefixes")
    with pytest.raises(ServerConfigError, match=r"would hold the prompts of all API keys .*--share-prefix-cache"):
        check_files(ServerConfig(api_keys=("sk-one",)), "prefixes")


@pytest.mark.parametrize("given", ["a b", "", ["a", ""], "a,,b"])
def test_what_is_no_served_name(given: str | list[str]) -> None:
    with pytest.raises(ServerConfigError, match="--served-model-name a,b"):
        served_names(given)


def test_a_second_name_after_a_blank_is_told_how_to_write_it(capsys: pytest.CaptureFixture[str]) -> None:
    """As vLLM's command takes it: here it is an argument too many."""
    with pytest.raises(SystemExit) as ended:
        app(["serve", "demo", "--served-model-name", "a", "b"])
    assert ended.value.code == 2
    assert "--served-model-name a,b" in capsys.readouterr().err


ENGINE: dict[str, object] = {"num_blocks": 1000, "in_process": True}


def body(max_tokens: int, **fields: object) -> dict[str, object]:
    return {"model": "tiny", "prompt": "x", "max_tokens": max_tokens, "ignore_eos": True, **fields}


def test_a_drain_under_load(tiny_folder: Path) -> None:
    """While a long stream runs: `/ready` says no, new requests are told to come again, on the old connection and on new
    ones; the stream ends as it should; a stream that only watches does not hold the process up; one line a request is
    in the log, and no traceback."""
    serving = serving_process(tiny_folder, ENGINE, drain_timeout_s=1000, log_format="json")
    with serving as (child, url), httpx.Client(base_url=url, timeout=TIMEOUT_S) as http:
        with http.stream("POST", "/v1/completions", json=body(2000, stream=True)) as response:
            lines = response.iter_lines()
            for _ in range(10):
                next(lines)
            is_watching = threading.Event()

            def watch() -> None:
                with httpx.stream("GET", f"{url}/live", timeout=TIMEOUT_S) as live:
                    for _ in live.iter_lines():
                        is_watching.set()

            watcher = threading.Thread(target=watch)
            watcher.start()
            assert is_watching.wait(TIMEOUT_S)
            with httpx.Client(base_url=url, timeout=TIMEOUT_S) as other:
                assert other.get("/ready").status_code == 200
                assert other.post("/v1/completions", json=body(2)).status_code == 200
                child.send_signal(signal.SIGTERM)
                wait_until(lambda: other.get("/ready").status_code == 503)
                assert other.get("/ready").json() == {"ready": False, "state": "draining"}
                assert other.get("/health").status_code == 200
                assert "\nxserv:draining{" in other.get("/metrics").text
                refused = other.post("/v1/completions", json=body(2))
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "draining"
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.headers["connection"] == "close"
            rest = list(lines)
        assert rest[-2:] == ["data: [DONE]", ""]
        assert '"finish_reason":"length"' in rest[-4]
        output, errors = child.communicate(timeout=TIMEOUT_S)
        watcher.join(TIMEOUT_S)
        assert not watcher.is_alive()
    assert output == "ended\n"
    assert child.returncode == 0
    logged = [json.loads(line) for line in errors.splitlines()]
    assert not [line for line in logged if "exception" in line or line["level"] in ("error", "critical")]
    statuses = [line["status"] for line in logged if line.get("path") == "/v1/completions"]
    assert sorted(statuses) == [200, 200, 503]


def test_a_hang_up_without_files_of_keys_ends_nothing_but_a_terminals_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = object.__new__(server.http_server.HttpServer)
    one.app = SimpleNamespace(config=ServerConfig())  # type: ignore[assignment]
    ended: list[int] = []
    monkeypatch.setattr(server.http_server.HttpServer, "handle_exit", lambda self, sig, frame: ended.append(sig))
    monkeypatch.setattr(server.http_server, "sys", SimpleNamespace(stdin=None))
    with caplog.at_level(logging.INFO):
        one._hang_up()
    assert "no files of API keys" in caplog.text
    assert ended == []
    monkeypatch.setattr(server.http_server, "sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))
    one._hang_up()
    assert ended == [signal.SIGTERM]


def test_a_hang_up_reads_admin_keys_again_without_other_keys(tmp_path: Path) -> None:
    file = tmp_path / "admin"
    file.write_text("sk-old\n")
    app = server.app.Application(["m"], ServerConfig(admin_key_files=(str(file),)))
    one = object.__new__(server.http_server.HttpServer)
    one.app = app
    file.write_text("sk-new\n")
    one._hang_up()
    assert app.admin_keys.holder_of(b"sk-new") is not None
    assert app.admin_keys.holder_of(b"sk-old") is None


def test_keys_are_read_again_and_an_idle_server_ends_at_once(tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-old\n")
    times = {"drain_timeout_s": 1000, "keep_alive_timeout_s": 1000}  # neither is waited for
    serving = serving_process(tiny_folder, ENGINE, log_format="json", api_key_files=[str(file)], **times)
    with serving as (child, url), httpx.Client(base_url=url, timeout=TIMEOUT_S) as http:

        def status(key: str) -> int:
            return http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code

        assert (status("sk-old"), status("sk-new")) == (200, 401)
        file.write_text("sk-new\n")
        child.send_signal(signal.SIGHUP)
        wait_until(lambda: status("sk-new") == 200)
        assert status("sk-old") == 401
        child.send_signal(signal.SIGTERM)
        assert child.wait(TIMEOUT_S) == 0
