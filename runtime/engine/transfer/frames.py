"""Frames between two engines: messages in MessagePack, some with pages, each with a code that authenticates it.

A frame has lengths, a header in MessagePack and maybe pages, and a code over its number, its direction and its content
by a key of the connection. Nothing is encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import select
import socket
import struct
from collections.abc import Sequence
from typing import Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.engine.transfer.identity import Identity, TransferError
from runtime.engine.transfer.transport import Pages
from runtime.kv.page_store import PageName

_MOST_HEADER_BYTES = 16 << 20
_MOST_PAGE_BYTES = 1 << 33
_MOST_PEEKED = 1 << 16
_HEAD = struct.Struct("<4sIQ16s")  # magic, bytes of the header, bytes of the pages, code
_MAGIC = b"xkv1"


class Wanted(msgspec.Struct, tag=True):
    """The receiver asks for an offer.

    identity   of the receiver
    block_ids  what the offer must hold; empty: whatever it holds
    is_early   the receiver waits if the offer is not made yet
    released   memory of earlier pages that the sender may use again (`runtime.engine.transfer.segments`)
    """

    identity: Identity
    lease: str
    block_ids: list[int]
    is_early: bool = False
    released: list[int] = []


class Mine(msgspec.Struct, tag=True):
    """The sender's identity."""

    identity: Identity


class Refusal(msgspec.Struct, tag=True):
    """The sender gives nothing."""

    reason: str
    is_stale: bool


class Header(msgspec.Struct, tag=True):
    """Pages follow: by plane from ``first_plane`` on, ``page_bytes`` of each name."""

    pool: int
    names: list[PageName]
    page_bytes: list[int]
    first_plane: int = 0


class Alive(msgspec.Struct, tag=True):
    """The sender of this is at work: the other side must wait."""


class End(msgspec.Struct, tag=True):
    """That was all."""


class Place(msgspec.Struct, tag=True):
    """Bytes of pages lie in the sender's memory, for a library that knows it by ``metadata``."""

    metadata: bytes
    address: int
    num_bytes: int
    digest: bytes


class IsRead(msgspec.Struct, tag=True):
    """The receiver has read these."""


Message = Wanted | Mine | Refusal | Header | Place | IsRead | Alive | End
T = TypeVar("T")
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class PlaneCarrier(Protocol):
    """How a stream's pages travel.

    num_inline  1 if pages follow their header in the stream, 0 if they lie elsewhere
    """

    num_inline: int

    def check_form(self, header: Header) -> None:
        """Raises `TransferError` for pages that this engine's pool has not."""
        ...

    def send_planes(self, stream: Stream, planes: Sequence[NDArray[np.uint8]]) -> None:
        """Sends the pages of a header that was sent. Raises OSError, `TransferError`."""
        ...

    def receive_planes(self, stream: Stream, num_bytes: int) -> NDArray[np.uint8]:
        """All planes' bytes. Raises OSError, `TransferError`."""
        ...


class Stream:
    """Frames over a connection. Each has a code over its number, its direction and its content."""

    def __init__(self, connection: socket.socket, key: bytes, carrier: PlaneCarrier, *, is_sender: bool) -> None:
        self.connection, self._key, self._carrier = connection, key, carrier
        self._is_sender = is_sender
        self._num_sent = self._num_received = 0
        self._code = b""
        self._begun = hashlib.blake2b()

    def send(self, message: Message, planes: Sequence[NDArray[np.uint8]] = ()) -> None:
        """Sends a message, and the pages of a `Header`. Raises OSError."""
        header = msgspec.msgpack.encode(message)
        inline = planes if self._carrier.num_inline else ()
        num_bytes = sum(plane.nbytes for plane in inline)
        code = self._start(self._num_sent, header, by_sender=self._is_sender)
        for plane in inline:
            code.update(plane.reshape(-1).data)
        self._num_sent += 1
        self.connection.sendall(_HEAD.pack(_MAGIC, len(header), num_bytes, code.digest()) + header)
        if planes:
            self._carrier.send_planes(self, planes)

    @property
    def has_room(self) -> bool:
        """Whether three quarters of the connection's buffer are free, by Linux's rule for Unix sockets."""
        poll = select.poll()
        poll.register(self.connection, select.POLLOUT)
        return any(event & select.POLLOUT for _, event in poll.poll(0))

    @property
    def has_message(self) -> bool:
        """Whether a whole message has come that has no pages, so that to receive it does not wait."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        if not poll.poll(0):
            return False
        try:
            data = self.connection.recv(_MOST_PEEKED, socket.MSG_PEEK)
        except OSError:  # the peer was killed; the connection's own thread finds that, too
            return False
        return len(data) >= _HEAD.size and len(data) - _HEAD.size >= _HEAD.unpack_from(data)[1]

    def send_pages(self, pages: Pages) -> None:
        """Raises OSError."""
        sizes = [plane.shape[1] for plane in pages.planes]
        self.send(Header(pages.pool, list(pages.names), sizes, pages.first_plane), pages.planes)

    def receive_a(self, kind: type[T]) -> T:
        """The next message, of this kind. Raises OSError, `TransferError`."""
        return _checked(self.receive(), kind)

    def await_a(self, kind: type[T]) -> T:
        """The same, after any number of `Alive`."""
        while isinstance(message := self.receive(), Alive):
            pass
        return _checked(message, kind)

    def receive(self) -> Message:
        """The next message, but for its pages. Raises OSError, `TransferError`."""
        head = bytearray(_HEAD.size)
        read_whole(self.connection, memoryview(head))
        magic, num_header, num_bytes, self._code = _HEAD.unpack(head)
        if magic != _MAGIC or num_header > _MOST_HEADER_BYTES or num_bytes > _MOST_PAGE_BYTES:
            raise TransferError(f"the peer sent no frame, or one of {num_header:,} and {num_bytes:,} bytes")
        header = bytearray(num_header)
        read_whole(self.connection, memoryview(header))
        self._begun = self._start(self._num_received, header, by_sender=not self._is_sender)
        self._num_received += 1
        try:
            message = _DECODER.decode(header)
        except msgspec.MsgspecError as error:
            raise TransferError(f"the peer sent something else than a message: {error}") from None
        expected = 0
        if isinstance(message, Header):
            expected = _num_bytes(message) * self._carrier.num_inline
        if num_bytes != expected:
            raise TransferError(f"the peer's frame has {num_bytes:,} bytes of pages, {expected:,} by its header")
        if not num_bytes:
            self._verify()
        return message

    def receive_pages(self, header: Header) -> list[NDArray[np.uint8]]:
        """By plane ``[num_pages, page_bytes]``. Raises OSError, `TransferError`."""
        self._carrier.check_form(header)
        count, num_bytes = len(header.names), _num_bytes(header)
        data = self._carrier.receive_planes(self, num_bytes)
        if self._carrier.num_inline:
            self._begun.update(data.data)
            self._verify()
        ends = np.cumsum([size * count for size in header.page_bytes]).tolist()
        starts = [0, *ends]
        return [data[a:b].reshape(count, size) for a, b, size in zip(starts, ends, header.page_bytes)]

    def _start(self, number: int, header: bytes | bytearray, *, by_sender: bool) -> hashlib.blake2b:
        code = hashlib.blake2b(struct.pack("<Q?", number, by_sender), key=self._key, digest_size=16)
        code.update(header)
        return code

    def _verify(self) -> None:
        if not hmac.compare_digest(self._begun.digest(), self._code):
            raise TransferError("a frame was changed on its way: its code does not fit")


def _checked(message: Message, kind: type[T]) -> T:
    if not isinstance(message, kind):
        raise TransferError(f"the peer sent {type(message).__name__} instead of {kind.__name__}")
    return message


def _num_bytes(header: Header) -> int:
    if not header.names or not header.page_bytes or min(header.page_bytes) < 1:
        raise TransferError("the peer sent a frame without pages")
    return len(header.names) * sum(header.page_bytes)


def read_whole(connection: socket.socket, data: memoryview) -> None:
    """Fill ``data``. Raises OSError, and `TransferError` if the peer stalls or goes."""
    while data:
        try:
            count = connection.recv_into(data)
        except TimeoutError:
            raise TransferError(f"the peer has sent nothing for {connection.gettimeout():g} s") from None
        if not count:
            raise TransferError("the peer has closed the connection: the transfer is truncated")
        data = data[count:]
