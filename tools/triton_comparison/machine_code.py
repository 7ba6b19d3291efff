"""A kernel's machine code as nvdisasm shows it, and what its main loop executes for each tensor-core operation.

nvdisasm is not part of the compilers that the engine needs: it comes with the CUDA toolkit, and with Triton.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

_LABEL = re.compile(r"^\s*(\.L_x_\d+|\.L_\d+):")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][A-Za-z0-9_.]*)([^;]*);")
_TARGET = re.compile(r"`\((\.L_[\w]+)\)")
_HMMA = re.compile(r"HMMA\.(\d+)")
_HGMMA = re.compile(r"HGMMA\.64x(\d+)x(\d+)")
_EQUIVALENT = 16 * 8 * 16
_HMMA_SIZES = {"16816": 16 * 8 * 16, "1688": 16 * 8 * 8}


class NoDisassemblerError(RuntimeError):
    """nvdisasm is not on this machine."""


@dataclass(frozen=True, slots=True)
class MachineInstruction:
    """One instruction: its opcode with modifiers, the index of what it may branch to (None for none), and whether it
    always does what it says: it has no predicate, and is no branch of diverged lanes alone (BRA.DIV)."""

    opcode: str
    target: int | None
    is_certain: bool = True


@dataclass(frozen=True, slots=True)
class MainLoop:
    """An innermost loop that holds tensor-core instructions.

    Attributes:
        num_instructions: of its leanest turn, NOP left out: a branch forward is taken where that skips no tensor-core
            instruction, so that what only some turns do (a mask on the diagonal, say) is not in it.
        num_operations: tensor-core work of one turn for a warp, in products of 16 x 8 x 16. A wgmma of 64 x N x 16 is
            N / 8 of them for each of its four warps.
        mix: number of instructions by opcode without modifiers, the most frequent first.
    """

    num_instructions: int
    num_operations: float
    mix: dict[str, int]

    @property
    def instructions_per_operation(self) -> float:
        return self.num_instructions / self.num_operations


def find_nvdisasm(asked: str | None = None) -> str:
    """The program: `asked`, or on PATH, or in an installed Triton. Raises NoDisassemblerError with where it looked."""
    if asked is not None:
        found = shutil.which(asked)
        if found is None:
            raise NoDisassemblerError(f"--nvdisasm {asked}: no such program")
        return found
    found = shutil.which("nvdisasm")
    triton = find_spec("triton")
    if found is None and triton is not None and triton.submodule_search_locations:
        found = shutil.which(Path(triton.submodule_search_locations[0], "backends", "nvidia", "bin", "nvdisasm"))
    if found is None:
        raise NoDisassemblerError(
            "nvdisasm is neither on PATH nor in an installed triton; it comes with the CUDA toolkit and with triton "
            "(pip install triton). Name it by --nvdisasm."
        )
    return found


def disassemble(cubin: bytes, nvdisasm: str) -> list[MachineInstruction]:
    """The code of a cubin that holds one kernel. Raises RuntimeError with nvdisasm's words where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        done = subprocess.run([nvdisasm, "-c", str(file)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvdisasm: {done.stderr.strip()}")
    return parse(done.stdout)


def parse(listing: str) -> list[MachineInstruction]:
    """nvdisasm's text as instructions. Raises ValueError for one that branches to a label that there is not."""
    labels: dict[str, int] = {}
    found: list[tuple[str, str | None, bool]] = []
    for line in listing.split("\n"):
        if label := _LABEL.match(line):
            labels[label[1]] = len(found)
        elif instruction := _INSTRUCTION.match(line):
            opcode = instruction[2]
            target = _TARGET.search(instruction[3]) if opcode.split(".")[0] in ("BRA", "BRX", "JMP") else None
            is_certain = instruction[1] is None and not opcode.startswith("BRA.")
            found.append((opcode, target[1] if target else None, is_certain))
    missing = {target for _, target, _ in found if target is not None and target not in labels}
    if missing:
        raise ValueError(f"branches to {sorted(missing)}, which the listing does not have")
    return [
        MachineInstruction(opcode, None if target is None else labels[target], is_certain)
        for opcode, target, is_certain in found
    ]


def operations_of(opcode: str) -> float:
    """Tensor-core work of one instruction for a warp, in products of 16 x 8 x 16; 0 for every other instruction.

    Raises ValueError for a tensor-core instruction of a shape that is not known here.
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
        and leanest_turn(instructions, first, last)  # else what waits out of line only comes back
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
    """The opcodes of the shortest way from a loop's first instruction to its last that skips no tensor-core work; none
    where no way leads there.

    Branches backwards, but for the last, are taken for not taken, and so are those out of the loop.
    """
    costs = {last: 1}  # of the way from an instruction to the end
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
    """The leanest of the innermost loops with tensor-core instructions: what most turns go through, where a second loop
    masks or drains. Raises ValueError where there is none."""
    loops = main_loops(instructions)
    if not loops:
        raise ValueError("no loop holds a tensor-core instruction")
    return min(loops, key=lambda loop: loop.instructions_per_operation)
