"""Predefined registers such as %tid.x: the source of each value.

Thread indices lie in the first slots of the register file; the rest is uniform over a warp and read from the warp's,
the block's or the launch's array. %clock and %globaltimer are the host's cycle counter: they rise, without a unit.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from runtime.emulator.execution import warp_state
from runtime.emulator.translation.vectors import I32, LONG, WORD

Value = Any

TID_SLOTS = {"%tid.x": 0, "%tid.y": 128, "%tid.z": 256}
FIXED_SLOT_BYTES = 384

_AXES = ("x", "y", "z")
_BLOCK_FIELDS = {f"%ctaid.{axis}": warp_state.BLOCK_X + index for index, axis in enumerate(_AXES)}
_BLOCK_FIELDS["%cluster_ctarank"] = warp_state.BLOCK_RANK
_LAUNCH_FIELDS = {
    **{f"%nctaid.{axis}": warp_state.LAUNCH_GRID_X + index for index, axis in enumerate(_AXES)},
    **{f"%ntid.{axis}": warp_state.LAUNCH_BLOCK_X + index for index, axis in enumerate(_AXES)},
    **{f"%cluster_nctaid.{axis}": warp_state.LAUNCH_CLUSTER_X + index for index, axis in enumerate(_AXES)},
    "%cluster_nctarank": warp_state.LAUNCH_CLUSTER_SIZE,
    "%nwarpid": warp_state.LAUNCH_NUM_WARPS,
    "%dynamic_smem_size": warp_state.LAUNCH_DYNAMIC_SHARED_BYTES,
    "%total_smem_size": warp_state.LAUNCH_SHARED_BYTES,
    "%aggr_smem_size": warp_state.LAUNCH_SHARED_BYTES,
    "%nsmid": warp_state.LAUNCH_NUM_SMS,
    "%gridid": warp_state.LAUNCH_NUMBER,
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
        return low.warp_field(warp_state.WARP_INDEX)
    if name == "%smid":
        return builder.urem(low.block_field(warp_state.BLOCK_LINEAR), low.launch_field(warp_state.LAUNCH_NUM_SMS))
    if name == "%is_explicit_cluster":
        size = low.launch_field(warp_state.LAUNCH_CLUSTER_SIZE)
        return builder.zext(builder.icmp_unsigned(">", size, low.i64(1)), LONG)
    kind, _, axis = name[1:].partition(".")
    if axis not in _AXES or kind not in ("clusterid", "nclusterid", "cluster_ctaid"):
        raise low.refuse(f"special register {name}")
    index = _AXES.index(axis)
    size = low.launch_field(warp_state.LAUNCH_CLUSTER_X + index)
    if kind == "nclusterid":
        return builder.udiv(low.launch_field(warp_state.LAUNCH_GRID_X + index), size)
    divide = builder.udiv if kind == "clusterid" else builder.urem
    return divide(low.block_field(warp_state.BLOCK_X + index), size)


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
