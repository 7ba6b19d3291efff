"""The blocks that share a row of logits, one or a cluster, and their exchange of results.

Each has a run of the row. Their partial results lie in shared memory, where all blocks read them after a barrier.
Without a cluster a block reads its own.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import cuda, types

from numba_kernels.cuda.intrinsics import cluster, memory
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.sync import sync_block
from numba_kernels.cuda.intrinsics.warp import maximum_u32_of_warp, or_b32, sync_warp

uint32 = types.uint32

THREADS = 512
WARPS = THREADS // 32
MAX_BLOCKS = 8  # of a portable cluster
_ENTRY_BYTES = 16
ENTRIES_BYTES = (WARPS + 1) * _ENTRY_BYTES
"""Shared memory of an exchange."""


@functools.cache
def row_blocks(is_cluster: bool) -> tuple[Any, ...]:
    """Device functions ``rank()``, ``size()``; ``meet()``, a barrier of all threads of all blocks; ``leave()``, at the
    end, so that no block ends while others read its memory; ``read_4(address, rank)`` and ``read_2``: words that it
    left in its shared memory before they met, of the block of that rank."""
    if not is_cluster:
        load_4, load_2 = memory.shared_load_4xb32, memory.shared_load_2xb32
        return (
            device_function(lambda: uint32(0)), device_function(lambda: uint32(1)), sync_block,
            device_function(lambda: None), device_function(lambda address, rank: load_4(address)),
            device_function(lambda address, rank: load_2(address)),
        )  # fmt: skip
    load_4_of, load_2_of, address_in = cluster.load_4xb32, cluster.load_2xb32, cluster.address_in
    release, arrive, wait = cluster.release_shared, cluster.arrive_relaxed, cluster.wait

    @device_function
    def meet():
        release()
        sync_warp()
        arrive()
        wait()

    @device_function
    def leave():
        sync_warp()
        arrive()
        wait()

    return (
        cluster.rank, cluster.size, meet, leave,
        device_function(lambda address, rank: load_4_of(address_in(address, rank))),
        device_function(lambda address, rank: load_2_of(address_in(address, rank))),
    )  # fmt: skip


@device_function
def _best_of_warp(a, b, c, flags):
    best_a = maximum_u32_of_warp(a)
    is_best = a == best_a
    best_b = maximum_u32_of_warp(b if is_best else uint32(0))
    is_best = is_best and b == best_b
    return best_a, best_b, maximum_u32_of_warp(c if is_best else uint32(0)), or_b32(flags)


@functools.cache
def exchange(is_cluster: bool) -> Any:
    """A device function ``(entries, a, b, c, flags)``: of all threads of all blocks the largest (a, b, c), by a, then
    b, then c, and all flags, uint32 each; in every thread. The blocks meet.

    ``entries`` is the address of `ENTRIES_BYTES` of shared memory of its own.
    """
    _, size, meet, _, read_4, _ = row_blocks(is_cluster)
    load_4, store_4 = memory.shared_load_4xb32, memory.shared_store_4xb32

    @device_function
    def exchanged(entries, a, b, c, flags):
        thread = uint32(cuda.threadIdx.x)
        lane, warp = thread & uint32(31), thread >> uint32(5)
        a, b, c, flags = _best_of_warp(a, b, c, flags)
        if lane == uint32(0):
            store_4(uint32(entries + warp * uint32(_ENTRY_BYTES)), (a, b, c, flags))
        sync_block()
        of_block = uint32(entries + uint32(WARPS * _ENTRY_BYTES))
        if warp == uint32(0):
            a, b, c, flags = load_4(uint32(entries + uint32(lane & uint32(WARPS - 1)) * uint32(_ENTRY_BYTES)))
            a, b, c, flags = _best_of_warp(a, b, c, flags)
            if lane == uint32(0):
                store_4(of_block, (a, b, c, flags))
        meet()
        a, b, c, flags = read_4(of_block, uint32(lane & uint32(size() - uint32(1))))
        return _best_of_warp(a, b, c, flags)

    return exchanged
