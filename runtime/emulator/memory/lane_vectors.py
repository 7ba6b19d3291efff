"""The quick way of a warp's load or store: 32 lanes at once as LLVM vectors, for the common case.

`moves_lanes` makes intrinsics for Numba: bounds, alignment and shadow bytes of all lanes are tested as
vectors; then the data is moved, contiguous lanes by plain vector loads and stores, others one by one. If any lane fails
a test no data is moved and the result is 0: the careful way (`careful_access.py`) then goes lane by lane and reports.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from runtime.emulator.memory.device_memory import IS_INITIALISED
from runtime.emulator.translation.vectors import BIT, BYTE, I1, I64, LANES, LONG, WORD, lanes, splat

_EVERY_BYTE = 0x0101010101010101


class _Access:
    """One warp access while its code is generated. `size` bytes an element, `count` elements a lane."""

    def __init__(self, builder: Any, arguments: Any, size: int, count: int, slot_bits: int) -> None:
        self.builder, self.size, self.count, self.total, self.slot_bits = builder, size, count, size * count, slot_bits
        self.addresses, self.offset, mask, window, *self.slots = arguments
        self.start, self.limit, self.host, self.shadow, self.need, self.want = (
            builder.load(builder.gep(window, [ir.Constant(LONG, index)])) for index in range(6)
        )
        self.mask = builder.trunc(mask, WORD)
        self.element = ir.IntType(8 * size)
        self.truths = builder.bitcast(self.mask, I1)
        self.is_checked = builder.icmp_unsigned("!=", self.shadow, ir.Constant(LONG, 0))

    def splat(self, scalar: Any) -> Any:
        undefined = ir.Constant(lanes(scalar.type), ir.Undefined)
        first = self.builder.insert_element(undefined, scalar, ir.Constant(WORD, 0))
        return self.builder.shuffle_vector(first, undefined, ir.Constant(lanes(WORD), None))

    def load(self, address: Any, kind: Any, align: int) -> Any:
        value = self.builder.load(self.builder.inttoptr(address, kind.as_pointer()))
        value.align = align
        return value

    def store(self, value: Any, address: Any, align: int) -> None:
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer())).align = align

    def slot(self, index: int, kind: Any) -> Any:
        return self.builder.bitcast(self.slots[index], kind.as_pointer())

    def any(self, truths: Any) -> Any:
        """Whether a bit is set in a vector of them."""
        number = ir.IntType(truths.type.count)
        return self.builder.icmp_unsigned("!=", self.builder.bitcast(truths, number), ir.Constant(number, 0))

    def is_nonzero(self, bits: Any) -> Any:
        """Whether an integer, or an element of a vector of them, is not 0."""
        if isinstance(bits.type, ir.VectorType):
            return self.any(self.builder.icmp_unsigned("!=", bits, splat(bits.type, 0)))
        return self.builder.icmp_unsigned("!=", bits, ir.Constant(bits.type, 0))

    def part(self, address: Any) -> Any:
        """A lane's bytes from an address on, 16 at most, in one access (which LLVM cannot merge to a gather)."""
        if self.total >= 16:
            return self.load(address, ir.VectorType(LONG, 2), 1)
        kind = ir.IntType(8 * self.total)
        return self.builder.load_atomic(self.builder.inttoptr(address, kind.as_pointer()), "monotonic", self.total)

    def parts_at(self, address: Any) -> list[Any]:
        offsets = range(0, max(self.total, 16), 16)
        return [self.part(self.builder.add(address, ir.Constant(LONG, offset))) for offset in offsets]

    def places(self, relative: Any, base: Any, idle: Any) -> list[Any]:
        """Each lane's address as a scalar."""
        builder = self.builder
        chosen = builder.select(self.truths, builder.add(relative, self.splat(base)), self.splat(idle))
        return [builder.extract_element(chosen, ir.Constant(WORD, lane)) for lane in range(LANES)]

    def packed(self) -> Any:
        """The slots' elements in memory's order."""
        slot = lanes(ir.IntType(self.slot_bits))
        parts = []
        for index in range(self.count):
            value = self.builder.load(self.slot(index, slot))
            value.align = 8
            is_same = slot.element.width == self.size * 8
            parts.append(value if is_same else self.builder.trunc(value, lanes(self.element)))
        return _interleave(self.builder, parts)

    def unpack(self, data: Any, is_blended: bool) -> None:
        """Elements in memory's order to the slots; `is_blended` keeps those of idle lanes."""
        builder, count = self.builder, self.count
        slot = lanes(ir.IntType(self.slot_bits))
        for index in range(count):
            order = ir.Constant(lanes(WORD), [ir.Constant(WORD, lane * count + index) for lane in range(LANES)])
            part = data if count == 1 else builder.shuffle_vector(data, ir.Constant(data.type, ir.Undefined), order)
            wide = part if self.size * 8 == self.slot_bits else builder.zext(part, slot)
            if is_blended:
                old = builder.load(self.slot(index, slot))
                old.align = 8
                wide = builder.select(self.truths, wide, old)
            builder.store(wide, self.slot(index, slot)).align = 8

    def relative(self) -> tuple[Any, Any]:
        """Each lane's address counted from the window's start, and whether a lane is outside or misaligned."""
        builder = self.builder
        addresses = self.load(builder.ptrtoint(self.addresses, LONG), I64, 8)
        relative = builder.add(addresses, self.splat(builder.sub(self.offset, self.start)))
        last = self.splat(builder.sub(self.limit, ir.Constant(LONG, self.total)))
        bad = builder.icmp_unsigned(">", relative, last)
        if self.total > 1:
            low = builder.and_(relative, splat(I64, self.total - 1))
            bad = builder.or_(bad, builder.icmp_unsigned("!=", low, splat(I64, 0)))
        too_small = builder.icmp_signed("<", self.limit, ir.Constant(LONG, self.total))
        return relative, builder.or_(self.any(builder.and_(bad, self.truths)), too_small)

    def is_contiguous(self, relative: Any, first: Any) -> Any:
        builder = self.builder
        steps = ir.Constant(I64, [ir.Constant(LONG, lane * self.total) for lane in range(LANES)])
        other = builder.icmp_unsigned("!=", relative, builder.add(self.splat(first), steps))
        full = builder.icmp_unsigned("==", self.mask, ir.Constant(WORD, -1))
        return builder.and_(builder.not_(self.any(other)), full)

    def is_wrong(self, states: Any) -> Any:
        """Whether a vector of shadow bytes (as wider integers) has a wrong one."""
        builder, kind = self.builder, states.type
        need, want = self.repeated(self.need, kind), self.repeated(self.want, kind)
        return self.any(builder.icmp_unsigned("!=", builder.and_(states, need), want))

    def repeated(self, scalar: Any, kind: Any) -> Any:
        """A 64-bit pattern cut to an integer type, or to a vector's element and then in each of its elements."""
        element = kind.element if isinstance(kind, ir.VectorType) else kind
        if element.width < 64:
            scalar = self.builder.trunc(scalar, element)
        if kind is element:
            return scalar
        first = self.builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(WORD, 0))
        zeros = ir.Constant(ir.VectorType(WORD, kind.count), None)
        return self.builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), zeros)


def _generate(size: int, count: int, slot_bits: int, arguments: Any, builder: Any, is_store: bool) -> Any:
    access = _Access(builder, arguments, size, count, slot_bits)
    result = cgutils.alloca_once_value(builder, ir.Constant(WORD, 0))
    relative, is_bad = access.relative()
    has_lanes = builder.icmp_unsigned("!=", access.mask, ir.Constant(WORD, 0))
    with builder.if_then(builder.and_(builder.not_(is_bad), has_lanes), likely=True):
        lane_zero = builder.add(builder.load(access.addresses), builder.sub(access.offset, access.start))
        with builder.if_else(access.is_contiguous(relative, lane_zero)) as (then, otherwise):
            with then:
                _contiguous(access, lane_zero, is_store, result)
            with otherwise:
                _scattered(access, relative, is_store, result)
    return builder.load(result)


def _contiguous(access: _Access, first: Any, is_store: bool, result: Any) -> None:
    builder, total, count = access.builder, access.total, access.count
    is_right = cgutils.alloca_once_value(builder, ir.Constant(BIT, 1))
    with builder.if_then(access.is_checked):
        kind = ir.VectorType(LONG, LANES * total // 8)
        at = builder.add(access.shadow, first)
        states = access.load(at, kind, 1)
        builder.store(builder.not_(access.is_wrong(states)), is_right)
        if is_store:
            with builder.if_then(builder.load(is_right), likely=True):
                marks = splat(kind, IS_INITIALISED * _EVERY_BYTE)
                access.store(builder.or_(states, marks), at, 1)
    with builder.if_then(builder.load(is_right), likely=True):
        builder.store(ir.Constant(WORD, 1), result)
        at = builder.add(access.host, first)
        if is_store:
            access.store(access.packed(), at, min(total, 16))
        else:
            access.unpack(access.load(at, ir.VectorType(access.element, LANES * count), min(total, 16)), False)


def _scattered(access: _Access, relative: Any, is_store: bool, result: Any) -> None:
    """Lane by lane, unrolled; idle lanes use bytes of this function itself. (A gather takes twice as long.)"""
    builder, total = access.builder, access.total
    idle = cgutils.alloca_once(builder, ir.ArrayType(BYTE, 32))
    idle_address = builder.ptrtoint(idle, LONG)
    is_right = cgutils.alloca_once_value(builder, ir.Constant(BIT, 1))
    with builder.if_then(access.is_checked):
        wanted = access.repeated(access.want, ir.VectorType(LONG, 4))
        access.store(wanted, idle_address, 1)
        places = access.places(relative, access.shadow, idle_address)
        wrong: Any = None
        fresh: Any = None
        for lane in range(LANES):
            for state in access.parts_at(places[lane]):
                differs = builder.xor(builder.and_(state, access.repeated(access.need, state.type)),
                                      access.repeated(access.want, state.type))  # fmt: skip
                wrong = differs if wrong is None else builder.or_(wrong, differs)
                fresh = state if fresh is None else builder.and_(fresh, state)
        builder.store(builder.not_(access.is_nonzero(wrong)), is_right)
        if is_store:
            marks = splat_any(fresh.type, IS_INITIALISED * _EVERY_BYTE)
            is_fresh = access.is_nonzero(builder.xor(builder.and_(fresh, marks), marks))
            with builder.if_then(builder.and_(is_fresh, builder.load(is_right))):
                for lane in range(LANES):
                    for index, state in enumerate(access.parts_at(places[lane])):
                        at = builder.add(places[lane], ir.Constant(LONG, index * 16))
                        access.store(builder.or_(state, marks), at, 1)
    with builder.if_then(builder.load(is_right), likely=True):
        builder.store(ir.Constant(WORD, 1), result)
        places = access.places(relative, access.host, idle_address)
        kind = ir.VectorType(access.element, LANES * access.count)
        if not is_store and total < 16:
            whole = ir.Constant(lanes(ir.IntType(8 * total)), ir.Undefined)
            for lane in range(LANES):
                whole = builder.insert_element(whole, access.part(places[lane]), ir.Constant(WORD, lane))
            access.unpack(builder.bitcast(whole, kind), True)
            return
        buffer = cgutils.alloca_once(builder, ir.ArrayType(BYTE, LANES * total))
        address = builder.ptrtoint(buffer, LONG)
        if is_store:
            access.store(access.packed(), address, 1)
        for lane in range(LANES):
            for index in range(max(1, total // 16)):
                here = builder.add(address, ir.Constant(LONG, lane * total + index * 16))
                there = builder.add(places[lane], ir.Constant(LONG, index * 16))
                if is_store:
                    access.store(access.part(here), there, 1)
                else:
                    access.store(access.part(there), here, 1)
        if not is_store:
            access.unpack(access.load(address, kind, 1), True)


def splat_any(kind: Any, value: int) -> Any:
    """A constant of an integer type, or in every element of a vector of them."""
    if isinstance(kind, ir.VectorType):
        return splat(kind, value)
    return ir.Constant(kind, value & ((1 << kind.width) - 1))


def _interleave(builder: Any, parts: list[Any]) -> Any:
    """``[a0, b0, c0, d0, a1, …]`` of equally long vectors, a power of two of them."""
    while len(parts) > 1:
        half = len(parts) // 2
        merged = []
        for first, second in zip(parts[:half], parts[half:]):
            length = first.type.count
            order = [index // 2 + (index % 2) * length for index in range(2 * length)]
            mask = ir.Constant(ir.VectorType(WORD, 2 * length), [ir.Constant(WORD, index) for index in order])
            merged.append(builder.shuffle_vector(first, second, mask))
        parts = merged
    return parts[0]


def moves_lanes(size: int, count: int, is_store: bool) -> Any:
    """``f(addresses, offset, mask, window, *slots) -> 1 when done, else 0``: a load, or a store.

    `addresses` (int64*) + `offset` lie in a window, int64[6]: it begins at `start` and has `limit` bytes, found at host
    address `host`; its shadow at `shadow`, or 0 for no check; a shadow byte s is right when s & `need` == `want` (both
    repeated to 64 bits). Elements of `size` bytes, `count` a lane, are extended with zeros into `slots`, of 64 bits a
    lane for 8 bytes and else of 32. The highest of several lanes that store to the same address wins.
    """

    @intrinsic
    def access(typing_context, addresses, offset, mask, window, *slots):
        if len(slots) != count:
            raise TypeError(f"{count} slots expected")
        signature = types.int32(addresses, types.int64, types.int64, window, types.BaseTuple.from_types(slots))

        def generate(context, builder, signature, arguments):
            *plain, packed = arguments
            parts = cgutils.unpack_tuple(builder, packed, count)
            return _generate(size, count, 64 if size == 8 else 32, [*plain, *parts], builder, is_store)

        return signature, generate

    return access
