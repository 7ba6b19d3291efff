"""The order of works between streams, and the memory that each has touched, to find missing events.

Every stream (and every branch of a graph) is a slot with a counter; a work's epoch is ``slot << 24 | count``, its
vector clock holds for each slot the last count that stream order, events and the host's synchronisations put before it.
For every GRANULE_BYTES of memory the epochs of the last write and of up to three unordered reads are kept (after
Flanagan and Freund, "FastTrack: efficient and precise dynamic race detection", PLDI 2009). A work that touches memory
which another has written, or writes memory which another has read, without that other in its clock, is at fault, in
whichever order the two have run.

Limits: kernels' accesses to other devices' memory and to pinned memory of another device's context are not checked; at
most three readers unordered among each other are kept; neighbours within one granule are taken for one (allocations
never share one). Atomic operations count as writes. The host counts as one thread, and its own accesses to pinned
memory are not seen.

Also faults beyond a single kernel, as exceptions; and the status by which the driver reports any fault.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import Any

import numpy as np
from cuda.bindings import driver as cu

from runtime.emulator.driver.work_queues import Queue, Work
from runtime.emulator.execution.fault import EmulatorFault, FaultKind
from runtime.emulator.memory.device_memory import Allocation, Machine, Mapping
from runtime.emulator.races.clocks import CELLS, GRANULE_SHIFT, MAX_SEQUENCE, SEQUENCE_BITS, StreamTouch

GRANULE_BYTES = 1 << GRANULE_SHIFT
MAX_SLOTS = 256
"""More streams at once than this share slots: then some missing events are not found."""
REMEMBERED_WORKS = 1 << 16

_CHUNK = 1 << 18  # granules looked at in one go


class Overlap(Enum):
    """A work's dependence on the kernel right before it in its stream."""

    NONE = auto()  # it is no kernel: all of the stream comes before it
    KERNEL = auto()  # a kernel that all of the stream comes before
    WAITING = auto()  # a dependent launch that executes griddepcontrol.wait: it comes after that kernel
    UNORDERED = auto()  # a dependent launch that never does: ordered only after that kernel's predecessors


class Conflict(Exception):
    """Two unordered works touch the same memory.

    Attributes:
        address: the first granule in question.
        earlier: the epoch of the work that ran first.
        earlier_wrote, later_writes: whether each writes.
    """

    def __init__(self, address: int, earlier: int, *, earlier_wrote: bool, later_writes: bool) -> None:
        super().__init__(address, earlier)
        self.address, self.earlier = address, earlier
        self.earlier_wrote, self.later_writes = earlier_wrote, later_writes


class StreamOrder:
    """Vector clocks of one driver's streams and the memory that they have touched.

    Attributes:
        is_active: whether accesses are kept, from the second queue on: one alone is ordered.
    """

    def __init__(self, *, is_wanted: bool = True) -> None:
        self.is_active = False
        self._is_wanted = is_wanted
        self._host = np.zeros(MAX_SLOTS, np.uint32)
        self._host_version = 0  # counts the host's waits; a queue that has it in its clock has its number
        self._counts = [0] * MAX_SLOTS  # the last count of each slot: a slot that is used again goes on
        self._free: deque[int] = deque(range(MAX_SLOTS))
        self._num_queues = 0
        self._cells: dict[Machine, tuple[Mapping, Any]] = {}
        self._labels: dict[int, str] = {}

    # -- clocks ---------------------------------------------------------------------------------------------------

    def open(self, queue: Queue) -> None:
        """Gives a queue its slot."""
        self._num_queues += 1
        self.is_active = self._is_wanted and (self.is_active or self._num_queues > 1)
        queue.slot = self._free.popleft() if self._free else MAX_SLOTS - 1
        queue.clock = self._host.copy()
        queue.host_version = self._host_version

    def close(self, queue: Queue) -> None:
        """Takes the slot back, for another queue."""
        self._num_queues -= 1
        for slot in (queue.slot, *queue.side_slots):
            if slot not in self._free:
                self._free.append(slot)

    def stamp(
        self, work: Work, after: Iterable[Work] = (), *, label: str = "", overlap: Overlap = Overlap.NONE,
        starts_next_early: bool = False,
    ) -> None:  # fmt: skip
        """Sets a work's clock and epoch: after its queue, after `after`, after the host's waits.

        Dependent launches may come after less than all of their queue. A later launch that is not dependent comes after
        all. A dependent launch may begin when all blocks of the kernel before it have said so. If they say it after
        their own wait, all works in front of that kernel have ended then: `early` is the clock of what has. A kernel
        that `starts_next_early` says it before.
        """
        queue = work.queue
        work.starts_next_early = starts_next_early
        before, queue.kernel = queue.kernel, work if overlap is not Overlap.NONE else None
        slot, clock = queue.slot, queue.clock
        if before is None and overlap is not Overlap.NONE:
            work.early = clock.copy()
        if before is not None and overlap in (Overlap.WAITING, Overlap.UNORDERED):
            clock = before.clock.copy()
            work.early = before.early
            if not before.starts_next_early or before.early is None:
                work.early = clock.copy()
                work.early[before.epoch >> SEQUENCE_BITS] = (before.epoch & MAX_SEQUENCE) - 1
            if overlap is Overlap.UNORDERED:
                clock[before.epoch >> SEQUENCE_BITS] = (before.epoch & MAX_SEQUENCE) - 1
            if (clock < queue.clock).any():
                slot = self._side_slot(queue)
            else:
                clock = queue.clock
        if clock is not queue.clock or queue.host_version != self._host_version:
            np.maximum(clock, self._host, out=clock)
            if clock is queue.clock:
                queue.host_version = self._host_version
        for other in after:
            if other.clock is not None:
                np.maximum(clock, other.clock, out=clock)
        count = self._counts[slot] + 1
        self._counts[slot] = count
        clock[slot] = count
        if clock is queue.clock:
            work.clock = clock.copy()
        else:
            work.clock = clock
            np.maximum(queue.clock, clock, out=queue.clock)
        work.epoch = slot << SEQUENCE_BITS | count
        if label:
            labels = self._labels
            labels[work.epoch] = label
            if len(labels) > REMEMBERED_WORKS:
                del labels[next(iter(labels))]

    def _side_slot(self, queue: Queue) -> int:
        """A slot for a work that its own queue does not wholly come before; two take turns."""
        if len(queue.side_slots) < 2:
            queue.side_slots.append(self._free.popleft() if self._free else MAX_SLOTS - 1)
        queue.side_slots.reverse()
        return queue.side_slots[0]

    def is_exhausted(self, queue: Queue) -> bool:
        """Whether a slot's counter is at its end: then everything must be finished and `restart` called."""
        return max(self._counts[slot] for slot in (queue.slot, *queue.side_slots)) >= MAX_SEQUENCE

    def restart(self, queues: Iterable[Queue]) -> None:
        """Restarts after the host has waited for all works."""
        for mapping, _ in self._cells.values():
            mapping.drop(mapping.address, mapping.size_bytes)
        self._host[:] = 0
        self._counts = [0] * MAX_SLOTS
        self._labels.clear()
        for queue in queues:
            queue.clock[:] = 0
            queue.kernel = None

    def host_knows(self, work: Work | None) -> None:
        """The host has waited for a work: all that it queues from now on comes after it."""
        if work is not None and work.clock is not None:
            np.maximum(self._host, work.clock, out=self._host)
            self._host_version += 1

    def label_of(self, epoch: int) -> str:
        return self._labels.get(epoch, "an earlier work of another stream")

    # -- memory ---------------------------------------------------------------------------------------------------

    def cells(self, machine: Machine) -> tuple[int, Any]:
        """The granules' cells of a machine's arena: their address, and as an array [num_granules, CELLS]."""
        found = self._cells.get(machine)
        if found is None:
            num_granules = machine.span >> GRANULE_SHIFT
            mapping = Mapping(num_granules * CELLS * 4)
            buffer = (ctypes.c_uint32 * (num_granules * CELLS)).from_address(mapping.address)
            found = (mapping, np.ctypeslib.as_array(buffer).reshape(num_granules, CELLS))
            self._cells[machine] = found
        return found[0].address, found[1]

    def forget(self, machine: Machine, address: int, size_bytes: int) -> None:
        """Forgets the accesses to a range, just freed or allocated."""
        found = self._cells.get(machine)
        if found is None or size_bytes <= 0:
            return
        mapping, cells = found
        first, last = self._granules(machine, address, size_bytes)
        if last - first > 1 << 15:
            start = mapping.address + first * CELLS * 4
            mapping.drop(start, (last - first) * CELLS * 4)
            page = 4096 // (CELLS * 4)
            cells[first : first + page] = 0
            cells[last - page : last] = 0
        else:
            cells[first:last] = 0

    def launch_fields(self, work: Work, machine: Machine) -> StreamTouch | None:
        """The data for `launch` to check a kernel; it must outlive the launch.

        None where the work is not checked.
        """
        if work.clock is None:
            return None
        touch = StreamTouch.new()
        touch.cells, touch.arena, touch.arena_bytes = self.cells(machine)[0], machine.base, machine.span
        touch.clock, touch.epoch = work.clock.ctypes.data, work.epoch
        touch.early = 0 if work.early is None else work.early.ctypes.data
        return touch

    def conflict_at(self, work: Work, machine: Machine, address: int) -> Conflict | None:
        """The conflict at which a kernel has stopped."""
        try:
            self.touch(work, machine, address, 1, is_write=True)
        except Conflict as conflict:
            return conflict
        return None

    def touch(self, work: Work, machine: Machine, address: int, size_bytes: int, *, is_write: bool) -> None:
        """A work reads or writes a range. Raises Conflict."""
        if work.clock is None or size_bytes <= 0:
            return
        _, cells = self.cells(machine)
        first, last = self._granules(machine, address, size_bytes)
        for start in range(first, last, _CHUNK):
            part = cells[start : min(start + _CHUNK, last)]
            self._compare(work, machine, start, part[:, 0], earlier_wrote=True, later_writes=is_write)
            if is_write:
                for column in range(1, CELLS):
                    self._compare(work, machine, start, part[:, column], earlier_wrote=False, later_writes=True)
                part[:, 0] = work.epoch
                part[:, 1:] = 0
            else:
                self._note_reads(work, part)

    @staticmethod
    def _granules(machine: Machine, address: int, size_bytes: int) -> tuple[int, int]:
        offset = address - machine.base
        return offset >> GRANULE_SHIFT, (offset + size_bytes + GRANULE_BYTES - 1) >> GRANULE_SHIFT

    def _compare(
        self, work: Work, machine: Machine, start: int, epochs: Any, *, earlier_wrote: bool, later_writes: bool
    ) -> None:
        unordered = work.clock[epochs >> SEQUENCE_BITS] < (epochs & MAX_SEQUENCE)
        if unordered.any():
            at = int(unordered.argmax())
            raise Conflict(
                machine.base + ((start + at) << GRANULE_SHIFT), int(epochs[at]),
                earlier_wrote=earlier_wrote, later_writes=later_writes,
            )  # fmt: skip

    @staticmethod
    def _note_reads(work: Work, part: Any) -> None:
        """Puts the epoch where an older read is ordered before it, else in place of the last cell's."""
        left = np.ones(len(part), bool)
        for column in range(1, CELLS):
            epochs = part[:, column]
            here = left & (work.clock[epochs >> SEQUENCE_BITS] >= (epochs & MAX_SEQUENCE))
            part[here, column] = work.epoch
            left &= ~here
        part[left, CELLS - 1] = work.epoch


R = cu.CUresult

_NOWHERE = (0, 0, 0)
_STATUS_BY_NAME = {
    "TRAP": R.CUDA_ERROR_LAUNCH_FAILED,
    "ASSERT": R.CUDA_ERROR_ASSERT,
    "DEADLOCK": R.CUDA_ERROR_LAUNCH_TIMEOUT,
    "MISALIGNED": R.CUDA_ERROR_MISALIGNED_ADDRESS,
    "OUT_OF_BOUNDS": R.CUDA_ERROR_ILLEGAL_ADDRESS,
    "FREED": R.CUDA_ERROR_ILLEGAL_ADDRESS,
    "PEER_ACCESS": R.CUDA_ERROR_ILLEGAL_ADDRESS,
    "USE_AFTER_FREE": R.CUDA_ERROR_ILLEGAL_ADDRESS,
}


class DriverFault(EmulatorFault):
    """A fault of a copy, of two works of different streams, or of a whole program.

    Attributes:
        works: the labels of the works concerned, "kernel scale in stream 2".
    """

    def __init__(
        self,
        kind: FaultKind,
        message: str,
        *,
        works: Sequence[str] = (),
        address: int = 0,
        fault: EmulatorFault | None = None,
    ) -> None:
        """`fault`: the kernel's own, where one was stopped by it."""
        self.kernel, self.line, self.text = "", 0, ""
        self.block = self.thread = _NOWHERE
        where = ""
        if fault is not None:
            self.kernel, self.line, self.text = fault.kernel, fault.line, fault.text
            self.block, self.thread = fault.block, fault.thread
            where = f"\n  kernel {fault.kernel}, block {fault.block}, thread {fault.thread}\n"
            where += f"  PTX line {fault.line}: {fault.text.strip()}"
        Exception.__init__(self, f"{kind.name}: {message}{where}")
        self.kind, self.works, self.address = kind, tuple(works), address


def missing_event(
    order: StreamOrder,
    work: Work,
    conflict: Conflict,
    *,
    machine: Machine | None = None,
    fault: EmulatorFault | None = None,
) -> DriverFault:
    """The fault of two works that touch the same memory without an order between them, with both their names."""
    later = order.label_of(work.epoch)
    earlier = order.label_of(conflict.earlier)
    did = "wrote" if conflict.earlier_wrote else "read"
    does = "touches" if fault is not None else "writes" if conflict.later_writes else "reads"
    where = f": {machine.describe(conflict.address)}" if machine is not None else ""
    return DriverFault(
        FaultKind.MISSING_EVENT,
        f"missing event between streams: {later} {does} what {earlier} {did} at {conflict.address:#x}{where}, and "
        f"neither an event nor a synchronisation puts one before the other",
        works=(earlier, later),
        address=conflict.address,
        fault=fault,
    )


def leak(allocations: Sequence[Allocation]) -> DriverFault:
    """The fault of a program that ends with allocations alive, all of them named."""
    total = sum(allocation.size_bytes for allocation in allocations)
    names = "".join(f"\n  {allocation}" for allocation in allocations[:20])
    more = f"\n  … and {len(allocations) - 20} more" if len(allocations) > 20 else ""
    return DriverFault(
        FaultKind.LEAK,
        f"{len(allocations)} allocations ({total:,} bytes) are alive at the end of their context:{names}{more}",
        address=allocations[0].address,
    )


def status_of(failure: Exception) -> Any:
    """The CUresult by which CUDA reports such a fault: a failed launch if hardware does not notice it."""
    if isinstance(failure, EmulatorFault):
        for name, status in _STATUS_BY_NAME.items():
            if failure.kind.name.startswith(name):
                return status
    return R.CUDA_ERROR_LAUNCH_FAILED
