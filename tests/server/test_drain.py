"""The end of a server under load: nobody new is let in, whoever is inside finishes, and the process ends with 0."""

from __future__ import annotations

import json
import logging
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from server import serve
from server.config import ServerConfig
from tests.server.running import serving_process
from tests.waiting import TIMEOUT_S, wait_until

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
    server = object.__new__(serve._Server)
    server.app = SimpleNamespace(config=ServerConfig())  # type: ignore[assignment]
    ended: list[int] = []
    monkeypatch.setattr(serve._Server, "handle_exit", lambda self, sig, frame: ended.append(sig))
    monkeypatch.setattr(serve, "sys", SimpleNamespace(stdin=None))
    with caplog.at_level(logging.INFO):
        server._hang_up()
    assert "no files of API keys" in caplog.text
    assert ended == []
    monkeypatch.setattr(serve, "sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))
    server._hang_up()
    assert ended == [signal.SIGTERM]


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
