"""The transports of this program: over TCP between hosts, and through shared memory on one.

    receiver → sender   connects; both prove that they know the secret (`runtime.engine.process.handshake`)
    sender → receiver   its identity
    receiver → sender   its identity, the lease, the blocks that it expects, the memory that it has released
    sender → receiver   a refusal; or pages as they come, a sign of life each second between them, and the end

After the end the receiver keeps the connection for a while, for the next lease: to connect takes as long as a short
prompt.
Frames are authenticated, not encrypted (`runtime.engine.transfer.frames`), so `TcpTransport` takes private addresses
alone. `SharedMemoryTransport` puts pages into memory files that both sides map (`runtime.engine.transfer.segments`),
and sends the files' numbers over a Unix socket, with the descriptors of new ones.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from runtime.engine.messages import Source
from runtime.engine.process.handshake import HandshakeError, answer, greet
from runtime.engine.transfer.frames import Alive, End, Header, Mine, Refusal, Stream, Wanted, read_whole
from runtime.engine.transfer.identity import Identity, RefusedError, TransferError
from runtime.engine.transfer.segments import SentSegments, TakenSegments
from runtime.engine.transfer.transport import STALL_S, Arrived, Ended, Pages, StaleLeaseError
from runtime.errors import InvalidArgumentError, XservError

logger = logging.getLogger("xserv.engine")

ALIVE_S = 1.0
LEASE_S = 60.0
"""An offer that was not taken is dropped after so long."""
MOST_NAMES_AT_ONCE = 256
"""A frame with so many pages' names fits a connection's buffer three quarters of which are free."""
MOST_CONNECTIONS = 256
"""Offers that are sent at once; further ones wait."""
IDLE_S = 60.0
MOST_IDLE = 4
"""How long, and how many of a peer's, connections are kept for the next lease."""
_SEGMENT = struct.Struct("<I")  # its number


@dataclass(slots=True)
class _Offer:
    waiting: deque[Pages] = field(default_factory=deque)
    num_blocks: int = 0
    is_complete: bool = False
    is_taken: bool = False
    is_ended: bool = False  # the receiver was told that it is complete
    touched_s: float = field(default_factory=time.monotonic)
    stream: Stream | None = None  # while its thread waits for pages


_Heard = tuple[str, _Offer | TransferError | None]
"""The lease that a receiver asks for, with its offer, the reason for a refusal, or None if it will be offered."""


class _Caller:
    """A connection on which a receiver asks for one lease after another. Its own thread reads them; while that waits,
    the thread that offers pages may, too (`SocketTransport._hear_resting`).

    heard  what the other thread has read, or its error; guarded by the condition
    """

    def __init__(self, connection: socket.socket, stream: Stream) -> None:
        self.connection, self.stream = connection, stream
        self.heard: _Heard | Exception | None = None
        self._awake, self._asleep = socket.socketpair()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._poll.register(self._asleep, select.POLLIN)

    def wait(self) -> bool:
        """Wait until the receiver asks or leaves, or `wake`. False if nothing happens for `IDLE_S`."""
        return bool(self._poll.poll(IDLE_S * 1000))

    def wake(self) -> None:
        """End its own thread's `wait`."""
        self._awake.send(b"+")

    def take_heard(self) -> _Heard | Exception | None:
        """Take what the other thread has read, if anything."""
        heard, self.heard = self.heard, None
        if heard is not None:
            self._asleep.recv(1)
        return heard

    def close(self) -> None:
        self._awake.close()
        self._asleep.close()


@dataclass(slots=True, eq=False)
class _Link:
    """A receiver's connection, between two leases."""

    connection: socket.socket
    stream: Stream
    since_s: float = 0.0

    @property
    def has_ended(self) -> bool:
        """Whether the peer has closed it, may soon, or has sent what was not asked for."""
        if time.monotonic() - self.since_s > IDLE_S / 2:
            return True
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        return bool(poll.poll(0))


class SocketTransport(ABC):
    """See `Transport`.

    Args:
        listener: a bound socket, which is owned from now on.
        secret: that all peers share.
        identity: of this engine.
        most_bytes: that offers may have waiting; further ones are dropped.

    Attributes:
        sends_at_once: few pages are sent by the thread that offers them, if they need not wait. Where all threads share
            one processor, another thread would send them only once this one has nothing to do.
    """

    sends_at_once = False

    def __init__(self, listener: socket.socket, secret: bytes, identity: Identity, most_bytes: int) -> None:
        self._listener, self._secret, self._identity = listener, secret, identity
        self._most_bytes = most_bytes
        self._condition = threading.Condition()
        # Guarded by the condition:
        self._offers: dict[str, _Offer] = {}
        self._num_staged_bytes = 0
        self._pulls: dict[str, socket.socket | None] = {}
        self._dropped: set[str] = set()  # pulls that are to end
        self._idle: dict[str, list[_Link]] = {}  # by address
        self._resting: list[_Caller] = []  # whose threads wait for the next lease
        self._early: dict[str, _Caller] = {}  # by lease: who waits for an offer that is not made yet
        self._is_closed = False
        self.num_sent_bytes = self.num_received_bytes = self.num_expired = 0
        self._room = threading.Semaphore(MOST_CONNECTIONS)
        listener.listen(128)
        listener.settimeout(STALL_S)
        threading.Thread(target=self._accept, name="xserv-transfer", daemon=True).start()

    @property
    @abstractmethod
    def address(self) -> str:
        """See `Transport`."""

    @property
    def num_open(self) -> int:
        """Offers and pulls that are neither over nor dropped."""
        with self._condition:
            return len(self._offers) + len(self._pulls)

    def offer(self, lease: str, pages: Pages | None) -> bool:
        """See `Transport`."""
        with self._condition:
            if self._is_closed:
                return False
            offer = self._offers.get(lease) or self._new_offer(lease)
            offer.touched_s = time.monotonic()
            if self.sends_at_once and not offer.is_taken:
                self._hear_resting()
            if pages is None:
                offer.is_complete = True
                offer.is_ended = self.sends_at_once and self._sent_end(offer)
            elif self._num_staged_bytes + pages.num_bytes > self._most_bytes:
                logger.warning("pages of a request are not handed over: more than %d bytes wait", self._most_bytes)
                self._forget(lease)
                return False
            elif pages.names:
                offer.num_blocks += 0 if pages.first_plane else len(pages.names)
                if self.sends_at_once and self._sent_at_once(offer, pages):
                    return True
                offer.waiting.append(pages)
                self._num_staged_bytes += pages.num_bytes
            self._condition.notify_all()
            return True

    def _new_offer(self, lease: str) -> _Offer:
        """The condition is held."""
        offer = self._offers[lease] = _Offer()
        if (caller := self._early.pop(lease, None)) is not None:
            offer.is_taken, offer.stream = True, caller.stream
        return offer

    def _sent_at_once(self, offer: _Offer, pages: Pages) -> bool:
        """Send pages on this thread. False if they would have to wait. The condition is held."""
        stream = offer.stream
        if stream is None or offer.waiting or len(pages.names) > MOST_NAMES_AT_ONCE or not stream.has_room:
            return False
        try:
            stream.send_pages(pages)
        except OSError:  # its own thread finds that, too, and forgets the offer
            return False
        self.num_sent_bytes += pages.num_bytes
        return True

    def _sent_end(self, offer: _Offer) -> bool:
        """Say on this thread that an offer is complete. False if others have to be sent before. The condition is
        held."""
        if offer.stream is None or offer.waiting:
            return False
        with contextlib.suppress(OSError):  # its own thread forgets the offer
            offer.stream.send(End())
        return True

    def _hear_resting(self) -> None:
        """Take the leases that receivers have asked for while this thread computed. The condition is held."""
        for caller in [each for each in self._resting if each.stream.has_message]:
            self._resting.remove(caller)
            try:
                caller.heard = self._hear(caller)
            except (OSError, TransferError) as error:
                caller.heard = error
            else:
                if isinstance(offer := caller.heard[1], _Offer):
                    offer.stream = caller.stream
            caller.wake()

    def pull(self, source: Source, arrived: Arrived, ended: Ended) -> None:
        """See `Transport`."""
        with self._condition:
            is_refused = self._is_closed or source.lease in self._pulls
            if not is_refused:
                self._pulls[source.lease] = None
        if is_refused:
            ended(StaleLeaseError("it is taken already"))
            return
        threading.Thread(None, self._pull, "xserv-transfer-pull", (source, arrived, ended), daemon=True).start()

    def has_sent(self, lease: str) -> bool:
        """See `Transport`."""
        with self._condition:
            offer = self._offers.get(lease)
            return offer is None or (offer.is_taken and not offer.waiting)

    def drop(self, lease: str) -> None:
        """See `Transport`."""
        with self._condition:
            self._forget(lease)
            if self._early.pop(lease, None) is not None:
                self._condition.notify_all()
            if lease in self._pulls:
                self._dropped.add(lease)
            connection = self._pulls.get(lease)
            if connection is not None:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def use(self, identity: Identity) -> None:
        """See `Transport`."""
        with self._condition:
            self._identity = identity
            for lease in {*self._offers, *self._pulls, *self._early}:
                self.drop(lease)
            self._close_idle()

    def _close_idle(self) -> None:
        """The condition is held."""
        for link in (link for links in self._idle.values() for link in links):
            link.connection.close()
        self._idle.clear()

    def close(self, timeout_s: float = 0.0) -> None:
        """See `Transport`."""
        with self._condition:
            self._condition.wait_for(lambda: not any(each.is_complete for each in self._offers.values()), timeout_s)
            self._is_closed = True
            for lease in list(self._offers):
                self._forget(lease)
            pulls = list(self._pulls)
            self._close_idle()
            self._condition.notify_all()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for lease in pulls:
            self.drop(lease)

    def _forget(self, lease: str) -> None:
        """The condition is held."""
        offer = self._offers.pop(lease, None)
        if offer is not None:
            self._num_staged_bytes -= sum(pages.num_bytes for pages in offer.waiting)
            offer.waiting.clear()
            self._condition.notify_all()

    # The sender's threads

    def _accept(self) -> None:
        while not self._is_closed:
            self._drop_expired()
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                if not self._is_closed:
                    logger.exception("no more pages are handed over from here")
                return
            self._room.acquire()
            threading.Thread(target=self._serve, args=(connection,), name="xserv-transfer-send", daemon=True).start()

    def _drop_expired(self) -> None:
        before_s = time.monotonic() - LEASE_S
        with self._condition:
            expired = [k for k, each in self._offers.items() if not each.is_taken and each.touched_s < before_s]
            for lease in expired:
                self._forget(lease)
            self.num_expired += len(expired)

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                self.check_peer(connection)
                stream = Stream(connection, greet(connection, self._secret), self, is_sender=True)
                connection.settimeout(STALL_S)
                stream.send(Mine(self._identity))
                with contextlib.closing(_Caller(connection, stream)) as caller:
                    while self._serve_one(caller):
                        pass
        except (OSError, XservError) as error:
            logger.info("pages were not handed over: %s", error)
        finally:
            self._room.release()

    def _serve_one(self, caller: _Caller) -> bool:
        """Send the next offer. False if the connection is at its end. Raises OSError, `TransferError`."""
        with self._condition:
            self._resting.append(caller)
        is_called = caller.wait()
        with self._condition:
            if caller in self._resting:
                self._resting.remove(caller)
            heard = caller.take_heard()
        if heard is None:
            if not is_called or not caller.connection.recv(1, socket.MSG_PEEK):
                return False
            heard = self._hear(caller)
        if isinstance(heard, Exception):
            raise heard
        lease, offer = heard
        if offer is None:
            offer = self._await_offer(caller, lease)
        if isinstance(offer, TransferError):
            caller.stream.send(Refusal(str(offer), isinstance(offer, StaleLeaseError)))
            return False
        try:
            return self._send(caller.stream, lease, offer)
        finally:
            with self._condition:
                if self._offers.get(lease) is offer:
                    self._forget(lease)

    def _hear(self, caller: _Caller) -> _Heard:
        """Read what a caller asks for. Raises OSError, `TransferError`."""
        wanted = caller.stream.receive_a(Wanted)
        self.reuse(caller.stream, wanted.released)
        try:
            with self._condition:  # else `use` might come between: an early lease would get pages of new weights
                self._identity.check(wanted.identity)
                return wanted.lease, self._take(wanted, caller)
        except TransferError as error:
            return wanted.lease, error

    def _await_offer(self, caller: _Caller, lease: str) -> _Offer | TransferError:
        """Wait until the caller's offer is made. Raises OSError if the caller leaves."""
        until_s = time.monotonic() + LEASE_S
        try:
            while True:
                with self._condition:
                    is_made = self._condition.wait_for(lambda: self._early.get(lease) is not caller, ALIVE_S)
                    offer = self._offers.get(lease) if is_made else None
                if offer is not None and offer.stream is caller.stream:  # else one of other weights, made since
                    return offer
                if is_made or self._is_closed or time.monotonic() > until_s:
                    return StaleLeaseError("the lease was not offered in time, or has ended")
                caller.stream.send(Alive())
        finally:
            with self._condition:
                if self._early.get(lease) is caller:
                    del self._early[lease]

    def _take(self, wanted: Wanted, caller: _Caller) -> _Offer | None:
        """The condition is held."""
        offer = self._offers.get(wanted.lease)
        if offer is None and wanted.is_early:
            self._early[wanted.lease] = caller
            return None
        if offer is None or offer.is_taken:
            raise StaleLeaseError("the lease is not known: it was used, or has expired")
        if wanted.block_ids and wanted.block_ids != list(range(offer.num_blocks)):
            raise StaleLeaseError(f"the lease has blocks 0 to {offer.num_blocks - 1}, not {wanted.block_ids[:8]}")
        offer.is_taken = True
        return offer

    def _send(self, stream: Stream, lease: str, offer: _Offer) -> bool:
        """False if it was dropped."""
        while True:
            with self._condition:
                offer.stream = stream
                self._condition.wait_for(
                    lambda: offer.waiting or offer.is_complete or self._offers.get(lease) is not offer, ALIVE_S
                )
                offer.stream = None
                pages = offer.waiting.popleft() if offer.waiting else None
                is_over = pages is None and offer.is_complete
                if pages is None and self._offers.get(lease) is not offer:
                    return False  # the other side sees the connection end
            if pages is not None:
                stream.send_pages(pages)
                with self._condition:
                    self._num_staged_bytes -= pages.num_bytes
                    self.num_sent_bytes += pages.num_bytes
            elif is_over:
                if not offer.is_ended:
                    stream.send(End())
                return True
            else:
                stream.send(Alive())

    # The receiver's threads

    def _pull(self, source: Source, arrived: Arrived, ended: Ended) -> None:
        error: TransferError | None = None
        link: _Link | None = None
        try:
            link = self._idle_link(source.address) or self._link(source)
            with self._condition:
                self._pulls[source.lease] = link.connection
                if source.lease in self._dropped:
                    raise TransferError("the pages are not wanted any more")
                identity = self._identity
            released = self.released(link.stream)
            link.stream.send(Wanted(identity, source.lease, source.block_ids, source.is_early, released))
            self._receive(link.stream, arrived)
        except TransferError as caught:
            error = caught
        except (OSError, XservError) as caught:
            error = TransferError(f"{source.address}: {caught or type(caught).__name__}")
        except Exception:
            logger.exception("pages could not be taken from %s", source.address)
            error = TransferError("pages could not be taken")
        with self._condition:
            self._pulls.pop(source.lease, None)
            self._dropped.discard(source.lease)
            links = self._idle.setdefault(source.address, [])
            if link is not None and error is None and len(links) < MOST_IDLE and not self._is_closed:
                link.since_s = time.monotonic()
                links.append(link)
                link = None
            if not links:
                del self._idle[source.address]
        if link is not None:
            link.connection.close()
        ended(error)

    def _link(self, source: Source) -> _Link:
        """A new connection to a peer that has alike pages. Raises OSError, `TransferError`."""
        connection = self.connect(source.address)
        try:
            with self._condition:
                self._pulls[source.lease] = connection
            connection.settimeout(STALL_S)
            try:
                key = answer(connection, self._secret, source.address)
            except HandshakeError as caught:
                raise RefusedError(f"{source.address} and this engine do not share a key: {caught}") from None
            stream = Stream(connection, key, self, is_sender=False)
            connection.settimeout(STALL_S)
            self._identity.check(stream.receive_a(Mine).identity)
        except BaseException:
            connection.close()
            raise
        return _Link(connection, stream)

    def _idle_link(self, address: str) -> _Link | None:
        """A kept connection to a peer, and none whose peer has closed it."""
        with self._condition:
            for each in list(self._idle):
                alive = [link for link in self._idle[each] if not link.has_ended]
                for link in self._idle[each]:
                    if link not in alive:
                        link.connection.close()
                self._idle[each] = alive
                if not alive:
                    del self._idle[each]
            links = self._idle.get(address)
            return links.pop() if links else None

    def _receive(self, stream: Stream, arrived: Arrived) -> None:
        while True:
            message = stream.receive()
            match message:
                case Header(pool, names):
                    pages = Pages(pool, names, stream.receive_pages(message), message.first_plane)
                    with self._condition:
                        self.num_received_bytes += pages.num_bytes
                    arrived(pages)
                case End():
                    return
                case Refusal(reason, is_stale):
                    raise (StaleLeaseError if is_stale else TransferError)(reason)
                case Alive():
                    pass
                case _:
                    raise TransferError("the peer sent a message that does not belong here")

    def check_form(self, header: Header) -> None:
        """Raises `TransferError` for pages that this engine's pool has not."""
        known, pool, sizes, first = self._identity.page_bytes, header.pool, header.page_bytes, header.first_plane
        if not 0 <= pool < len(known) or first < 0 or sizes != known[pool][first : first + len(sizes)]:
            raise TransferError(
                f"the peer sent pages of {sizes} bytes from plane {first} on for pool {pool}; here pools have {known}"
            )

    # What differs

    @abstractmethod
    def connect(self, address: str) -> socket.socket:
        """A connection to a peer. Raises OSError, TransferError."""

    @abstractmethod
    def check_peer(self, connection: socket.socket) -> None:
        """Raises `TransferError` for a peer that is not spoken to."""

    def send_planes(self, stream: Stream, planes: Sequence[NDArray[np.uint8]]) -> None:
        """After a header."""
        for plane in planes:
            stream.connection.sendall(plane.reshape(-1).data)

    def receive_planes(self, stream: Stream, num_bytes: int) -> NDArray[np.uint8]:
        """All planes' bytes."""
        found = np.empty(num_bytes, np.uint8)
        read_whole(stream.connection, found.data)
        return found

    def released(self, stream: Stream) -> list[int]:
        """Numbers of the segments of `receive_planes` that are free again, for the sender's `reuse`."""
        return []

    def reuse(self, stream: Stream, released: list[int]) -> None:
        """The receiver has released these segments. Raises `TransferError` for one that it does not hold."""
        if released:
            raise TransferError("the peer has released memory that it does not hold")

    num_inline = 1
    """1 if pages follow their header in the stream, 0 if they lie elsewhere."""


class TcpTransport(SocketTransport):
    """Over TCP, between private addresses alone."""

    def __init__(self, host: str, port: int, secret: bytes, identity: Identity, most_bytes: int) -> None:
        """Listens at an address of this machine; port 0: any. Raises InvalidArgumentError for one that is public, or
        cannot be used."""
        check_private(host)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, port), family=family)
        except OSError as error:
            raise InvalidArgumentError(f"{host}:{port} cannot be listened at: {error}", param="kv_transfer") from None
        self.host, self.port = host, int(listener.getsockname()[1])
        super().__init__(listener, secret, identity, most_bytes)

    @property
    def address(self) -> str:
        return f"tcp:{self.host}:{self.port}"

    def connect(self, address: str) -> socket.socket:
        host, _, port = address.removeprefix("tcp:").rpartition(":")
        check_private(host)
        connection = socket.create_connection((host, int(port)), STALL_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def check_peer(self, connection: socket.socket) -> None:
        host = connection.getpeername()[0]
        if not _is_private(host):
            raise TransferError(f"{host} is no private address")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class SharedMemoryTransport(SocketTransport):
    """Through memory files, between processes of one user on one machine."""

    num_inline = 0

    def __init__(self, secret: bytes, identity: Identity, most_bytes: int) -> None:
        self._sent: weakref.WeakKeyDictionary[Stream, SentSegments] = weakref.WeakKeyDictionary()
        self._taken: weakref.WeakKeyDictionary[Stream, TakenSegments] = weakref.WeakKeyDictionary()
        self._name = f"xserv-{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"\0{self._name}")  # no file: it goes with its process
        super().__init__(listener, secret, identity, most_bytes)

    @property
    def address(self) -> str:
        return f"unix:{self._name}"

    def connect(self, address: str) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(STALL_S)
            connection.connect("\0" + address.removeprefix("unix:"))
        except BaseException:
            connection.close()
            raise
        return connection

    def check_peer(self, connection: socket.socket) -> None:
        found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, user, _ = struct.unpack("3i", found)
        if user != os.geteuid():
            raise TransferError(f"user {user} asked for pages of user {os.geteuid()}")

    def send_planes(self, stream: Stream, planes: Sequence[NDArray[np.uint8]]) -> None:
        number, memory = self._sent.setdefault(stream, SentSegments()).place(planes)
        if memory is None:
            stream.connection.sendall(_SEGMENT.pack(number))
            return
        try:
            socket.send_fds(stream.connection, [_SEGMENT.pack(number)], [memory])
        finally:
            os.close(memory)

    def receive_planes(self, stream: Stream, num_bytes: int) -> NDArray[np.uint8]:
        data, descriptors, _, _ = socket.recv_fds(stream.connection, _SEGMENT.size, 1)
        try:
            if len(data) != _SEGMENT.size:
                raise TransferError("the peer's memory did not come")
            taken = self._taken.setdefault(stream, TakenSegments())
            return taken.take(_SEGMENT.unpack(data)[0], descriptors[0] if descriptors else None, num_bytes)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def released(self, stream: Stream) -> list[int]:
        taken = self._taken.get(stream)
        return [] if taken is None else taken.released()

    def reuse(self, stream: Stream, released: list[int]) -> None:
        if released:
            self._sent.setdefault(stream, SentSegments()).reuse(released)


def _is_private(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    address = mapped or address
    return (address.is_private or address.is_loopback or address.is_link_local) and not address.is_unspecified


def check_private(host: str) -> None:
    """Raises `TransferError` unless a host is, or resolves to, private addresses alone."""
    try:
        found = {str(each[4][0]) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise TransferError(f"{host} is not known: {error}") from None
    public = sorted(each for each in found if not _is_private(each))
    if public:
        raise TransferError(
            f"{host} is {public[0]}, which is no private address: keys and values are sent in clear text; use an"
            " address of a private network, or a tunnel's"
        )
