"""Counters of a launch: instructions of warps and of lanes by opcode, memory traffic, tensor-core work.

Translated code counts how often each stretch of instructions ran to its end, and with how many lanes; this turns those
counts into instructions. A lane counts as active whatever its guard predicate; an instruction that was retried counts
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.emulator.execution.traffic import Traffic
from runtime.emulator.translation.ptx import Instruction


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
