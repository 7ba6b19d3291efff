"""Pages that are dropped, by another thread, after they were found, are lost: never are others read in their place."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.engine.messages import Source
from runtime.engine.transfer.arrivals import Arrivals
from runtime.engine.transfer.identity import TransferError
from runtime.engine.transfer.sockets import SharedMemoryTransport
from runtime.kv.page_store import Fill, PageLostError
from tests.runtime.engine.transfer.test_sockets import IDENTITY, SECRET, pages
from tests.waiting import wait_until


def test_dropped_pages_are_lost() -> None:
    transport = SharedMemoryTransport(SECRET, IDENTITY, 1 << 20)
    arrivals = Arrivals({"unix": transport}, 1 << 20, [1])
    offered = {"a": pages(1, 3), "b": pages(2, 2)}
    for lease, each in offered.items():
        transport.offer(lease, each)
        transport.offer(lease, None)
        arrivals.expect(Source(transport.address, lease))
    wait_until(lambda: all(arrivals.result(lease) == (True, None) for lease in offered))
    keys = [name.key for lease in ("b", "a") for name in offered[lease].names]
    assert arrivals.find(keys) == [*offered["b"].names, *offered["a"].names]
    assert [run.num_pages for run in arrivals.runs(keys)] == [2, 3]
    arrivals.drop("b")
    runs = arrivals.runs(keys)
    assert sum(run.num_pages for run in runs) == 5
    found: list[np.ndarray] = []

    def take(fill: Fill) -> None:
        for plane, size in enumerate(IDENTITY.page_bytes[0]):
            found.append(np.empty((runs[-1].num_pages, size), np.uint8))
            fill(plane, found[-1])

    arrivals.read(runs[-1], take)
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(found, offered["a"].planes, strict=True))
    for run in runs[:-1]:
        with pytest.raises(PageLostError):
            arrivals.read(run, take)
    arrivals.drop("a")
    assert arrivals.is_empty
    assert arrivals.num_open == 0
    transport.close()


def test_there_is_room_for_so_many_bytes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.engine.transfer.arrivals.STALL_S", 0.05)
    transport = SharedMemoryTransport(SECRET, IDENTITY, 1 << 20)
    arrivals = Arrivals({"unix": transport}, 100, [1])
    for lease in ("a", "b"):
        transport.offer(lease, pages(1, 2))  # 64 bytes
        transport.offer(lease, None)
        arrivals.expect(Source(transport.address, lease))
        wait_until(lambda lease=lease: arrivals.result(lease)[0])
    assert arrivals.result("a") == (True, None)
    error = arrivals.result("b")[1]
    assert isinstance(error, TransferError)
    assert "more than 100 bytes" in str(error)
    arrivals.close()
    transport.close()
