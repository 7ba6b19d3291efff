"""Values of a kernel's names: its variables' and parameters' addresses, and predefined registers such as %tid.x.

A .global or .const variable has a device address, a shared one an offset. Shared variables get SHARED_REDZONE_BYTES of
dead bytes after each, so that one array's end is not another's beginning: their shadow never becomes live. A kernel
that has no room for that (its descriptors see 18 bits of an address) gets them packed as ptxas packs them.

Thread indices lie in the first slots of the register file; other registers are uniform over a warp and read from the
warp's, the block's or the launch's record. %clock and %globaltimer are the host's cycle counter: they rise, without a
unit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from runtime.emulator.execution.state import Block, Launch, Warp
from runtime.emulator.memory.device_memory import IS_ALLOCATED, Machine
from runtime.emulator.records import Field
from runtime.emulator.translation.ptx import Kernel, Module, PtxError, Symbol, Variable, leaves
from runtime.emulator.translation.vectors import I32, LONG, WORD

SHARED_START = 1024
"""The first shared address that a kernel owns: below lie the hardware's reserve, and null."""
SHARED_REDZONE_BYTES = 128
SHARED_LIMIT = 1 << 18


@dataclass(frozen=True, slots=True)
class SharedLayout:
    """Shared memory of a kernel.

    Attributes:
        offsets: name → shared address; of `extern` arrays too, which all begin where the static ones end.
        live: (offset, size) of each static variable: the bytes that a kernel may touch, besides the dynamic ones.
        dynamic_offset: where the dynamic bytes begin.
        static_bytes: size of the variables without redzones, as the driver reports it.
    """

    offsets: dict[str, int]
    live: tuple[tuple[int, int], ...]
    dynamic_offset: int
    static_bytes: int

    def total_bytes(self, dynamic_bytes: int) -> int:
        """Size of a block's shared memory, counted from shared address 0."""
        return self.dynamic_offset + dynamic_bytes

    def shadow(self, dynamic_bytes: int) -> bytes:
        """The shadow of a block that starts, a byte for each of `total_bytes`, for `Block.shared_shadow`."""
        states = bytearray(self.total_bytes(dynamic_bytes))
        for start, size in (*self.live, (self.dynamic_offset, dynamic_bytes)):
            states[start : start + size] = bytes([IS_ALLOCATED]) * size
        return bytes(states)

    def name_at(self, offset: int, dynamic_bytes: int) -> str:
        """Words for a shared address in a message."""
        extents = sorted((start, size, name) for name, start, size in self._extents(dynamic_bytes))
        for start, size, name in extents:
            if start <= offset < start + size:
                return f"{offset - start} bytes into {name}, which has {size} bytes"
        before = [(start + size, f"{name} of {size} bytes") for start, size, name in extents if start + size <= offset]
        after = [(start, f"{name} of {size} bytes") for start, size, name in extents if start > offset]
        words = []
        if before:
            end, name = max(before)
            words.append(f"{offset - end} bytes past the end of {name}")
        if after:
            start, name = min(after)
            words.append(f"{start - offset} bytes before {name}")
        return " and ".join(words) or "the kernel has no shared memory"

    def _extents(self, dynamic_bytes: int) -> Iterable[tuple[str, int, int]]:
        sizes = dict(self.live)
        for name, start in self.offsets.items():
            if start in sizes and (start != self.dynamic_offset or sizes[start]):
                yield f"shared variable {name}", start, sizes[start]
        if dynamic_bytes:
            yield "dynamic shared memory", self.dynamic_offset, dynamic_bytes


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def shared_layout(module: Module, kernel: Kernel) -> SharedLayout:
    """Lays out the shared variables of a module and of a kernel's body.

    Raises:
        PtxError: an initial value for shared memory, which PTX does not allow.
    """
    variables = [v for v in (*module.variables.values(), *kernel.variables) if v.space == "shared"]
    for variable in variables:
        if variable.initial:
            raise PtxError(f"shared variable {variable.name} has an initial value")
    sized = sorted((v for v in variables if v.size_bytes is not None), key=lambda v: -v.align)
    extern_align = max((v.align for v in variables if v.size_bytes is None), default=16)
    packed = _lay(sized, 0, 16)
    static_bytes = packed[1] - SHARED_START
    offsets, end = _lay(sized, SHARED_REDZONE_BYTES, extern_align)
    if end > SHARED_LIMIT - (1 << 10) or static_bytes > 96 << 10:
        offsets, end = _lay(sized, 0, extern_align)
    live = tuple((offsets[v.name], v.size_bytes or 0) for v in sized)
    offsets.update({v.name: end for v in variables if v.size_bytes is None})
    return SharedLayout(offsets, live, end, static_bytes)


def _lay(variables: list[Variable], gap: int, end_align: int) -> tuple[dict[str, int], int]:
    offsets: dict[str, int] = {}
    offset = SHARED_START
    for variable in variables:
        offset = _align(offset, max(variable.align, gap))
        offsets[variable.name] = offset
        offset += (variable.size_bytes or 0) + gap
    return offsets, _align(offset, max(end_align, 16))


def place_variables(machine: Machine, module: Module) -> dict[str, int]:
    """Allocates the .global and .const variables of a module in device memory: name → address.

    Without an initial value they hold zeros, as in PTX. Allocated anew each time a module is loaded; the caller
    frees them when it unloads it.
    """
    addresses: dict[str, int] = {}
    for variable in module.variables.values():
        if variable.space not in ("global", "const"):
            continue
        if variable.size_bytes is None:
            raise PtxError(f"{variable.space} variable {variable.name} has no size")
        size = max(variable.size_bytes, 1)
        label = f".{variable.space} {variable.name}"
        address = machine.allocate(size, max(variable.align, 256), label=label)
        machine.fill(address, 0, size)
        if variable.initial:
            machine.write(address, variable.initial)
        addresses[variable.name] = address
    return addresses


def used_variables(module: Module, kernel: Kernel) -> list[str]:
    """The .global and .const variables that a kernel names, in the order of its symbol table (`Launch.symbols`)."""
    operands = (operand for ins in kernel.instructions for operand in ins.operands)
    named = {leaf.name for operand in operands for leaf in leaves(operand) if isinstance(leaf, Symbol)}
    return [v.name for v in module.variables.values() if v.space in ("global", "const") and v.name in named]


def parameter_offsets(kernel: Kernel) -> tuple[dict[str, tuple[int, int]], int]:
    """Parameter name → (offset, size) in the parameter bytes, each at its own alignment; and how many bytes."""
    return _in_a_row(kernel.parameters)


def local_offsets(kernel: Kernel) -> tuple[dict[str, int], int]:
    """Local variable → offset in a thread's local memory, and its size."""
    found, size = _in_a_row([variable for variable in kernel.variables if variable.space == "local"])
    return {name: offset for name, (offset, _) in found.items()}, _align(size, 64)


def _in_a_row(variables: Iterable[Variable]) -> tuple[dict[str, tuple[int, int]], int]:
    found: dict[str, tuple[int, int]] = {}
    offset = 0
    for variable in variables:
        offset = _align(offset, variable.align)
        found[variable.name] = (offset, variable.size_bytes or 0)
        offset += variable.size_bytes or 0
    return found, offset


Value = Any

TID_SLOTS = {"%tid.x": 0, "%tid.y": 128, "%tid.z": 256}
FIXED_SLOT_BYTES = 384

_AXES = ("x", "y", "z")
_INDEX, _GRID = (Block.x, Block.y, Block.z), (Launch.grid_x, Launch.grid_y, Launch.grid_z)
_THREADS = Launch.block_x, Launch.block_y, Launch.block_z
_CLUSTER = Launch.cluster_x, Launch.cluster_y, Launch.cluster_z


def _by_axis(name: str, fields: tuple[Field, ...]) -> dict[str, Field]:
    return {f"{name}.{axis}": field for axis, field in zip(_AXES, fields)}


_BLOCK_FIELDS = _by_axis("%ctaid", _INDEX) | {"%cluster_ctarank": Block.rank}
_LAUNCH_FIELDS = {
    **_by_axis("%nctaid", _GRID),
    **_by_axis("%ntid", _THREADS),
    **_by_axis("%cluster_nctaid", _CLUSTER),
    "%cluster_nctarank": Launch.cluster_size,
    "%nwarpid": Launch.num_warps,
    "%dynamic_smem_size": Launch.dynamic_shared_bytes,
    "%total_smem_size": Launch.shared_bytes,
    "%aggr_smem_size": Launch.shared_bytes,
    "%nsmid": Launch.num_sms,
    "%gridid": Launch.number,
}
_LANE_MASKS = {
    "%lanemask_eq": [1 << lane for lane in range(32)],
    "%lanemask_lt": [(1 << lane) - 1 for lane in range(32)],
    "%lanemask_le": [(2 << lane) - 1 for lane in range(32)],
    "%lanemask_ge": [0xFFFFFFFF & ~((1 << lane) - 1) for lane in range(32)],
    "%lanemask_gt": [0xFFFFFFFF & ~((2 << lane) - 1) for lane in range(32)],
}
_CLOCKS = {"%clock", "%clock_hi", "%clock64", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi"}


def _clock(low: Any, name: str) -> Value:
    module = low.builder.module
    function = module.globals.get("llvm.readcyclecounter")
    if function is None:
        function = ir.Function(module, ir.FunctionType(LONG, []), "llvm.readcyclecounter")
    ticks = low.builder.call(function, [])
    return low.builder.lshr(ticks, low.i64(32)) if name.endswith("_hi") else ticks


def _scalar(low: Any, name: str) -> Value:
    """The i64 value of a register that is the same in every lane."""
    builder = low.builder
    if name in _CLOCKS:
        return _clock(low, name)
    if name in _BLOCK_FIELDS:
        return low.block_field(_BLOCK_FIELDS[name])
    if name in _LAUNCH_FIELDS:
        return low.launch_field(_LAUNCH_FIELDS[name])
    if name == "%warpid":
        return low.warp_field(Warp.index)
    if name == "%smid":
        return builder.urem(low.block_field(Block.linear), low.launch_field(Launch.num_sms))
    if name == "%is_explicit_cluster":
        size = low.launch_field(Launch.cluster_size)
        return builder.zext(builder.icmp_unsigned(">", size, low.i64(1)), LONG)
    kind, _, axis = name[1:].partition(".")
    if axis not in _AXES or kind not in ("clusterid", "nclusterid", "cluster_ctaid"):
        raise low.refuse(f"special register {name}")
    index = _AXES.index(axis)
    size = low.launch_field(_CLUSTER[index])
    if kind == "nclusterid":
        return builder.udiv(low.launch_field(_GRID[index]), size)
    divide = builder.udiv if kind == "clusterid" else builder.urem
    return divide(low.block_field(_INDEX[index]), size)


def special_register(low: Any, name: str) -> Value:
    """The lanes of a special register: ``<32 x i32>``, or ``<32 x i64>`` for the 64-bit ones. `low` is a Lowering."""
    if name in TID_SLOTS:
        return low.builder.load(low.at(TID_SLOTS[name], I32))
    if name == "%laneid":
        return ir.Constant(I32, [ir.Constant(WORD, lane) for lane in range(32)])
    if name in _LANE_MASKS:
        return ir.Constant(I32, [ir.Constant(WORD, mask) for mask in _LANE_MASKS[name]])
    scalar = _scalar(low, name)
    is_long = name in ("%clock64", "%globaltimer", "%gridid")
    return low.splat(scalar if is_long else low.builder.trunc(scalar, WORD))
