"""Finds a kernel's main loop, and counts its instructions per tensor-core operation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tools.kernel_costs.machine_code import MachineInstruction

_HMMA = re.compile(r"HMMA\.(\d+)")
_HGMMA = re.compile(r"HGMMA\.64x(\d+)x(\d+)")
_EQUIVALENT = 16 * 8 * 16
_HMMA_SIZES = {"16816": 16 * 8 * 16, "1688": 16 * 8 * 8}


@dataclass(frozen=True, slots=True)
class MainLoop:
    """An innermost loop that holds tensor-core instructions.

    Attributes:
        num_instructions: of its shortest iteration, without NOP: a forward branch is taken if that skips no tensor-core
            instruction, so that code of only some iterations (a mask on the diagonal, say) is not counted.
        num_operations: tensor-core work of one iteration for a warp, in products of 16 x 8 x 16. A wgmma of 64 x N x 16
            is N / 8 of them for each of its four warps.
        mix: number of instructions by opcode without modifiers, the most frequent first.
    """

    num_instructions: int
    num_operations: float
    mix: dict[str, int]

    @property
    def instructions_per_operation(self) -> float:
        return self.num_instructions / self.num_operations


def operations_of(opcode: str) -> float:
    """Tensor-core work of one instruction for a warp, in products of 16 x 8 x 16; 0 for every other instruction.

    Raises ValueError for a tensor-core instruction of an unknown shape.
    """
    if opcode.startswith("HMMA"):
        shape = _HMMA.match(opcode)
        if shape is None or shape[1] not in _HMMA_SIZES:
            raise ValueError(f"{opcode}: a tensor-core instruction of unknown shape")
        return _HMMA_SIZES[shape[1]] / _EQUIVALENT
    if opcode.startswith("HGMMA"):
        shape = _HGMMA.match(opcode)
        if shape is None:
            raise ValueError(f"{opcode}: a tensor-core instruction of unknown shape")
        return 16 * int(shape[1]) * int(shape[2]) / _EQUIVALENT  # 64 rows, 16 for each of four warps
    return 0.0


def main_loops(instructions: Sequence[MachineInstruction]) -> list[MainLoop]:
    """The innermost loops with tensor-core instructions, in the code's order."""
    spans: dict[int, int] = {}  # first instruction: last branch back to it
    for index, instruction in enumerate(instructions):
        if instruction.target is not None and instruction.target <= index:
            spans[instruction.target] = index
    working = {
        first: last
        for first, last in spans.items()
        if any(operations_of(each.opcode) for each in instructions[first : last + 1])
        and leanest_turn(instructions, first, last)  # else an out-of-line wait only jumps back
    }
    innermost = {
        first: last
        for first, last in working.items()
        if not any(first <= other and end <= last and (first, last) != (other, end) for other, end in working.items())
    }
    found = []
    for first, last in sorted(innermost.items()):
        body = [opcode for opcode in leanest_turn(instructions, first, last) if opcode != "NOP"]
        mix = dict(Counter(opcode.split(".")[0] for opcode in body).most_common())
        found.append(MainLoop(len(body), sum(map(operations_of, body)), mix))
    return found


def leanest_turn(instructions: Sequence[MachineInstruction], first: int, last: int) -> list[str]:
    """The opcodes of the shortest path from a loop's first instruction to its last that skips no tensor-core work;
    empty if there is no path.

    Backward branches, except the last, and branches out of the loop count as not taken.
    """
    costs = {last: 1}  # of the path from an instruction to the end
    follows: dict[int, int] = {}
    works = [bool(operations_of(each.opcode)) for each in instructions]
    for index in range(last - 1, first - 1, -1):
        each = instructions[index]
        target = each.target
        ends = each.is_certain and (each.opcode in ("EXIT", "RET") or (target is not None and target > index))
        ways = [] if ends else [index + 1]
        if target is not None and index < target <= last and (each.is_certain or not any(works[index:target])):
            ways.append(target)
        ways = [way for way in ways if way in costs]
        if ways:
            follows[index] = min(ways, key=lambda way: costs[way])
            costs[index] = costs[follows[index]] + (each.opcode != "NOP")
    if first not in costs:
        return []
    way = [first]
    while way[-1] != last:
        way.append(follows[way[-1]])
    return [instructions[index].opcode for index in way]


def main_loop(instructions: Sequence[MachineInstruction]) -> MainLoop:
    """The shortest of the innermost loops with tensor-core instructions: the one of most iterations, if a second loop
    masks or drains. Raises ValueError if there is none."""
    loops = main_loops(instructions)
    if not loops:
        raise ValueError("no loop holds a tensor-core instruction")
    return min(loops, key=lambda loop: loop.instructions_per_operation)
