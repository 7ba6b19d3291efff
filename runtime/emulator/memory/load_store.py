"""ld and st: the operations ``load_32x1`` … ``store_64x4`` (slot width, vector length), and cvta.

They try `lane_vectors`, after the race checker has checked the whole warp. Accesses that fail, and all while traffic is
counted, go to one function, `memory_careful` of `careful_access.py`.
"""

from __future__ import annotations

from numba import types

from numba_kernels.cache import njit
from runtime.emulator.execution.state import (
    CHECK_MEMORY,
    CHECK_RACES,
    CHECK_UNINITIALIZED,
    COUNT_MEMORY,
    LANES,
    LOCAL_WINDOW,
    PARAM_WINDOW,
    SHARED_WINDOW,
    Launch,
)
from runtime.emulator.memory.careful_access import (
    IS_HALF,
    IS_NC,
    IS_RELEASE,
    IS_SIGNED,
    IS_STORE,
    IS_STRONG,
    SCOPE_SHIFT,
    extend_sign,
    memory_careful,
)
from runtime.emulator.memory.lane_vectors import load_lanes, store_lanes
from runtime.emulator.memory.locate import CONST, GENERIC, GLOBAL, LOCAL, PARAM, SHARED, SHARED_CLUSTER
from runtime.emulator.memory.pointers import address_of, addresses_of, trailing_zeros
from runtime.emulator.races.clocks import SCOPE_CLUSTER, SCOPE_CTA, SCOPE_GPU, touch_lanes, warp_is_fine
from runtime.emulator.translation.lowering import Lowering, lowers
from runtime.emulator.translation.modifiers import Modifiers
from runtime.emulator.translation.operations import OPERATIONS as OPERATIONS
from runtime.emulator.translation.operations import operation
from runtime.emulator.translation.ptx import TYPE_BYTES, Address, Instruction, Operand, Register, Symbol, Vector
from runtime.emulator.translation.vectors import I32, I64, INTEGERS, Value, splat

_EVERY_BYTE = 0x0101010101010101


@njit
def window_of(warp, addresses, offset, mask, space, flags, total):
    """The likely window of a warp access of `total` bytes a lane: (start, bytes, host, shadow, need, want) for
    `lane_vectors`. Zero bytes where only the careful way will do. The race checker has run."""
    block, launch = warp.block, warp.launch
    checks = launch.checks
    start, size, host, shadow = types.int64(0), types.int64(0), types.int64(0), types.int64(0)
    is_racing = checks & CHECK_RACES != 0 and bool(warp.clock)
    if checks & COUNT_MEMORY or warp.is_before_dependency or (is_racing and flags & IS_STRONG):
        return start, size, host, shadow, start, start
    block_address = types.int64(0)
    inside = space
    if space == GENERIC and mask != 0:
        first = types.int64(addresses[trailing_zeros(mask)]) + offset
        inside = SHARED if first >= SHARED_WINDOW else GLOBAL
        start = types.int64(SHARED_WINDOW) if first >= SHARED_WINDOW else start
    if inside in (GLOBAL, CONST):
        start, size, host = launch.arena, launch.arena_bytes, launch.arena
        shadow = launch.arena_shadow
        if launch.stream_order and touch_lanes(launch, addresses, offset, mask, flags & IS_STORE != 0):
            size = types.int64(0)
    elif inside in (SHARED, SHARED_CLUSTER) and not (flags & IS_STORE and block.proxy):
        size, host, shadow = block.shared_bytes, block.shared, block.shared_shadow
        block_address = address_of(warp.block)
    if (
        is_racing
        and size
        and not warp_is_fine(warp, mask, addresses, offset, start, size, block_address, total, flags & IS_STORE)
    ):
        size = types.int64(0)
    if flags & IS_STORE:
        need, want = types.int64(0x71 * _EVERY_BYTE), types.int64(_EVERY_BYTE)
    elif checks & CHECK_UNINITIALIZED:
        need, want = types.int64(0x13 * _EVERY_BYTE), types.int64(0x03 * _EVERY_BYTE)
    else:
        need, want = types.int64(0x11 * _EVERY_BYTE), types.int64(_EVERY_BYTE)
    if not checks & (CHECK_MEMORY | CHECK_UNINITIALIZED):
        shadow = types.int64(0)
    return start, size, host, shadow, need, want


def _of_size(move, count, is_wide):
    """``f(warp, mask, site, addresses, offset, space, size, flags, slots)``: an access of `count` elements a lane.

    `move` is `load_lanes` or `store_lanes` for these, all of one size; `is_wide`: their slots have 64 bits.
    """

    @njit
    def access(warp, mask, site, addresses, offset, space, size, flags, slots):
        start, limit, host, shadow, need, want = window_of(warp, addresses, offset, mask, space, flags, count * size)
        if move(addresses, offset, mask, start, limit, host, shadow, need, want, *slots):
            return 0
        places = addresses_of(slots)
        return memory_careful(warp, mask, site, addresses, offset, space, size, count, is_wide, flags, *places)

    return access


def _of_any_size(make, count):
    """As `_of_size`, of elements of 1, 2 or 4 bytes in 32-bit slots. `make`: `load_lanes` or `store_lanes`."""
    one, two, four = make(1, count, 32), make(2, count, 32), make(4, count, 32)

    @njit
    def access(warp, mask, site, addresses, offset, space, size, flags, slots):
        start, limit, host, shadow, need, want = window_of(warp, addresses, offset, mask, space, flags, count * size)
        done = 0
        if size == 4:
            done = four(addresses, offset, mask, start, limit, host, shadow, need, want, *slots)
        elif size == 2:
            done = two(addresses, offset, mask, start, limit, host, shadow, need, want, *slots)
        else:
            done = one(addresses, offset, mask, start, limit, host, shadow, need, want, *slots)
        places = addresses_of(slots)
        if not done:
            return memory_careful(warp, mask, site, addresses, offset, space, size, count, 0, flags, *places)
        if flags & IS_SIGNED:
            for index in range(count):
                extend_sign(mask, places[index], size, 0, flags)
        return 0

    return access


# Operations take slots one by one.


def _with_1_slot(access):
    def run(warp, mask, site, addresses, offset, space, size, flags, a):
        return access(warp, mask, site, addresses, offset, space, size, flags, (a,))

    return run


def _with_2_slots(access):
    def run(warp, mask, site, addresses, offset, space, size, flags, a, b):
        return access(warp, mask, site, addresses, offset, space, size, flags, (a, b))

    return run


def _with_4_slots(access):
    def run(warp, mask, site, addresses, offset, space, size, flags, a, b, c, d):
        return access(warp, mask, site, addresses, offset, space, size, flags, (a, b, c, d))

    return run


def _with_8_slots(access):
    def run(warp, mask, site, addresses, offset, space, size, flags, a, b, c, d, e, f, g, h):
        return access(warp, mask, site, addresses, offset, space, size, flags, (a, b, c, d, e, f, g, h))

    return run


for _name, _make in (("load", load_lanes), ("store", store_lanes)):
    for _count, _with_slots in ((1, _with_1_slot), (2, _with_2_slots), (4, _with_4_slots)):
        operation(f"{_name}_32x{_count}", "qllll" + "p" * _count)(_with_slots(_of_any_size(_make, _count)))
        operation(f"{_name}_64x{_count}", "qllll" + "q" * _count)(
            _with_slots(_of_size(_make(8, _count, 64), _count, 1))
        )
    operation(f"{_name}_32x8", "qllll" + "p" * 8)(_with_8_slots(_of_size(_make(4, 8, 32), 8, 0)))


SPACES = {
    "global": GLOBAL, "shared": SHARED, "shared::cta": SHARED, "shared::cluster": SHARED_CLUSTER, "local": LOCAL,
    "param": PARAM, "param::entry": PARAM, "const": CONST,
}  # fmt: skip
SCOPES = {"cta": SCOPE_CTA, "cluster": SCOPE_CLUSTER, "gpu": SCOPE_GPU, "sys": SCOPE_GPU}
_CACHE_OPERATORS = {"ca", "cg", "cs", "lu", "cv", "wb", "wt"}
_EVICTIONS = {"evict_normal", "evict_unchanged", "evict_first", "evict_last", "no_allocate"}
_SIZES = {"64B", "128B", "256B"}


def space_of(mods: Modifiers) -> int:
    """The state space among the modifiers; generic without one."""
    word = mods.one_of(SPACES, "")
    return SPACES[word] if word else GENERIC


def take_cache_hints(mods: Modifiers) -> bool:
    """Takes every cache modifier; returns whether a cache policy is an operand."""
    has_policy = False
    for word in list(mods.words):
        level, _, hint = word.partition("::")
        known = (level == "L1" and hint in _EVICTIONS) or (level == "L2" and hint in _EVICTIONS | _SIZES)
        if word in _CACHE_OPERATORS or known or word == "L2::cache_hint":
            mods.take(word)
            has_policy |= word == "L2::cache_hint"
    return has_policy


def order_of(mods: Modifiers, default_scope: int = 0) -> int:
    """The bits of `flags` for .weak, .volatile, .relaxed … and their scope."""
    flags = 0
    order = mods.one_of(("weak", "volatile", "relaxed", "acquire", "release", "acq_rel"), "weak")
    mods.take("mmio")
    scope = mods.one_of(SCOPES, "")
    if order != "weak":
        flags |= IS_STRONG
    if order in ("release", "acq_rel"):
        flags |= IS_RELEASE
    if order == "volatile":
        scope = "sys"
    if not scope and order != "weak" and not default_scope:
        raise mods.refuse(f".{order} needs a scope")
    return flags | (SCOPES[scope] if scope else default_scope) << SCOPE_SHIFT


def elements_of(mods: Modifiers, operand: Operand) -> tuple[int, list[Operand]]:
    """The size of an element in bytes and the registers of one lane, one for each element."""
    count = {"": 1, "v2": 2, "v4": 4, "v8": 8}[mods.one_of(("v2", "v4", "v8"), "")]
    kind = mods.type(TYPE_BYTES)
    items: list[Operand] = list(operand.items) if isinstance(operand, Vector) else [operand]
    if len(items) != count:
        raise mods.refuse(f"{len(items)} registers for {count} elements")
    size = TYPE_BYTES[kind]
    if size * count > 32 or (count == 8 and size != 4):
        raise mods.refuse(f"{size * count} bytes a lane")
    return size, items


@lowers("ld")
def lower_load(low: Lowering, ins: Instruction) -> None:
    mods = Modifiers(ins)
    kind = mods.words[-1] if mods.words else ""
    has_policy = take_cache_hints(mods)
    space, flags = space_of(mods), order_of(mods)
    flags |= IS_NC if mods.take("nc") or mods.name == "ldu" else 0
    to, source, *_ = mods.operands(3 if has_policy else 2)
    size, items = elements_of(mods, to)
    mods.done()
    if space == PARAM and isinstance(source, Address) and isinstance(source.base, Symbol):
        _load_parameter(low, source.base.name, source.offset, kind, size, items)
        return
    if isinstance(source, Address) and isinstance(source.base, Symbol) and source.base.name in low.parameters:
        raise low.refuse("a parameter's name outside of .param")
    address, offset = low.address(source, 64)
    if size == 16:
        wide = low.destination(items[0], 128)
        parts = [wide, low.builder.gep(wide, [low.i64(LANES)])]
        low.call("load_64x2", address, offset, space, 8, flags, *parts)
        return
    is_signed = kind in ("s8", "s16")
    if is_signed:
        flags |= IS_SIGNED
        if all(isinstance(item, Register) and item.type.endswith("16") for item in items):
            flags |= IS_HALF
    bits = 64 if size == 8 else 32
    targets = [low.destination(item, bits, "s32" if kind[0] == "s" else "") for item in items]
    low.call(f"load_{bits}x{len(items)}", address, offset, space, size, flags, *targets)


def _load_parameter(low: Lowering, name: str, offset: int, kind: str, size: int, items: list[Operand]) -> None:
    """The same for every lane: one scalar load."""
    if name not in low.parameters:
        raise low.refuse(f"{name} is no parameter")
    start, size_bytes = low.parameters[name]
    if offset < 0 or offset + size * len(items) > size_bytes:
        raise low.refuse(f"bytes {offset} to {offset + size * len(items)} of a parameter of {size_bytes}")
    if size == 16:
        raise low.refuse("a .b128 parameter")
    base = low.launch_field(Launch.parameters)
    for index, item in enumerate(items):
        element = INTEGERS[8 * size].element
        at = low.builder.add(base, low.i64(start + offset + index * size))
        scalar = low.builder.load(low.builder.inttoptr(at, element.as_pointer()))
        scalar.align = 1
        low.write(item, extended(low, low.splat(scalar), item, kind))


def extended(low: Lowering, vector: Value, item: Operand, kind: str) -> Value:
    """A loaded element with its sign, where its type has one, as wide as the register that gets it."""
    if kind[0] != "s" or not isinstance(item, Register):
        return vector
    wanted = INTEGERS[16] if item.type.endswith("16") else I64 if low.bits_of(item) == 64 else I32
    return low.builder.sext(vector, wanted) if wanted.element.width > vector.type.element.width else vector


@lowers("st")
def lower_store(low: Lowering, ins: Instruction) -> None:
    mods = Modifiers(ins)
    has_policy = take_cache_hints(mods)
    space, flags = space_of(mods), order_of(mods) | IS_STORE
    if space in (PARAM, CONST):
        raise low.refuse("a store to this space")
    target, source, *_ = mods.operands(3 if has_policy else 2)
    size, items = elements_of(mods, source)
    mods.done()
    address, offset = low.address(target, 64)
    if size == 16:
        wide = low.slot(items[0], 128)
        parts = [wide, low.builder.gep(wide, [low.i64(LANES)])]
        low.call("store_64x2", address, offset, space, 8, flags, *parts)
        return
    bits = 64 if size == 8 else 32
    values = [low.slot(item, bits) for item in items]
    low.call(f"store_{bits}x{len(items)}", address, offset, space, size, flags, *values)


# --- addresses ---

_WINDOWS = {
    GLOBAL: 0, CONST: 0, SHARED: SHARED_WINDOW, SHARED_CLUSTER: SHARED_WINDOW,
    LOCAL: LOCAL_WINDOW, PARAM: PARAM_WINDOW,
}  # fmt: skip


@lowers("cvta")
def lower_cvta(low: Lowering, ins: Instruction) -> None:
    """Converts between the address of a state space and the generic address."""
    mods = Modifiers(ins)
    is_back = mods.take("to")
    window = _WINDOWS.get(space_of(mods))
    if window is None or mods.type(("u64", "u32")) != "u64":
        raise low.refuse("only 64-bit addresses of a named space")
    to, source = mods.operands(2)
    mods.done()
    if isinstance(source, Symbol) and source.name in low.parameters:
        address = splat(I64, low.parameters[source.name][0])
    else:
        address = low.value(source, "u64")
    window_vector = splat(I64, window)
    low.write(to, low.builder.sub(address, window_vector) if is_back else low.builder.add(address, window_vector))
