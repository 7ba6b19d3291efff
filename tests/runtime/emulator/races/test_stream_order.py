"""Vector clocks over streams: what is ordered, and what two works may not both touch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from runtime.emulator.driver.work_queues import Queue, Work
from runtime.emulator.memory.device_memory import Machine
from runtime.emulator.races.stream_order import GRANULE_BYTES, MAX_SLOTS, Conflict, Overlap, StreamOrder


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = Machine(1 << 20)
    yield machine
    machine.close()


class Streams:
    """Named queues over one order."""

    def __init__(self, machine: Machine, names: str = "ab") -> None:
        self.machine, self.order = machine, StreamOrder()
        self.queues = {name: Queue(None) for name in names}
        for queue in self.queues.values():
            self.order.open(queue)
        self.address = machine.allocate(4096)

    def work(self, name: str, *after: Work, overlap: Overlap = Overlap.NONE) -> Work:
        work = Work(None, self.queues[name], ())
        self.order.stamp(work, after, label=f"work in {name}", overlap=overlap)
        return work

    def touch(self, work: Work, is_write: bool, offset: int = 0, size: int = 64) -> None:
        self.order.touch(work, self.machine, self.address + offset, size, is_write=is_write)


def test_one_queue_alone_is_not_watched() -> None:
    order = StreamOrder()
    order.open(Queue(None))
    assert not order.is_active
    order.open(Queue(None))
    assert order.is_active
    unwanted = StreamOrder(is_wanted=False)
    for _ in range(3):
        unwanted.open(Queue(None))
    assert not unwanted.is_active


@pytest.mark.parametrize(("first", "second"), [(True, True), (True, False), (False, True), (False, False)])
def test_unordered_accesses_conflict_unless_both_read(machine: Machine, first: bool, second: bool) -> None:
    streams = Streams(machine)
    one, two = streams.work("a"), streams.work("b")
    streams.touch(one, first)
    if not first and not second:
        streams.touch(two, second)
        return
    with pytest.raises(Conflict) as caught:
        streams.touch(two, second)
    assert caught.value.earlier == one.epoch
    assert caught.value.address == streams.address
    assert (caught.value.earlier_wrote, caught.value.later_writes) == (first, second)
    assert streams.order.label_of(caught.value.earlier) == "work in a"


def test_an_event_orders(machine: Machine) -> None:
    streams = Streams(machine, "abc")
    one = streams.work("a")
    streams.touch(one, True)
    two = streams.work("b", one)
    streams.touch(two, True)
    streams.touch(streams.work("c", two), True)  # through another stream too
    with pytest.raises(Conflict):
        streams.touch(streams.work("a"), False)


def test_the_same_stream_is_ordered_and_other_bytes_do_not_matter(machine: Machine) -> None:
    streams = Streams(machine)
    streams.touch(streams.work("a"), True)
    streams.touch(streams.work("a"), True)
    streams.touch(streams.work("b"), True, offset=64)
    with pytest.raises(Conflict) as caught:
        streams.touch(streams.work("b"), True, offset=32, size=64)
    assert caught.value.address == streams.address + 32


def test_the_host_orders_what_it_has_waited_for(machine: Machine) -> None:
    streams = Streams(machine)
    one = streams.work("a")
    streams.touch(one, True)
    early = streams.work("b")
    streams.order.host_knows(one)
    streams.touch(streams.work("b"), True)
    streams.touch(streams.work("a", streams.work("b")), False)
    assert (early.clock < one.clock).any()


def test_three_readers_are_remembered(machine: Machine) -> None:
    for late in "abc":
        streams = Streams(machine, "abcd")
        reads = {name: streams.work(name) for name in "abc"}
        for work in reads.values():
            streams.touch(work, False)
        known = [work for name, work in reads.items() if name != late]
        with pytest.raises(Conflict) as caught:
            streams.touch(streams.work("d", *known), True)
        assert caught.value.earlier == reads[late].epoch
        assert not caught.value.earlier_wrote
        streams.touch(streams.work("d", *reads.values()), True)


def test_a_range_may_be_forgotten(machine: Machine) -> None:
    streams = Streams(machine)
    streams.touch(streams.work("a"), True, size=4096)
    streams.order.forget(machine, streams.address, 4096)
    streams.touch(streams.work("b"), True, size=4096)
    big = machine.allocate(1 << 19)
    work = streams.work("a")
    streams.order.touch(work, machine, big, 1 << 19, is_write=True)
    streams.order.forget(machine, big, 1 << 19)
    streams.order.touch(streams.work("b"), machine, big, 1 << 19, is_write=True)


def test_dependent_launches(machine: Machine) -> None:
    streams = Streams(machine)
    first = streams.work("a", overlap=Overlap.KERNEL)
    waiting = streams.work("a", overlap=Overlap.WAITING)
    streams.touch(first, True)
    streams.touch(waiting, True)
    never = streams.work("a", overlap=Overlap.UNORDERED)
    with pytest.raises(Conflict) as caught:
        streams.touch(never, False)
    assert caught.value.earlier == waiting.epoch
    streams.touch(never, True, offset=128)
    behind = streams.work("a", overlap=Overlap.WAITING)  # after `never`, which has not waited for `waiting`
    streams.touch(behind, True, offset=128)
    with pytest.raises(Conflict):
        streams.touch(behind, False)
    streams.touch(streams.work("a", overlap=Overlap.KERNEL), True)  # an ordinary launch comes after all of them


def test_restart_forgets_all(machine: Machine) -> None:
    streams = Streams(machine)
    streams.touch(streams.work("a"), True)
    streams.order.restart(streams.queues.values())
    streams.touch(streams.work("b"), True)
    with pytest.raises(Conflict):
        streams.touch(streams.work("a"), True)


def test_more_streams_than_slots(machine: Machine) -> None:
    streams = Streams(machine, "")
    for number in range(MAX_SLOTS + 20):
        streams.queues[str(number)] = Queue(None)
        streams.order.open(streams.queues[str(number)])
    streams.touch(streams.work("0"), True)
    with pytest.raises(Conflict):
        streams.touch(streams.work(str(MAX_SLOTS + 10)), True)
    for queue in streams.queues.values():
        streams.order.close(queue)
    assert GRANULE_BYTES == 32
