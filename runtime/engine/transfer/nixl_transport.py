"""Pages between machines by NIXL, NVIDIA's transfer library (the extra `nixl`): over RDMA where UCX finds it, else TCP.

    sender → receiver   a header, as over TCP; then for each piece: its place in registered memory, and a digest
    receiver            reads the piece from there, compares the digest
    receiver → sender   it was read: the place may be used again; until then from time to time that it is being read

The frames of `runtime.engine.transfer.sockets` name peers, leases and places, authenticated; NIXL moves the bytes
alone, neither encrypted nor authenticated, so their digest travels in the frames. Without a GPU the library works by
TCP, installed without what it requires: ``pip install --no-deps nixl nixl-cu12``.
"""

from __future__ import annotations

import hashlib
import queue
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.engine.transfer.frames import Alive, IsRead, Place, Stream
from runtime.engine.transfer.identity import Identity, TransferError
from runtime.engine.transfer.sockets import ALIVE_S, TcpTransport
from runtime.engine.transfer.transport import STALL_S
from runtime.errors import InvalidArgumentError
from runtime.later import later

_nixl = later("nixl")

PIECE_BYTES = 16 << 20
NUM_PIECES = 4
"""Registered memory of a sender: so many pieces of this size are under way at once."""
_POLL_S = 100e-6
MOST_KNOWN = 64
"""So many peers' agents are kept. Another one replaces the one that was read from longest ago."""


class NixlTransport(TcpTransport):
    """See the module. UCX_TLS, which UCX reads, chooses networks: `tcp,self` without RDMA."""

    num_inline = 0

    def __init__(self, host: str, port: int, secret: bytes, identity: Identity, most_bytes: int) -> None:
        """As `TcpTransport`. Raises InvalidArgumentError, also if the library is not there, or has no network."""
        self._lock = threading.Lock()
        self._memory = np.zeros((NUM_PIECES, PIECE_BYTES), np.uint8)
        self._free: queue.Queue[int] = queue.Queue()
        # Guarded by the lock:
        self._known: dict[bytes, str] = {}  # agents of peers, by their metadata, in the order of their latest reads
        self._num_readers: Counter[bytes] = Counter()
        for piece in range(NUM_PIECES):
            self._free.put(piece)
        try:
            strict = _nixl.nixl_agent_config(sync_mode=_nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
            self._agent = _nixl.nixl_agent(f"xserv-{secrets.token_hex(16)}", strict)
            self._registered = self._register(self._memory)
            self._metadata = bytes(self._agent.get_agent_metadata())
        except ImportError:
            raise InvalidArgumentError(
                "kv_transfer_library is 'nixl', which is not installed: pip install '.[nixl]' in xserv's checkout",
                param="kv_transfer_library",
            ) from None
        except Exception as error:  # the library's own kinds have no base
            raise InvalidArgumentError(f"NIXL cannot be used: {error}", param="kv_transfer_library") from None
        super().__init__(host, port, secret, identity, most_bytes)

    def close(self, timeout_s: float = 0.0) -> None:
        super().close(timeout_s)
        with self._lock:
            for metadata in list(self._known):
                self._forget_agent(metadata)

    def send_planes(self, stream: Stream, planes: Sequence[NDArray[np.uint8]]) -> None:
        """After a header: copies pieces into registered memory, and waits for each to be read."""
        piece = self._free_piece(stream)
        try:
            memory = self._memory[piece]
            for num_bytes in _filled(memory, planes):
                digest = hashlib.blake2b(memory[:num_bytes].data, digest_size=16).digest()
                stream.send(Place(self._metadata, memory.ctypes.data, num_bytes, digest))
                stream.await_a(IsRead)
        finally:
            self._free.put(piece)

    def _free_piece(self, stream: Stream) -> int:
        while True:
            try:
                return self._free.get(timeout=ALIVE_S)
            except queue.Empty:
                stream.send(Alive())

    def receive_planes(self, stream: Stream, num_bytes: int) -> NDArray[np.uint8]:
        """All planes' bytes."""
        found = np.empty(num_bytes, np.uint8)
        registered = self._register(found)
        try:
            first = 0
            while first < num_bytes:
                place = stream.await_a(Place)
                if not 0 < place.num_bytes <= num_bytes - first:
                    raise TransferError(f"the peer sent {place.num_bytes:,} bytes, {num_bytes - first:,} are left")
                piece = found[first : first + place.num_bytes]
                try:
                    self._read(stream, place, piece)
                except (OSError, TransferError):
                    raise
                except Exception as error:  # the library's own kinds have no base
                    raise TransferError(f"NIXL: {error}") from None
                if hashlib.blake2b(piece.data, digest_size=16).digest() != place.digest:
                    raise TransferError("pages have other bytes than their sender had")
                stream.send(IsRead())
                first += place.num_bytes
        finally:
            self._agent.deregister_memory(registered)
        return found

    def _register(self, memory: NDArray[np.uint8]) -> Any:
        return self._agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")

    def _read(self, stream: Stream, place: Place, into: NDArray[np.uint8]) -> None:
        """Tells the sender meanwhile that it has to wait."""
        agent = self._agent
        while not self._lock.acquire(timeout=ALIVE_S):  # another thread connects to a peer
            stream.send(Alive())
        try:
            peer = self._known.pop(place.metadata, None)
            if peer is None:
                name = agent.add_remote_agent(place.metadata)
                agent.make_connection(name)  # first transfers at once may wait for ever otherwise
                peer = name.decode() if isinstance(name, bytes) else name
            self._known[place.metadata] = peer
            self._num_readers[place.metadata] += 1
        finally:
            self._lock.release()
        try:
            self._read_from(stream, peer, place, into)
        except BaseException:
            with self._lock:
                self._num_readers[place.metadata] -= 1
                if not self._num_readers[place.metadata]:  # it may have died
                    self._forget_agent(place.metadata)
            raise
        with self._lock:
            self._num_readers[place.metadata] -= 1
            idle = [each for each in self._known if not self._num_readers[each]]
            for metadata in idle[: max(0, len(self._known) - MOST_KNOWN)]:
                self._forget_agent(metadata)

    def _forget_agent(self, metadata: bytes) -> None:
        """The lock is held."""
        del self._num_readers[metadata]
        name = self._known.pop(metadata, None)
        if name is not None:
            with suppress(Exception):  # it has gone
                self._agent.remove_remote_agent(name)

    def _read_from(self, stream: Stream, peer: str, place: Place, into: NDArray[np.uint8]) -> None:
        agent = self._agent
        ours = agent.get_xfer_descs([(into.ctypes.data, into.nbytes, 0)], "DRAM")
        theirs = agent.get_xfer_descs([(place.address, place.num_bytes, 0)], "DRAM")
        transfer = agent.initialize_xfer("READ", ours, theirs, peer, b"")
        begun_s = told_s = time.monotonic()
        try:
            state = agent.transfer(transfer)
            while state == "PROC" and (now_s := time.monotonic()) < begun_s + STALL_S:
                if now_s > told_s + ALIVE_S:
                    told_s = now_s
                    stream.send(Alive())
                time.sleep(_POLL_S)
                state = agent.check_xfer_state(transfer)
            if state == "PROC":
                raise TransferError(f"NIXL has not read {place.num_bytes:,} bytes in {STALL_S:g} s")
            if state != "DONE":
                raise TransferError(f"NIXL has failed: {state}")
        finally:
            agent.release_xfer_handle(transfer)


def _filled(memory: NDArray[np.uint8], planes: Sequence[NDArray[np.uint8]]) -> Iterator[int]:
    """Copies the planes' bytes into memory, again and again until all were there; gives how many lie there."""
    count = 0
    for plane in planes:
        data = plane.reshape(-1)
        while data.nbytes:
            now = min(data.nbytes, memory.nbytes - count)
            memory[count : count + now] = data[:now]
            data, count = data[now:], count + now
            if count == memory.nbytes:
                yield count
                count = 0
    if count:
        yield count
