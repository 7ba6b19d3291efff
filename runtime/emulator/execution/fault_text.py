"""The text of faults that needs more than the fault's record: of memory, and of a deadlock.

A fault of memory says the action, its bytes, the memory there or next to them, and the other access, from the machine's
allocations, the kernel's shared variables and the shape of the launch; a deadlock says which warps wait, and for what.
"""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import c_int32
from dataclasses import dataclass

from runtime.emulator.execution.fault import Fault, FaultKind
from runtime.emulator.execution.state import BLOCKED, EXITED, SHARED_OFFSET_MASK, SHARED_RANK_SHIFT, Block, Warp
from runtime.emulator.execution.warp_scheduler import Slot
from runtime.emulator.memory.device_memory import Machine
from runtime.emulator.memory.locate import ACTIONS, CONST, GENERIC, GLOBAL, LOCAL, PARAM, SHARED_CLUSTER, SPACE_NAMES
from runtime.emulator.races.clocks import IN_SHARED
from runtime.emulator.translation.program import LoadedKernel
from runtime.emulator.translation.symbols import SharedLayout

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


def kind_of(kind: FaultKind, fault: Fault, machine: Machine) -> FaultKind:
    """The kind of a record: shadow bytes alone do not distinguish freed memory from memory never allocated."""
    in_device_memory = fault.c in (GENERIC, GLOBAL, CONST)
    if kind == FaultKind.OUT_OF_BOUNDS and in_device_memory and machine.is_freed(fault.address):
        return FaultKind.ACCESS_AFTER_FREE
    return kind


def describe(kind: FaultKind, fault: Fault, machine: Machine, layout: SharedLayout, shape: LaunchShape) -> str:
    """The sentence for a fault's record (memory's numbers are documented in locate.py)."""
    block, address, a, b, c, d = fault.block, fault.address, fault.a, fault.b, fault.c, fault.d
    words: dict[str, object] = {"address": address, "a": a, "b": b, "c": c, "d": d}
    if FaultKind.NC_WRITTEN <= kind <= FaultKind.RACE_WITHIN_WARP:
        if a == IN_SHARED:
            warps = -(-(shape.block[0] * shape.block[1] * shape.block[2]) // 32)
            c += shape.cluster_of(block) * shape.cluster[0] * shape.cluster[1] * shape.cluster[2] * warps
        space = SHARED_CLUSTER if a == IN_SHARED else GLOBAL
        words["place"] = f"{address:#x} ({_there(address, space, machine, layout, shape)})"
        words["other"] = shape.warp_name(c, d)
    elif FaultKind.OUT_OF_BOUNDS <= kind <= FaultKind.IMMUTABLE_WRITTEN:
        at = "" if address == d else f", whose byte {address - d} is at {address:#x}"
        words["what"] = f"a {ACTIONS[a]} of {b} bytes at {SPACE_NAMES[c]} address {d:#x}{at}"
        words["there"] = there = _there(address, c, machine, layout, shape)
        words["place"] = f"{address:#x} ({there})"
    return kind.message.format_map(words)


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
