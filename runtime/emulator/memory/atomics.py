"""atom and red: one read-modify-write a lane, in the order of the lanes.

OS threads never share device memory while a kernel has atomics, so plain loads and stores do. add.f32 on device memory
flushes subnormal inputs and results to zero and on shared memory does not, as in PTX. Vectors are that many scalar
operations.
"""

from __future__ import annotations

from numba import types

from numba_kernels.cache import njit
from numba_kernels.pointers import i64_at, u32_at, u64_at
from runtime.emulator.async_copies.proxy import wrote
from runtime.emulator.async_copies.reduction import (
    ADD,
    AND,
    BRAIN,
    BRAIN_PAIR,
    CAS,
    DEC,
    EXCH,
    FLOAT,
    HALF,
    HALF_PAIR,
    INC,
    MAX,
    MIN,
    OR,
    SIGNED,
    UNSIGNED,
    XOR,
    add_float,
    result_of,
)  # fmt: skip
from runtime.emulator.execution.counters import count_access
from runtime.emulator.execution.state import CHECK_RACES, COUNT_MEMORY, block_at
from runtime.emulator.memory.careful_access import (
    IS_RELEASE,
    IS_STRONG,
    SCOPE_SHIFT,
    element,
    races_of_lane,
    set_element,
    slot_value,
)
from runtime.emulator.memory.load_store import order_of, space_of, take_cache_hints
from runtime.emulator.memory.locate import (
    ATOMIC,
    BLOCK,
    GENERIC,
    GLOBAL,
    HOST,
    SHADOW,
    SHARED,
    SHARED_CLUSTER,
    check_bytes,
    locate,
    mark_written,
)
from runtime.emulator.memory.pointers import address_of, stack_longs
from runtime.emulator.races.clocks import SCOPE_GPU
from runtime.emulator.races.vector_clocks import strong_read, strong_write
from runtime.emulator.translation.forms import Modifiers
from runtime.emulator.translation.lowering import Lowering
from runtime.emulator.translation.operations import compiled_once, operation
from runtime.emulator.translation.ptx import TYPE_BYTES, Instruction, Operand, Sink, Vector

_BITS = ("b16", "b32", "b64", "b128")
_PAIRS = ("f16x2", "bf16x2")
_HALVES = ("f16", "bf16", *_PAIRS)
OPERATIONS_OF = {
    "add": (ADD, ("u32", "s32", "u64", "s64", "f32", "f64", *_HALVES)),
    "inc": (INC, ("u32",)),
    "dec": (DEC, ("u32",)),
    "min": (MIN, ("u32", "s32", "u64", "s64", *_HALVES)),
    "max": (MAX, ("u32", "s32", "u64", "s64", *_HALVES)),
    "and": (AND, ("b32", "b64")),
    "or": (OR, ("b32", "b64")),
    "xor": (XOR, ("b32", "b64")),
    "exch": (EXCH, ("b32", "b64", "b128")),
    "cas": (CAS, _BITS),
}
_KINDS = {
    "f32": FLOAT, "f64": FLOAT, "f16": HALF, "bf16": BRAIN, "f16x2": HALF_PAIR, "bf16x2": BRAIN_PAIR, "s32": SIGNED,
    "s64": SIGNED,
}  # fmt: skip


@njit
def _enter(warp, site, lane, address, size, space, flags, place):
    """Everything before the lane's read-modify-write. Returns 1 with a fault reported, or 0."""
    if locate(warp, site, lane, address, size, ATOMIC, space, address_of(place)):
        return 1
    if check_bytes(warp, site, lane, address, size, ATOMIC, space, place[SHADOW]):
        return 1
    if warp.clock and place[BLOCK] >= 0 and warp.launch.checks & CHECK_RACES:
        strong_read(warp, place[HOST], flags >> SCOPE_SHIFT)
        if races_of_lane(warp, site, place[HOST], place[BLOCK], size, lane, ATOMIC, flags | IS_STRONG, False):
            return 1
        strong_write(warp, place[HOST], flags >> SCOPE_SHIFT, flags & IS_RELEASE != 0)
    return 0


@njit
def _leave(warp, place, size):
    mark_written(place[SHADOW], size)
    if place[BLOCK] > 0 and block_at(place[BLOCK]).proxy:
        wrote(place[BLOCK], warp, place[HOST] - block_at(place[BLOCK]).shared, size)


@compiled_once("llqllllllllll")
def atomic(warp, mask, site, addresses, offset, space, code, size, align, flags, target, operands, others, is_wide):
    """Slots come as addresses. `code` is kind << 8 | operation; `align` is the address's alignment."""
    kind, code = code >> 8, code & 255
    place, places, blocks = stack_longs(3), stack_longs(32), stack_longs(32)
    low = types.uint64(0xFFFFFFFFFFFFFFFF) >> types.uint64(64 - 8 * size)
    for lane in range(32):
        if not (mask >> lane) & 1:
            continue
        address = addresses[lane] + offset
        if align > size and locate(warp, site, lane, address, align, ATOMIC, space, address_of(place)):
            return 1
        if _enter(warp, site, lane, address, size, space, flags, place):
            return 1
        places[lane], blocks[lane] = place[HOST], place[BLOCK]
        old = element(place[HOST], size)
        if kind == FLOAT and code == ADD:
            add_float(place[HOST], operands + lane * size, size, place[BLOCK] <= 0)
        else:
            operand = slot_value(operands, lane, is_wide) & low
            other = slot_value(others, lane, is_wide) & low
            set_element(place[HOST], size, result_of(code, kind, old, operand, other, size))
        if is_wide:
            u64_at(target)[lane] = old
        else:
            u32_at(target)[lane] = types.uint32(old)
        _leave(warp, place, size)
    if warp.launch.checks & COUNT_MEMORY:
        count_access(warp, site, mask, address_of(places), address_of(blocks), size)
    return 0


@operation("atomic_32", "qllllllppp")
def atomic_32(warp, mask, site, addresses, offset, space, code, size, align, flags, target, operands, others):
    return atomic(
        warp, mask, site, addresses, offset, space, code, size, align, flags, address_of(target), address_of(operands),
        address_of(others), 0,
    )  # fmt: skip


@operation("atomic_64", "qllllllqqq")
def atomic_64(warp, mask, site, addresses, offset, space, code, size, align, flags, target, operands, others):
    return atomic(
        warp, mask, site, addresses, offset, space, code, size, align, flags, address_of(target), address_of(operands),
        address_of(others), 1,
    )  # fmt: skip


@operation("atomic_128", "qllllqqq")
def atomic_128(warp, mask, site, addresses, offset, space, code, flags, target, operands, others):
    """exch and cas of 16 bytes; slots hold 32 low halves, then 32 high ones."""
    place = stack_longs(3)
    for lane in range(32):
        if not (mask >> lane) & 1:
            continue
        address = addresses[lane] + offset
        if _enter(warp, site, lane, address, 16, space, flags, place):
            return 1
        memory = i64_at(place[HOST])
        low, high = memory[0], memory[1]
        if code == EXCH:
            memory[0], memory[1] = operands[lane], operands[lane + 32]
        elif low == operands[lane] and high == operands[lane + 32]:
            memory[0], memory[1] = others[lane], others[lane + 32]
        target[lane], target[lane + 32] = low, high
        _leave(warp, place, 16)
    return 0


def lower_atomic(low: Lowering, ins: Instruction) -> None:
    mods = Modifiers(ins)
    is_red = mods.name == "red"
    has_policy = take_cache_hints(mods)
    flags, space = order_of(mods, SCOPE_GPU) | IS_STRONG, space_of(mods)
    if space not in (GENERIC, GLOBAL, SHARED, SHARED_CLUSTER):
        raise low.refuse("this space")
    count = {"": 1, "v2": 2, "v4": 4, "v8": 8}[mods.one_of(("v2", "v4", "v8"), "")]
    name = mods.one_of(OPERATIONS_OF)
    code, kinds = OPERATIONS_OF[name]
    is_unflushed = mods.take("noftz")
    kind = mods.type(kinds)
    mods.done()
    if is_unflushed != (kind in _HALVES):
        raise low.refuse(".noftz stands with 16-bit floats and nowhere else")
    if is_red and name in ("exch", "cas"):
        raise low.refuse("atom has this operation alone")
    size = TYPE_BYTES[kind]
    if count > 1 and (kind not in (*_HALVES, "f32") or size * count > 16):
        raise low.refuse(f"a vector of {count}")
    operands = list(mods.operands(*(n + has_policy for n in ((2,) if is_red else (4,) if name == "cas" else (3,)))))
    target: Operand = Sink() if is_red else operands.pop(0)
    address, offset = low.address(operands[0], 64)
    low_code = _KINDS.get(kind, UNSIGNED) << 8 | code
    if size == 16:
        third = operands[2] if name == "cas" else operands[1]
        places = [low.slot(operands[1], 128), low.slot(third, 128)]
        low.call("atomic_128", address, offset, space, code, flags, low.destination(target, 128), *places)
        return
    bits = 64 if size == 8 else 32
    values = list(operands[1].items) if isinstance(operands[1], Vector) else [operands[1]]
    targets = list(target.items) if isinstance(target, Vector) else [target] * count
    if len(values) != count or len(targets) != count:
        raise low.refuse(f"{len(values)} values for {count} elements")
    # All elements are read before the first result is written, into the same register perhaps.
    slots = [low.slot(value, bits) if count == 1 else low.spill(low.value(value, "b32")) for value in values]
    for index, (to, operand) in enumerate(zip(targets, slots)):
        other = low.slot(operands[2], bits) if name == "cas" else operand
        align = size * count if index == 0 else size
        place = low.destination(to, bits)
        low.call(
            f"atomic_{bits}", address, offset + index * size, space, low_code, size, align, flags, place, operand, other
        )
