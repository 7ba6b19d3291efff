"""`xserv serve --data-parallel-size 2`, a whole server: what an operator sees of two engines, and their restart under
load."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from runtime.parallel.fleet import Fleet
from server.app import create_app
from server.config import ServerConfig
from tests.runtime.engine.process.test_process_faults import Sink, request
from tests.runtime.parallel.test_fleet import light_fleet
from tests.server.running import running
from tests.waiting import TIMEOUT_S, wait_until


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Fleet, httpx.Client]]:
    fleet = light_fleet()
    config = ServerConfig(drain_timeout_s=TIMEOUT_S)
    app = create_app(fleet, None, model_name="light", default_sampling={}, config=config)
    with running(app) as url, httpx.Client(base_url=url, timeout=TIMEOUT_S) as http:
        yield fleet, http
    fleet.close()


def complete(http: httpx.Client, first: int, max_tokens: int = 4) -> httpx.Response:
    body: dict[str, Any] = {"model": "light", "prompt": [first], "max_tokens": max_tokens, "return_token_ids": True}
    return http.post("/v1/completions", json=body)


def test_operators_see_each_engine(served: tuple[Fleet, httpx.Client]) -> None:
    fleet, http = served
    before = list(fleet.router.num_routed)
    for i in range(6):
        answer = complete(http, 10 * i)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["token_ids"] == [10 * i + k for k in range(1, 5)]
    assert http.get("/health").json() == {"status": "ok", "engines": ["ready", "ready"]}
    assert http.get("/ready").json() == {"ready": True, "state": "ready"}
    routed = [number + 3 for number in before]
    wait_until(lambda: all(client.stats().num_running == 0 for client in fleet.engines))
    text = http.get("/metrics").text
    for engine in (0, 1):
        assert f'vllm:num_requests_running{{engine="{engine}",model_name="light"}} 0.0' in text
        assert f'xserv:engine_up{{engine="{engine}",model_name="light"}} 1.0' in text
        assert f'xserv:routed_requests_total{{engine="{engine}",model_name="light"}} {routed[engine]}.0' in text
    listed = http.get("/engines").json()
    assert (listed["routing_policy"], listed["is_restarting"]) == ("round-robin", False)
    assert [(each["engine"], each["state"], each["num_routed"]) for each in listed["engines"]] == [
        (0, "ready", routed[0]),
        (1, "ready", routed[1]),
    ]
    with http.stream("GET", "/live") as stream:
        line = next(line for line in stream.iter_lines() if line.startswith("data: "))
    assert line.count('"state":"ready"') == 3


def test_one_that_is_killed_leaves_the_server_ready(served: tuple[Fleet, httpx.Client]) -> None:
    fleet, http = served
    pid = fleet.engines[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: fleet.engines[1].pid != pid)
    assert http.get("/ready").status_code == 200
    assert http.get("/health").status_code == 200
    assert complete(http, 5).status_code == 200
    wait_until(lambda: fleet.engines[1].state == "ready")


def test_a_restart_is_noticed_by_nobody(served: tuple[Fleet, httpx.Client]) -> None:
    fleet, http = served
    before = [client.pid for client in fleet.engines]
    statuses: list[int] = []
    is_over = threading.Event()
    with_time = Sink()  # it keeps the restart from being over before the second one is asked for
    fleet.submit(request("with time", [1], max_tokens=50_000), with_time)

    def ask() -> None:
        while not is_over.is_set():
            statuses.append(complete(http, 3, max_tokens=10).status_code)
            time.sleep(0.01)

    thread = threading.Thread(target=ask)
    thread.start()
    assert http.post("/restart_engines").json()["is_restarting"]
    again = http.post("/restart_engines")
    assert (again.status_code, again.json()["error"]["code"]) == (409, "restarting")
    fleet.cancel("with time")
    assert with_time.reasons() == ["abort"]
    wait_until(lambda: not http.get("/engines").json()["is_restarting"])
    is_over.set()
    thread.join()
    assert Counter(statuses).keys() == {200}
    assert not set(before) & {client.pid for client in fleet.engines}
