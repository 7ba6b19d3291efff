"""`serve` as a process: ready, in use, drained, forced; and the parts of it that need no process."""

from __future__ import annotations

import re
import signal
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

import server.serve
from models.errors import ModelLoadError
from runtime.cli import app
from server.config import ServerConfigError
from server.serve import ServerStartError, listen, serve, served_names, warm_up
from tests.server.fake_engine import FakeEngineClient
from tests.server.running import serving_process
from tests.waiting import TIMEOUT_S, wait_until

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
    ("device", "is_compiled", "is_warmed"),
    [("cpu", True, True), ("cpu", False, False), ("emulated", False, True), ("nonsense", False, False)],
)
def test_the_tokenizer_is_compiled_in_the_server_only_where_nobody_else_does(
    monkeypatch: pytest.MonkeyPatch, device: str, is_compiled: bool, is_warmed: bool
) -> None:
    calls: list[None] = []
    stand_in = SimpleNamespace(is_compiled=lambda: is_compiled, warm_up=lambda: calls.append(None))
    monkeypatch.setattr(server.serve, "tokenizer_warm_up", stand_in)
    server.serve._warm_up_tokenizer(device)
    assert bool(calls) == is_warmed


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


@pytest.mark.parametrize(
    ("given", "names"),
    [(None, []), ("a", ["a"]), ("a,b", ["a", "b"]), (["a", "b, c", "a"], ["a", "b", "c"]), ("org/a:7b", ["org/a:7b"])],
)
def test_served_names(given: str | list[str] | None, names: list[str]) -> None:
    assert served_names(given) == names


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
