"""Mutual authentication of two processes that share a secret, before any other message.

    server → engine   MAGIC, a random number
    engine → server   another one, HMAC-SHA256(secret, "engine", both)
    server → engine   HMAC-SHA256(secret, "server", both)
    server ↔ engine   a few clock exchanges, to convert the engine's times to the server's

Nothing is encrypted: the network between the machines is taken to be private. A peer without the secret is
disconnected, and learns nothing from the attempt.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from contextlib import suppress

from runtime.errors import XservError

logger = logging.getLogger("xserv.engine")

MAGIC = b"xserv-1\n"
SECRET_BYTES = 32
NONCE_BYTES = 32
TIMEOUT_S = 5.0
"""Seconds for a whole handshake."""
MOST_AT_ONCE = 16
NUM_CLOCK_QUESTIONS = 4
_CLOCK = struct.Struct("<d")
KEEPALIVE = ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3))
"""The kernel probes a silent peer each second, independently of the processes."""
SILENT_MS = 3_500
"""How long it may acknowledge nothing: a machine that has gone is detected after 3.5 to 4.5 s. So is a process that
leaves both kernels' buffers full, megabytes; here a separate thread reads all the time."""


def watch_connection(connection: socket.socket) -> None:
    """Have the kernel end a connection whose other machine has silently gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_MS)


class HandshakeError(XservError):
    """The peer does not know the secret or speaks another protocol, or none came in time."""


class Listener:
    """Waits on a free port of an address for one process that knows the secret. The port is freed when it has come, or
    the wait is over."""

    def __init__(self, host: str, secret: bytes) -> None:
        """Raises ``OSError`` for an address that is not this machine's."""
        self._secret = secret
        self._socket = socket.create_server((host, 0))
        self.port: int = self._socket.getsockname()[1]
        self._condition = threading.Condition()
        self._found: tuple[socket.socket, float] | None = None
        self._is_over = False
        self._room = threading.Semaphore(MOST_AT_ONCE)
        threading.Thread(target=self._listen, name="xserv-handshake", daemon=True).start()

    def wait(self, timeout_s: float) -> tuple[socket.socket, float]:
        """The connection, and the seconds by which the peer's clock is ahead of ours. Raises ``HandshakeError`` if no
        peer has come in time."""
        with self._condition:
            self._condition.wait_for(lambda: self._found is not None, timeout_s)
            self._is_over = True
            found = self._found
        self.close()
        if found is None:
            raise HandshakeError(f"nobody who knows the secret has connected within {timeout_s:.0f} s")
        return found

    def close(self) -> None:
        """Stop waiting. Idempotent."""
        self._is_over = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()

    def _listen(self) -> None:
        while True:
            try:
                connection, address = self._socket.accept()
            except OSError:
                return
            if not self._room.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._meet, args=(connection, address[0]), daemon=True).start()

    def _meet(self, connection: socket.socket, address: str) -> None:
        try:
            offset_s = welcome(connection, self._secret)
        except (OSError, HandshakeError) as error:
            logger.warning("a connection from %s was refused: %s", address, error)
            connection.close()
            return
        finally:
            self._room.release()
        with self._condition:
            if self._is_over or self._found is not None:
                connection.close()
                return
            self._found = connection, offset_s
            self._condition.notify_all()


def greet(connection: socket.socket, secret: bytes) -> bytes:
    """The first side, which has proved afterwards that it knows the secret, as the other has. Returns a key of this
    connection. Raises ``HandshakeError``, ``OSError``."""
    deadline_s = time.monotonic() + TIMEOUT_S
    ours = secrets.token_bytes(NONCE_BYTES)
    connection.settimeout(TIMEOUT_S)
    connection.sendall(MAGIC + ours)
    theirs = _receive(connection, NONCE_BYTES, deadline_s)
    proof = _receive(connection, hmac.new(secret, b"", "sha256").digest_size, deadline_s)
    if not hmac.compare_digest(proof, _proof(secret, b"engine", ours, theirs)):
        raise HandshakeError("it does not know the secret")
    connection.sendall(_proof(secret, b"server", ours, theirs))
    return _proof(secret, b"key", ours, theirs)


def answer(connection: socket.socket, secret: bytes, name: str) -> bytes:
    """The other side of ``greet``, of a peer of this name; the same key. Raises ``HandshakeError``, ``OSError``."""
    deadline_s = time.monotonic() + TIMEOUT_S
    if _receive(connection, len(MAGIC), deadline_s) != MAGIC:
        raise HandshakeError(f"{name} is no server of this release")
    theirs = _receive(connection, NONCE_BYTES, deadline_s)
    ours = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(ours + _proof(secret, b"engine", theirs, ours))
    proof = _receive(connection, hmac.new(secret, b"", "sha256").digest_size, deadline_s)
    if not hmac.compare_digest(proof, _proof(secret, b"server", theirs, ours)):
        raise HandshakeError(f"{name} does not know the secret")
    return _proof(secret, b"key", theirs, ours)


def welcome(connection: socket.socket, secret: bytes) -> float:
    """The server's side. Returns the seconds by which the other clock is ahead. Raises ``HandshakeError``,
    ``OSError``."""
    greet(connection, secret)
    deadline_s = time.monotonic() + TIMEOUT_S
    best_s, offset_s = float("inf"), 0.0
    for _ in range(NUM_CLOCK_QUESTIONS):
        asked_s = time.monotonic()
        connection.sendall(b"?")
        (there_s,) = _CLOCK.unpack(_receive(connection, _CLOCK.size, deadline_s))
        answered_s = time.monotonic()
        if answered_s - asked_s < best_s:
            best_s, offset_s = answered_s - asked_s, there_s - (asked_s + answered_s) / 2
    connection.settimeout(None)
    return offset_s


def join(host: str, port: int, secret: bytes) -> socket.socket:
    """The engine's side: a connection to a server that has proved that it knows the secret. Raises ``HandshakeError``,
    ``OSError``."""
    connection = socket.create_connection((host, port), TIMEOUT_S)
    try:
        answer(connection, secret, f"{host}:{port}")
        deadline_s = time.monotonic() + TIMEOUT_S
        for _ in range(NUM_CLOCK_QUESTIONS):
            _receive(connection, 1, deadline_s)
            connection.sendall(_CLOCK.pack(time.monotonic()))
    except BaseException:
        connection.close()
        raise
    connection.settimeout(None)
    return connection


def _proof(secret: bytes, side: bytes, server: bytes, engine: bytes) -> bytes:
    return hmac.new(secret, side + server + engine, "sha256").digest()


def _receive(connection: socket.socket, count: int, deadline_s: float) -> bytes:
    data = b""
    while len(data) < count:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0.0:
            raise HandshakeError("it took too long")
        connection.settimeout(left_s)
        try:
            piece = connection.recv(count - len(data))
        except TimeoutError:
            raise HandshakeError("it took too long") from None
        if not piece:
            raise HandshakeError("it has closed the connection")
        data += piece
    return data
