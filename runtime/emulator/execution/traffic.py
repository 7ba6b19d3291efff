"""Counts the costs of memory instructions: sectors of device memory, wavefronts of shared memory.

A sector is 32 aligned bytes. A wavefront serves each of the 32 four-byte banks once; lanes that access the same word of
a bank are served together. 8-byte accesses go by half warps, 16-byte ones by quarters (CUDA programming guide, "Shared
memory", and Nsight Compute's metrics of the same names).

Each OS thread of a launch has TRAFFIC_FIELDS int64 for each instruction, at launch[LAUNCH_TRAFFIC].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from numba_kernels.cache import njit
from numba_kernels.pointers import i64_at
from runtime.emulator.execution.warp_state import BLOCK_SHARED, LAUNCH_TRAFFIC, WARP_LAUNCH
from runtime.emulator.memory.pointers import stack_longs

GLOBAL_REQUESTS, GLOBAL_SECTORS, GLOBAL_BYTES = 0, 1, 2
SHARED_REQUESTS, SHARED_WAVEFRONTS, SHARED_IDEAL, SHARED_BYTES = 3, 4, 5, 6
TRAFFIC_FIELDS = 8


@dataclass(slots=True)
class Traffic:
    """The memory traffic of one instruction, or many; addable.

    Attributes:
        global_requests: warp instructions to device memory with at least one lane.
        global_sectors: 32-byte sectors that they touched, counted for each instruction.
        global_bytes: bytes that the lanes accessed, counted for each lane.
        shared_requests: warp instructions to shared memory.
        shared_wavefronts: how often the banks were used for them.
        shared_ideal: how often without any conflict.
        shared_bytes: as global_bytes.
    """

    global_requests: int = 0
    global_sectors: int = 0
    global_bytes: int = 0
    shared_requests: int = 0
    shared_wavefronts: int = 0
    shared_ideal: int = 0
    shared_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    @property
    def sector_efficiency(self) -> float:
        """Bytes accessed over bytes of the sectors touched; above 1 where lanes share bytes."""
        return self.global_bytes / (32 * self.global_sectors) if self.global_sectors else 1.0

    @property
    def bank_conflicts(self) -> int:
        return self.shared_wavefronts - self.shared_ideal


def traffic_of(fields: Sequence[int]) -> dict[int, Traffic]:
    """Flat counters of a launch → instruction index: Traffic, without the instructions that moved no data."""
    found = {}
    for site in range(len(fields) // TRAFFIC_FIELDS):
        numbers = [int(value) for value in fields[site * TRAFFIC_FIELDS : (site + 1) * TRAFFIC_FIELDS - 1]]
        if any(numbers):
            found[site] = Traffic(*numbers)
    return found


@njit
def count_access(warp, site, mask, places, blocks, size):
    """Counts one warp instruction. `places`: host address of each lane; `blocks`: 0 for device memory, a block array's
    address for shared memory, negative for neither; `size`: bytes a lane."""
    launch = i64_at(warp[WARP_LAUNCH])
    if launch[LAUNCH_TRAFFIC] == 0 or mask == 0:
        return
    fields = i64_at(launch[LAUNCH_TRAFFIC] + site * (TRAFFIC_FIELDS * 8))
    sectors, lanes = 0, 0
    seen = stack_longs(32)
    for lane in range(32):
        if (mask >> lane) & 1 and blocks[lane] == 0:
            lanes += 1
            sector, index = places[lane] >> 5, sectors - 1
            while index >= 0 and seen[index] != sector:
                index -= 1
            if index < 0:
                seen[sectors] = sector
                sectors += 1
    if lanes:
        fields[GLOBAL_REQUESTS] += 1
        fields[GLOBAL_SECTORS] += sectors
        fields[GLOBAL_BYTES] += lanes * size
    _count_shared(fields, mask, places, blocks, size)


@njit
def _count_shared(fields, mask, places, blocks, size):
    group = 32 if size <= 4 else 128 // size  # lanes served together
    words = max(1, size // 4)
    depths, wanted = stack_longs(32), stack_longs(1024)  # of each bank: how many words, and which
    total = 0
    for first in range(0, 32, group):
        deepest, lanes = 0, 0
        for bank in range(32):
            depths[bank] = 0
        for lane in range(first, first + group):
            if (mask >> lane) & 1 and blocks[lane] > 0:
                lanes += 1
                start = (places[lane] - i64_at(blocks[lane])[BLOCK_SHARED]) >> 2
                for word in range(start, start + words):
                    deepest = max(deepest, _want(depths, wanted, word, blocks[lane]))
        if lanes:
            fields[SHARED_WAVEFRONTS] += deepest
            fields[SHARED_IDEAL] += 1
            total += lanes
    if total:
        fields[SHARED_REQUESTS] += 1
        fields[SHARED_BYTES] += total * size


@njit
def _want(depths, wanted, word, block_address):
    """Notes an access to a word of a block's shared memory; returns how many words of its bank are accessed."""
    bank, name = word & 31, word + (block_address << 13)
    depth = depths[bank]
    for index in range(depth):
        if wanted[bank * 32 + index] == name:
            return depth
    wanted[bank * 32 + depth] = name
    depths[bank] = depth + 1
    return depth + 1
