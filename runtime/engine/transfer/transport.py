"""A transport carries pages from one engine to another: six functions, of which an adapter of another library is made.

    sender                                     receiver
    offer(lease, NO_PAGES): some will come     pull(source, arrived, ended)
    offer(lease, pages), as they are computed
    offer(lease, None): that was all
    has_sent(lease), drop(lease)               use(identity), close()

A lease names an offer. It cannot be guessed, is taken once, and ends when it was taken, or after a time. Pages are on
the host; the engine's blocks are free as soon as ``offer`` has returned. `runtime.engine.transfer.sockets` has the two
transports, of which one passes shared memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.engine.messages import Source
from runtime.engine.transfer.identity import Identity, RefusedError, TransferError
from runtime.kv.page_store import PageName

STALL_S = 5.0
"""A peer that sends nothing for so long is given up."""


class StaleLeaseError(RefusedError):
    """The peer has no such offer: it was taken, it has expired, or there never was one."""


class Pages(NamedTuple):
    """Pages of a pool: their names, and by plane ``[num_pages, page_bytes]``. The planes of later layers may follow,
    with the same names: these begin with plane ``first_plane``."""

    pool: int
    names: Sequence[PageName]
    planes: Sequence[NDArray[np.uint8]]
    first_plane: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes)


NO_PAGES = Pages(0, (), ())
"""Makes an offer whose pages are still to be computed."""

Arrived = Callable[[Pages], None]
"""Takes pages, on any thread; raises `TransferError` if it cannot use them, which ends the pull."""

Ended = Callable[[TransferError | None], None]
"""Called once, on any thread: all pages have arrived, or no more will, and why."""


class Transport(Protocol):
    """See the module. Thread-safe. ``address`` is where others pull from."""

    num_sent_bytes: int
    num_received_bytes: int

    @property
    def address(self) -> str: ...

    @property
    def num_open(self) -> int:
        """Offers and pulls that are not over."""
        ...

    def offer(self, lease: str, pages: Pages | None) -> bool:
        """Add pages to an offer, which the first call makes, perhaps with none; None completes it. The arrays are kept.
        False: the offer was dropped, and more of it is not wanted."""
        ...

    def pull(self, source: Source, arrived: Arrived, ended: Ended) -> None:
        """Take an offer of another engine. Returns at once. For an offer that its sender has not made yet, ``ended``
        gets `StaleLeaseError`."""
        ...

    def has_sent(self, lease: str) -> bool:
        """Whether all that was offered under it is sent, or it has ended."""
        ...

    def drop(self, lease: str) -> None:
        """Forget an offer, or end a pull of it. Others are left as they are."""
        ...

    def use(self, identity: Identity) -> None:
        """From now on the engine's pages have this identity: all offers and pulls of others end."""
        ...

    def close(self, timeout_s: float = 0.0) -> None:
        """End all; for so long, offers that are being taken are completed first."""
        ...


def check_names(pages: Pages) -> None:
    """Raises `TransferError` for pages with names that are not those of their tokens."""
    for name in pages.names:
        is_right = name.key[-1:] == name.parent[-1:] and len(name.key) == len(name.parent) == _KEY_BYTES
        if not is_right or name.key[:-1] != hashlib.sha256(name.parent[:-1] + name.tokens).digest():
            raise TransferError("the peer sent a page whose hash does not fit its tokens")


_KEY_BYTES = hashlib.sha256().digest_size + 1  # and the number of its cache group
