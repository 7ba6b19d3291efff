"""ld and st: the operations ``load_1x1`` … ``store_8x4`` (bytes of an element, elements a lane), and cvta.

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
    IS_NC,
    IS_RELEASE,
    IS_STORE,
    IS_STRONG,
    SCOPE_SHIFT,
    memory_careful,
)
from runtime.emulator.memory.device_memory import IS_ALLOCATED, IS_INITIALISED
from runtime.emulator.memory.lane_vectors import moves_lanes
from runtime.emulator.memory.locate import CONST, GENERIC, GLOBAL, LOCAL, PARAM, SHARED, SHARED_CLUSTER
from runtime.emulator.memory.pointers import address_of, addresses_of, stack_longs, trailing_zeros
from runtime.emulator.races.clocks import SCOPE_CLUSTER, SCOPE_CTA, SCOPE_GPU, touch_lanes
from runtime.emulator.races.rules import warp_is_fine
from runtime.emulator.translation.forms import Modifiers
from runtime.emulator.translation.lowering import Lowering
from runtime.emulator.translation.operations import OPERATIONS as OPERATIONS
from runtime.emulator.translation.operations import compiled_once, operation
from runtime.emulator.translation.ptx import TYPE_BYTES, Address, Instruction, Operand, Symbol, Vector
from runtime.emulator.translation.vectors import I64, INTEGERS, splat

_EVERY_BYTE = 0x0101010101010101


@compiled_once("qlllllq")
def window_of(warp, addresses, offset, mask, space, flags, total, window):
    """Fills `window` with the likely window of a warp access of `total` bytes a lane, for `lane_vectors`: start, bytes,
    host, shadow, need, want. Zero bytes where only the careful way will do. The race checker has run."""
    block, launch = warp.block, warp.launch
    checks = launch.checks
    start, size, host, shadow = types.int64(0), types.int64(0), types.int64(0), types.int64(0)
    window[1] = 0
    is_racing = checks & CHECK_RACES != 0 and bool(warp.clock)
    if checks & COUNT_MEMORY or warp.is_before_dependency or (is_racing and flags & IS_STRONG):
        return 0
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
            return 0
    elif inside in (SHARED, SHARED_CLUSTER) and not (flags & IS_STORE and block.proxy):
        size, host, shadow = block.shared_bytes, block.shared, block.shared_shadow
        block_address = address_of(warp.block)
    if (
        is_racing
        and size
        and not warp_is_fine(warp, mask, addresses, offset, start, size, block_address, total, flags & IS_STORE)
    ):
        return 0
    window[0], window[1], window[2] = start, size, host
    window[3] = shadow if checks & (CHECK_MEMORY | CHECK_UNINITIALIZED) else 0
    need, want = types.int64(0x11), types.int64(IS_ALLOCATED)
    if flags & IS_STORE:
        need = types.int64(0x71)
    elif checks & CHECK_UNINITIALIZED:
        need, want = types.int64(0x13), types.int64(IS_ALLOCATED | IS_INITIALISED)
    window[4], window[5] = need * _EVERY_BYTE, want * _EVERY_BYTE
    return 0


def _access(is_store, size, count):
    """``f(warp, mask, site, addresses, offset, space, flags, slots)``: `count` elements of `size` bytes a lane."""
    move, is_wide = moves_lanes(size, count, is_store), int(size == 8)

    @njit
    def access(warp, mask, site, addresses, offset, space, flags, slots):
        window = stack_longs(6)
        window_of(warp, addresses, offset, mask, space, flags, count * size, window)
        if move(addresses, offset, mask, window, *slots):
            return 0
        places = addresses_of(slots)
        return memory_careful(warp, mask, site, addresses, offset, space, size, count, is_wide, flags, *places)

    return access


# Operations take slots one by one.


def _with_1_slot(access):
    def run(warp, mask, site, addresses, offset, space, flags, a):
        return access(warp, mask, site, addresses, offset, space, flags, (a,))

    return run


def _with_2_slots(access):
    def run(warp, mask, site, addresses, offset, space, flags, a, b):
        return access(warp, mask, site, addresses, offset, space, flags, (a, b))

    return run


def _with_4_slots(access):
    def run(warp, mask, site, addresses, offset, space, flags, a, b, c, d):
        return access(warp, mask, site, addresses, offset, space, flags, (a, b, c, d))

    return run


def _with_8_slots(access):
    def run(warp, mask, site, addresses, offset, space, flags, a, b, c, d, e, f, g, h):
        return access(warp, mask, site, addresses, offset, space, flags, (a, b, c, d, e, f, g, h))

    return run


for _count, _with_slots, _sizes in (
    (1, _with_1_slot, (1, 2, 4, 8)), (2, _with_2_slots, (1, 2, 4, 8)), (4, _with_4_slots, (1, 2, 4, 8)),
    (8, _with_8_slots, (4,)),
):  # fmt: skip
    for _size in _sizes:
        for _name in ("load", "store"):
            _slots = ("q" if _size == 8 else "p") * _count
            operation(f"{_name}_{_size}x{_count}", "qlll" + _slots)(
                _with_slots(_access(_name == "store", _size, _count))
            )

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


def lower_load(low: Lowering, ins: Instruction) -> None:
    mods = Modifiers(ins)
    kind = mods.words[-1] if mods.words else ""
    has_policy = take_cache_hints(mods)
    space, flags = space_of(mods), order_of(mods)
    flags |= IS_NC if mods.take("nc") else 0
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
        low.call("load_8x2", address, offset, space, flags, *parts)
        return
    targets = [low.destination(item, 64 if size == 8 else 32, kind) for item in items]
    low.call(f"load_{size}x{len(items)}", address, offset, space, flags, *targets)


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
        low.write(item, low.extended(low.splat(scalar), item, kind))


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
        low.call("store_8x2", address, offset, space, flags, *parts)
        return
    values = [low.slot(item, 64 if size == 8 else 32) for item in items]
    low.call(f"store_{size}x{len(items)}", address, offset, space, flags, *values)


# --- addresses ---

_WINDOWS = {
    GLOBAL: 0, CONST: 0, SHARED: SHARED_WINDOW, SHARED_CLUSTER: SHARED_WINDOW,
    LOCAL: LOCAL_WINDOW, PARAM: PARAM_WINDOW,
}  # fmt: skip


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
