"""Memory that a program declares immutable: a model's weights, once they are loaded.

An emulated driver has a function for it that no real one has. From its place in the stream on, and for as long as the
allocation or the pool's block lives, a write to these bytes is a fault; and a dependent launch may read them before
its griddepcontrol.wait, since the previous kernel cannot be writing them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from runtime.emulator.driver.state import DriverState, R, Refused, entry, handle_of
from runtime.emulator.driver.work_queues import Work
from runtime.emulator.memory.device_memory import DeviceMemoryError, Machine


@dataclass(frozen=True, slots=True)
class Declaration:
    """A range that is immutable from this place in a stream on."""

    driver: DriverState
    machine: Machine
    address: int
    size_bytes: int

    @property
    def label(self) -> str:
        return f"declaration of {self.size_bytes:,} immutable bytes"

    def run(self, work: Work) -> None:
        self.machine.check_block(self.address, self.size_bytes, self.label)
        self.driver.order.touch(work, self.machine, self.address, self.size_bytes, is_write=False)
        self.machine.declare_immutable(self.address, self.size_bytes)


class ImmutableFunctions(DriverState):
    """Promises of a program to an emulated driver."""

    @entry()
    def emuDeclareImmutableAsync(self, dptr: Any, size_bytes: int, hStream: Any) -> None:
        """Freezes these bytes once the work now in the stream has run."""
        address, stream = handle_of(dptr), self.stream(hStream)
        machine = self.machine_at(address)
        if machine is None:
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"{address:#x} is no device memory")
        try:
            machine.check(address, size_bytes, "emuDeclareImmutableAsync")
        except DeviceMemoryError as error:
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, str(error)) from None
        if stream.capture is not None:
            self.refuse_while_captured(stream.context, "a declaration of immutable memory")
        self.enqueue(stream, Declaration(self, machine, address, size_bytes))
