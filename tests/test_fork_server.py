"""Processes that `tests.fork_server` forks: children of the caller like those that are started, which end like them."""

from __future__ import annotations

import os
import socket
import sys

import psutil
import pytest

from runtime.engine.process.main import EXIT_SERVER_GONE
from runtime.engine.process.spawning import connected_process
from runtime.own_packages import python_module
from tests import fork_server
from tests.waiting import TIMEOUT_S, wait_until

LIGHT = python_module("tests.runtime.engine.light_engine")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere all processes are started")
@pytest.mark.parametrize(("changed", "module"), [("TOLD", "tests.fork_server"), ("XSERV_TOLD", LIGHT[1])])
def test_a_process_is_forked_unless_an_import_has_read_what_changed(
    changed: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = connected_process(LIGHT)
    monkeypatch.setenv(changed, "1")
    connection, process = connected_process(LIGHT)
    child = psutil.Process(process.pid)
    assert child.ppid() == os.getpid()
    wait_until(lambda: module in child.cmdline())
    assert process.poll() is None
    for each in (before, (connection, process)):
        each[0].close()
        assert each[1].wait(TIMEOUT_S) == EXIT_SERVER_GONE


def test_a_kill_is_told() -> None:
    connection, process = connected_process(LIGHT)
    process.kill()
    assert process.wait(TIMEOUT_S) == -9
    connection.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere all processes are started")
def test_a_server_that_has_ended_fails_one_test_alone() -> None:
    fork_server._running_server()[0].shutdown(socket.SHUT_RDWR)
    with pytest.raises(OSError):
        connected_process(LIGHT)
    connection, process = connected_process(LIGHT)
    connection.close()
    assert process.wait(TIMEOUT_S) == EXIT_SERVER_GONE
