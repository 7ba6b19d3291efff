"""Which tier a product takes where nothing has been measured: the one that a small model expects to be the fastest.

A tier takes at least as long as memory needs for its bytes, as the second-level cache needs for what its blocks read
anew, as the arithmetic units need for its work, padding included, and as the weight's bytes need that its blocks can
have on their way at once (Little's law).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from numba_kernels.cuda.gemm import few_rows, gemv, hopper
from numba_kernels.cuda.intrinsics.element import ITEM_BYTES

HOPPER_ROWS = 17  # from so many on wgmma may be the fastest, where there is one
HOPPER_CLOCK, HOPPER_MULTIPROCESSORS = 1.7e9, 132


@dataclass(frozen=True, slots=True)
class Machine:
    """What an architecture's product with the most bandwidth does in a second.

    Attributes:
        memory_bytes, cache_bytes: read from device memory, and from the second-level cache.
        tensor_flops: by `mma.sync` of 16-bit factors.
        float_flops: float32 multiply-adds, two each.
    """

    memory_bytes: float
    cache_bytes: float
    tensor_flops: float
    float_flops: float


MACHINES = {
    "sm_80": Machine(2.0e12, 4.5e12, 312e12, 19.5e12),
    "sm_86": Machine(0.94e12, 3.0e12, 71e12, 35.6e12),
    "sm_89": Machine(1.0e12, 5.0e12, 165e12, 82.6e12),
    "sm_90a": Machine(4.8e12, 6.5e12, 600e12, 67e12),
    "sm_100a": Machine(8.0e12, 10e12, 600e12, 80e12),
    "sm_120a": Machine(1.8e12, 6.0e12, 210e12, 105e12),
}
"""Data sheets; the caches, and `mma.sync` on Hopper and Blackwell, are estimates."""

LATENCY_S = 0.8e-6  # of device memory under load
_TILE = 64  # rows and columns of the tensor_core tier's small tile
_TILE_BYTES = 16 << 10  # of the weight, that such a tile's block has on its way: two stages
_FEW_ROWS_BYTES = 64 << 10  # and a block of few_rows: 8 warps of 16 loads


@functools.lru_cache(maxsize=1 << 14)
def choose(m: int, n: int, k: int, dtype: str, arch: str) -> str:
    """The tier for ``y[m, n]`` and a weight [n, k], rows on 16-byte bounds, all sizes at least 1, no bits prescribed.

    An architecture that is not in the table is taken for sm_80. Of tiers that are equal, the one that comes first.
    """
    can_wgmma = arch == hopper.ARCH and m >= HOPPER_ROWS and dtype != "f32"
    if m > few_rows.MAX_ROWS or dtype == "f32":
        if m <= gemv.MAX_ROWS[dtype]:
            return "gemv"
        return "hopper" if can_wgmma else "tensor_core"
    machine, size = MACHINES.get(arch, MACHINES["sm_80"]), ITEM_BYTES[dtype]
    weight = size * n * k
    least = (weight + size * (m * k + m * n)) / machine.memory_bytes
    block_columns = few_rows.COLUMNS * few_rows.BLOCK_WARPS // few_rows.split(n, k)
    times = {
        "gemv": n * k * 2 * (m + 1) / machine.float_flops if m <= gemv.MAX_ROWS[dtype] else float("inf"),
        "few_rows": max(
            2 * n * k * -(-m // 16) * 16 / machine.tensor_flops,
            weight * (1 + m / block_columns) / machine.cache_bytes,
            LATENCY_S * weight / (-(-n // block_columns) * _FEW_ROWS_BYTES),
        ),
        "tensor_core": max(
            2 * n * k * -(-m // _TILE) * _TILE / machine.tensor_flops,
            weight * 2 / machine.cache_bytes,
            LATENCY_S * weight / (-(-n // _TILE) * -(-m // _TILE) * _TILE_BYTES),
        ),
    }  # fmt: skip
    if can_wgmma:
        option = hopper.choose(m, n, k, HOPPER_MULTIPROCESSORS, exact=False)
        times["hopper"] = hopper.cycles(*option, m, n, k, HOPPER_MULTIPROCESSORS) / HOPPER_CLOCK
    return min(times, key=lambda tier: max(times[tier], least))
