"""Faults beyond a single kernel, as exceptions; and the status by which the driver reports any fault."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cuda.bindings import driver as cu

from runtime.emulator.driver.work_queues import Work
from runtime.emulator.execution.fault import EmulatorFault, FaultKind
from runtime.emulator.memory.device_memory import Allocation, Machine
from runtime.emulator.races.stream_order import Conflict, StreamOrder

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
