"""One kernel's translation to LLVM IR: registers, masks, chunks; and the registry of what each opcode becomes.

A *chunk* is straight code between two resume points, entered with one mask of active lanes and left as a whole. Within
it a register's value is an SSA vector; it goes to the register file only where an operation needs a pointer, and at the
chunk's end where it is still live, blended there by the chunk's mask, so that lanes elsewhere keep theirs.
`control.py` makes the ends of chunks, `dispatch.py` the frame around them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from runtime.device.emulator import context, specials
from runtime.device.emulator.blocks import CARRY, Block, split
from runtime.device.emulator.fault import FaultKind
from runtime.device.emulator.operations import OPERATIONS
from runtime.device.emulator.ptx import (
    Address,
    Float,
    Instruction,
    Integer,
    Kernel,
    Module,
    Negated,
    Operand,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
)
from runtime.device.emulator.variables import SharedLayout, shared_layout
from runtime.device.emulator.vectors import BYTE, F32, F64, I16, I32, I64, LONG, WORD, mask_of, splat, truths_of
from runtime.device.emulator.vectors import I8 as I8_LANES
from runtime.device.emulator.wgmma_registers import WgmmaRegisters

Value = Any  # an llvmlite IR value

TYPES: dict[str, Any] = {
    **dict.fromkeys(("b8", "u8", "s8", "e4m3", "e5m2"), I8_LANES),
    **dict.fromkeys(("b16", "u16", "s16", "f16", "bf16", "e4m3x2", "e5m2x2"), I16),
    **dict.fromkeys(("b32", "u32", "s32", "f16x2", "bf16x2", "tf32"), I32),
    **dict.fromkeys(("b64", "u64", "s64"), I64),
    "f32": F32,
    "f64": F64,
}
"""What `Lowering.value` gives for a PTX type: 16-bit floats come as their bits."""

REGISTER_BITS = {
    "pred": 1, "b8": 32, "u8": 32, "s8": 32, "b16": 32, "u16": 32, "s16": 32, "f16": 32, "bf16": 32, "b32": 32,
    "u32": 32, "s32": 32, "f32": 32, "f16x2": 32, "bf16x2": 32, "b64": 64, "u64": 64, "s64": 64, "f64": 64, "b128": 128,
}  # fmt: skip
"""Bits a lane of the slot of a register type; a predicate is one 32-bit mask."""

_VECTORS = {1: WORD, 32: I32, 64: I64, 128: I64}
_ELEMENTS = {32: WORD, 64: LONG, 128: LONG}
SLOT_KINDS = (BYTE, WORD, LONG, I32, I64)
"""What a pointer into the register file may point at."""

SLOT_BYTES = {1: 64, 32: 128, 64: 256, 128: 512}


class UnsupportedInstruction(Exception):
    """An instruction that this emulator does not know; it is never skipped.

    Attributes:
        instruction: the instruction.
        why: what about it is not understood.
    """

    def __init__(self, instruction: Instruction, why: str) -> None:
        self.instruction, self.why = instruction, why
        super().__init__(f"PTX line {instruction.line}: {instruction.opcode}: {why}")


Lower = Callable[["Lowering", Instruction], None]
_LOWERINGS: dict[str, Lower] = {}


def lowers(*opcodes: str) -> Callable[[Lower], Lower]:
    """Registers the translation of opcodes, named by their first parts: "ld", or "fence.proxy" (the longest wins)."""

    def register(function: Lower) -> Lower:
        for opcode in opcodes:
            if opcode in _LOWERINGS:
                raise ValueError(f"two translations of {opcode}")
            _LOWERINGS[opcode] = function
        return function

    return register


def lowering_of(instruction: Instruction) -> Lower:
    """The translation of an instruction. Raises UnsupportedInstruction."""
    parts = instruction.parts
    for count in range(len(parts), 0, -1):
        found = _LOWERINGS.get(".".join(parts[:count]))
        if found is not None:
            return found
    raise UnsupportedInstruction(instruction, "unknown instruction")


class Lowering:
    """The state of one kernel's translation. What the translations of instructions use:

    Attributes:
        builder: llvmlite's IRBuilder, at the place where the instruction goes.
        mask: i32, the lanes that execute this instruction: active, and with its guard.
        chunk_mask: i32, the lanes that execute the chunk.
        site: the instruction's index in the kernel.
        shared: where shared variables lie (SharedLayout).
        warp: ``int64*``, the warp's array (context.py).
    """

    def __init__(self, module: Module, kernel: Kernel) -> None:
        self.module, self.kernel = module, kernel
        self.blocks = split(kernel)
        kernel.registers.setdefault(CARRY.name, CARRY)
        self.shared: SharedLayout = shared_layout(module, kernel)
        self.parameters = _parameter_offsets(kernel)
        self.locals, self.local_bytes = _local_offsets(kernel)
        self.symbols = used_variables(module, kernel)
        self.call_arguments: dict[str, Value] = {}  # name of a call's argument: what was stored to it last
        self.operations: list[str] = []  # used, in order of first use
        self.chunks: list[tuple[int, int]] = []  # first and last + 1 instruction of each counted stretch
        self.register_bytes = specials.FIXED_SLOT_BYTES
        self.wgmma = WgmmaRegisters(kernel)
        self.wgmma.offset = self.register_bytes
        self.register_bytes += self.wgmma.size_bytes

        self.ir = ir.Module(kernel.name)
        self.function = ir.Function(self.ir, ir.FunctionType(WORD, [LONG.as_pointer()]), "run")
        self.warp: Value = self.function.args[0]
        self.builder: Any = ir.IRBuilder()
        self.mask: Value = None
        self.chunk_mask: Value = None
        self.site = 0
        self.instruction: Instruction = kernel.instructions[0] if kernel.instructions else _NO_INSTRUCTION
        self.block = Block(0, 0)
        self.status: Value = None
        self.is_terminated = False
        self.yield_result: Value = None  # of a blocking call: DONE or DONE_BUT_YIELD
        self.has_loose_barriers = any(
            ins.parts[0] == "barrier" and "aligned" not in ins.parts and "cluster" not in ins.parts
            for ins in kernel.instructions
        )

        self._chunk_truths: Value = None
        self._truths: Value = None
        self.chunk_start = -1
        self._cache: dict[str, Value] = {}  # register: its value, an i32 (predicate), <32 x i32> or <32 x i64>
        self._dirty: set[str] = set()  # those whose value the register file does not hold yet
        self._permanent: dict[str, int] = {}  # register: offset in the register file
        self._temporary: dict[str, int] = {}
        self._free: dict[int, list[int]] = {size: [] for size in SLOT_BYTES.values()}
        self._scratch: list[tuple[int, int]] = []  # (size, offset) to be freed after the instruction
        self._after_call: list[Callable[[], None]] = []
        self._constants: dict[tuple[int, int], Value] = {}
        self.global_registers = set().union(*(block.live_in for block in self.blocks)) if self.blocks else set()
        self.global_registers |= self.wgmma.index.keys()  # written behind the translation's back: slots of their own

    # --- scalars ---

    def i32(self, value: int) -> Value:
        return ir.Constant(WORD, value % (1 << 32))

    def i64(self, value: int) -> Value:
        return ir.Constant(LONG, value % (1 << 64))

    def splat(self, scalar: Value) -> Value:
        """A scalar in every lane."""
        vector = ir.VectorType(scalar.type, context.LANES)
        undefined = ir.Constant(vector, ir.Undefined)
        first = self.builder.insert_element(undefined, scalar, ir.Constant(WORD, 0))
        zeros = ir.Constant(ir.VectorType(WORD, context.LANES), None)
        return self.builder.shuffle_vector(first, undefined, zeros)

    def field(self, array: Value, index: int) -> Value:
        """``array[index]`` of an ``int64*``."""
        return self.builder.load(self.builder.gep(array, [self.i64(index)]))

    def warp_field(self, index: int) -> Value:
        return self.field(self.warp, index)

    def block_field(self, index: int) -> Value:
        return self.field(self._pointer(self.warp_field(context.WARP_BLOCK), LONG), index)

    def launch_field(self, index: int) -> Value:
        return self.field(self.launch, index)

    def set_warp_field(self, index: int, value: Value) -> None:
        """``warp[index] = value``, an i64, or an i32 that is widened with zeros."""
        wide = value if value.type == LONG else self.builder.zext(value, LONG)
        self.builder.store(wide, self.builder.gep(self.warp, [self.i64(index)]))

    def _pointer(self, address: Value, element: Any) -> Value:
        return self.builder.inttoptr(address, element.as_pointer())

    # --- reading operands ---

    def bits_of(self, operand: Operand) -> int:
        """Bits a lane of a register's slot: 1, 32, 64 or 128."""
        if not isinstance(operand, Register):
            raise self.refuse(f"{operand} is no register")
        bits = REGISTER_BITS.get(operand.type)
        if bits is None:
            raise self.refuse(f"register type .{operand.type}")
        return bits

    def refuse(self, why: str) -> UnsupportedInstruction:
        """The error to raise for what is not understood about this instruction."""
        return UnsupportedInstruction(self.instruction, why)

    def value(self, operand: Operand, kind: str) -> Value:
        """An operand's lanes as a PTX type: ``<32 x iN>``, float or double (TYPES)."""
        wanted = TYPES.get(kind)
        if wanted is None:
            raise self.refuse(f"type .{kind}")
        if isinstance(operand, Integer):
            if wanted in (F32, F64):
                raise self.refuse("an integer literal where a float is expected")
            return splat(wanted, operand.value)
        if isinstance(operand, Float):
            return self._float(operand, wanted)
        if isinstance(operand, Special):
            return self._resize(specials.value(self, operand.name), wanted, kind)
        if isinstance(operand, Symbol):
            return self._resize(self.splat(self.symbol_address(operand.name)), wanted, kind)
        if not isinstance(operand, Register):
            raise self.refuse(f"operand {operand}")
        bits = self.bits_of(operand)
        if bits not in (32, 64):
            raise self.refuse(f"register {operand.name} of type .{operand.type} as .{kind}")
        return self._resize(self._raw(operand), wanted, kind)

    def _float(self, operand: Float, wanted: Any) -> Value:
        bits = splat(I32 if operand.width == 32 else I64, operand.bits)
        if wanted in (F32, I32) and operand.width == 32:
            return self.builder.bitcast(bits, wanted)
        if wanted in (F64, I64) and operand.width == 64:
            return self.builder.bitcast(bits, wanted)
        raise self.refuse(f"a {operand.width}-bit float literal here")

    def _resize(self, raw: Value, wanted: Any, kind: str) -> Value:
        """An integer vector cut or extended to the width of `wanted`, then seen as it."""
        element = wanted.element
        bits = {str(F32.element): 32, str(F64.element): 64}.get(str(element)) or element.width
        have = raw.type.element.width
        integers = ir.VectorType(ir.IntType(bits), context.LANES)
        if have > bits:
            raw = self.builder.trunc(raw, integers)
        elif have < bits:
            raw = self.builder.sext(raw, integers) if kind[0] == "s" else self.builder.zext(raw, integers)
        return raw if raw.type == wanted else self.builder.bitcast(raw, wanted)

    def _raw(self, register: Register) -> Value:
        """A register's value as it lies in its slot."""
        name = register.name
        if name not in self._cache:
            self._cache[name] = self.builder.load(self._slot_of(register))
        return self._cache[name]

    def predicate(self, operand: Operand) -> Value:
        """A predicate operand as an i32 mask; bits outside of the chunk's mask mean nothing."""
        if isinstance(operand, Negated):
            return self.builder.not_(self.predicate(operand.operand))
        if isinstance(operand, Integer):
            return self.i32(-1 if operand.value else 0)
        if isinstance(operand, Special):
            return mask_of(self.builder, self.builder.icmp_unsigned("!=", self.value(operand, "b32"), splat(I32, 0)))
        if not isinstance(operand, Register) or operand.type != "pred":
            raise self.refuse(f"{operand} is no predicate")
        return self._raw(operand)

    def uniform(self, operand: Operand) -> int:
        """An operand that has to be a literal, as an int."""
        if not isinstance(operand, Integer):
            raise self.refuse(f"{operand} where a literal is expected")
        return operand.value

    def symbol_address(self, name: str) -> Value:
        """A variable's address as an i64: shared offset, offset in local or param space, or device address."""
        if name in self.shared.offsets:
            return self.i64(self.shared.offsets[name])
        if name in self.parameters:
            return self.i64(self.parameters[name][0])
        if name in self.locals:
            return self.i64(self.locals[name])
        if name not in self.symbols:
            raise self.refuse(f"unknown symbol {name}")
        table = self._pointer(self.launch_field(context.LAUNCH_SYMBOLS), LONG)
        return self.field(table, self.symbols.index(name))

    # --- writing results ---

    def write(self, operand: Operand, vector: Value) -> None:
        """Sets a register in the lanes of `mask`. Narrow integers are extended with zeros; extend signs beforehand."""
        if isinstance(operand, Sink):
            return
        bits = self.bits_of(operand)
        assert isinstance(operand, Register)
        if bits not in (32, 64):
            raise self.refuse(f"a result in register {operand.name} of type .{operand.type}")
        raw = vector
        if vector.type in (F32, F64):
            raw = self.builder.bitcast(vector, I32 if vector.type == F32 else I64)
        raw = self._resize(raw, I32 if bits == 32 else I64, "b")
        if operand.type.endswith("16") and vector.type != I16:
            raw = self.builder.and_(raw, splat(I32, 0xFFFF))
        if self.instruction.guard is not None:
            raw = self.builder.select(self.truths, raw, self._raw(operand))
        self._cache[operand.name] = raw
        self._dirty.add(operand.name)

    def write_predicate(self, operand: Operand, mask: Value) -> None:
        """Sets a predicate register to an i32 of lane bits."""
        if isinstance(operand, Sink):
            return
        if not isinstance(operand, Register) or operand.type != "pred":
            raise self.refuse(f"{operand} is no predicate")
        if self.instruction.guard is not None:
            mask = self._blend_bits(mask, self._raw(operand), self.mask)
        self._cache[operand.name] = mask
        self._dirty.add(operand.name)

    def _blend_bits(self, new: Value, old: Value, mask: Value) -> Value:
        changed = self.builder.and_(self.builder.xor(new, old), mask)
        return self.builder.xor(old, changed)

    @property
    def truths(self) -> Value:
        """`mask` as ``<32 x i1>``."""
        if self._truths is None:
            self._truths = truths_of(self.builder, self.mask)
        return self._truths

    # --- the register file ---

    def _allocate(self, size: int, reuse: bool = True) -> int:
        """Room in the register file; what must keep its value across chunks shares with nobody (`reuse` False)."""
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
        return self.at(self._offset_of(register), _VECTORS[self.bits_of(register)])

    def _store(self, register: Register) -> None:
        """Brings the register file up to date for one register."""
        name = register.name
        if name not in self._dirty:
            return
        self._dirty.remove(name)
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

    def _scratch_slot(self, bits: int) -> int:
        """The offset of a slot until the end of the instruction."""
        size = SLOT_BYTES[bits]
        offset = self._allocate(size)
        self._scratch.append((size, offset))
        return offset

    def slot(self, operand: Operand, bits: int, kind: str = "") -> Value:
        """A pointer to an operand's lanes for an operation to read: ``i32*`` (bits 32) or ``i64*`` (64, and 128).

        A register of another width is converted into a scratch slot, with its sign when `kind` is "s32" or "s64".
        """
        if isinstance(operand, Register) and self.bits_of(operand) == bits:
            self._store(operand)
            return self.at(self._offset_of(operand), _ELEMENTS[bits])
        if bits == 128:
            raise self.refuse(f"{operand} as .b128")
        if isinstance(operand, Integer | Float):
            bit_pattern = operand.value if isinstance(operand, Integer) else operand.bits
            return self._constant(bit_pattern, bits)
        return self.spill(self.value(operand, kind or f"b{bits}"))

    def spill(self, vector: Value) -> Value:
        """A vector of i32, i64, float or double in a scratch slot: a pointer to its first lane."""
        bits = 64 if vector.type in (I64, F64) else 32
        offset = self._scratch_slot(bits)
        if vector.type in (F32, F64):
            vector = self.builder.bitcast(vector, _VECTORS[bits])
        self.builder.store(vector, self.at(offset, _VECTORS[bits]))
        return self.at(offset, _ELEMENTS[bits])

    def _constant(self, value: int, bits: int) -> Value:
        """A constant slot in the object's own data."""
        key = (value % (1 << bits), bits)
        if key not in self._constants:
            kind = I32 if bits == 32 else I64
            found = ir.GlobalVariable(self.ir, kind, f"constant_{bits}_{key[0]:x}")
            found.linkage, found.global_constant, found.align = "internal", True, 64
            found.initializer = splat(kind, key[0])
            self._constants[key] = found
        return self.builder.bitcast(self._constants[key], _ELEMENTS[bits].as_pointer())

    def destination(self, operand: Operand, bits: int, kind: str = "") -> Value:
        """A pointer to a register's lanes for an operation to write (those of `mask` alone); call() follows.

        A 32-bit result for a 64-bit register goes through a scratch slot (and the reverse), with its sign when `kind`
        is "s32". For `_` it is a scratch slot that nobody reads.
        """
        if isinstance(operand, Sink):
            return self.at(self._scratch_slot(bits), _ELEMENTS[bits])
        width = self.bits_of(operand)
        assert isinstance(operand, Register)
        if width == bits:
            if self.instruction.guard is not None:
                self._store(operand)
            self._dirty.discard(operand.name)
            self._cache.pop(operand.name, None)
            return self.at(self._offset_of(operand), _ELEMENTS[bits])
        if 128 in (width, bits) or width == 1:
            raise self.refuse(f"a {bits}-bit result in register {operand.name} of type .{operand.type}")
        scratch = self._scratch_slot(bits)

        def convert() -> None:
            wanted = I32 if width == 32 else I64
            self.write(operand, self._resize(self.builder.load(self.at(scratch, _VECTORS[bits])), wanted, kind or "b"))

        self._after_call.append(convert)
        return self.at(scratch, _ELEMENTS[bits])

    def predicate_destination(self, operand: Operand) -> Value:
        """A pointer to one u32 for an operation to write a predicate's lane bits to; call() follows."""
        scratch = self.at(self._scratch_slot(1), WORD)
        self.builder.store(self.i32(0), scratch)
        if not isinstance(operand, Sink):
            self._after_call.append(lambda: self.write_predicate(operand, self.builder.load(scratch)))
        return scratch

    def address(self, operand: Operand, bits: int = 64) -> tuple[Value, int]:
        """An address operand as (slot of the base in each lane, 64-bit or 32-bit; constant offset to add)."""
        if not isinstance(operand, Address):
            raise self.refuse(f"{operand} is no address")
        base = operand.base
        if isinstance(base, Symbol):
            known = self.shared.offsets.get(base.name, self.locals.get(base.name))
            if known is not None:
                return self._constant(0, bits), known + operand.offset
        if isinstance(base, Integer):
            return self._constant(0, bits), base.value + operand.offset
        return self.slot(base, bits), operand.offset

    # --- for wgmma, which writes registers later than the instruction says ---

    def pinned_offset(self, register: Register) -> int:
        """The offset of a register's slot in the register file, which holds its value now."""
        self._store(register)
        return self._offset_of(register)

    def invalidate(self, register: Register) -> None:
        """Forgets a register's value: its slot has another one, or will have."""
        self._cache.pop(register.name, None)
        self._dirty.discard(register.name)

    def state_byte(self, offset: int) -> Value:
        """A pointer to one byte of the register file."""
        return self.at(offset, BYTE)

    def predicate_slot(self, operand: Operand) -> Value:
        """A pointer to a u32 with a predicate's lane bits, for an operation to read."""
        scratch = self.at(self._scratch_slot(1), WORD)
        self.builder.store(self.predicate(operand), scratch)
        return scratch

    def constant_table(self, values: list[int]) -> Value:
        """The address of an int32 array in the object's own data, as an i64."""
        type_ = ir.ArrayType(WORD, len(values))
        table = ir.GlobalVariable(self.ir, type_, f"table{self.site}")
        table.linkage, table.global_constant = "internal", True
        table.initializer = ir.Constant(type_, [ir.Constant(WORD, value) for value in values])
        return self.builder.ptrtoint(table, LONG)

    def call_if(self, condition: Value, name: str) -> None:
        """Calls an operation without arguments where an integer is not 0."""
        builder, function = self.builder, self.operation(name)
        before, inside, after = builder.block, builder.append_basic_block("if"), builder.append_basic_block("endif")
        builder.cbranch(builder.icmp_unsigned("!=", condition, condition.type(0)), inside, after)
        builder.position_at_end(inside)
        called = builder.call(function, [self.warp, self.mask, self.i32(self.site)])
        builder.branch(after)
        builder.position_at_end(after)
        result = builder.phi(WORD)
        result.add_incoming(self.i32(0), before)
        result.add_incoming(called, inside)
        self.status = result if self.status is None else builder.or_(self.status, result)

    # --- operations ---

    def operation(self, name: str) -> Value:
        """An operation's function, declared in the module."""
        found = OPERATIONS[name]
        function = self.ir.globals.get(found.symbol)
        if function is None:
            kinds = {"p": WORD.as_pointer(), "q": LONG.as_pointer(), "i": WORD, "l": LONG}
            types = [LONG.as_pointer(), WORD, WORD, *(kinds[kind] for kind in found.kinds)]
            function = ir.Function(self.ir, ir.FunctionType(WORD, types), found.symbol)
            self.operations.append(name)
        return function

    def call(self, name: str, *arguments: Value | int, blocks: bool = False) -> Value:
        """Calls an operation with this instruction's mask and site. Pointers come from slot() and destination().

        Where it may return RETRY or DONE_BUT_YIELD (`blocks`), resume_here() must have come first, before any operand
        was read.
        """
        operation = OPERATIONS.get(name)
        if operation is None:
            raise KeyError(f"{self.instruction.opcode} is translated to operation {name}, which nobody registered")
        if len(arguments) != len(operation.kinds):
            raise TypeError(f"operation {name} takes {len(operation.kinds)} arguments, not {len(arguments)}")
        if blocks and self.chunk_start != self.site:
            raise AssertionError(f"{self.instruction.opcode}: resume_here() before a call that may block")
        builder, function = self.builder, self.operation(name)
        given = [self.warp, self.mask, self.i32(self.site)]
        for kind, argument in zip(operation.kinds, arguments):
            if isinstance(argument, int):
                given.append(self.i32(argument) if kind == "i" else self.i64(argument))
            else:
                given.append(argument)
        if self.instruction.guard is None or blocks:
            result = builder.call(function, given)
        else:
            before, inside = builder.block, builder.append_basic_block("guarded")
            after = builder.append_basic_block("after")
            builder.cbranch(builder.icmp_unsigned("!=", self.mask, self.i32(0)), inside, after)
            builder.position_at_end(inside)
            called = builder.call(function, given)
            builder.branch(after)
            builder.position_at_end(after)
            result = builder.phi(WORD)
            result.add_incoming(self.i32(0), before)
            result.add_incoming(called, inside)
        if blocks:
            self.flow.leave_if_blocked(result)
            self.yield_result = result
        else:
            self.status = result if self.status is None else builder.or_(self.status, result)
        for action in self._after_call:
            action()
        self._after_call.clear()
        return result

    def resume_here(self) -> None:
        """Begins a chunk at this instruction, so that it can be tried again. Lanes without its guard go on ahead."""
        self.flow.resume_here()

    def converge(self, members: Operand | None = None) -> None:
        """For `.aligned` instructions, and `.sync` ones with a member mask: the lanes concerned run this one together.

        To be called first, before any operand is read. Lanes that come alone wait for the others; where those end or
        wait elsewhere, it is a fault.
        """
        if members is None:
            self.flow.converge(FaultKind.DIVERGENT_ALIGNED)
        elif isinstance(members, Integer) and members.value % (1 << 32) == context.FULL_MASK:
            self.flow.converge(FaultKind.DEADLOCK)
        else:
            self.flow.gather(members)

    # --- chunks: for control.py and dispatch.py ---

    def begin_chunk(self, index: int, mask: Value) -> None:
        """The builder stands where the chunk's code goes; nothing is known of any register."""
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
        """Sets `site`, `mask` and what depends on them."""
        self.site, self.instruction = index, self.kernel.instructions[index]
        self.mask, self._truths = self.chunk_mask, self._chunk_truths
        guard = self.instruction.guard
        if guard is not None:
            predicate = self.predicate(guard)
            if self.instruction.guard_negated:
                predicate = self.builder.not_(predicate)
            self.mask, self._truths = self.builder.and_(self.chunk_mask, predicate), None

    def end_instruction(self) -> None:
        """Forgets the registers that nobody reads from here on."""
        assert not self._after_call, f"{self.instruction.opcode}: a destination without a call"
        for size, offset in self._scratch:
            self._free[size].append(offset)
        self._scratch.clear()
        for name in {*self._cache, *self._temporary}:
            if self.block.is_live(name, self.site + 1):
                continue
            self._cache.pop(name, None)
            self._dirty.discard(name)
            if name in self._temporary:
                size = SLOT_BYTES[self.bits_of(self.kernel.registers[name])]
                self._free[size].append(self._temporary.pop(name))

    def flush(self, index: int | None = None) -> None:
        """Writes what is live to the register file: at the block's end, or before instruction `index` of the block."""
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

    flow: Any  # dispatch.Flow: the frame around the chunks
    registers: dict[Any, Value]  # the register file, as a pointer to each of SLOT_KINDS
    launch: Value  # int64*, the launch's array
    counters: Value  # int64*, the chunks' counters


_NO_INSTRUCTION = Instruction("", (), None, False, 0)


def used_variables(module: Module, kernel: Kernel) -> list[str]:
    """The .global and .const variables that a kernel names, in the order of its symbol table (LAUNCH_SYMBOLS)."""
    named: set[str] = set()
    pending: list[Operand | None] = [operand for ins in kernel.instructions for operand in ins.operands]
    while pending:
        operand = pending.pop()
        if isinstance(operand, Symbol):
            named.add(operand.name)
        elif isinstance(operand, Address):
            pending += [operand.base, operand.coordinates]
        elif isinstance(operand, Vector):
            pending += operand.items
    return [v.name for v in module.variables.values() if v.space in ("global", "const") and v.name in named]


def _parameter_offsets(kernel: Kernel) -> dict[str, tuple[int, int]]:
    """Parameter name → (offset, size) in the parameter bytes, each at its own alignment."""
    found: dict[str, tuple[int, int]] = {}
    offset = 0
    for variable in kernel.parameters:
        offset = -(-offset // variable.align) * variable.align
        size = variable.size_bytes or 0
        found[variable.name] = (offset, size)
        offset += size
    return found


def _local_offsets(kernel: Kernel) -> tuple[dict[str, int], int]:
    """Local variable → offset in a thread's local memory, and its size."""
    found: dict[str, int] = {}
    offset = 0
    for variable in kernel.variables:
        if variable.space == "local":
            offset = -(-offset // variable.align) * variable.align
            found[variable.name] = offset
            offset += variable.size_bytes or 0
    return found, -(-offset // 64) * 64
