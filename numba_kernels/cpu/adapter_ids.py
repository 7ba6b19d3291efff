"""The numbers of adapters' experts, or of their tables' rows: each adapter has as many of them as the model."""

from __future__ import annotations

import functools

from numba import carray

from numba_kernels.cpu.running.launch import Fields, Kernel, int32_at

FIELDS = Fields("*adapters *ids *out num_rows top_k num_adapters each none")


@functools.cache
def adapter_ids_kernel() -> Kernel:
    """``out [T, k] = adapters[t] * each + ids[t, j]``, or ``none`` where the adapter is not one of ``num_adapters``.
    All int32; one work item."""

    def adapter_ids(arguments, work_item):
        a = carray(arguments, 1)[0]
        count = a.num_rows * a.top_k
        adapters, ids, out = int32_at(a.adapters, a.num_rows), int32_at(a.ids, count), int32_at(a.out, count)
        for row in range(a.num_rows):
            adapter = adapters[row]
            for place in range(row * a.top_k, (row + 1) * a.top_k):
                out[place] = a.none
                if adapter >= 0 and adapter < a.num_adapters and ids[place] >= 0 and ids[place] < a.each:
                    out[place] = adapter * a.each + ids[place]

    return Kernel(adapter_ids, FIELDS)
