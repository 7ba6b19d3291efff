"""The transports: pages arrive as they were offered, once, at who knows the secret and has the same pages; anything
else is a line, and nothing arrives."""

from __future__ import annotations

import gc
import hashlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from runtime.engine.messages import Source
from runtime.engine.transfer import segments, sockets
from runtime.engine.transfer.frames import Stream
from runtime.engine.transfer.identity import Identity, MismatchError, RefusedError, TransferError
from runtime.engine.transfer.segments import SentSegments, TakenSegments
from runtime.engine.transfer.sockets import SharedMemoryTransport, SocketTransport, TcpTransport, check_private
from runtime.engine.transfer.transport import NO_PAGES, Pages, StaleLeaseError, check_names
from runtime.errors import InvalidArgumentError
from runtime.kv.page_store import PageName
from runtime.rank_notices import shared_memory
from tests.waiting import TIMEOUT_S, wait_until

SECRET = b"s" * 32
FACTS = {"model": "m", "dtype": "float32", "block_size": "16"}
IDENTITY = Identity(FACTS, "f" * 64, [[8, 24], [40]])


def transport(
    scheme: str, *, secret: bytes = SECRET, identity: Identity = IDENTITY, most: int = 1 << 20
) -> SocketTransport:
    if scheme == "tcp":
        return TcpTransport("127.0.0.1", 0, secret, identity, most)
    return SharedMemoryTransport(secret, identity, most)


@pytest.fixture(params=["unix", "unix, at once", "tcp"])
def pair(request: Any) -> Iterator[tuple[SocketTransport, SocketTransport]]:
    scheme, _, is_at_once = request.param.partition(", ")
    made = transport(scheme), transport(scheme)
    made[0].sends_at_once = bool(is_at_once)
    yield made
    for each in made:
        each.close()


def pages(number: int, count: int = 2, pool: int = 0) -> Pages:
    names, before = [], b"\0" * 32
    for row in range(count):
        tokens = bytes([number, row & 255, row >> 8, 0]) * 4
        key = hashlib.sha256(before + tokens).digest()
        names.append(PageName(key + b"\0", before + b"\0", tokens))
        before = key
    rng = np.random.default_rng(number)
    planes = [rng.integers(0, 256, (count, size), np.uint8) for size in IDENTITY.page_bytes[pool]]
    return Pages(pool, names, planes)


class Taken:
    """What a pull has brought."""

    def __init__(self, puller: SocketTransport, source: Source) -> None:
        self.pages: list[Pages] = []
        self.error: TransferError | None = None
        self.done = threading.Event()
        puller.pull(source, self.arrived, self.ended)

    def arrived(self, found: Pages) -> None:
        check_names(found)
        self.pages.append(found)

    def ended(self, error: TransferError | None) -> None:
        assert not self.done.is_set(), "it has ended twice"
        self.error = error
        self.done.set()

    def wait(self) -> TransferError | None:
        assert self.done.wait(TIMEOUT_S)
        return self.error


def same(left: Pages, right: Pages) -> bool:
    return (left.pool, list(left.names)) == (right.pool, list(right.names)) and all(
        np.array_equal(a, b) for a, b in zip(left.planes, right.planes, strict=True)
    )


def test_pages_arrive_while_more_are_offered(pair: tuple[SocketTransport, SocketTransport]) -> None:
    sender, receiver = pair
    offered = [pages(1), pages(2, 1, pool=1), pages(3, 5)]
    assert sender.offer("a", offered[0])
    taken = Taken(receiver, Source(sender.address, "a"))
    wait_until(lambda: len(taken.pages) == 1)
    assert not taken.done.is_set()
    for each in offered[1:]:
        assert sender.offer("a", each)
    assert sender.offer("a", None)
    assert taken.wait() is None
    assert all(map(same, taken.pages, offered))
    wait_until(lambda: sender.num_open == receiver.num_open == 0)
    assert sender.num_sent_bytes == receiver.num_received_bytes == sum(each.num_bytes for each in offered)


def noted_senders(sender: SocketTransport, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that send planes from now on."""
    threads: list[str] = []
    send = sender.send_planes

    def noted(stream: Any, planes: Any) -> None:
        threads.append(threading.current_thread().name)
        send(stream, planes)

    monkeypatch.setattr(sender, "send_planes", noted)
    return threads


def test_pages_are_sent_at_once_only_if_they_need_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = transport("unix"), transport("unix")
    sender.sends_at_once = True
    threads = noted_senders(sender, monkeypatch)
    own, other = threading.current_thread().name, "xserv-transfer-send"
    sender.offer("a", pages(1))  # nobody takes them yet
    taken = Taken(receiver, Source(sender.address, "a"))
    wait_until(lambda: len(taken.pages) == 1 and sender._offers["a"].stream is not None)
    sender.offer("a", pages(2))
    wait_until(lambda: sender._offers["a"].stream is not None)
    sender.offer("a", pages(3, sockets.MOST_NAMES_AT_ONCE + 1))
    wait_until(lambda: len(taken.pages) == 3)
    monkeypatch.setattr(Stream, "has_room", False)
    wait_until(lambda: sender._offers["a"].stream is not None)
    sender.offer("a", pages(4))
    sender.offer("a", None)
    assert taken.wait() is None
    assert threads == [other, own, other, other]
    known = [pages(1), pages(2), pages(3, sockets.MOST_NAMES_AT_ONCE + 1), pages(4)]
    assert list(map(same, taken.pages, known)) == [True] * 4
    assert sender.num_sent_bytes == receiver.num_received_bytes == sum(each.num_bytes for each in known)
    for each in (sender, receiver):
        each.close()


def test_a_connection_serves_further_leases(
    pair: tuple[SocketTransport, SocketTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = pair
    num_links = 0
    connect = receiver.connect

    def counted(address: str) -> Any:
        nonlocal num_links
        num_links += 1
        return connect(address)

    monkeypatch.setattr(receiver, "connect", counted)
    for number in range(5):
        assert sender.offer(f"{number}", NO_PAGES)
        taken = Taken(receiver, Source(sender.address, f"{number}"))
        sender.offer(f"{number}", pages(number))
        sender.offer(f"{number}", None)
        assert taken.wait() is None
        assert list(map(same, taken.pages, [pages(number)])) == [True]
    assert num_links == 1
    assert isinstance(Taken(receiver, Source(sender.address, "gone")).wait(), StaleLeaseError)
    sender.offer("a", pages(1))
    sender.offer("a", None)
    assert Taken(receiver, Source(sender.address, "a")).wait() is None
    assert num_links == 2


def test_a_kept_connection_that_the_peer_has_closed_is_not_used(
    pair: tuple[SocketTransport, SocketTransport],
) -> None:
    sender, receiver = pair
    for number in range(3):
        sender.offer(f"{number}", pages(number))
        sender.offer(f"{number}", None)
        assert Taken(receiver, Source(sender.address, f"{number}")).wait() is None
        assert len(receiver._idle[sender.address]) == 1
        for link in receiver._idle[sender.address]:
            link.connection.shutdown(socket.SHUT_WR)  # the peer closes its side
        wait_until(lambda: all(link.has_ended for link in receiver._idle[sender.address]))


def test_a_lease_serves_once(pair: tuple[SocketTransport, SocketTransport]) -> None:
    sender, receiver = pair
    sender.offer("a", pages(1))
    sender.offer("a", None)
    source = Source(sender.address, "a", [0, 1])
    assert isinstance(Taken(receiver, Source(sender.address, "b")).wait(), StaleLeaseError)
    wrong = Taken(receiver, Source(sender.address, "a", [0, 1, 2])).wait()
    assert isinstance(wrong, StaleLeaseError)
    assert "blocks 0 to 1" in str(wrong)
    assert Taken(receiver, source).wait() is None
    assert isinstance(Taken(receiver, source).wait(), StaleLeaseError)


def test_an_offer_that_was_dropped_or_has_expired_is_gone(
    pair: tuple[SocketTransport, SocketTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = pair
    sender.offer("a", pages(1))
    sender.drop("a")
    assert isinstance(Taken(receiver, Source(sender.address, "a")).wait(), StaleLeaseError)
    sender.offer("b", pages(1))
    taken = Taken(receiver, Source(sender.address, "b"))
    wait_until(lambda: len(taken.pages) == 1)
    sender.drop("b")
    assert "truncated" in str(taken.wait())
    monkeypatch.setattr(sockets, "LEASE_S", 0.0)
    sender.offer("c", pages(1))
    time.sleep(0.01)
    assert isinstance(Taken(receiver, Source(sender.address, "x")).wait(), StaleLeaseError)  # a connection wakes it
    wait_until(lambda: sender.num_open == 0)
    assert sender.num_expired == 1


def test_too_many_pages_are_not_kept() -> None:
    sender = transport("unix", most=100)
    assert sender.offer("a", pages(1))  # 64 bytes
    assert not sender.offer("b", pages(2))
    assert sender.num_open == 1
    sender.close()


@pytest.mark.parametrize("scheme", ["unix", "tcp"])
def test_another_key_is_refused(scheme: str) -> None:
    sender, receiver = transport(scheme), transport(scheme, secret=b"x" * 32)
    sender.offer("a", pages(1))
    error = Taken(receiver, Source(sender.address, "a")).wait()
    assert isinstance(error, RefusedError)
    assert "do not share a key" in str(error)
    assert sender.num_open == 1, "the lease was not spent"
    sender.close()
    receiver.close()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (IDENTITY._replace(facts={**FACTS, "model": "n"}), "model is n here and m there"),
        (IDENTITY._replace(facts={**FACTS, "dtype": "bfloat16"}), "dtype is bfloat16 here and float32 there"),
        (IDENTITY._replace(facts={**FACTS, "block_size": "32"}), "block_size is 32 here and 16 there"),
        (IDENTITY._replace(page_bytes=[[8]]), r"pages have \[\[8\]\] bytes here and"),
        (IDENTITY._replace(fingerprint="0" * 64), "digest is 000000000000 here and ffffffffffff there"),
    ],
)
def test_engines_whose_pages_differ_are_refused(other: Identity, words: str) -> None:
    sender, receiver = transport("tcp"), transport("tcp", identity=other)
    sender.offer("a", pages(1))
    error = Taken(receiver, Source(sender.address, "a")).wait()
    assert isinstance(error, MismatchError)
    with pytest.raises(MismatchError, match=words):
        raise error
    assert sender.num_open == 1, "the lease was not spent"
    sender.close()
    receiver.close()


class Tampering:
    """A wire between two transports that changes, or cuts, what the sender sends after its first frames."""

    def __init__(self, target: str, after: int, change: bytes | None) -> None:
        host, _, port = target.removeprefix("tcp:").rpartition(":")
        self._target, self._after, self._change = (host, int(port)), after, change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp:127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with self._listener:
            receiver, _ = self._listener.accept()
        sender = socket.create_connection(self._target)
        back = threading.Thread(target=self._copy, args=(receiver, sender), daemon=True)
        with receiver, sender:
            back.start()
            with suppress(OSError):
                self._forward(sender, receiver)
            for each in (receiver, sender):
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            back.join()

    def _forward(self, sender: socket.socket, receiver: socket.socket) -> None:
        count = 0
        while data := sender.recv(1 << 16):
            if count <= self._after < count + len(data):
                at = self._after - count
                if self._change is None:
                    receiver.sendall(data[:at])
                    return
                data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            count += len(data)
            receiver.sendall(data)

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)


@pytest.mark.parametrize("change", [None, b"x"])
def test_what_is_cut_or_changed_on_the_way_does_not_arrive(change: bytes | None) -> None:
    """At any byte after the handshake."""
    sender, receiver = transport("tcp"), transport("tcp")
    offered = pages(1)
    sender.offer("whole", offered)
    sender.offer("whole", None)
    wire = Tampering(sender.address, 1 << 30, change)
    whole = Taken(receiver, Source(wire.address, "whole"))
    assert whole.wait() is None
    for number, after in enumerate(range(75, 560, 37)):
        sender.offer(f"{number}", offered)
        sender.offer(f"{number}", None)
        wire = Tampering(sender.address, after, change)
        taken = Taken(receiver, Source(wire.address, f"{number}"))
        error = taken.wait()
        assert error is not None, after
        assert all(same(each, offered) for each in taken.pages), "pages were changed"
    sender.close()
    receiver.close()


def test_a_silent_peer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "STALL_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        receiver = transport("tcp")
        begun_s = time.monotonic()
        error = Taken(receiver, Source(f"tcp:127.0.0.1:{silent.getsockname()[1]}", "a")).wait()
        assert error is not None
        assert time.monotonic() - begun_s < 10.0
        receiver.close()


def test_a_page_whose_hash_does_not_fit_its_tokens_is_refused() -> None:
    good = pages(1)
    check_names(good)
    first, second = good.names
    for wrong in (
        PageName(first.key, first.parent, first.tokens + b"\0"),
        PageName(second.key, first.parent, second.tokens),
        PageName(first.key[:-1] + b"\1", first.parent, first.tokens),
        PageName(b"", b"", b""),
    ):
        with pytest.raises(TransferError, match="hash does not fit"):
            check_names(good._replace(names=[wrong]))


def test_public_addresses_are_not_spoken_to() -> None:
    for address in ("8.8.8.8", "2001:4860:4860::8888", "0.0.0.0"):
        with pytest.raises(TransferError, match="no private address"):
            check_private(address)
    for address in ("127.0.0.1", "10.1.2.3", "192.168.0.9", "::1", "fd00::1"):
        check_private(address)
    with pytest.raises(TransferError, match="no private address"):
        TcpTransport("0.0.0.0", 0, SECRET, IDENTITY, 1)
    receiver = transport("tcp")
    assert "no private address" in str(Taken(receiver, Source("tcp:8.8.8.8:80", "a")).wait())
    receiver.close()
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(InvalidArgumentError, match="cannot be listened at"),
    ):
        TcpTransport("127.0.0.1", other.getsockname()[1], SECRET, IDENTITY, 1)


def test_an_offer_may_be_asked_for_before_it_is_made(pair: tuple[SocketTransport, SocketTransport]) -> None:
    sender, receiver = pair
    for number in range(2):  # over a new connection, and one that is kept
        lease, offered = f"{number}", [pages(number), pages(number + 2, 3)]
        taken = Taken(receiver, Source(sender.address, lease, is_early=True))
        wait_until(lambda: lease in sender._early)  # noqa: B023
        assert sender.offer(lease, NO_PAGES)
        for each in offered:
            assert sender.offer(lease, each)
        sender.offer(lease, None)
        assert taken.wait() is None
        assert list(map(same, taken.pages, offered)) == [True, True]
    wait_until(lambda: sender.num_open == receiver.num_open == 0)


@pytest.mark.parametrize("ends", ["drop", "use", "time"])
def test_an_offer_that_is_not_made_is_stale(
    pair: tuple[SocketTransport, SocketTransport], ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = pair
    monkeypatch.setattr(sockets, "ALIVE_S", 0.01)
    if ends == "time":
        monkeypatch.setattr(sockets, "LEASE_S", 0.1)
    taken = Taken(receiver, Source(sender.address, "a", is_early=True))
    if ends != "time":
        wait_until(lambda: "a" in sender._early)
        if ends == "drop":
            sender.drop("a")
        else:
            sender.use(IDENTITY._replace(fingerprint="e" * 64))
    assert isinstance(taken.wait(), StaleLeaseError)
    assert not sender._early


def test_weights_that_change_while_a_lease_is_heard_end_it(pair: tuple[SocketTransport, SocketTransport]) -> None:
    sender, receiver = pair
    changes: list[threading.Thread] = []

    class Changing(Identity):
        def check(self, other: Identity) -> None:
            change = threading.Thread(target=sender.use, args=(IDENTITY._replace(fingerprint="e" * 64),))
            change.start()
            changes.append(change)  # started: one that is not yet alive has not ended
            change.join(0.2)
            super().check(other)

    sender.use(Changing(*IDENTITY))
    taken = Taken(receiver, Source(sender.address, "a", is_early=True))
    wait_until(lambda: bool(changes) and not changes[0].is_alive())
    sender.offer("a", pages(0))  # of the new weights
    sender.offer("a", None)
    assert isinstance(taken.wait(), StaleLeaseError)
    assert taken.pages == []


def test_an_offer_of_new_weights_is_not_taken_by_who_waited_for_one_of_the_old(
    pair: tuple[SocketTransport, SocketTransport],
) -> None:
    sender, receiver = pair
    taken = Taken(receiver, Source(sender.address, "a", is_early=True))
    wait_until(lambda: "a" in sender._early)
    with sender._condition:  # both before the thread that waits can look
        sender.use(IDENTITY._replace(fingerprint="e" * 64))
        sender.offer("a", pages(0))
    assert isinstance(taken.wait(), StaleLeaseError)
    assert taken.pages == []
    assert sender.num_open == 1  # the new offer waits for who asks for it


def test_a_pull_that_is_dropped_before_it_is_connected_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = transport("unix"), transport("unix")
    go, link = threading.Event(), receiver._link

    def late(source: Source) -> Any:
        assert go.wait(TIMEOUT_S)
        return link(source)

    monkeypatch.setattr(receiver, "_link", late)
    taken = Taken(receiver, Source(sender.address, "a", is_early=True))
    receiver.drop("a")
    go.set()
    assert "not wanted any more" in str(taken.wait())
    assert receiver.num_open == 0
    assert not receiver._dropped
    for each in (sender, receiver):
        each.close()


def test_the_thread_that_offers_hears_who_asks_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an engine's does whose transport's threads have no processor while it computes."""
    sender, receiver = transport("unix"), transport("unix")
    sender.sends_at_once = True
    sender.offer("a", None)
    assert Taken(receiver, Source(sender.address, "a")).wait() is None
    wait_until(lambda: len(sender._resting) == 1)
    threads = noted_senders(sender, monkeypatch)
    for lease, is_known in (("b", True), ("c", False)):
        with sender._condition:  # its own thread waits for this
            stream = sender._resting[0].stream
            assert not stream.has_message
            if is_known:
                sender.offer(lease, NO_PAGES)
            taken = Taken(receiver, Source(sender.address, lease))
            wait_until(lambda: stream.has_message)  # noqa: B023
            sender.offer(lease, pages(1))
            sender.offer(lease, None)
            assert sender._offers[lease].is_ended
            assert taken.wait() is None
        assert list(map(same, taken.pages, [pages(1)])) == [True]
        wait_until(lambda: sender.num_open == 0 and len(sender._resting) == 1)
    assert threads == [threading.current_thread().name] * 2
    for each in (sender, receiver):
        each.close()


def test_a_peer_that_was_killed_has_no_message() -> None:
    sender = transport("unix")
    ours, theirs = socket.socketpair()
    stream = Stream(ours, b"k", sender, is_sender=True)
    ours.send(b"unread")
    theirs.close()  # resets the connection
    assert not stream.has_message
    ours.close()
    sender.close()


def test_memory_is_used_again_once_its_pages_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = transport("unix"), transport("unix")
    made: list[int] = []
    make = shared_memory

    def noted(size: int) -> int:
        made.append(size)
        return make(size)

    monkeypatch.setattr("runtime.engine.transfer.segments.shared_memory", noted)

    def handed(number: int) -> Taken:
        sender.offer(f"{number}", pages(number))
        sender.offer(f"{number}", None)
        taken = Taken(receiver, Source(sender.address, f"{number}"))
        assert taken.wait() is None
        wait_until(lambda: sender.num_open == 0)
        return taken

    kept = handed(0)
    for number in range(1, 4):
        handed(number)
        gc.collect()
    assert len(made) == 2
    assert list(map(same, kept.pages, [pages(0)])) == [True]
    monkeypatch.setattr(segments, "MOST_KEPT_BYTES", 0)
    others = [handed(number) for number in range(4, 7)]
    assert made[2:] == [64, 64]  # the first lay in the free one
    assert [same(other.pages[0], pages(number)) for number, other in enumerate(others, 4)] == [True] * 3
    for each in (sender, receiver):
        each.close()


def test_memory_that_a_peer_cannot_have_is_refused() -> None:
    sent, taken = SentSegments(), TakenSegments()
    number, memory = sent.place([np.ones((2, 8), np.uint8)])
    assert memory is not None
    for wrong in ([number + 1], [-1]):
        with pytest.raises(TransferError, match="released memory"):
            sent.reuse(wrong)
    with pytest.raises(TransferError, match="smaller than"):
        taken.take(number, memory, 1 << 20)
    with pytest.raises(TransferError, match="did not come"):
        taken.take(number, None, 16)
    assert taken.take(number, memory, 16).tolist() == [1] * 16
    with pytest.raises(TransferError, match="came twice"):
        taken.take(number, memory, 16)
    assert taken.released() == [number]
    sent.reuse([number])
    with pytest.raises(TransferError, match="released memory"):
        sent.reuse([number])
    os.close(memory)
    sender = transport("tcp")
    with socket.socket() as connection, pytest.raises(TransferError, match="released memory"):
        sender.reuse(Stream(connection, b"k", sender, is_sender=True), [0])
    sender.close()
