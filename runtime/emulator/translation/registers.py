"""A warp's registers while a kernel is translated: SSA values within a chunk, slots in memory between chunks.

A *chunk* is straight code between two resume points, entered with one mask of active lanes and left as a whole. Within
it a register's value is an SSA vector; it goes to the register file only where an operation needs a pointer, and at the
chunk's end where it is still live, blended there by the chunk's mask, so that lanes elsewhere keep theirs. Slots of
registers that live in one chunk alone are used again; a register that outlives its chunk has a slot of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from llvmlite import ir

from runtime.emulator.execution.state import LANES, Warp
from runtime.emulator.records import Field
from runtime.emulator.translation.basic_blocks import Block, definitions, registers_of, split
from runtime.emulator.translation.ptx import Instruction, Kernel, Operand, Register, Vector
from runtime.emulator.translation.symbols import FIXED_SLOT_BYTES
from runtime.emulator.translation.vectors import BYTE, I32, I64, LONG, WORD, truths_of
from runtime.errors import UnsupportedError

Value = Any  # an llvmlite IR value

REGISTER_BITS = {
    "pred": 1, "b8": 32, "u8": 32, "s8": 32, "b16": 32, "u16": 32, "s16": 32, "f16": 32, "bf16": 32, "b32": 32,
    "u32": 32, "s32": 32, "f32": 32, "f16x2": 32, "bf16x2": 32, "b64": 64, "u64": 64, "s64": 64, "f64": 64, "b128": 128,
}  # fmt: skip
"""Bits a lane of the slot of a register type; a predicate is one 32-bit mask."""

VECTORS = {1: WORD, 32: I32, 64: I64, 128: I64}
ELEMENTS = {32: WORD, 64: LONG, 128: LONG}
"""By the bits of a slot: its type, and the pointee type of a pointer for an operation."""
SLOT_KINDS = (BYTE, WORD, LONG, I32, I64)
"""The pointee types of a pointer into the register file."""

SLOT_BYTES = {1: 64, 32: 128, 64: 256, 128: 512}


class UnsupportedInstruction(UnsupportedError):
    """An instruction, or a form of one, that this emulator does not have; it is never skipped.

    Attributes:
        instruction: the instruction.
        why: the part that is not understood.
    """

    def __init__(self, instruction: Instruction, why: str) -> None:
        self.instruction, self.why = instruction, why
        super().__init__(f"PTX line {instruction.line}: {instruction.opcode} is not emulated: {why}")


WRITTEN, ACCUMULATES, IS_READ = 1, 2, 4


class WgmmaRegisters:
    """The accumulators and A fragments of all wgmma of a kernel, which wgmma owns while it runs; and the code that
    watches other instructions touch them.

    A byte for each such register lies in the register file: whether it was written since the last wgmma.fence, and
    whether a wgmma in flight accumulates in it or reads it. Other instructions that name the register look there first.

    Attributes:
        index: register name → its byte among the state bytes.
        offset: of the state bytes in the register file, set by the translation.
    """

    def __init__(self, kernel: Kernel) -> None:
        names: dict[str, None] = {}
        for instruction in kernel.instructions:
            if instruction.opcode.startswith("wgmma.mma_async"):
                for operand in instruction.operands[:2]:
                    if isinstance(operand, Vector):
                        names.update(dict.fromkeys(register.name for register in registers_of(operand)))
        self.index = {name: number for number, name in enumerate(names)}
        self.offset = -1
        self._seen: dict[tuple[str, bool], None] = {}
        self._chunk = -1

    @property
    def size_bytes(self) -> int:
        return -(-len(self.index) // 64) * 64

    def __bool__(self) -> bool:
        return bool(self.index)

    def forget(self) -> None:
        """After a wgmma instruction: earlier checks no longer hold."""
        self._seen.clear()

    def watch(self, low: Any) -> None:
        """Emits the check of the state bytes before the current instruction; `low` is a Lowering."""
        instruction = low.instruction
        if instruction.opcode.startswith("wgmma.mma_async"):
            self.forget()
            return
        if low.chunk_start != self._chunk:
            self._chunk = low.chunk_start
            self.forget()
        written = definitions(instruction) & self.index.keys()
        named = {register.name for operand in instruction.operands for register in registers_of(operand)}
        self._check(low, sorted((named & self.index.keys()) - written), ACCUMULATES, False)
        self._check(low, sorted(written), ACCUMULATES | IS_READ, True)

    def _check(self, low: Any, names: Iterable[str], forbidden: int, writes: bool) -> None:
        fresh = [name for name in names if (name, writes) not in self._seen]
        if not fresh:
            return
        state: Any = None
        for name in fresh:
            self._seen[name, writes] = None
            place = low.state_byte(self.offset + self.index[name])
            value = low.builder.load(place)
            if writes:
                low.builder.store(low.builder.or_(value, value.type(WRITTEN)), place)
            state = value if state is None else low.builder.or_(state, value)
        low.call_if(low.builder.and_(state, state.type(forbidden)), "wgmma_touched")


class Registers:
    """The part of translation's state for masks, registers and arrays; `Lowering` adds operands and calls.

    Attributes:
        builder: llvmlite's IRBuilder, at the place where the instruction goes.
        mask: i32, the lanes that execute this instruction: active, and with its guard.
        chunk_mask: i32, the lanes that execute the chunk.
        chunk_start: the instruction at which the chunk begins.
        site, instruction: the instruction's index in the kernel, and itself.
        warp: ``int64*``, the warp's record (execution/state.py).
        register_bytes: size of a warp's register file so far.
        status: i32, returned by operations of this chunk, or-ed; None before the first.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.blocks = split(kernel)
        self.register_bytes = FIXED_SLOT_BYTES
        self.wgmma = WgmmaRegisters(kernel)
        self.wgmma.offset = self.register_bytes
        self.register_bytes += self.wgmma.size_bytes

        self.ir = ir.Module(kernel.name)
        self.function = ir.Function(self.ir, ir.FunctionType(WORD, [LONG.as_pointer()]), "run")
        self.warp: Value = self.function.args[0]
        self.builder: Any = ir.IRBuilder()
        self.mask: Value = None
        self.chunk_mask: Value = None
        self.chunk_start = -1
        self.site = 0
        self.instruction: Instruction = kernel.instructions[0] if kernel.instructions else _NO_INSTRUCTION
        self.block = Block(0, 0)
        self.status: Value = None
        self.is_terminated = False
        self.yield_result: Value = None  # of a blocking call: DONE or DONE_BUT_YIELD

        self._chunk_truths: Value = None
        self._truths: Value = None
        self._cache: dict[str, Value] = {}  # register: its value, an i32 (predicate), <32 x i32> or <32 x i64>
        self._dirty: dict[str, None] = {}  # those whose value the register file does not hold yet
        self._permanent: dict[str, int] = {}  # register: offset in the register file
        self._temporary: dict[str, int] = {}
        self._free: dict[int, list[int]] = {size: [] for size in SLOT_BYTES.values()}
        self._scratch: list[tuple[int, int]] = []  # (size, offset) to be freed after the instruction
        self._after_call: list[Callable[[], None]] = []  # what moves an operation's results where they belong
        self.global_registers = set().union(*(block.live_in for block in self.blocks)) if self.blocks else set()
        self.global_registers |= self.wgmma.index.keys()  # written later by wgmma: slots of their own

    registers: dict[Any, Value]  # the register file, as a pointer to each of SLOT_KINDS
    launch: Value  # int64*, the launch's array
    counters: Value  # int64*, the chunks' counters

    def refuse(self, why: str) -> UnsupportedInstruction:
        """The error to raise for an unsupported part of this instruction."""
        return UnsupportedInstruction(self.instruction, why)

    # --- scalars and arrays ---

    def i32(self, value: int) -> Value:
        return ir.Constant(WORD, value % (1 << 32))

    def i64(self, value: int) -> Value:
        return ir.Constant(LONG, value % (1 << 64))

    def splat(self, scalar: Value) -> Value:
        """A scalar in every lane."""
        vector = ir.VectorType(scalar.type, LANES)
        undefined = ir.Constant(vector, ir.Undefined)
        first = self.builder.insert_element(undefined, scalar, ir.Constant(WORD, 0))
        zeros = ir.Constant(ir.VectorType(WORD, LANES), None)
        return self.builder.shuffle_vector(first, undefined, zeros)

    def element(self, array: Value, index: int) -> Value:
        """``array[index]`` of an ``int64*``."""
        return self.builder.load(self.builder.gep(array, [self.i64(index)]))

    def warp_field(self, field: Field) -> Value:
        return self.element(self.warp, field.index)

    def block_field(self, field: Field) -> Value:
        return self.element(self._pointer(self.warp_field(Warp.block), LONG), field.index)

    def launch_field(self, field: Field) -> Value:
        return self.element(self.launch, field.index)

    def set_warp_field(self, field: Field, value: Value) -> None:
        """Sets a field to an i64, or to an i32 that is widened with zeros."""
        self.builder.store(self.wide(value), self.builder.gep(self.warp, [self.i64(field.index)]))

    def wide(self, value: Value | int) -> Value:
        """A number, an i64, or an i32 that is widened with zeros, as i64."""
        if isinstance(value, int):
            return self.i64(value)
        return self.builder.zext(value, LONG) if value.type == WORD else value

    def _pointer(self, address: Value, element: Any) -> Value:
        return self.builder.inttoptr(address, element.as_pointer())

    # --- slots ---

    def bits_of(self, operand: Operand) -> int:
        """Bits a lane of a register's slot: 1, 32, 64 or 128."""
        if not isinstance(operand, Register):
            raise self.refuse(f"{operand} is no register")
        bits = REGISTER_BITS.get(operand.type)
        if bits is None:
            raise self.refuse(f"register type .{operand.type}")
        return bits

    def _allocate(self, size: int, reuse: bool = True) -> int:
        """Room in the register file; registers that keep their values across chunks do not share it (`reuse` False)."""
        if reuse and self._free[size]:
            return self._free[size].pop()
        offset = self.register_bytes
        self.register_bytes += size
        return offset

    def at(self, offset: int, kind: Any) -> Value:
        """A pointer into the register file; `kind` is one of SLOT_KINDS."""
        return self.builder.gep(self.registers[kind], [self.i64(offset)], source_etype=BYTE)

    def _offset_of(self, register: Register, permanent: bool = False) -> int:
        name = register.name
        if name in self._permanent:
            return self._permanent[name]
        size = SLOT_BYTES[self.bits_of(register)]
        if permanent or name in self.global_registers or size == SLOT_BYTES[128]:  # 128 bits are no SSA value
            self._permanent[name] = self._allocate(size, reuse=False)
            return self._permanent[name]
        if name not in self._temporary:
            self._temporary[name] = self._allocate(size)
        return self._temporary[name]

    def _slot_of(self, register: Register) -> Value:
        return self.at(self._offset_of(register), VECTORS[self.bits_of(register)])

    def _scratch_slot(self, bits: int) -> int:
        """The offset of a slot until the end of the instruction."""
        size = SLOT_BYTES[bits]
        offset = self._allocate(size)
        self._scratch.append((size, offset))
        return offset

    def _raw(self, register: Register) -> Value:
        """A register's value as it lies in its slot."""
        name = register.name
        if name not in self._cache:
            self._cache[name] = self.builder.load(self._slot_of(register))
        return self._cache[name]

    def _store(self, register: Register) -> None:
        """Brings the register file up to date for one register."""
        name = register.name
        if name not in self._dirty:
            return
        del self._dirty[name]
        self._put(register, self._cache[name])

    def _put(self, register: Register, value: Value) -> None:
        slot = self._slot_of(register)
        if register.name in self._permanent:
            old = self.builder.load(slot)
            if value.type == WORD:
                value = self._blend_bits(value, old, self.chunk_mask)
            else:
                value = self.builder.select(self._chunk_truths, value, old)
        self.builder.store(value, slot)

    def _blend_bits(self, new: Value, old: Value, mask: Value) -> Value:
        changed = self.builder.and_(self.builder.xor(new, old), mask)
        return self.builder.xor(old, changed)

    @property
    def truths(self) -> Value:
        """`mask` as ``<32 x i1>``."""
        if self._truths is None:
            self._truths = truths_of(self.builder, self.mask)
        return self._truths

    # --- for wgmma, which writes registers later than the instruction does ---

    def pinned_offset(self, register: Register) -> int:
        """The offset of a register's slot in the register file, which holds its value now."""
        self._store(register)
        return self._offset_of(register)

    def invalidate(self, register: Register) -> None:
        """Forgets a register's value: its slot has another one, or will have."""
        self._cache.pop(register.name, None)
        self._dirty.pop(register.name, None)

    def state_byte(self, offset: int) -> Value:
        """A pointer to one byte of the register file."""
        return self.at(offset, BYTE)

    # --- chunks and instructions ---

    def begin_chunk(self, index: int, mask: Value) -> None:
        """Begins a chunk: the builder is at its code, and no register has a known value."""
        self._cache.clear()
        self._dirty.clear()
        for name, offset in self._temporary.items():
            self._free[SLOT_BYTES[self.bits_of(self.kernel.registers[name])]].append(offset)
        self._temporary.clear()
        self.chunk_start = index
        self.chunk_mask = mask
        self._chunk_truths = truths_of(self.builder, mask)
        self.status = None
        self.is_terminated = False
        self.yield_result = None

    def begin_instruction(self, index: int) -> None:
        """Sets `site`, `mask` and their dependents."""
        self.site, self.instruction = index, self.kernel.instructions[index]
        self.mask, self._truths = self.chunk_mask, self._chunk_truths
        guard = self.instruction.guard
        if guard is not None:
            predicate = self._raw(guard)
            if self.instruction.guard_negated:
                predicate = self.builder.not_(predicate)
            self.mask, self._truths = self.builder.and_(self.chunk_mask, predicate), None

    def end_instruction(self) -> None:
        """Forgets the registers that are not read from here on."""
        assert not self._after_call, f"{self.instruction.opcode}: a destination without a call"
        for size, offset in self._scratch:
            self._free[size].append(offset)
        self._scratch.clear()
        for name in [*self._cache, *(name for name in self._temporary if name not in self._cache)]:
            if self.block.is_live(name, self.site + 1):
                continue
            self._cache.pop(name, None)
            self._dirty.pop(name, None)
            if name in self._temporary:
                size = SLOT_BYTES[self.bits_of(self.kernel.registers[name])]
                self._free[size].append(self._temporary.pop(name))

    def flush(self, index: int | None = None) -> None:
        """Writes live registers to the register file, at the block's end or before its instruction `index`."""
        for name in [*self._dirty]:
            live = name in self.block.live_out if index is None else self.block.is_live(name, index)
            if live:
                self._offset_of(self.kernel.registers[name], permanent=name not in self._temporary)
                if name not in self._temporary:
                    self._store(self.kernel.registers[name])
        if index is not None:  # a local register outlives its chunk: its slot must be its own
            for name in [*self._temporary]:
                if self.block.is_live(name, index):
                    register = self.kernel.registers[name]
                    value = self._raw(register)
                    self._free[SLOT_BYTES[self.bits_of(register)]].append(self._temporary.pop(name))
                    self._offset_of(register, permanent=True)
                    self._put(register, value)
        self._dirty.clear()


_NO_INSTRUCTION = Instruction("", (), None, False, 0)
