"""One kernel's translation to LLVM IR: operands, results, calls.

`registers.py` keeps the registers, `synchronisation/control.py` makes the ends of chunks, `dispatch.py` the frame
around them.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from runtime.emulator.execution.fault import FaultKind
from runtime.emulator.execution.state import FULL_MASK, LANES, Launch
from runtime.emulator.translation.operations import OPERATIONS
from runtime.emulator.translation.ptx import (
    Address,
    Float,
    Integer,
    Kernel,
    Module,
    Negated,
    Operand,
    Register,
    Sink,
    Special,
    Symbol,
)
from runtime.emulator.translation.registers import ELEMENTS, VECTORS, Registers
from runtime.emulator.translation.registers import UnsupportedInstruction as UnsupportedInstruction
from runtime.emulator.translation.symbols import (
    SharedLayout,
    local_offsets,
    parameter_offsets,
    shared_layout,
    special_register,
    used_variables,
)
from runtime.emulator.translation.vectors import F32, F64, I16, I32, I64, INTEGERS, LONG, WORD, mask_of, splat
from runtime.emulator.translation.vectors import I8 as I8_LANES

Value = Any  # an llvmlite IR value

TYPES: dict[str, Any] = {
    **dict.fromkeys(("b8", "u8", "s8", "e4m3", "e5m2"), I8_LANES),
    **dict.fromkeys(("b16", "u16", "s16", "f16", "bf16", "e4m3x2", "e5m2x2"), I16),
    **dict.fromkeys(("b32", "u32", "s32", "f16x2", "bf16x2", "tf32"), I32),
    **dict.fromkeys(("b64", "u64", "s64"), I64),
    "f32": F32,
    "f64": F64,
}
"""The LLVM type of `Lowering.value` for a PTX type: 16-bit floats come as their bits."""


class Lowering(Registers):
    """The state of one kernel's translation: the part used by instructions' translations, besides `Registers`.

    Attributes:
        module, kernel: under translation.
        shared: where shared variables lie.
        parameters: name → (offset, size) in the parameter bytes.
        locals: name → offset in a thread's local memory.
        symbols: the .global and .const variables that have an entry in the symbol table.
        operations: names of the operations used, in the order of first use.
        chunks: first and last + 1 instruction of each counted stretch.
        flow: the frame around the chunks (dispatch.Flow).
    """

    flow: Any

    def __init__(self, module: Module, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.module = module
        self.shared: SharedLayout = shared_layout(module, kernel)
        self.parameters, _ = parameter_offsets(kernel)
        self.locals, self.local_bytes = local_offsets(kernel)
        self.symbols = used_variables(module, kernel)
        self.operations: list[str] = []
        self.chunks: list[tuple[int, int]] = []
        self.call_arguments: dict[str, Value] = {}  # name of a call's argument: the value stored to it last
        self.has_loose_barriers = any(
            ins.parts[0] == "barrier" and "aligned" not in ins.parts and "cluster" not in ins.parts
            for ins in kernel.instructions
        )
        self._constants: dict[tuple[int, int], Value] = {}

    # --- reading operands ---

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
            return self._resize(special_register(self, operand.name), wanted, kind)
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
        integers = ir.VectorType(ir.IntType(bits), LANES)
        if have > bits:
            raw = self.builder.trunc(raw, integers)
        elif have < bits:
            raw = self.builder.sext(raw, integers) if kind[0] == "s" else self.builder.zext(raw, integers)
        return raw if raw.type == wanted else self.builder.bitcast(raw, wanted)

    def predicate(self, operand: Operand) -> Value:
        """A predicate operand as an i32 mask; bits outside of the chunk's mask are undefined."""
        if isinstance(operand, Negated):
            return self.builder.not_(self.predicate(operand.operand))
        if isinstance(operand, Integer):
            return self.i32(-1 if operand.value else 0)
        if isinstance(operand, Special):
            return mask_of(self.builder, self.builder.icmp_unsigned("!=", self.value(operand, "b32"), splat(I32, 0)))
        if not isinstance(operand, Register) or operand.type != "pred":
            raise self.refuse(f"{operand} is no predicate")
        return self._raw(operand)

    def only(self, *known: str, first: int = 1) -> None:
        """Refuses this instruction's modifiers from part `first` on that are not `known`."""
        for part in self.instruction.parts[first:]:
            if part not in known:
                raise self.refuse(f"modifier .{part}")

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
        table = self._pointer(self.launch_field(Launch.symbols), LONG)
        return self.element(table, self.symbols.index(name))

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
        self._dirty[operand.name] = None

    def write_predicate(self, operand: Operand, mask: Value) -> None:
        """Sets a predicate register to an i32 of lane bits."""
        if isinstance(operand, Sink):
            return
        if not isinstance(operand, Register) or operand.type != "pred":
            raise self.refuse(f"{operand} is no predicate")
        if self.instruction.guard is not None:
            mask = self._blend_bits(mask, self._raw(operand), self.mask)
        self._cache[operand.name] = mask
        self._dirty[operand.name] = None

    # --- pointers for operations ---

    def slot(self, operand: Operand, bits: int, kind: str = "") -> Value:
        """A pointer to an operand's lanes for an operation to read: ``i32*`` (bits 32) or ``i64*`` (64, and 128).

        A register of another width is converted into a scratch slot, with its sign when `kind` is "s32" or "s64".
        """
        if isinstance(operand, Register) and self.bits_of(operand) == bits:
            self._store(operand)
            return self.at(self._offset_of(operand), ELEMENTS[bits])
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
            vector = self.builder.bitcast(vector, VECTORS[bits])
        self.builder.store(vector, self.at(offset, VECTORS[bits]))
        return self.at(offset, ELEMENTS[bits])

    def _constant(self, value: int, bits: int) -> Value:
        """A constant slot in the object's own data."""
        key = (value % (1 << bits), bits)
        if key not in self._constants:
            kind = I32 if bits == 32 else I64
            found = ir.GlobalVariable(self.ir, kind, f"constant_{bits}_{key[0]:x}")
            found.linkage, found.global_constant, found.align = "internal", True, 64
            found.initializer = splat(kind, key[0])
            self._constants[key] = found
        return self.builder.bitcast(self._constants[key], ELEMENTS[bits].as_pointer())

    def destination(self, operand: Operand, bits: int, kind: str = "") -> Value:
        """A pointer to a register's lanes for an operation to write (those of `mask` alone); call() follows.

        A result that is narrower or wider than the register goes through a scratch slot, and so does one of 8 or 16
        bits that is extended by its sign, as `kind` says. For `_` it is a scratch slot that is never read.
        """
        if isinstance(operand, Sink):
            return self.at(self._scratch_slot(bits), ELEMENTS[bits])
        width = self.bits_of(operand)
        assert isinstance(operand, Register)
        if width == bits and kind not in ("s8", "s16"):
            if self.instruction.guard is not None:
                self._store(operand)
            self._dirty.pop(operand.name, None)
            self._cache.pop(operand.name, None)
            return self.at(self._offset_of(operand), ELEMENTS[bits])
        if 128 in (width, bits) or width == 1:
            raise self.refuse(f"a {bits}-bit result in register {operand.name} of type .{operand.type}")
        scratch = self._scratch_slot(bits)

        def convert() -> None:
            vector = self.builder.load(self.at(scratch, VECTORS[bits]))
            if kind in ("s8", "s16"):
                vector = self.builder.trunc(vector, INTEGERS[int(kind[1:])])
            self.write(operand, self.extended(vector, operand, kind))

        self._after_call.append(convert)
        return self.at(scratch, ELEMENTS[bits])

    def extended(self, vector: Value, operand: Operand, kind: str) -> Value:
        """An integer with its sign, if its type has one, as wide as the register that gets it."""
        if kind[:1] != "s" or not isinstance(operand, Register):
            return vector
        wanted = I16 if operand.type.endswith("16") else I64 if self.bits_of(operand) == 64 else I32
        return self.builder.sext(vector, wanted) if wanted.element.width > vector.type.element.width else vector

    def predicate_destination(self, operand: Operand) -> Value:
        """A pointer to one u32 for an operation to write a predicate's lane bits to; call() follows."""
        scratch = self.at(self._scratch_slot(1), WORD)
        self.builder.store(self.i32(0), scratch)
        if not isinstance(operand, Sink):
            self._after_call.append(lambda: self.write_predicate(operand, self.builder.load(scratch)))
        return scratch

    def predicate_slot(self, operand: Operand) -> Value:
        """A pointer to a u32 with a predicate's lane bits, for an operation to read."""
        scratch = self.at(self._scratch_slot(1), WORD)
        self.builder.store(self.predicate(operand), scratch)
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

    def constant_table(self, values: list[int]) -> Value:
        """The address of an int32 array in the object's own data, as an i64."""
        type_ = ir.ArrayType(WORD, len(values))
        table = ir.GlobalVariable(self.ir, type_, f"table{self.site}")
        table.linkage, table.global_constant = "internal", True
        table.initializer = ir.Constant(type_, [ir.Constant(WORD, value) for value in values])
        return self.builder.ptrtoint(table, LONG)

    # --- operations ---

    def operation(self, name: str) -> Value:
        """An operation's function, declared in the module."""
        found = OPERATIONS[name]
        function = self.ir.globals.get(found.symbol)
        if function is None:
            kinds = {"p": WORD.as_pointer(), "q": LONG.as_pointer(), "l": LONG}
            types = [LONG.as_pointer(), LONG, LONG, *(kinds[kind] for kind in found.kinds)]
            function = ir.Function(self.ir, ir.FunctionType(WORD, types), found.symbol)
            self.operations.append(name)
        return function

    def invoke(self, name: str, mask: Value, site: int, *arguments: Value | int) -> Value:
        """Calls an operation, whatever comes of it."""
        given = [self.warp, self.wide(mask), self.i64(site), *map(self.wide, arguments)]
        return self.builder.call(self.operation(name), given)

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
        given = [self.warp, self.wide(self.mask), self.i64(self.site), *map(self.wide, arguments)]
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

    def operation_address(self, name: str) -> Value:
        """The address of an operation, as an i64, for another one to call."""
        return self.builder.ptrtoint(self.operation(name), LONG)

    def call_if(self, condition: Value, name: str) -> None:
        """Calls an operation without arguments where an integer is not 0."""
        builder, function = self.builder, self.operation(name)
        before, inside, after = builder.block, builder.append_basic_block("if"), builder.append_basic_block("endif")
        builder.cbranch(builder.icmp_unsigned("!=", condition, condition.type(0)), inside, after)
        builder.position_at_end(inside)
        called = builder.call(function, [self.warp, self.wide(self.mask), self.i64(self.site)])
        builder.branch(after)
        builder.position_at_end(after)
        result = builder.phi(WORD)
        result.add_incoming(self.i32(0), before)
        result.add_incoming(called, inside)
        self.status = result if self.status is None else builder.or_(self.status, result)

    def resume_here(self) -> None:
        """Begins a chunk at this instruction, so that it can be tried again. Lanes without its guard skip it."""
        self.flow.resume_here()

    def converge(self, members: Operand | None = None) -> None:
        """For `.aligned` instructions, and `.sync` ones with a member mask: the lanes concerned run this one together.

        To be called first, before any operand is read. Lanes that come alone wait for the others; if those end or wait
        elsewhere, it is a fault.
        """
        if members is None:
            self.flow.converge(FaultKind.DIVERGENT_ALIGNED)
        elif isinstance(members, Integer) and members.value % (1 << 32) == FULL_MASK:
            self.flow.converge(FaultKind.DEADLOCK)
        else:
            self.flow.gather(members)
