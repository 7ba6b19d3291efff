"""The race checker's data of one launch, and its compiled entries."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from numba import types

from numba_kernels.cache import compile_c_function
from runtime.emulator.memory.device_memory import Machine, Mapping
from runtime.emulator.races import rules, vector_clocks
from runtime.emulator.races.clocks import (
    CALL_BLOCK,
    CALL_LANE,
    CALL_ORDER,
    CALL_RUN,
    CALL_WARP,
    ENTRY_FIELDS,
    RACES_AGENTS,
    RACES_BASE,
    RACES_CALLS,
    RACES_CLOCK,
    RACES_FIELDS,
    RACES_GLOBAL_READS,
    RACES_GLOBAL_WRITES,
    RACES_NEXT,
    RACES_SCRATCH,
    RACES_SHARED_GRANULES,
    RACES_SHIFT,
    RACES_TABLE,
    RACES_WIDTH,
    TABLE_ENTRIES,
)


@functools.cache
def _entries() -> dict[int, Any]:
    """The compiled rules by CALL_…; kept alive here."""
    functions = {
        CALL_ORDER: (vector_clocks.order_entry, 5),
        CALL_BLOCK: (vector_clocks.block_entry, 3),
        CALL_LANE: (rules.lane_entry, 8),
        CALL_RUN: (rules.run_entry, 7),
        CALL_WARP: (rules.warp_entry, 8),
    }
    return {
        number: compile_c_function(entry.py_func, types.int64(*(types.int64,) * count))
        for number, (entry, count) in functions.items()
    }


_RACE_BYTES = 1 << 40
_CLOCK_LIMIT = 1 << 30


class RaceMemory:
    """The race checker's data of one launch: one array for each OS thread, and the machine's global shadow.

    Args:
        machine: whose memory the kernel runs on.
        shift: of `granule_shift`.
        num_warps: of a block.
        cluster_size: blocks a cluster.
        num_blocks: of the grid.
        shared_bytes: of a block, as BLOCK_SHARED_BYTES.
        num_threads: OS threads.
    """

    def __init__(
        self, machine: Machine, *, shift: int, num_warps: int, cluster_size: int, num_blocks: int, shared_bytes: int,
        num_threads: int,
    ) -> None:  # fmt: skip
        self._machine = machine
        machine.race_clock = clock = 0 if machine.race_clock > _CLOCK_LIMIT else machine.race_clock
        if clock == 0:
            machine.race_shadows.clear()
        granules = machine.span >> shift
        if shift not in machine.race_shadows:
            machine.race_shadows[shift] = Mapping(granules * 24)
        shadow = machine.race_shadows[shift].address
        self._mapping = Mapping(_RACE_BYTES)
        self._addresses = []
        width = num_warps * cluster_size
        for thread in range(num_threads):
            address = self._mapping.address + thread * (_RACE_BYTES // num_threads)
            table = address + RACES_FIELDS * 8
            scratch = table + (TABLE_ENTRIES + 1) * ENTRY_FIELDS * 8
            fields = (ctypes.c_int64 * RACES_FIELDS).from_address(address)
            fields[RACES_BASE] = fields[RACES_CLOCK] = clock
            fields[RACES_TABLE] = table
            fields[RACES_SCRATCH] = scratch
            fields[RACES_NEXT] = (scratch + (width + 15) * 12 + 63) // 64 * 64
            fields[RACES_AGENTS] = num_blocks * num_warps
            fields[RACES_WIDTH] = width
            fields[RACES_SHIFT] = shift
            fields[RACES_GLOBAL_WRITES] = shadow
            fields[RACES_GLOBAL_READS] = shadow + granules * 8
            fields[RACES_SHARED_GRANULES] = (shared_bytes >> shift) + 1
            for number, entry in _entries().items():
                fields[RACES_CALLS + number] = entry.address
            self._addresses.append(address)

    def address(self, thread: int) -> int:
        """The value of LAUNCH_GLOBAL_RACES in an OS thread's launch array."""
        return self._addresses[thread]

    def close(self) -> None:
        """Ends the launch: its writes are ordered before the next."""
        for address in self._addresses:
            fields = (ctypes.c_int64 * RACES_FIELDS).from_address(address)
            self._machine.race_clock = max(self._machine.race_clock, fields[RACES_CLOCK])
        self._addresses = []
        self._mapping.close()
