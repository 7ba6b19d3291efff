"""The messages between a server and its engine process, and their framing on the socket.

A frame is the length of a message (4 bytes, little-endian) and the message, as msgspec encodes it to MessagePack: one
of the structs of this file or of ``messages``, distinguished by its tag. Nothing is ever executed.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from typing import Literal

import msgspec
import numpy as np

import models.errors
import runtime.device.errors
import runtime.engine.errors
from runtime.engine.config import EngineConfig
from runtime.engine.messages import (
    EngineInfo,
    EngineOutput,
    EngineRequest,
    EngineStats,
    PoolingRequest,
    Source,
    StepView,
    TransferSettings,
)
from runtime.engine.weights.commands import Command, SentWeights
from runtime.errors import OutOfMemoryError, XservError

MAX_FRAME_BYTES = 1 << 30
"""A longer message is refused by its sender, and ends the connection of its receiver."""

BUFFER_BYTES = 1 << 18
"""Bytes of one read: many steps' outputs."""

CallName = Literal["logits", "embed", "load_adapter", "reset_prefix_cache"]
"""Computations other than requests, by ``EngineClient``'s names; each has one answer."""


class WireError(XservError):
    """The peer sent a malformed message, or a message is too long to be sent."""


# To the engine


class RemoteRank(msgspec.Struct, frozen=True):
    """A rank of a split model that was started elsewhere: the address where it waits for its engine, the shared secret,
    and its device there."""

    host: str
    port: int
    secret: bytes
    device: str


class Start(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message: ``engine_of``'s arguments. Log lines from ``log_level`` on are sent back. An engine with work
    that finishes no step for ``hang_timeout_s`` gives up. ``cores`` are its processors, all if empty;
    ``routing_secret`` keys the digests of reported block contents; ``remote_ranks`` are ranks 1 and following, if the
    engine does not start them itself; with ``draws_bars`` progress is shown as bars on a terminal, else as log
    lines; ``transfer`` is for engines that hand requests over; ``weights`` are those of this version that an engine
    before this one served last."""

    model: str | None
    config: EngineConfig
    log_level: int
    hang_timeout_s: float
    cores: list[int] = []
    routing_secret: bytes | None = None
    remote_ranks: list[RemoteRank] = []
    draws_bars: bool = True
    transfer: TransferSettings | None = None
    weights: SentWeights | None = None
    weight_version: str = ""


class Expect(msgspec.Struct, frozen=True, tag=True):
    """A request will come whose pages are offered here: take them now. If it is given, reserve blocks for its prompt;
    its choices have begun with one token, whichever."""

    source: Source
    request: EngineRequest | None


class DropPages(msgspec.Struct, frozen=True, tag=True):
    """The pages of this lease, offered or taken, are not needed any more."""

    lease: str


class LimitSteps(msgspec.Struct, frozen=True, tag=True):
    """The most tokens and mean seconds of the next steps, and the most that these may save; ``coefficients``: of the
    times of steps (`LinearStepModel`)."""

    max_tokens: int
    seconds: float
    coefficients: tuple[float, ...]
    most_saved_s: float


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """See ``EngineClient.cancel``."""

    request_id: str
    index: int | None


class Pause(msgspec.Struct, frozen=True, tag=True):
    """See ``EngineClient.pause``, and ``resume``."""

    request_id: str
    is_paused: bool


class Watch(msgspec.Struct, frozen=True, tag=True):
    """Turns views of the steps on or off."""

    is_wanted: bool


class Call(msgspec.Struct, frozen=True, tag=True):
    """Compute something with these arguments, or what is pooled; answered once by ``Answer`` or ``CallFailed``."""

    call_id: int
    name: CallName
    arguments: tuple[list[int] | str, ...] = ()
    pooled: PoolingRequest | None = None


class Order(msgspec.Struct, frozen=True, tag=True):
    """See ``EngineClient.order``; answered as a ``Call`` is."""

    call_id: int
    command: Command


class CancelCall(msgspec.Struct, frozen=True, tag=True):
    """The answer is not needed any more; it is sent all the same."""

    call_id: int


class Close(msgspec.Struct, frozen=True, tag=True):
    """See ``EngineClient.close``."""

    drain: bool


ToEngine = (
    Start | EngineRequest | Expect | DropPages | LimitSteps | Cancel | Pause | Watch | Call | Order | CancelCall | Close
)


# From the engine


class Problem(msgspec.Struct, frozen=True):
    """An error: its class and base classes, nearest first; its text; its plain attributes. See ``problem_of``."""

    kinds: list[str]
    message: str
    attributes: dict[str, str | int | float | bool | list[str] | None]


class Started(msgspec.Struct, frozen=True, tag=True):
    """Requests are accepted."""

    info: EngineInfo


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The last message of a process that could not start its engine."""

    problem: Problem


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """The outputs of a step, and the state of the queue: ``num_waiting`` requests of ``num_waiting_tokens`` prompt
    tokens have not been scheduled, among the first ``num_received`` that were sent, which have ``num_received_tokens``.
    ``stored_blocks`` and ``removed_blocks`` are ``BlockChanges`` as bytes."""

    outputs: list[EngineOutput]
    num_received: int
    num_received_tokens: int
    num_waiting: int
    num_waiting_tokens: int
    stored_blocks: bytes = b""
    removed_blocks: bytes = b""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A request was not admitted."""

    request_id: str
    problem: Problem


class Pulse(msgspec.Struct, frozen=True, tag=True):
    """The engine is alive, with this state."""

    stats: EngineStats
    num_received: int


class Answer(msgspec.Struct, frozen=True, tag=True):
    """``data`` is float32 of this shape."""

    call_id: int
    shape: list[int]
    data: bytearray


class CallFailed(msgspec.Struct, frozen=True, tag=True):
    call_id: int
    problem: Problem


class LogLine(msgspec.Struct, frozen=True, tag=True):
    """A record of ``logging``; ``created_s`` is ``time.time()``."""

    name: str
    level: int
    message: str
    created_s: float
    traceback: str | None


FromEngine = Started | StartFailed | Outputs | Refused | Pulse | StepView | Answer | CallFailed | LogLine

_LENGTH = struct.Struct("<I")


def _plain(value: object) -> object:
    """Converts numpy's numbers to Python's."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value)} cannot be sent")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)


def frame(message: object, encoder: msgspec.msgpack.Encoder = _ENCODER) -> bytearray:
    """A message, ready to be sent. Raises ``WireError`` if it is too long."""
    data = bytearray(_LENGTH.size)
    encoder.encode_into(message, data, _LENGTH.size)
    size = len(data) - _LENGTH.size
    if size > MAX_FRAME_BYTES:
        raise WireError(f"a message of {size:,} bytes is too long: at most {MAX_FRAME_BYTES:,} can be sent")
    _LENGTH.pack_into(data, 0, size)
    return data


class FrameReader:
    """Reads messages from a socket, still encoded."""

    def __init__(self, connection: socket.socket, most_bytes: int = MAX_FRAME_BYTES) -> None:
        """``most_bytes`` bounds a message."""
        self._connection = connection
        self._most_bytes = most_bytes
        self._buffer = bytearray(BUFFER_BYTES)
        self._start = self._end = 0  # of the bytes that were read and not taken

    def read(self) -> list[memoryview]:
        """The messages that have come, at least one; waits for it. Valid until the next call. Empty if the peer has
        closed.

        Raises ``BlockingIOError`` after the socket's timeout, ``WireError``, ``OSError``.
        """
        while not (messages := self._take()):
            self._make_room()
            with memoryview(self._buffer) as buffer, buffer[self._end :] as room:
                count = self._connection.recv_into(room)
            if count == 0:
                return []
            self._end += count
        return messages

    def _take(self) -> list[memoryview]:
        view = memoryview(self._buffer)
        messages = []
        while self._end - self._start >= _LENGTH.size:
            begin = self._start + _LENGTH.size
            end = begin + self._next_size()
            if end > self._end:
                break
            messages.append(view[begin:end])
            self._start = end
        return messages

    def _next_size(self) -> int:
        size: int = _LENGTH.unpack_from(self._buffer, self._start)[0]
        if size > self._most_bytes:
            raise WireError(f"a message claims {size:,} bytes; at most {self._most_bytes:,} are taken")
        return size

    def _make_room(self) -> None:
        """Make room in the buffer for the whole of the next message, and for something in any case."""
        left = self._end - self._start
        if left == 0:
            self._start = self._end = 0
        needed = _LENGTH.size if left < _LENGTH.size else self._next_size() + _LENGTH.size
        size = max(BUFFER_BYTES, needed)
        if self._start + needed <= len(self._buffer) <= size and self._end < len(self._buffer):
            return
        buffer = bytearray(size)  # a new one: views of the old one may still exist
        buffer[:left] = memoryview(self._buffer)[self._start : self._end]
        self._buffer, self._start, self._end = buffer, 0, left


class WaitingWriter:
    """Sends frames; callers wait while the peer does not read. Thread-safe."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, data: bytearray) -> None:
        """Raises ``OSError`` if the peer is gone."""
        with self._lock:
            self._connection.sendall(data)


class PatientWriter:
    """Sends frames and never makes a caller wait: a thread sends what the socket does not take at once. Thread-safe.
    Frames to a peer that is gone are dropped: the reader will notice."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._condition = threading.Condition()
        self._pending: deque[memoryview] = deque()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="xserv-engine-writer", daemon=True)
        self._thread.start()

    def send(self, data: bytearray) -> None:
        with self._condition:
            if self._is_closed:
                return
            rest = memoryview(data)
            if not self._pending:
                try:
                    rest = rest[self._connection.send(data, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    pass
                except OSError:
                    self._is_closed = True
                    return
            if rest:
                self._pending.append(rest)
                self._condition.notify()

    def close(self) -> None:
        """The socket must have been shut down, so that the thread does not wait for it."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not (self._pending or self._is_closed):
                    self._condition.wait()
                if self._is_closed:
                    return
                data = self._pending[0]
            try:
                self._connection.sendall(data)
            except OSError:
                with self._condition:
                    self._is_closed = True
                return
            with self._condition:
                self._pending.popleft()


_TREES = (models.errors, runtime.device.errors, runtime.engine.errors)
"""Modules whose errors are sent: they are imported, so that their classes are known."""


def problem_of(error: BaseException) -> Problem:
    """An error as a message. A plain ``MemoryError`` becomes an ``OutOfMemoryError``; any other foreign error becomes
    an ``XservError`` that names its type."""
    if isinstance(error, OSError) and error.errno is not None:
        filename = None if error.filename is None else str(error.filename)
        return Problem(["OSError"], error.strerror or str(error), {"errno": error.errno, "filename": filename})
    if isinstance(error, XservError):
        kinds = [_name(kind) for kind in type(error).__mro__ if issubclass(kind, XservError)]
        return Problem(kinds, str(error), _attributes(error))
    if isinstance(error, MemoryError):
        return Problem([_name(OutOfMemoryError)], str(error) or "the host has no more memory", {})
    return Problem([_name(XservError)], f"{type(error).__name__} in the engine; see the log", {})


def error_of(problem: Problem) -> Exception:
    """The error of a message, as the nearest class that is known here."""
    if problem.kinds == ["OSError"]:
        return OSError(problem.attributes.get("errno"), problem.message, problem.attributes.get("filename"))
    known = _known()
    kind = next((known[name] for name in problem.kinds if name in known), XservError)
    error: XservError = Exception.__new__(kind, problem.message)  # its args: the text
    error.__dict__.update(problem.attributes)
    return error


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _known() -> dict[str, type[XservError]]:
    found: dict[str, type[XservError]] = {}
    kinds = [XservError]
    while kinds:
        kind = kinds.pop()
        found[_name(kind)] = kind
        kinds += kind.__subclasses__()
    return found


def _attributes(error: XservError) -> dict[str, str | int | float | bool | list[str] | None]:
    """The attributes that can be sent."""
    found: dict[str, str | int | float | bool | list[str] | None] = {}
    for name, value in vars(error).items():
        if isinstance(value, (tuple, list)) and all(isinstance(each, str) for each in value):
            found[name] = list(value)
        elif value is None or isinstance(value, (str, int, float, bool)):
            found[name] = value
    return found
