"""Pages by NIXL, beside the real library where it is installed: ``pip install --no-deps nixl nixl-cu12`` suffices, by
TCP and without a GPU."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.engine.config import EngineConfig
from runtime.engine.errors import RequestError
from runtime.engine.messages import Source
from runtime.engine.transfer import nixl_transport
from runtime.engine.transfer.frames import Alive, Stream
from runtime.engine.transfer.identity import MismatchError
from runtime.engine.transfer.nixl_transport import NixlTransport
from runtime.engine.transfer.transport import Pages, StaleLeaseError
from runtime.errors import InvalidArgumentError
from runtime.kv.kinds import State
from runtime.later import later
from tests.runtime.engine.storing_engine import SETTINGS, make_requests
from tests.runtime.engine.test_stored_prefixes import len_vocabulary, write_case
from tests.runtime.engine.transfer.handing import answered_alone, handed_over, joined_engine, said
from tests.runtime.engine.transfer.test_sockets import IDENTITY, SECRET, Taken, pages, same
from tests.waiting import TIMEOUT_S, wait_until

needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="nixl is not installed: pip install --no-deps nixl nixl-cu12"
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """TCP alone, and pages that take several pieces."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setattr(nixl_transport, "PIECE_BYTES", 300)


@pytest.fixture
def pair() -> Iterator[tuple[NixlTransport, NixlTransport]]:
    made = tuple(NixlTransport("127.0.0.1", 0, SECRET, IDENTITY, 1 << 20) for _ in range(2))
    yield made[0], made[1]
    for each in made:
        each.close()


@needs_nixl
def test_pages_arrive_while_more_are_offered(pair: tuple[NixlTransport, NixlTransport]) -> None:
    sender, receiver = pair
    offered = [pages(1), pages(2, 1, pool=1), pages(3, 50)]
    assert offered[2].num_bytes > 3 * nixl_transport.PIECE_BYTES
    assert sender.offer("a", offered[0])
    taken = Taken(receiver, Source(sender.address, "a"))
    wait_until(lambda: len(taken.pages) == 1)
    for each in offered[1:]:
        assert sender.offer("a", each)
    assert sender.offer("a", None)
    assert taken.wait() is None
    assert all(map(same, taken.pages, offered))
    assert isinstance(Taken(receiver, Source(sender.address, "a")).wait(), StaleLeaseError)
    wait_until(lambda: sender.num_open == receiver.num_open == 0)


@needs_nixl
def test_agents_of_peers_that_have_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_transport, "MOST_KNOWN", 2)
    receiver = NixlTransport("127.0.0.1", 0, SECRET, IDENTITY, 1 << 20)
    seen: list[list[str]] = []
    for number in range(4):
        sender = NixlTransport("127.0.0.1", 0, SECRET, IDENTITY, 1 << 20)
        for lease in ("a", "b"):
            assert sender.offer(lease, pages(number))
            assert sender.offer(lease, None)
            taken = Taken(receiver, Source(sender.address, lease))
            assert taken.wait() is None
            assert list(map(same, taken.pages, [pages(number)])) == [True]
        sender.close()
        seen.append(list(receiver._known.values()))
    assert [len(each) for each in seen] == [1, 2, 2, 2]
    assert not set(seen[0]) & set(seen[3])
    receiver.close()
    assert not receiver._known


@needs_nixl
def test_other_bytes_than_the_sender_had_are_refused(
    pair: tuple[NixlTransport, NixlTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = pair
    read = receiver._read

    def changed(stream: Stream, place: Any, into: Any) -> None:
        read(stream, place, into)
        into[-1] ^= 1

    monkeypatch.setattr(receiver, "_read", changed)
    sender.offer("a", pages(1))
    sender.offer("a", None)
    taken = Taken(receiver, Source(sender.address, "a"))
    assert "other bytes" in str(taken.wait())
    assert taken.pages == []


@needs_nixl
@pytest.mark.parametrize("busy_with", ["a connection", "bytes"])
def test_a_sender_waits_for_a_receiver_that_is_busy(
    busy_with: str, pair: tuple[NixlTransport, NixlTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = pair
    agent, told, is_free = receiver._agent, threading.Semaphore(0), threading.Event()
    begin, check, send = agent.transfer, agent.check_xfer_state, Stream.send

    def counted(stream: Stream, message: Any, *planes: Any) -> None:
        send(stream, message, *planes)
        if isinstance(message, Alive):
            told.release()

    monkeypatch.setattr(nixl_transport, "ALIVE_S", 0.01)
    monkeypatch.setattr(Stream, "send", counted)
    monkeypatch.setattr(agent, "transfer", lambda transfer: begin(transfer) and "PROC")
    monkeypatch.setattr(agent, "check_xfer_state", lambda each: check(each) if is_free.is_set() else "PROC")
    assert sender.offer("a", pages(1))
    assert sender.offer("a", None)
    if busy_with == "bytes":
        taken = Taken(receiver, Source(sender.address, "a"))
        assert all(told.acquire(timeout=TIMEOUT_S) for _ in range(3))
        is_free.set()
    else:
        is_free.set()
        with receiver._lock:
            taken = Taken(receiver, Source(sender.address, "a"))
            assert all(told.acquire(timeout=TIMEOUT_S) for _ in range(3))
    assert taken.wait() is None
    assert list(map(same, taken.pages, [pages(1)])) == [True]


@needs_nixl
@pytest.mark.parametrize("case", ["full", "windows", "states"])
def test_the_answer_is_that_of_one_engine(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(State, "most_pages", lambda *_: 8)
    monkeypatch.setattr(nixl_transport, "PIECE_BYTES", 1 << 20)
    model, own = write_case(tmp_path / "model", case)
    settings: dict[str, Any] = {**SETTINGS, **own, "num_blocks": 200}
    requests = make_requests(1, 12, len_vocabulary(model))
    known = answered_alone(model, requests, **settings)
    with (
        joined_engine(model, "tcp", library="nixl", **settings, max_num_batched_tokens=16) as first,
        joined_engine(model, "tcp", library="nixl", **settings) as second,
    ):
        assert said(handed_over(first, second, requests, "tcp"), requests) == known
        stats = second.stats()
        assert stats.num_arrived > 3
        assert stats.num_lost_transfers == 0
        assert stats.prefix_cache_restored > 0
        for engine in (first, second):
            assert engine.pool.num_free == engine.pool.num_blocks
            wait_until(lambda engine=engine: engine.stats().num_open_transfers == 0)


@needs_nixl
def test_both_sides_must_use_it(tmp_path: Path) -> None:
    model, own = write_case(tmp_path / "model", "full")
    settings: dict[str, Any] = {**SETTINGS, **own, "num_blocks": 200}
    with (
        joined_engine(model, "tcp", library="nixl", **settings) as first,
        joined_engine(model, "tcp", **settings) as second,
    ):
        ours, theirs = second.info.identity, first.info.identity
        assert ours is not None
        assert theirs is not None
        with pytest.raises(MismatchError, match="kv_transfer_library is tcp here and nixl there"):
            ours.check(theirs)


def test_planes_are_cut_into_pieces() -> None:
    rng = np.random.default_rng(0)
    planes = [rng.integers(0, 256, shape, np.uint8) for shape in ((3, 70), (1, 5), (2, 40))]
    memory = np.zeros(64, np.uint8)
    found = [memory[:count].copy() for count in nixl_transport._filled(memory, planes)]
    assert [len(each) for each in found] == [64, 64, 64, 64, 39]
    assert np.array_equal(np.concatenate(found), np.concatenate([each.reshape(-1) for each in planes]))
    assert Pages(0, (), planes).num_bytes == sum(map(len, found))


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_transport, "_nixl", later("xserv_has_no_such_module"))
    with pytest.raises(InvalidArgumentError, match=r"nixl', which is not installed: pip install '\.\[nixl\]'"):
        NixlTransport("127.0.0.1", 0, SECRET, IDENTITY, 1 << 20)


@pytest.mark.parametrize("settings", [{}, {"prefill_engines": 1, "decode_engines": 1}])
def test_pages_that_stay_on_a_machine_need_none(settings: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="kv_transfer_library is 'nixl', but no pages go to other machines"):
        EngineConfig(kv_transfer_library="nixl", **settings)
