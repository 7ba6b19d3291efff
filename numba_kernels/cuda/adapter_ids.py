"""The numbers of adapters' experts, or of their tables' rows: each adapter has as many of them as the model.

    out[t, j] = (adapters[t] - first) each + ids[t, j], or none where that is not one of num_adapters

Sizes are those of a batch: bound by the launch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from numba import cuda, types, uint32, uint64

from numba_kernels.cuda.intrinsics.math import divide_u32
from numba_kernels.cuda.intrinsics.memory import load_b32, store_b32
from numba_kernels.cuda.intrinsics.sync import launch_dependents, wait_for_previous_grid
from numba_kernels.cuda.specialisation import Launch, Specialisation

THREADS = 256


@functools.cache
def _adapter_ids() -> Specialisation:
    """Arguments: see `plan`."""

    @cuda.jit
    def adapter_ids(adapters, ids, out, count, top_k, first, num_adapters, each, none):
        wait_for_previous_grid()
        launch_dependents()
        index = uint32(uint32(cuda.blockIdx.x) * uint32(THREADS) + uint32(cuda.threadIdx.x))
        if index < count:
            adapter = uint32(load_b32(adapters + uint64(divide_u32(index, top_k)) * uint64(4)) - first)
            own = load_b32(ids + uint64(index) * uint64(4))
            found = none
            if adapter < num_adapters and own < each:  # negative ones are large
                found = uint32(adapter * each + own)
            store_b32(out + uint64(index) * uint64(4), found)

    arguments = (types.uint64,) * 3 + (types.uint32,) * 6
    return Specialisation("adapter_ids", adapter_ids, arguments, THREADS)


def plan(count: int) -> Launch:
    """The launch for so many numbers, at least one.

    Arguments: adapters int32 [T], ids int32 [T, k], out int32 [T, k] addresses; T k, k, the first adapter, how many,
    how many numbers each has, and the result for others.
    """
    return Launch(_adapter_ids(), (-(-count // THREADS), 1, 1), (THREADS, 1, 1))


def specialisations() -> Iterator[Specialisation]:
    """The family's one kernel."""
    yield _adapter_ids()
