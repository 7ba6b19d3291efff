"""The text of faults that needs more than the fault's record: of memory, and of a deadlock.

A fault of memory says the action, its bytes, the memory there or next to them, and the other access, from the machine's
allocations, the kernel's shared variables and the shape of the launch; a deadlock says which warps wait, and for what.
"""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import c_int32
from dataclasses import dataclass

from runtime.emulator.execution.fault import Fault, FaultKind
from runtime.emulator.execution.residency import Slot
from runtime.emulator.execution.state import BLOCKED, EXITED, SHARED_OFFSET_MASK, SHARED_RANK_SHIFT, Block, Warp
from runtime.emulator.memory.device_memory import Machine
from runtime.emulator.memory.locate import ACTIONS, CONST, GENERIC, GLOBAL, LOCAL, PARAM, SHARED_CLUSTER, SPACE_NAMES
from runtime.emulator.races.clocks import IN_SHARED
from runtime.emulator.translation.program import LoadedKernel
from runtime.emulator.translation.variables import SharedLayout

_MAX_LINES = 24


def who_waits(slots: Iterable[int], kernel: LoadedKernel) -> list[str]:
    """A line for each block and place where its warps wait, for the clusters at these addresses that are resident."""
    lines = []
    for slot in map(Slot, slots):
        if slot.is_running:
            for rank in range(slot.num_blocks):
                lines += _of_block(Block(Slot(slot.blocks)[rank]), kernel)
    if len(lines) > _MAX_LINES:
        lines[_MAX_LINES:] = [f"… and {len(lines) - _MAX_LINES} more"]
    return lines


def _of_block(block: Block, kernel: LoadedKernel) -> list[str]:
    places: dict[tuple[str, int], list[int]] = {}
    for index in range(block.num_warps):
        warp = Warp(block.warps + index * Warp.size_bytes)
        if warp.state == EXITED:
            place = ("have exited", -1)
        elif warp.state == BLOCKED:
            place = ("wait at", warp.site)
        else:
            counters = (c_int32 * 32).from_address(warp.pcs)
            place = ("poll at", min(counters[lane] for lane in range(32) if warp.live >> lane & 1))
        places.setdefault(place, []).append(index)
    name = block.x, block.y, block.z
    lines = []
    for (what, site), warps in sorted(places.items(), key=lambda item: item[0][1]):
        text = f"block {name}: warps {ranges(warps)} {what}"
        if site >= 0:
            line = kernel.kernel.instructions[site].line
            text += f" line {line}: {kernel.module.lines[line - 1].strip()}"
        lines.append(text)
    return lines


def ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] → "0-2, 5"."""
    words: list[str] = []
    start = previous = numbers[0]
    for number in [*numbers[1:], -2]:
        if number == previous + 1:
            previous = number
            continue
        words.append(str(start) if start == previous else f"{start}-{previous}")
        start = previous = number
    return ", ".join(words)


Dim3 = tuple[int, int, int]
_RACES = {
    FaultKind.NC_WRITTEN: (
        "a .nc load of {place}, which {other} has written in this launch: .nc is for data that nobody writes"
    ),
    FaultKind.RACE_READ_AFTER_WRITE: (
        "a race: this reads {place}, which {other} has written, and nothing orders the two"
    ),
    FaultKind.RACE_WRITE_AFTER_WRITE: (
        "a race: this writes {place}, which {other} has written another value to, and nothing orders the two"
    ),
    FaultKind.RACE_WRITE_AFTER_READ: "a race: this writes {place}, which {other} has read, and nothing orders the two",
    FaultKind.RACE_WITHIN_WARP: (
        "a race: this reads {place}, which {other} of the same warp has written, with no bar.warp.sync between the two"
    ),
}
_REASONS = {
    FaultKind.OUT_OF_BOUNDS: "which is outside of every allocation",
    FaultKind.ACCESS_AFTER_FREE: "which has been freed",
    FaultKind.UNINITIALIZED: "which nothing has written",
    FaultKind.NO_PEER_ACCESS: "which belongs to another device",
    FaultKind.WRONG_SPACE: "which is not in the instruction's state space",
    FaultKind.IMMUTABLE_WRITTEN: "which was declared immutable",
}


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """The part of a launch in messages: blocks, threads a block, blocks a cluster, dynamic shared bytes."""

    grid: Dim3
    block: Dim3
    cluster: Dim3
    dynamic_bytes: int

    def warp_name(self, agent: int, lane: int) -> str:
        """A thread by its warp's number in the launch (cluster after cluster); the warp where the lane is unknown."""
        threads = self.block[0] * self.block[1] * self.block[2]
        num_warps = -(-threads // 32)
        cx, cy, cz = self.cluster
        number, warp = divmod(agent, num_warps)
        cluster, rank = divmod(number, cx * cy * cz)
        wide, high = self.grid[0] // cx, self.grid[1] // cy
        block = (
            cluster % wide * cx + rank % cx,
            cluster // wide % high * cy + rank // cx % cy,
            cluster // (wide * high) * cz + rank // (cx * cy),
        )
        if lane < 0:
            return f"warp {warp} of block {block}"
        thread = 32 * warp + lane
        x, y = self.block[0], self.block[1]
        return f"thread {(thread % x, thread // x % y, thread // (x * y))} of block {block}"

    def cluster_of(self, linear: int) -> int:
        """The number of the cluster that a block, by its linear index, is in."""
        gx, gy, _ = self.grid
        x, y, z = linear % gx, linear // gx % gy, linear // (gx * gy)
        cx, cy, cz = self.cluster
        return x // cx + gx // cx * (y // cy + gy // cy * (z // cz))


def is_memory_fault(kind: FaultKind) -> bool:
    return FaultKind.OUT_OF_BOUNDS <= kind <= FaultKind.IMMUTABLE_WRITTEN


def kind_of(kind: FaultKind, fault: Fault, machine: Machine) -> FaultKind:
    """The kind of a record: shadow bytes alone do not distinguish freed memory from memory never allocated."""
    in_device_memory = fault.c in (GENERIC, GLOBAL, CONST)
    if kind == FaultKind.OUT_OF_BOUNDS and in_device_memory and machine.is_freed(fault.address):
        return FaultKind.ACCESS_AFTER_FREE
    return kind


def explain(kind: FaultKind, fault: Fault, machine: Machine, layout: SharedLayout, shape: LaunchShape) -> str:
    """The sentence for a memory fault's record (its numbers are documented in execution/fault.py and locate.py)."""
    block, address, a, b, c, d = fault.block, fault.address, fault.a, fault.b, fault.c, fault.d
    if kind in _RACES:
        is_shared = a == IN_SHARED
        place = _place(address, SHARED_CLUSTER if is_shared else GLOBAL, machine, layout, shape)
        if is_shared:
            warps = -(-(shape.block[0] * shape.block[1] * shape.block[2]) // 32)
            c += shape.cluster_of(block) * shape.cluster[0] * shape.cluster[1] * shape.cluster[2] * warps
        return _RACES[kind].format(place=place, other=shape.warp_name(c, d))
    if kind == FaultKind.LANES_DIFFER:
        return f"two lanes of this instruction write different values to {_place(address, c, machine, layout, shape)}"
    what = f"a {ACTIONS[a]} of {b} bytes at {SPACE_NAMES[c]} address {d:#x}"
    if kind == FaultKind.MISALIGNED:
        return f"{what}, which is no multiple of {b}"
    at = "" if address == d else f", whose byte {address - d} is at {address:#x}"
    return f"{what}{at}, {_REASONS[kind]}: {_there(address, c, machine, layout, shape)}"


def _place(address: int, space: int, machine: Machine, layout: SharedLayout, shape: LaunchShape) -> str:
    return f"{address:#x} ({_there(address, space, machine, layout, shape)})"


def _there(address: int, space: int, machine: Machine, layout: SharedLayout, shape: LaunchShape) -> str:
    """A description of the memory at an address of a space, or next to it."""
    if space in (GENERIC, GLOBAL, CONST):
        return machine.describe(address)
    if space == LOCAL:
        return "local memory is smaller"
    if space == PARAM:
        return "the kernel's parameters are fewer"
    if address < 0 or address >> 32:
        return "no address of shared memory"
    rank = (address >> SHARED_RANK_SHIFT) - 1
    words = layout.name_at(address & SHARED_OFFSET_MASK, shape.dynamic_bytes)
    return words if rank < 0 else f"{words}, of the cluster's block {rank}"
