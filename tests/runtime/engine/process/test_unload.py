"""An engine that is unloaded has no process, and is reloaded with nothing lost but its cache."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from runtime.engine.errors import EngineDeadError
from runtime.engine.process.process_client import ProcessEngineClient
from runtime.parallel.fleet import Fleet
from tests.runtime.engine.process.test_process_faults import Sink, is_gone, light_client, request
from tests.runtime.parallel.test_fleet import light_fleet
from tests.waiting import TIMEOUT_S, wait_until


def answers(client: ProcessEngineClient | Fleet, name: str) -> bool:
    sink = Sink()
    client.submit(request(name, [10], max_tokens=3), sink)
    return sink.token_ids() == [11, 12, 13]


def test_a_reloaded_engine_answers() -> None:
    client = light_client()
    try:
        assert answers(client, "before")
        for round_number in range(3):
            pid = client.pid
            assert pid is not None
            client.unload(TIMEOUT_S)
            assert (client.state, client.pid, client.ready_in_s) == ("unloaded", None, None)
            assert is_gone(pid)
            with pytest.raises(EngineDeadError, match="unloaded"):
                client.submit(request("meanwhile", [1]), Sink())
            with pytest.raises(EngineDeadError, match="unloaded"):
                client.stats()
            with pytest.raises(EngineDeadError, match="unloaded"):
                client.unload(TIMEOUT_S)
            client.reload()
            assert client.state == "ready"
            assert answers(client, f"after {round_number}")
        with pytest.raises(EngineDeadError, match="not unloaded but ready"):
            client.reload()
    finally:
        client.close()


def test_open_requests_finish_first_or_are_told() -> None:
    client = light_client()
    try:
        short, long = Sink(), Sink()
        client.submit(request("short", [10], max_tokens=50), short)
        client.unload(TIMEOUT_S)
        assert short.token_ids() == list(range(11, 61))
        client.reload()
        client.submit(request("long", [10], max_tokens=90_000), long)
        client.unload(0.05)
        assert long.reasons() == ["error"]
        client.reload()
        assert answers(client, "next")
    finally:
        client.close()


def test_a_failed_reload_is_told_and_may_be_tried_again(tmp_path: Path) -> None:
    model = tmp_path / "broken"  # a file keeps the light engine from starting
    client = light_client(str(model))
    try:
        client.unload(TIMEOUT_S)
        model.write_text("")
        for _ in range(2):
            with pytest.raises(Exception, match="broken"):
                client.reload()
            assert client.state == "unloaded"
        model.unlink()
        client.reload()
        assert answers(client, "at last")
    finally:
        client.close()


def test_one_that_is_killed_while_it_drains_is_unloaded_and_one_after_a_reload_comes_back() -> None:
    client = light_client()
    try:
        client.submit(request("long", [10], max_tokens=90_000), sink := Sink())
        thread = threading.Thread(target=client.unload, args=(TIMEOUT_S,))
        thread.start()
        wait_until(lambda: client.state == "draining")
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        thread.join()
        assert (client.state, sink.reasons()) == ("unloaded", ["error"])
        client.reload()
        pid = client.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: client.state == "ready" and client.pid not in (None, pid))
        assert answers(client, "again")
    finally:
        client.close()


def test_closing_ends_an_unloaded_one_at_once() -> None:
    client = light_client()
    client.unload(TIMEOUT_S)
    client.close()
    assert client.state == "closing"
    with pytest.raises(EngineDeadError, match="closing"):
        client.reload()


def test_a_fleet_is_unloaded_and_reloaded_whole() -> None:
    fleet = light_fleet()
    try:
        assert answers(fleet, "before")
        fleet.unload(TIMEOUT_S)
        assert fleet.state == "unloaded"
        with pytest.raises(EngineDeadError):
            fleet.submit(request("meanwhile", [1]), Sink())
        fleet.reload()
        assert [client.state for client in fleet.engines] == ["ready", "ready"]
        assert answers(fleet, "after")
    finally:
        fleet.close()
