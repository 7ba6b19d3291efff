"""Completes the inputs of a recorded decode step: block tables that have grown, tokens that lie in another array.

The writers of places and sources have checked them.
"""

from __future__ import annotations

import functools

from numba import carray

from numba_kernels.cpu.running.launch import Fields, Kernel, int32_at

FIELDS = Fields("*changes *num_changes *tables *sources *sampled *token_ids num_tokens table_entries num_sampled")


@functools.cache
def decode_inputs_kernel() -> Kernel:
    """``tables`` gets the ``num_changes [1]`` pairs (entry, value) of ``changes``; ``token_ids [num_tokens]`` get
    ``sampled[sources]`` where sources are not negative. All int32; one work item."""

    def decode_inputs(arguments, work_item):
        a = carray(arguments, 1)[0]
        num_changes = int32_at(a.num_changes, 1)[0]
        changes = int32_at(a.changes, 2 * num_changes)
        tables = int32_at(a.tables, a.table_entries)
        for i in range(num_changes):
            tables[changes[2 * i]] = changes[2 * i + 1]
        sources, sampled = int32_at(a.sources, a.num_tokens), int32_at(a.sampled, a.num_sampled)
        token_ids = int32_at(a.token_ids, a.num_tokens)
        for i in range(a.num_tokens):
            if sources[i] >= 0:
                token_ids[i] = sampled[sources[i]]

    return Kernel(decode_inputs, FIELDS)
