"""Estimates of a kernel's registers, and of the blocks that a multiprocessor can hold.

Registers are an estimate, from the values of the PTX text that are alive at once: the allocation is ptxas's, which an
emulated device does not run. The limits on blocks follow the "CUDA Occupancy Calculator" of the CUDA Toolkit: registers
are handed out by 256 a warp, warps by four, shared memory by 128 bytes.
"""

from __future__ import annotations

from runtime.emulator.driver.architectures import (
    MAX_REGISTERS_PER_THREAD,
    REGISTERS_PER_SM,
    RESERVED_SHARED_BYTES_PER_BLOCK,
    WARP_SIZE,
    GpuModel,
)
from runtime.emulator.translation.ptx import (
    Address,
    Instruction,
    Kernel,
    Negated,
    Operand,
    Pair,
    Register,
    Symbol,
    Vector,
)

_REGISTER_UNIT = 256  # registers, for a warp
_WARP_UNIT = 4
_SHARED_UNIT = 128
_FEWEST_REGISTERS = 16

_WITHOUT_RESULT = frozenset({"st", "red", "bar", "barrier", "bra", "brx", "exit", "ret", "trap", "membar", "fence",
    "prefetch", "prefetchu", "cp", "stmatrix", "setmaxnreg", "griddepcontrol", "nanosleep", "wgmma", "tensormap",
    "discard", "applypriority", "pmevent", "brkpt", "multimem"})  # fmt: skip
_ENDS = frozenset({"exit", "ret", "trap"})


def _registers(operand: Operand | None) -> list[Register]:
    if isinstance(operand, Register):
        return [operand]
    if isinstance(operand, Negated):
        return [operand.operand]
    if isinstance(operand, Vector):
        return [register for item in operand.items for register in _registers(item)]
    if isinstance(operand, Pair):
        return _registers(operand.first) + _registers(operand.second)
    if isinstance(operand, Address):
        return _registers(operand.base) + _registers(operand.coordinates)
    return []


def _width(register: Register) -> int:
    """Its size in 32-bit registers; predicates have a file of their own."""
    if register.type == "pred":
        return 0
    bits = int(register.type.lstrip("bufs") or "32")
    return max(1, bits // 32)


def _successors(index: int, instruction: Instruction, kernel: Kernel) -> list[int]:
    first = instruction.parts[0]
    found = []
    if first in ("bra", "brx"):
        names = [operand.name for operand in instruction.operands if isinstance(operand, Symbol)]
        targets = [target for name in names for target in kernel.branch_targets.get(name, (name,))]
        found = [kernel.labels[target] for target in targets]
    is_end = first in _ENDS or first in ("bra", "brx")
    if not is_end or instruction.guard is not None:
        found.append(index + 1)
    return found


def estimate_registers(kernel: Kernel) -> int:
    """32-bit registers a thread, by the most values alive at once; or `.maxnreg` where it is given."""
    if "maxnreg" in kernel.directives:
        return kernel.directives["maxnreg"][0]
    numbers: dict[Register, int] = {}
    uses, kills, successors = [], [], []
    for index, instruction in enumerate(kernel.instructions):
        has_result = instruction.parts[0] not in _WITHOUT_RESULT and len(instruction.operands) > 1
        sources = instruction.operands[1:] if has_result else instruction.operands
        results = _registers(instruction.operands[0]) if has_result else []
        read = [register for operand in sources for register in _registers(operand)]
        if instruction.guard is not None:
            read.append(instruction.guard)
            read += results  # a lane that is left out keeps its value
        bits = [0, 0]
        for side, registers in enumerate((read, results)):
            for register in registers:
                bits[side] |= 1 << numbers.setdefault(register, len(numbers))
        uses.append(bits[0])
        kills.append(bits[1])
        successors.append(_successors(index, instruction, kernel))
    count = len(kernel.instructions)
    alive = [0] * (count + 1)
    is_stable = False
    while not is_stable:
        is_stable = True
        for index in range(count - 1, -1, -1):
            after = 0
            for other in successors[index]:
                after |= alive[other]
            now = uses[index] | (after & ~kills[index])
            if now != alive[index]:
                alive[index], is_stable = now, False
    widths = [_width(register) for register in numbers]
    most = max((_weight(state, widths) for state in set(alive)), default=0)
    return min(max(most, _FEWEST_REGISTERS), MAX_REGISTERS_PER_THREAD)


def _weight(state: int, widths: list[int]) -> int:
    total = 0
    while state:
        lowest = state & -state
        total += widths[lowest.bit_length() - 1]
        state ^= lowest
    return total


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def blocks_per_sm(model: GpuModel, threads: int, registers: int, shared_bytes: int) -> int:
    """Blocks of a kernel that one multiprocessor holds at once; 0 where not even one fits.

    Args:
        threads: a block.
        registers: a thread.
        shared_bytes: a block, static and dynamic.
    """
    if threads < 1 or shared_bytes > model.shared_bytes_per_block:
        return 0
    warps = -(-threads // WARP_SIZE)
    registers_per_warp = _up(registers * WARP_SIZE, _REGISTER_UNIT)
    warps_by_registers = REGISTERS_PER_SM // registers_per_warp // _WARP_UNIT * _WARP_UNIT
    shared = _up(shared_bytes + RESERVED_SHARED_BYTES_PER_BLOCK, _SHARED_UNIT)
    return min(
        model.blocks_per_sm,
        model.threads_per_sm // WARP_SIZE // warps,
        warps_by_registers // warps,
        model.shared_bytes_per_sm // shared,
    )
