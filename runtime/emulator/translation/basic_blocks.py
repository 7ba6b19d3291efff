"""Basic blocks of a kernel and the liveness of registers, computed before the translation.

Liveness follows the control flow of one lane, so it holds for diverged warps too. A guarded definition counts as a use,
since lanes without the guard keep the old value. The values alive at once also estimate the registers of a thread,
whose allocation is ptxas's, which an emulated device does not run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from runtime.emulator.translation.ptx import (
    CARRY,
    Address,
    Instruction,
    Kernel,
    Operand,
    Register,
    Symbol,
    Vector,
    leaves,
)

ENDS = {"bra", "brx", "ret", "exit", "trap"}
NO_RESULT = {
    "bar", "barrier", "bra", "brkpt", "brx", "call", "cp", "discard", "exit", "fence", "griddepcontrol", "membar",
    "nanosleep", "prefetch", "prefetchu", "red", "ret", "setmaxnreg", "st", "stmatrix", "tensormap", "trap", "wgmma",
}  # fmt: skip
"""Opcodes whose first operand is read, or both read and written; `bar.red` is an exception."""


def registers_of(operand: Operand | None) -> Iterator[Register]:
    """Every register in an operand."""
    return (leaf for leaf in leaves(operand) if isinstance(leaf, Register))


def definitions(instruction: Instruction) -> set[str]:
    """Names of the registers that an instruction sets in every lane that executes it."""
    parts = instruction.parts
    carry = {CARRY.name} if instruction.sets_carry else set()
    if not instruction.operands or (parts[0] in NO_RESULT and "red" not in parts[1:]):
        return set()
    first = instruction.operands[0]
    if isinstance(first, Address) or parts[0] in ("red", "cp"):
        return set()
    return carry | {register.name for register in registers_of(first)}


def uses(instruction: Instruction) -> set[str]:
    """Names of the registers that an instruction reads, its guard among them."""
    defined = definitions(instruction)
    found = {register.name for operand in instruction.operands[1:] for register in registers_of(operand)}
    if not defined and instruction.operands:
        found |= {register.name for register in registers_of(instruction.operands[0])}
    if instruction.reads_carry:
        found.add(CARRY.name)
    if instruction.guard is not None:
        found.add(instruction.guard.name)
        found |= defined
    return found


@dataclass(slots=True)
class Block:
    """Instructions `start` to `end` (exclusive), entered at the first and left after the last."""

    start: int
    end: int
    successors: tuple[int, ...] = ()  # starts of the blocks that may follow
    live_in: set[str] = field(default_factory=set)
    live_out: set[str] = field(default_factory=set)
    last_use: dict[str, int] = field(default_factory=dict)  # register: the last instruction here that names it

    def is_live(self, name: str, index: int) -> bool:
        """Whether a register's value may be read at instruction `index` of this block or after it."""
        return name in self.live_out or self.last_use.get(name, -1) >= index


def targets_of(kernel: Kernel, instruction: Instruction) -> list[int]:
    """The targets of a branch, without falling through."""
    if instruction.parts[0] == "bra":
        symbol = instruction.operands[0]
        assert isinstance(symbol, Symbol)
        return [kernel.labels[symbol.name]]
    if instruction.parts[0] == "brx":
        table = instruction.operands[1]
        if isinstance(table, Symbol):
            return [kernel.labels[name] for name in kernel.branch_targets[table.name]]
        assert isinstance(table, Vector)
        return [kernel.labels[item.name] for item in table.items if isinstance(item, Symbol)]
    return []


def split(kernel: Kernel) -> list[Block]:
    """The blocks in the order of the text, with their successors and live registers."""
    code = kernel.instructions
    leaders = {0, *(index for index in kernel.labels.values() if index < len(code))}
    for index, instruction in enumerate(code):
        if instruction.parts[0] in ENDS and index + 1 < len(code):
            leaders.add(index + 1)
    starts = sorted(leaders)
    blocks = [Block(start, end) for start, end in zip(starts, [*starts[1:], len(code)]) if start < end]
    for block in blocks:
        last = code[block.end - 1]
        following = set(targets_of(kernel, last))
        if last.parts[0] not in ENDS or last.guard is not None:
            following.add(block.end)
        block.successors = tuple(sorted(index for index in following if index < len(code)))
    _find_liveness(code, blocks)
    return blocks


def _find_liveness(code: list[Instruction], blocks: list[Block]) -> None:
    used: dict[int, set[str]] = {}
    defined: dict[int, set[str]] = {}
    for block in blocks:
        reads: set[str] = set()
        writes: set[str] = set()
        for index in range(block.start, block.end):
            now, results = uses(code[index]), definitions(code[index])
            reads |= now - writes
            if code[index].guard is None:
                writes |= results
            for name in now | results:
                block.last_use[name] = index
        used[block.start], defined[block.start] = reads, writes
        block.live_in = set(reads)
    by_start = {block.start: block for block in blocks}
    changed = True
    while changed:
        changed = False
        for block in reversed(blocks):
            out: set[str] = set()
            for successor in block.successors:
                out |= by_start[successor].live_in
            if len(out) != len(block.live_out):
                block.live_out = out
                live_in = used[block.start] | (out - defined[block.start])
                changed = changed or len(live_in) != len(block.live_in)
                block.live_in = live_in


_FEWEST_REGISTERS, _MOST_REGISTERS = 16, 255


def estimate_registers(kernel: Kernel) -> int:
    """32-bit registers a thread, by the most values alive at once; or `.maxnreg` where it is given."""
    if "maxnreg" in kernel.directives:
        return kernel.directives["maxnreg"][0]
    widths = {name: _width(register) for name, register in kernel.registers.items()}
    most = _FEWEST_REGISTERS
    for block in split(kernel):
        live = block.live_out
        for instruction in reversed(kernel.instructions[block.start : block.end]):
            live = uses(instruction) | (live - definitions(instruction))
            most = max(most, sum(widths[name] for name in live))
    return min(most, _MOST_REGISTERS)


def _width(register: Register) -> int:
    """Its size in 32-bit registers; predicates have a file of their own."""
    return 0 if register.type == "pred" else max(1, int(register.type.lstrip("bufs") or "32") // 32)
