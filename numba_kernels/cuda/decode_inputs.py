"""Completes a decode step's inputs on the device: tokens that only the device has, and changes of block tables.

A decode graph reads its inputs at fixed addresses. One copy uploads the changes of each step. This kernel, the graph's
first, then

    writes   tables[places[i]] = blocks[i]                 for the entries that were added since the last step
    takes    token_ids[t] = drawn[sources[t]]              where sources[t] is not negative

so that block tables go up once, entry by entry, and a step may be launched before the host has the previous step's
tokens (overlapped steps). A failed draw (-1) is taken as token 0: its sequence ends, and the result is dropped.

Sizes are those of a batch: bound by the launch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from numba import cuda, int32, types, uint32, uint64

from numba_kernels.cuda.intrinsics.memory import load_b32, store_b32
from numba_kernels.cuda.specialisation import Launch, Specialisation

THREADS = 256
BLOCKS = 8  # enough for a batch that is new as a whole: 2,048 entries at a time


@functools.cache
def _decode_inputs() -> Specialisation:
    """Arguments: see `plan`."""

    @cuda.jit
    def decode_inputs(changes, num_changes, tables, sources, sampled, token_ids, num_tokens):
        thread = uint32(uint32(cuda.blockIdx.x) * uint32(THREADS) + uint32(cuda.threadIdx.x))
        stride = uint32(uint32(cuda.gridDim.x) * uint32(THREADS))
        count = load_b32(num_changes)
        index = thread
        while index < count:
            change = changes + uint64(index) * uint64(8)
            store_b32(tables + uint64(load_b32(change)) * uint64(4), load_b32(change + uint64(4)))
            index = uint32(index + stride)
        index = thread
        while index < num_tokens:
            source = load_b32(sources + uint64(index) * uint64(4))
            if int32(source) >= int32(0):
                token = load_b32(sampled + uint64(source) * uint64(4))
                if int32(token) < int32(0):
                    token = uint32(0)
                store_b32(token_ids + uint64(index) * uint64(4), token)
            index = uint32(index + stride)

    arguments = (types.uint64,) * 6 + (types.uint32,)
    return Specialisation("decode_inputs", decode_inputs, arguments, THREADS)


def plan() -> Launch:
    """The launch for any batch.

    Arguments, all addresses but the last: changes int32 [n, 2] (entry of the tables, block), their number n int32 [1],
    tables int32 [entries], sources int32 [num_tokens], drawn int32, token_ids int32 [num_tokens], num_tokens.
    """
    return Launch(_decode_inputs(), (BLOCKS, 1, 1), (THREADS, 1, 1))


def specialisations() -> Iterator[Specialisation]:
    """The family's one kernel."""
    yield _decode_inputs()
