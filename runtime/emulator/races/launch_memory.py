"""The race checker's data of one launch, and its compiled entries."""

from __future__ import annotations

from runtime.emulator.memory.device_memory import Machine, Mapping
from runtime.emulator.races import rules, vector_clocks
from runtime.emulator.races.clocks import TABLE_ENTRIES, Entry, Races
from runtime.emulator.translation.operations import compiled_address

_ENTRIES = (vector_clocks.order_entry, vector_clocks.block_entry, rules.lane_entry, rules.run_entry, rules.warp_entry)
"""By CALL_…; compiled for the first launch that checks races."""
_RACE_BYTES = 1 << 40
_CLOCK_LIMIT = 1 << 30


class RaceMemory:
    """The race checker's data of one launch: one record for each OS thread, and the machine's global shadow.

    Args:
        machine: whose memory the kernel runs on.
        shift: of `granule_shift`.
        num_warps: of a block.
        cluster_size: blocks a cluster.
        num_blocks: of the grid.
        shared_bytes: of a block, as `Block.shared_bytes`.
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
            races = Races(address)
            races.base = races.clock = clock
            races.table = address + Races.size_bytes
            races.scratch = races.table + (TABLE_ENTRIES + 1) * Entry.size_bytes
            races.next = (races.scratch + (width + 15) * 12 + 63) // 64 * 64
            races.agents, races.width, races.shift = num_blocks * num_warps, width, shift
            races.global_writes, races.global_reads = shadow, shadow + granules * 8
            races.shared_granules = (shared_bytes >> shift) + 1
            for number, entry in enumerate(_ENTRIES):
                races[Races.calls.index + number] = compiled_address(entry)
            self._addresses.append(address)

    def address(self, thread: int) -> int:
        """The value of `Launch.races` for an OS thread."""
        return self._addresses[thread]

    def close(self) -> None:
        """Ends the launch: its writes are ordered before the next."""
        for address in self._addresses:
            self._machine.race_clock = max(self._machine.race_clock, Races(address).clock)
        self._addresses = []
        self._mapping.close()
