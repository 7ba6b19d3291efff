"""The engine's process is killed under a server: what is told to clients, and that it serves on."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import httpx

from runtime.engine.process.supervisor import ProcessEngineClient, Supervision
from runtime.own_packages import python_module
from server.app import create_app
from tests.runtime.engine.light_engine import EXITS
from tests.server.running import running
from tests.waiting import TIMEOUT_S, wait_until

BODY = {"model": "light", "prompt": [1, 2, 3], "max_tokens": 50_000, "ignore_eos": True}


def test_a_server_outlives_its_engine(tmp_path: Path) -> None:
    obstacle = tmp_path / "obstacle"  # while it is there, no engine starts
    supervision = Supervision(
        command=python_module("tests.runtime.engine.light_engine"), first_delay_s=0.1, most_delay_s=0.1
    )
    engine = ProcessEngineClient(obstacle, supervision=supervision)
    try:
        check(engine, obstacle)
    finally:
        engine.close()


def check(engine: ProcessEngineClient, obstacle: Path) -> None:
    app = create_app(engine, None, default_sampling={})
    with running(app) as url, httpx.Client(base_url=url, timeout=TIMEOUT_S) as http:
        assert http.get("/ready").status_code == 200
        with http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
            lines = (line for line in response.iter_lines() if line)
            assert "error" not in next(lines)
            obstacle.touch()
            os.kill(engine.pid or 0, signal.SIGKILL)
            assert '"code":"engine_unavailable"' in list(lines)[-1]
        wait_until(lambda: engine.state != "ready")
        assert http.get("/health").status_code == 200
        assert http.get("/ready").status_code == 503
        refused = http.post("/v1/completions", json=BODY)
        assert refused.status_code == 503
        assert int(refused.headers["Retry-After"]) >= 1
        obstacle.unlink()
        wait_until(lambda: engine.state == "ready")
        assert http.get("/ready").status_code == 200
        answers: list[httpx.Response] = []

        def ask() -> None:
            answers.append(httpx.post(f"{url}/v1/completions", json=BODY, timeout=TIMEOUT_S))

        thread = threading.Thread(target=ask)
        thread.start()
        wait_until(lambda: len(engine._delivery) == 1)
        bad = http.post("/v1/completions", json={**BODY, "prompt": [EXITS], "max_tokens": 2})
        thread.join()
        assert [bad.status_code, answers[0].status_code] == [503, 503]
        wait_until(lambda: engine.state == "ready")
        good = http.post("/v1/completions", json={**BODY, "max_tokens": 2})
        assert good.json()["usage"]["completion_tokens"] == 2
