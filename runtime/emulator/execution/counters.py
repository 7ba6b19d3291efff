"""Counters of a launch: instructions of warps and of lanes by opcode, and the costs of memory instructions.

Translated code counts how often each stretch of instructions ran to its end, and with how many lanes; this turns those
counts into instructions. A lane counts as active whatever its guard predicate; an instruction that was retried counts
once.

A sector is 32 aligned bytes. A wavefront serves each of the 32 four-byte banks once; lanes that access the same word of
a bank are served together. 8-byte accesses go by half warps, 16-byte ones by quarters (CUDA programming guide, "Shared
memory", and Nsight Compute's metrics of the same names).
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from numba_kernels.pointers import i64_at
from runtime.emulator.execution.state import block_at
from runtime.emulator.memory.pointers import stack_longs
from runtime.emulator.records import Long, Record
from runtime.emulator.translation.operations import compiled_once
from runtime.emulator.translation.ptx import Instruction


class TrafficCounts(Record):
    """An OS thread's counts for one instruction, as in `Traffic`; at launch.traffic."""

    global_requests, global_sectors, global_bytes = Long(), Long(), Long()
    shared_requests, shared_wavefronts, shared_ideal, shared_bytes = Long(), Long(), Long(), Long()


@dataclass(slots=True)
class Traffic:
    """The memory traffic of one instruction, or many; addable.

    Attributes:
        global_requests: warp instructions to device memory with at least one lane.
        global_sectors: 32-byte sectors that they touched, counted for each instruction.
        global_bytes: bytes that the lanes accessed, counted for each lane.
        shared_requests: warp instructions to shared memory.
        shared_wavefronts: how often the banks were used for them.
        shared_ideal: how often without any conflict.
        shared_bytes: as global_bytes.
    """

    global_requests: int = 0
    global_sectors: int = 0
    global_bytes: int = 0
    shared_requests: int = 0
    shared_wavefronts: int = 0
    shared_ideal: int = 0
    shared_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    @property
    def sector_efficiency(self) -> float:
        """Bytes accessed over bytes of the sectors touched; above 1 where lanes share bytes."""
        return self.global_bytes / (32 * self.global_sectors) if self.global_sectors else 1.0

    @property
    def bank_conflicts(self) -> int:
        return self.shared_wavefronts - self.shared_ideal


def traffic_of(fields: Sequence[int]) -> dict[int, Traffic]:
    """Flat counters of a launch → instruction index: Traffic, without the instructions that moved no data."""
    found = {}
    words = TrafficCounts.size_words
    for site in range(len(fields) // words):
        numbers = [int(value) for value in fields[site * words : (site + 1) * words]]
        if any(numbers):
            found[site] = Traffic(*numbers)
    return found


# If a launch does not count, launch.traffic is 0: callers ask first.


@compiled_once("lllll")
def count_access(warp, site, mask, place_address, block_address, size):
    """Counts one warp instruction. At `place_address` the host addresses of the lanes, at `block_address` for each 0
    for device memory, a block's address for shared memory, or a negative number; `size`: bytes a lane."""
    places, blocks = i64_at(place_address), i64_at(block_address)
    counts = warp.launch.traffic[site]
    num_sectors, num_lanes = 0, 0
    seen = stack_longs(32)
    for lane in range(32):
        if (mask >> lane) & 1 and blocks[lane] == 0:
            num_lanes += 1
            sector, index = places[lane] >> 5, num_sectors - 1
            while index >= 0 and seen[index] != sector:
                index -= 1
            if index < 0:
                seen[num_sectors] = sector
                num_sectors += 1
    if num_lanes:
        counts.global_requests += 1
        counts.global_sectors += num_sectors
        counts.global_bytes += num_lanes * size
    group = 32 if size <= 4 else 128 // size  # lanes served together
    words = max(1, size // 4)
    depths, wanted = stack_longs(32), stack_longs(1024)  # of each bank: how many words, and which
    total = 0
    for first in range(0, 32, group):
        deepest, num_lanes = 0, 0
        for bank in range(32):
            depths[bank] = 0
        for lane in range(first, first + group):
            if (mask >> lane) & 1 and blocks[lane] > 0:
                num_lanes += 1
                start = (places[lane] - block_at(blocks[lane]).shared) >> 2
                for word in range(start, start + words):
                    bank, name = word & 31, word + (blocks[lane] << 13)
                    index = 0
                    while index < depths[bank] and wanted[bank * 32 + index] != name:
                        index += 1
                    if index == depths[bank]:
                        wanted[bank * 32 + index] = name
                        depths[bank] += 1
                    deepest = max(deepest, depths[bank])
        if num_lanes:
            counts.shared_wavefronts += deepest
            counts.shared_ideal += 1
            total += num_lanes
    if total:
        counts.shared_requests += 1
        counts.shared_bytes += total * size
    return 0


@compiled_once("llll")
def count_run(warp, site, address, size, requests):
    """Adds `size` neighbouring bytes of device memory from a host address on, and `requests`."""
    counts = warp.launch.traffic[site]
    counts.global_requests += requests
    if size > 0:
        counts.global_sectors += ((address + size - 1) >> 5) - (address >> 5) + 1
        counts.global_bytes += size
    return 0


@dataclass(slots=True)
class Counters:
    """Additive counts of one or more launches.

    Attributes:
        warp_instructions: instructions executed by warps, in all.
        lane_instructions: the same times the active lanes.
        by_opcode: opcode as written ("fma.rn.f32"): warp instructions.
        lanes_by_opcode: the same in lane instructions.
        traffic: index of the instruction in its kernel: its memory traffic, where Checks.TRAFFIC was set. In sums over
            different kernels the indices have no meaning.
    """

    warp_instructions: int = 0
    lane_instructions: int = 0
    by_opcode: dict[str, int] = field(default_factory=dict)
    lanes_by_opcode: dict[str, int] = field(default_factory=dict)
    traffic: dict[int, Traffic] = field(default_factory=dict)

    def __add__(self, other: Counters) -> Counters:
        return Counters(
            self.warp_instructions + other.warp_instructions,
            self.lane_instructions + other.lane_instructions,
            _add(self.by_opcode, other.by_opcode),
            _add(self.lanes_by_opcode, other.lanes_by_opcode),
            _add(self.traffic, other.traffic, Traffic()),
        )


def _add(first: dict[Any, Any], second: dict[Any, Any], nothing: Any = 0) -> dict[Any, Any]:
    total = dict(first)
    for key, value in second.items():
        total[key] = total.get(key, nothing) + value
    return total


def expand(instructions: Sequence[Instruction], chunks: Sequence[Sequence[int]], counts: Any) -> Counters:
    """Counts a chunk, int64 [2 · chunks] (warps, lanes), as Counters. `chunks`: first and last + 1 instruction."""
    found = Counters()
    for number, (first, last) in enumerate(chunks):
        warps, lanes = int(counts[2 * number]), int(counts[2 * number + 1])
        if warps == 0:
            continue
        found.warp_instructions += warps * (last - first)
        found.lane_instructions += lanes * (last - first)
        for instruction in instructions[first:last]:
            name = instruction.opcode
            found.by_opcode[name] = found.by_opcode.get(name, 0) + warps
            found.lanes_by_opcode[name] = found.lanes_by_opcode.get(name, 0) + lanes
    return found
