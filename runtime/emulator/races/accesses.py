"""The race checker's entries for accesses. The rules are in `rules.py`, its memory in `launch_memory.py`."""

from __future__ import annotations

from collections.abc import Iterable

from numba_kernels.cache import njit
from runtime.emulator.memory.pointers import address_of
from runtime.emulator.races.clocks import CALL_LANE, CALL_RUN, CALL_WARP, call_address
from runtime.emulator.translation.ptx import TYPE_BYTES, Instruction

IN_SHARED, IN_GLOBAL = 0, 1
LOAD, STORE, ATOMIC = range(3)
ACCESS_STRONG, ACCESS_NC, ACCESS_SAME = 1, 2, 4
"""Flags of one lane's access: it is strong; it is a .nc load; it writes what is there already."""


@njit
def lane_races(warp, site, place, block_address, size, lane, action, flags):
    """Checks one lane's access, of `action`, with ACCESS_… flags, at host address `place` (of the shared memory of
    a block, or of device memory where `block_address` is 0). Returns 1 with a fault reported, or 0."""
    races = warp.clock.races
    entry = races.calls[CALL_LANE]
    return call_address(entry, address_of(warp), site, place, block_address, size, lane, action, flags)


@njit
def run_is_fine(warp, first, block_address, size, is_store, lane, lane_bytes):
    """Whether a plain access of lanes from `lane` on to a contiguous range can be no race; then it has been noted."""
    races = warp.clock.races
    entry = races.calls[CALL_RUN]
    return call_address(entry, address_of(warp), first, block_address, size, is_store, lane, lane_bytes) != 0


@njit
def warp_is_fine(warp, mask, addresses, offset, start, limit, block_address, size, is_store):
    """The same of a whole warp's plain access, `size` bytes a lane: see `race_rules.warp_entry`."""
    races = warp.clock.races
    entry, shape = races.calls[CALL_WARP], size | (256 if is_store else 0)
    return (
        call_address(entry, address_of(warp), mask, address_of(addresses), offset, start, limit, block_address, shape)
        != 0
    )


def granule_shift(instructions: Iterable[Instruction]) -> int:
    """log2 of the bytes that a shadow entry stands for: the smallest access to shared or device memory, at most 4."""
    smallest = 4
    for instruction in instructions:
        parts = instruction.parts
        if parts[0] in ("ld", "ldu", "st", "atom", "red") and not {"param", "local", "const"} & set(parts):
            smallest = min(smallest, *(TYPE_BYTES[part] for part in parts if part in TYPE_BYTES))
    return smallest.bit_length() - 1
