"""Only who knows the secret gets in, and the others cost no more than their own connection."""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

from runtime.engine.process import handshake
from runtime.engine.process.handshake import MAGIC, SILENT_MS, HandshakeError, Listener, join, watch_connection
from tests.waiting import TIMEOUT_S, wait_until

SECRET = b"s" * 32


def test_both_sides_meet_and_know_each_others_clock() -> None:
    listener = Listener("127.0.0.1", SECRET)
    begun = time.monotonic()
    theirs = join("127.0.0.1", listener.port, SECRET)
    ours, offset_s = listener.wait(TIMEOUT_S)
    ours.sendall(b"hello")
    assert theirs.recv(5) == b"hello"
    assert abs(offset_s) <= time.monotonic() - begun, "one machine, one clock"
    for each in (ours, theirs):
        each.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", listener.port), TIMEOUT_S)


def test_who_does_not_know_the_secret_is_refused_by_either_side(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = Listener("127.0.0.1", SECRET)
    with pytest.raises(HandshakeError, match="closed the connection"):
        join("127.0.0.1", listener.port, b"t" * 32)

    stranger = socket.create_server(("127.0.0.1", 0))  # repeats what it hears

    def repeat() -> None:
        with stranger.accept()[0] as connection:
            connection.sendall(MAGIC + b"0" * 32)
            said = connection.recv(64)
            connection.sendall(said[32:])
            connection.recv(1)

    thread = threading.Thread(target=repeat)
    thread.start()
    with pytest.raises(HandshakeError, match="does not know the secret"):
        join("127.0.0.1", stranger.getsockname()[1], SECRET)
    thread.join()
    stranger.close()
    join("127.0.0.1", listener.port, SECRET).close()
    listener.wait(TIMEOUT_S)[0].close()


def test_silent_and_babbling_connections_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have a moment, and whoever comes then as long as it takes."""
    monkeypatch.setattr(handshake, "TIMEOUT_S", 0.3)
    listener = Listener("127.0.0.1", SECRET)
    silent = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(40)]
    for each in silent[:5]:
        each.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 100)
    for each in silent:
        each.settimeout(TIMEOUT_S)
        with suppress(ConnectionResetError):  # with what it has babbled unread
            while each.recv(1000):  # until it is cut off
                pass
    monkeypatch.setattr(handshake, "TIMEOUT_S", TIMEOUT_S)
    wait_until(lambda: listener._room._value == handshake.MOST_AT_ONCE)
    theirs = join("127.0.0.1", listener.port, SECRET)
    listener.wait(TIMEOUT_S)[0].close()
    theirs.close()
    for each in silent:
        each.close()


def test_a_wait_ends_and_gives_the_port_back() -> None:
    listener = Listener("127.0.0.1", SECRET)
    with pytest.raises(HandshakeError, match="within 0 s"):
        listener.wait(0.1)
    socket.create_server(("127.0.0.1", listener.port)).close()


def test_a_server_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(HandshakeError, match="too long"):
        join("127.0.0.1", server.getsockname()[1], SECRET)


SO_ATTACH_FILTER = 26


def silence(connection: socket.socket) -> None:
    """Has the kernel drop all that comes for this side, acknowledgements included, and so answer nothing: what is left
    of a machine that has gone."""
    drop_all = np.array([0x06], np.uint64)  # BPF: return 0
    connection.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("@HP", 1, drop_all.ctypes.data))


@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "sending"])
@pytest.mark.exhaustive_cases("idle")
def test_a_machine_that_has_gone_is_noticed_within_5_s_and_one_that_is_only_busy_is_not(is_busy: bool) -> None:
    """Both at once: a side that does not read is no reason, as long as its kernel answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        pairs = []
        for _ in range(2):
            ours = socket.create_connection(server.getsockname())
            pairs.append((ours, server.accept()[0]))
            watch_connection(ours)
    (gone, its), (busy, other) = pairs
    begun = time.monotonic()
    silence(its)
    if is_busy:
        gone.sendall(b"a step")
        busy.sendall(b"a step")
    busy.settimeout(TIMEOUT_S)
    gone.settimeout(TIMEOUT_S)
    with pytest.raises(TimeoutError) as error:
        gone.recv(1)
    assert error.value.errno is not None, "the kernel has ended it, not this test"
    assert 2.0 < time.monotonic() - begun < 15.0  # a busy machine wakes the test late, the kernel's default is minutes
    assert 1.0 + SILENT_MS / 1000 < 5.0
    time.sleep(max(0.0, begun + 5.5 - time.monotonic()))
    other.sendall(b"an answer")
    assert busy.recv(9) == b"an answer"
    for each in (gone, its, busy, other):
        each.close()
