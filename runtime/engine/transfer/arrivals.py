"""Pages that other engines have handed over, on the host until their request starts: a `PageStore` that is read alone.

The engine finds them as it finds prefixes on the disk, whose store this one asks, too. Pages that did not come, or
not whole, are computed: an arrival never changes an answer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from runtime.engine.messages import Source
from runtime.engine.transfer.identity import TransferError
from runtime.engine.transfer.transport import STALL_S, Pages, Transport, check_names
from runtime.kv.page_store import Fill, PageLostError, PageName, PageRun, PageStore

logger = logging.getLogger("xserv.engine")

KEPT_S = 600.0
"""Pages whose request does not come are dropped after so long."""
_MARK = "\0"  # no file's name has it


@dataclass(slots=True)
class _Arrival:
    source: Source
    pages: list[Pages] = field(default_factory=list)
    parts: dict[bytes, Pages] = field(default_factory=dict)  # those whose later planes are missing, by their first key
    is_over: bool = False
    error: TransferError | None = None
    since_s: float = field(default_factory=time.monotonic)


class Arrivals:
    """See `PageStore`. Pages arrive on the transports' threads; the rest belongs to the engine's loop.

    Args:
        transports: by the scheme of their addresses.
        most_bytes: that lie here; a sender waits for room, and is given up if there is none for long.
        num_planes: of a page, by pool.
        backing: the store that is asked for what is not here, and written to.
    """

    def __init__(
        self,
        transports: dict[str, Transport],
        most_bytes: int,
        num_planes: Sequence[int],
        backing: PageStore | None = None,
    ) -> None:
        self._transports, self._most_bytes, self._backing = transports, most_bytes, backing
        self._num_planes = num_planes
        self._condition = threading.Condition()
        # Guarded by the condition:
        self._arrivals: dict[str, _Arrival] = {}
        self._places: dict[bytes, list[tuple[str, int, int]]] = {}  # lease, number of the pages, row; by key
        self._after: dict[bytes, dict[bytes, None]] = {}  # keys by their parent's
        self._num_bytes = 0
        self._fresh: dict[str, None] = {}
        self.on_arrival: Callable[[], None] = _do_nothing
        """Called when pages have come, on a transport's thread."""

    def expect(self, source: Source) -> None:
        """Have an offer pulled, unless it is already. Thread-safe."""
        self._drop_old()
        with self._condition:
            if source.lease in self._arrivals:
                return
            self._arrivals[source.lease] = _Arrival(source)
        transport = self._transports.get(source.address.partition(":")[0])
        if transport is None:
            self._end(source.lease, TransferError(f"no transport leads to {source.address!r:.80}"))
            return
        transport.pull(source, partial(self._add, source.lease), partial(self._end, source.lease))

    def result(self, lease: str) -> tuple[bool, TransferError | None]:
        """Whether no more will come, and the error if not all has."""
        with self._condition:
            arrival = self._arrivals.get(lease)
            return (True, None) if arrival is None else (arrival.is_over, arrival.error)

    def has(self, lease: str) -> bool:
        """Whether this offer is expected, or here."""
        with self._condition:
            return lease in self._arrivals

    def wait(self, timeout_s: float) -> None:
        """Wait at most so long until anything has come."""
        with self._condition:
            self._condition.wait(timeout_s)

    def drop(self, lease: str) -> None:
        """Forget what has come, and pull no more. Thread-safe."""
        with self._condition:
            arrival = self._arrivals.pop(lease, None)
            self._fresh.pop(lease, None)
            for part in () if arrival is None else arrival.parts.values():
                self._num_bytes -= part.num_bytes
            for number, pages in enumerate(() if arrival is None else arrival.pages):
                self._num_bytes -= pages.num_bytes
                for row, name in enumerate(pages.names):
                    places = self._places[name.key]
                    places.remove((lease, number, row))
                    if not places:
                        del self._places[name.key]
                        siblings = self._after[name.parent]
                        del siblings[name.key]
                        if not siblings:
                            del self._after[name.parent]
            self._condition.notify_all()
        if arrival is not None and not arrival.is_over:
            transport = self._transports.get(arrival.source.address.partition(":")[0])
            if transport is not None:
                transport.drop(lease)

    def _drop_old(self) -> None:
        """Forget what no request has come for."""
        before_s = time.monotonic() - KEPT_S
        with self._condition:
            old = [lease for lease, each in self._arrivals.items() if each.since_s < before_s]
        for lease in old:
            self.drop(lease)

    @property
    def num_open(self) -> int:
        """Arrivals that are not dropped."""
        return len(self._arrivals)

    def _add(self, lease: str, pages: Pages) -> None:
        """See `Arrived`."""
        if not pages.names:  # `NO_PAGES`, by which an offer begins
            return
        if not pages.first_plane:
            check_names(pages)
        with self._condition:
            if not self._condition.wait_for(
                lambda: lease not in self._arrivals or self._num_bytes + pages.num_bytes <= self._most_bytes, STALL_S
            ):
                raise TransferError(f"more than {self._most_bytes:,} bytes of pages wait for their requests")
            arrival = self._arrivals.get(lease)
            if arrival is None:
                raise TransferError("the request is gone")
            whole = self._whole(arrival, pages)
            if whole is None:
                return
            for row, name in enumerate(whole.names):
                self._places.setdefault(name.key, []).append((lease, len(arrival.pages), row))
                self._after.setdefault(name.parent, {})[name.key] = None
            arrival.pages.append(whole)
            self._fresh[lease] = None
            self._condition.notify_all()
        self.on_arrival()

    def _whole(self, arrival: _Arrival, pages: Pages) -> Pages | None:
        """The pages, with their first planes, if these have come before; None while later planes are missing. Raises
        `TransferError` for planes that do not follow those that came. The condition is held."""
        first = pages.names[0].key
        before = arrival.parts.pop(first, None)
        if before is not None and not pages.first_plane:  # they are sent once more
            self._num_bytes -= before.num_bytes
            before = None
        num_before = 0 if before is None else len(before.planes)
        if pages.first_plane != num_before or (before is not None and list(pages.names) != list(before.names)):
            self._num_bytes -= 0 if before is None else before.num_bytes
            raise TransferError(f"the peer sent planes from {pages.first_plane} on where {num_before} had come")
        self._num_bytes += pages.num_bytes
        if before is not None:
            pages = pages._replace(planes=[*before.planes, *pages.planes], first_plane=0)
        if len(pages.planes) < self._num_planes[pages.pool]:
            arrival.parts[first] = pages
            return None
        return pages

    @property
    def has_fresh(self) -> bool:
        """Whether ``take_fresh`` has something."""
        return bool(self._fresh)

    def take_fresh(self) -> list[str]:
        """Leases of which pages have come since the last call."""
        with self._condition:
            fresh, self._fresh = list(self._fresh), {}
        return fresh

    def _end(self, lease: str, error: TransferError | None) -> None:
        """See `Ended`."""
        with self._condition:
            arrival = self._arrivals.get(lease)
            if arrival is not None:
                arrival.is_over, arrival.error = True, error
            self._condition.notify_all()

    # PageStore

    def refresh(self) -> None:
        """See `PageStore`."""
        if self._backing is not None:
            self._backing.refresh()

    def find(self, keys: Sequence[bytes]) -> list[PageName | None]:
        """See `PageStore`."""
        with self._condition:
            found = [self._name(key) for key in keys]
        if self._backing is not None and None in found:
            others = self._backing.find(keys)
            found = [own or other for own, other in zip(found, others)]
        return found

    def inside(self, parent: bytes) -> list[PageName]:
        """See `PageStore`."""
        with self._condition:
            own = [name for key in self._after.get(parent, ()) if (name := self._name(key)) is not None]
        keys = {name.key for name in own}
        others = [] if self._backing is None else self._backing.inside(parent)
        return [*own, *(name for name in others if name.key not in keys)]

    def latest(self, most: int) -> list[PageName]:
        """See `PageStore`: what came from others is waited for by its request."""
        return [] if self._backing is None else self._backing.latest(most)

    def runs(self, keys: Sequence[bytes]) -> list[PageRun]:
        """See `PageStore`."""
        found: list[PageRun] = []
        left: list[bytes] = []  # those that only the other store has, side by side
        for key in keys:
            with self._condition:
                places = self._places.get(key)
                place = None if places is None else places[0]
            if place is None and self._backing is not None and self._backing.find([key]) != [None]:
                left.append(key)
                continue
            found += self._runs_backing(left)
            left = []
            lease, number, row = place or ("", 0, 0)  # dropped since it was found: to read it raises PageLostError
            name, last = f"{lease}{_MARK}{number}", found[-1] if found else None
            if last is not None and (last.file, last.row + last.num_pages) == (name, row):
                found[-1] = last._replace(num_pages=last.num_pages + 1)
            else:
                found.append(PageRun(name, row, 1))
        return [*found, *self._runs_backing(left)]

    def read(self, run: PageRun, take: Callable[[Fill], None]) -> None:
        """See `PageStore`."""
        lease, mark, number = run.file.partition(_MARK)
        if not mark:
            assert self._backing is not None, "its runs come from there"
            self._backing.read(run, take)
            return
        with self._condition:
            arrival = self._arrivals.get(lease)
        if arrival is None:
            raise PageLostError("pages that were handed over are dropped")
        planes = arrival.pages[int(number)].planes

        def fill(plane: int, pages: NDArray[np.uint8]) -> None:
            np.copyto(pages, planes[plane][run.row : run.row + run.num_pages])

        take(fill)

    @property
    def keeps(self) -> bool:
        """See `PageStore`."""
        return self._backing is not None and self._backing.keeps

    @property
    def is_empty(self) -> bool:
        """See `PageStore`."""
        return not self._places and (self._backing is None or self._backing.is_empty)

    @property
    def has_room(self) -> bool:
        """See `PageStore`."""
        return self._backing is not None and self._backing.has_room

    def write(self, pool: int, names: Sequence[PageName], planes: Sequence[NDArray[np.uint8]]) -> None:
        """See `PageStore`."""
        assert self._backing is not None, "nothing is kept"
        self._backing.write(pool, names, planes)

    def back_with(self, backing: PageStore | None) -> None:
        """From now on ask this store for what is not here. To be called after `close`."""
        self._backing = backing

    def close(self, timeout_s: float | None = None) -> int:
        """See `PageStore`."""
        for lease in list(self._arrivals):
            self.drop(lease)
        return 0 if self._backing is None else self._backing.close(timeout_s)

    def _runs_backing(self, keys: Sequence[bytes]) -> list[PageRun]:
        return self._backing.runs(keys) if self._backing is not None and keys else []

    def _name(self, key: bytes) -> PageName | None:
        """The condition is held."""
        places = self._places.get(key)
        if places is None:
            return None
        lease, number, row = places[0]
        return self._arrivals[lease].pages[number].names[row]


def _do_nothing() -> None:
    """The callback before one is set."""
