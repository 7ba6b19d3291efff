"""Predefined registers such as %tid.x: the source of each value.

Thread indices lie in the first slots of the register file; the rest is uniform over a warp and read from the warp's,
the block's or the launch's array. %clock and %globaltimer are the host's cycle counter: they rise, without a unit.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from runtime.emulator.execution.state import Block, Launch, Warp
from runtime.emulator.records import Field
from runtime.emulator.translation.vectors import I32, LONG, WORD

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


def value(low: Any, name: str) -> Value:
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
