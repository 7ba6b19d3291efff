"""An engine's part in handing requests over: it offers the pages of those that will leave, and waits for those of
requests that come.

    an engine that computes a prompt                  the one that goes on
    begin: its first step is planned         ──told──▶ reserve: the offer is being pulled, blocks will be held
    note: pages, copied to the host          ──pages─▶ take_in: they are read into the blocks
    end: the first token is drawn, all is there
             └──────── the fleet: the request, with the token ────────▶ admit, and the next step decodes it

Pages are copied after each chunk of a prompt, while later ones are computed; the last page, which is not full, when the
choice leaves. In a fleet a step's tokens go before its pages. If a chunk has many pages, the planes of its first layers
go while the later layers are computed, and the last ones once the step has not failed: without them the others are
worth nothing. A page's name is that of `StoredPrefixes`, so the other engine finds it by the tokens.

An engine that has nothing else to do relays: it goes on with an answer until one step after its pages are sent, so that
clients do not wait for them. Another request ends the relay before the next step.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from runtime.engine.messages import EngineOutput, Source
from runtime.engine.open_requests import OpenRequests
from runtime.engine.scheduling.block_pool import BlockPool
from runtime.engine.scheduling.reserved_prefixes import ReservedPrefixes
from runtime.engine.scheduling.scheduler import Scheduler
from runtime.engine.scheduling.sequence import Request, Sequence, State
from runtime.engine.scheduling.step import Step
from runtime.engine.scheduling.stored_prefixes import StoredPrefixes, of_group, page_key
from runtime.engine.transfer.arrivals import Arrivals
from runtime.engine.transfer.identity import RefusedError
from runtime.engine.transfer.transport import NO_PAGES, Pages, Transport
from runtime.kv.kinds import FULL
from runtime.kv.layer_copies import LayerCopies, PassCopy
from runtime.kv.page_store import PageName

logger = logging.getLogger("xserv.engine")

CLOSE_S = 5.0
"""How long an engine that ends waits for its offers to be taken."""


_Found = tuple[int, PageName, int]
"""A page: its group, its name without one, its block."""


@dataclass(slots=True)
class TransferCounters:
    """Since the engine's start: requests whose pages were offered, and that came with pages; offers that could not be
    made whole; requests whose pages did not all come."""

    offered: int = 0
    arrived: int = 0
    dropped: int = 0
    lost: int = 0


@dataclass(slots=True)
class _Offered:
    """A choice's full pages that were offered, and the name of the last, without a group."""

    num_pages: int = 0
    last: PageName | None = None


@dataclass(slots=True)
class _Ahead:
    """Pages of a choice up to a token, whose first planes are copied while the step runs that completes them."""

    end: int
    names: list[PageName]
    copies: dict[int, PassCopy]  # by pool


@dataclass(slots=True)
class _Lease:
    name: str
    transport: Transport
    is_dropped: bool = False
    may_relay: bool = False
    is_told: bool = False  # the fleet was, and so the other engine
    is_held: bool = False  # nothing is offered yet: a second token goes first
    num_relayed: int = 0  # tokens here since the first that it could leave with
    was_sent: bool = False  # before the step that ran last
    num_blocks: int = 0
    choices: dict[int, _Offered] = field(default_factory=dict)
    ahead: dict[int, _Ahead] = field(default_factory=dict)  # by choice; of the step that runs

    def drop(self) -> None:
        """Offer no more, and forget what was offered."""
        self.is_dropped = True
        self.transport.drop(self.name)

    def run(self, offer: Callable[[], object]) -> None:
        """Offer, unless it is dropped; if that happens meanwhile, nothing stays."""
        if not self.is_dropped:
            offer()
        if self.is_dropped:
            self.transport.drop(self.name)


class HandOvers:
    """See the module. Belongs to the engine's loop.

    Args:
        transports: by the scheme of their leases and addresses.
        arrivals: the store of ``stored``.
        copies: copies pages while a step computes them; None without.
        has_fleet: a fleet wants to know of requests that begin.
    """

    def __init__(
        self,
        pool: BlockPool,
        stored: StoredPrefixes,
        transports: dict[str, Transport],
        arrivals: Arrivals,
        copies: LayerCopies | None = None,
        *,
        has_fleet: bool,
    ) -> None:
        self._pool, self._stored, self._copies = pool, stored, copies
        self.reserved = ReservedPrefixes(pool, stored)
        self.tell: Callable[[EngineOutput], None] | None = None
        self.states_after: Callable[[Sequence, int], list[list[int]] | None] = lambda sequence, end: None
        self.transports, self.arrivals, self._has_fleet = transports, arrivals, has_fleet
        self.counters = TransferCounters()
        self._leases: dict[str, _Lease] = {}  # by request
        self.may_wait = False  # `send_waiting` comes after a step's outputs, before the next step is planned
        self._waits = False  # pages of the step that has just run
        self._waiting: deque[tuple[_Lease, Callable[[], object]]] = deque()
        self._relayed: Sequence | None = None
        self._is_full = all(kind == FULL for kind in pool.kinds)
        self._announced: list[EngineOutput] = []
        self._awaited: list[Request] = []
        self._starting: list[Request] = []  # their pages lie here until they run

    def __len__(self) -> int:
        """Requests that wait for pages."""
        return len(self._awaited)

    @property
    def has_pages(self) -> bool:
        """Whether pages have arrived that `take_in` can read."""
        return self.arrivals.has_fresh or self.reserved.has_pages

    def admit(self, request: Request) -> None:
        """A request was admitted."""
        if request.lease:
            transport = self.transports[request.lease.partition(":")[0]]
            lease = self._leases[request.request_id] = _Lease(request.lease, transport)
            if request.asked is not None:
                lease.may_relay, lease.is_told = request.asked.may_relay, request.asked.is_expected
                lease.is_held = lease.may_relay and not lease.is_told and self._is_full
            self.counters.offered += 1
        if request.source is not None:
            self.arrivals.expect(request.source)
            self._awaited.append(request)

    def begin(self, request: Request) -> None:
        """The request's first step is planned: say that its pages can be taken."""
        lease = self._leases.get(request.request_id)
        if lease is not None and not lease.is_held:
            self._open(request, lease)

    def _open(self, request: Request, lease: _Lease) -> None:
        """Make the offer, and tell the fleet, unless it knows."""
        if lease.transport.offer(lease.name, NO_PAGES) and self._has_fleet and not lease.is_told:
            lease.is_told = True
            self._tell(EngineOutput(request_id=request.request_id, index=0, new_token_ids=[], num_prompt_tokens=0))

    def _tell(self, output: EngineOutput) -> None:
        if self.tell is None:
            self._announced.append(output)
        else:
            self.tell(output)

    def relays(self, opened: OpenRequests, sequence: Sequence) -> bool:
        """Called with each token of a choice that will leave: whether it goes on here for now. So it does if there is
        nothing else to do, until the other engine has its pages."""
        lease = self._leases[sequence.request.request_id]
        if self._relayed is None and lease.may_relay and not lease.is_dropped and opened.is_alone(sequence.request):
            self._relayed = sequence
        lease.num_relayed += 1
        return self._relayed is sequence

    def relay(self, opened: OpenRequests) -> None:
        """Between two steps: offer the pages of the choice that goes on here once it has a second token, and have it
        leave if they were sent before the last step, or if it is not alone any more."""
        if (sequence := self._relayed) is None:
            return
        request = sequence.request
        lease = self._leases[request.request_id]
        is_over = lease.was_sent or lease.is_dropped or sequence.state is not State.RUNNING
        if is_over or not opened.is_alone(request):
            self._relayed, self._waits = None, self.may_wait
            self._tell(opened.hand_over(sequence))
        elif lease.is_held and lease.num_relayed > 1:
            lease.is_held = False
            self._open(request, lease)
            self.note(sequence)
        else:
            lease.was_sent = not lease.is_held and lease.transport.has_sent(lease.name)

    def note(self, sequence: Sequence, states: list[list[int]] | None = None, *, is_final: bool = False) -> None:
        """The first ``num_committed`` tokens of a choice that will leave lie in its blocks, and, by group, the states
        after them in ``states``. ``is_final``: it leaves now, or is preempted."""
        lease = self._leases.get(sequence.request.request_id)
        if lease is not None and is_final and sequence is self._relayed:
            lease.drop()  # it ends here
        if lease is None or lease.is_dropped or (lease.is_held and not is_final):
            return
        if lease.is_held:
            lease.is_held = False
            lease.transport.offer(lease.name, NO_PAGES)  # the other engine may ask before the pages are sent
        size, committed = self._pool.block_size, sequence.num_committed
        offered = lease.choices.setdefault(sequence.index, _Offered())
        ahead = lease.ahead.pop(sequence.index, None)
        if sequence is self._relayed and committed // size == offered.num_pages:
            return
        if ahead is not None and ahead.end != committed:
            ahead = None
        names = self._names(sequence, offered, committed) if ahead is None else ahead.names
        num_full = min(len(names), committed // size - offered.num_pages)
        found = self._found(sequence, offered, names[: None if is_final else num_full])
        if num_full:
            offered.num_pages, offered.last = offered.num_pages + num_full, names[num_full - 1]
        if states is not None:
            found += self._states(sequence, states, committed, offered.last, names[num_full:])
        lease.num_blocks += len(found)
        self._soon(lease, partial(self._offer, lease, found, {} if ahead is None else ahead.copies))

    def _found(self, sequence: Sequence, offered: _Offered, names: list[PageName]) -> list[_Found]:
        """The pages with these names that the other engine needs."""
        size, first, found = self._pool.block_size, offered.num_pages, list[_Found]()
        end = sequence.num_tokens // size * size  # of the pages that the other engine can find
        for group, kind in enumerate(self._pool.kinds):
            if group not in self._pool.states:
                needed = max(kind.first_page(end, size), sequence.first_pages[group], first)
                for page in range(needed, first + len(names)):
                    found.append((group, names[page - first], sequence.blocks[group][page]))
        return found

    def _states(
        self, sequence: Sequence, states: list[list[int]], end: int, last: PageName | None, rest: list[PageName]
    ) -> list[_Found]:
        """The states after the prompt, under the name of its last page: ``last`` is that of the last full page."""
        at = rest[-1] if rest else last
        if at is None or end < sequence.num_prompt_tokens - 1:
            return []
        return [(group, at, states[group][0]) for group in self._pool.states if states[group]]

    def look_ahead(self, step: Step) -> None:
        """A step is about to run: have the first layers' planes of the pages that it completes copied meanwhile."""
        copies = self._copies
        if copies is None or not self._leases or not copies.helps:
            return
        jobs: list[PassCopy] = []
        for sequence, start, count in ((each.sequence, each.start, each.num_tokens) for each in step.chunks):
            lease = self._leases.get(sequence.request.request_id)
            if lease is None or lease.is_dropped or lease.is_held or sequence.num_committed != start:
                continue
            offered = lease.choices.setdefault(sequence.index, _Offered())
            end, size = min(start + count, sequence.num_tokens), self._pool.block_size
            names = self._names(sequence, offered, end)
            num_full = min(len(names), max(0, end // size - offered.num_pages))
            found = self._found(sequence, offered, names[:num_full])
            if (states := self.states_after(sequence, end)) is not None:
                last = names[num_full - 1] if num_full else offered.last
                found += self._states(sequence, states, end, last, names[num_full:])
            ahead = _Ahead(end, names, {})
            for pool, of_pool in self._by_pool(found).items():
                bounds = copies.bounds(pool, len(of_pool))
                if len(bounds) > 1:
                    take = partial(self._take, sequence.request.lease, lease, pool, _with_groups(of_pool))
                    ahead.copies[pool] = PassCopy(pool, [block_id for _, _, block_id in of_pool], bounds, take)
            if ahead.copies:
                lease.ahead[sequence.index] = ahead
                jobs += ahead.copies.values()
        if jobs:
            copies.begin(jobs)

    def _take(
        self, name: str, lease: _Lease, pool: int, names: list[PageName], first: int, planes: list[NDArray[np.uint8]]
    ) -> bool:
        """See `Take`. Called on another thread."""
        return lease.transport.offer(name, Pages(pool, names, planes, first))

    def step_ran(self) -> None:
        """The step has run: nothing of it is copied ahead any more, and its tokens go before its pages."""
        self._waits = self.may_wait
        if self._copies is not None:
            self._copies.finish()

    def _soon(self, lease: _Lease, offer: Callable[[], object]) -> None:
        """Offer now, or once the step's tokens are told, if only the fleet may know the lease."""
        if self._waits and lease.transport is self.transports.get("unix"):
            self._waiting.append((lease, offer))
        else:
            lease.run(offer)

    def send_waiting(self) -> None:
        """Offer what waits for the step's tokens to be told. No block has changed since."""
        self._waits = False
        while self._waiting:
            lease, offer = self._waiting[0]
            lease.run(offer)
            self._waiting.popleft()  # not before: `drop` must find it

    def _names(self, sequence: Sequence, offered: _Offered, end: int) -> list[PageName]:
        """The names of a choice's pages up to ``end`` that were not offered, the last one maybe not full."""
        size, first = 4 * self._pool.block_size, offered.num_pages * self._pool.block_size
        tokens = np.ascontiguousarray(sequence.prefix_keys(first, end), np.int32).tobytes()
        before = self._stored.root_key(sequence.chain.salt) if offered.last is None else offered.last.key
        names: list[PageName] = []
        for start in range(0, len(tokens), size):
            identity = self._stored.identity(tokens[start : start + size])
            if identity is None:  # its picture is not known any more
                break
            names.append(PageName(page_key(before, identity), before, identity))
            before = names[-1].key
        return names

    def _by_pool(self, found: list[_Found]) -> dict[int, list[_Found]]:
        pools = self._pool.pools
        by_pool: dict[int, list[_Found]] = {}
        for each in found:
            by_pool.setdefault(pools[each[0]], []).append(each)
        return by_pool

    def _offer(self, lease: _Lease, found: list[_Found], ahead: dict[int, PassCopy]) -> None:
        for pool, of_pool in self._by_pool(found).items():
            names, blocks = _with_groups(of_pool), [block_id for _, _, block_id in of_pool]
            parts: list[tuple[int, int, int]] = []  # pages from, to, and their first plane
            copied = ahead.get(pool)
            if copied is not None and copied.num_planes:
                count = len(copied.block_ids)
                assert copied.block_ids == blocks[:count], "pages have moved while their step ran"
                parts.append((0, count, copied.num_planes))
            if not parts or parts[0][1] < len(blocks):
                parts.append((parts[0][1] if parts else 0, len(blocks), 0))
            for begin, end, first in parts:
                planes = self._stored.pages.copy_out(pool, blocks[begin:end], first)
                if not lease.transport.offer(lease.name, Pages(pool, names[begin:end], planes, first)):
                    lease.is_dropped = True
                    self.counters.dropped += 1
                    return

    def end(self, request: Request) -> None:
        """A request has ended here."""
        if self._relayed is not None and self._relayed.request is request:
            self._relayed = None
        lease = self._leases.pop(request.request_id, None)
        if lease is not None:
            if not lease.is_dropped and any(each.num_output_tokens for each in request.sequences):
                self._soon(lease, partial(lease.transport.offer, lease.name, None))
                request.offered = Source(lease.transport.address, lease.name, list(range(lease.num_blocks)))
            else:  # it was dropped or cancelled, or failed
                lease.drop()
        if request.source is not None:
            self._drop_arrival(request.source.lease)
            for requests in (self._awaited, self._starting):
                if request in requests:
                    requests.remove(request)

    def forget(self, request: Request) -> None:
        """Drop what a request has offered and taken: it begins again, with other weights."""
        lease = self._leases.pop(request.request_id, None)
        if lease is not None:
            lease.drop()

    def announce(self, outputs: list[EngineOutput]) -> None:
        """Say what `begin` could not tell."""
        outputs += self._announced
        self._announced.clear()

    def reserve(self, request: Request) -> None:
        """This request will come for its source; it has a token in the place of its first."""
        lease = _source_of(request).lease
        if self.arrivals.has(lease):
            self.reserved.expect(lease, Sequence(request, 0))
            self.reserved.note([lease])

    def take_in(self, scheduler: Scheduler) -> None:
        """Read pages that have arrived into reserved blocks."""
        self.reserved.note(self.arrivals.take_fresh())
        scheduler.fill_reserved()

    def wait(self, timeout_s: float) -> None:
        """Wait at most so long until anything has come."""
        if not any(self.arrivals.result(_source_of(each).lease)[0] for each in self._awaited):
            self.arrivals.wait(timeout_s)

    def advance(self, start: Callable[[Request], None], fail: Callable[[Request, str], None]) -> None:
        """Calls ``start`` with each request whose pages have come, or will not come; ``fail`` with those that a client
        has given a lease that is not known."""
        for request in list(self._awaited):
            source = _source_of(request)
            is_over, error = self.arrivals.result(source.lease)
            if not is_over:
                continue
            self._awaited.remove(request)
            if error is not None:
                logger.info("request %s: its pages have not come: %s", request.request_id, error)
                if source.is_foreign and isinstance(error, RefusedError):
                    fail(request, f"kv_transfer_params: {error}")
                    continue
                self.counters.lost += 1
            self.counters.arrived += error is None
            self._starting.append(request)
            start(request)

    def let_go(self) -> None:
        """Drop the pages of requests that have started."""
        for request in list(self._starting):
            if all(each.num_cached_tokens is not None or each.is_finished for each in request.sequences):
                self._starting.remove(request)
                self._drop_arrival(_source_of(request).lease)
        for lease in self.reserved.leases:
            if not self.arrivals.has(lease):  # too old: its request has not come
                self.reserved.drop(lease)

    def stats(self) -> dict[str, int]:
        """Fields of `EngineStats`. Thread-safe."""
        transports = self.transports.values()
        return {
            "num_offered": self.counters.offered,
            "num_arrived": self.counters.arrived,
            "num_lost_transfers": self.counters.lost,
            "transfer_sent_bytes": sum(each.num_sent_bytes for each in transports),
            "transfer_received_bytes": sum(each.num_received_bytes for each in transports),
            "num_open_transfers": sum(each.num_open for each in transports) + self.arrivals.num_open,
        }

    def drop(self, lease: str) -> None:
        """Forget the pages of this lease, offered or taken, but for reserved blocks. Thread-safe."""
        self.arrivals.drop(lease)
        for each in [*self._leases.values(), *(waiting for waiting, _ in list(self._waiting))]:
            if each.name == lease:
                each.is_dropped = True
        if (transport := self.transports.get(lease.partition(":")[0])) is not None:
            transport.drop(lease)

    def _drop_arrival(self, lease: str) -> None:
        self.arrivals.drop(lease)
        self.reserved.drop(lease)

    def close(self) -> None:
        """No more is offered or taken; offers that are being taken are completed first."""
        self.send_waiting()
        for transport in self.transports.values():
            transport.close(CLOSE_S)


def _with_groups(found: list[_Found]) -> list[PageName]:
    return [PageName(of_group(each.key, group), of_group(each.parent, group), each.tokens) for group, each, _ in found]


def _source_of(request: Request) -> Source:
    assert request.source is not None, "it waits for pages"
    return request.source
