"""ld, st, and cvta.

Cache hints are ignored here. Memory order is the program's; .volatile, .relaxed, .acquire and .release matter to the
race checker alone.
"""

from __future__ import annotations

from runtime.emulator.execution.state import LANES, LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, Launch
from runtime.emulator.memory import quick_access
from runtime.emulator.memory.careful_access import (
    IS_HALF,
    IS_NC,
    IS_RELEASE,
    IS_SIGNED,
    IS_STORE,
    IS_STRONG,
    SCOPE_SHIFT,
)
from runtime.emulator.memory.locate import (
    CONST,
    GENERIC,
    GLOBAL,
    LOCAL,
    PARAM,
    SHARED,
    SHARED_CLUSTER,
)
from runtime.emulator.races.clocks import SCOPE_CLUSTER, SCOPE_CTA, SCOPE_GPU
from runtime.emulator.translation.lowering import Lowering, lowers
from runtime.emulator.translation.modifiers import Modifiers
from runtime.emulator.translation.ptx import TYPE_BYTES, Address, Instruction, Operand, Register, Symbol, Vector
from runtime.emulator.translation.vectors import I32, I64, INTEGERS, Value, splat

assert "load_32x1" in quick_access.OPERATIONS  # registered

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
