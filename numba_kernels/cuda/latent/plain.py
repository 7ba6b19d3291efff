"""Latent attention in float32 arithmetic, for any rows.

A block takes one query and up to HEADS heads, with which it goes over the keys KEYS at a time. Each thread has one
score of a tile, then some columns of all heads' sums, so a row is read from memory once for these heads. A long
sequence is one block's; a row's bits depend on its token alone.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import cuda, float32, types, uint32, uint64

from numba_kernels.cuda.attention.online_softmax import (
    MINUS_INFINITY,
    group_max,
    group_sum,
    origin_of,
    reciprocal_of,
    subtract,
)
from numba_kernels.cuda.attention.tiles import visible_end
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import element_loader, elements_storer
from numba_kernels.cuda.intrinsics.element_types import ITEM_BYTES
from numba_kernels.cuda.intrinsics.math import exp2
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import maximum_f32
from numba_kernels.cuda.kv_cache import page_row
from numba_kernels.cuda.latent.rows import byte_row_loader
from numba_kernels.cuda.specialisation import Specialisation
from numba_kernels.latent_rows import LatentBytes

THREADS = 128
HEADS, KEYS = 8, 16  # of a tile of scores: one a thread
MAX_WIDTH = 1024  # queries of HEADS heads take 33 KB of shared memory


@functools.cache
def _row_loader(dtype: str) -> Any:
    load, item = element_loader(dtype), uint64(ITEM_BYTES[dtype])

    @device_function
    def load_number(row, column):
        return load(row + uint64(column) * item)

    return load_number


@functools.cache
def latent_float32(dtype: str, width: int, value_dim: int, block_size: int, pages: str = "") -> Specialisation:
    """Arguments: see `planning.LatentPlan.arguments`."""
    load, store = element_loader(dtype), elements_storer(dtype, 1)
    item, first_value = uint64(ITEM_BYTES[dtype]), width - value_dim
    row_bytes = LatentBytes(width, value_dim).row_bytes if pages else page_row(width) * ITEM_BYTES[dtype]
    load_number = byte_row_loader(width, value_dim, pages) if pages else _row_loader(dtype)
    rounds = -(-value_dim // THREADS)
    pitch = width | 1  # so that two heads' numbers lie in different banks
    query_size, num_scores = HEADS * pitch, HEADS * KEYS

    @cuda.jit
    def latent_attention(
        q, pages, out, query_start, seq_lens, block_tables, num_heads, table_width, scale
    ):  # fmt: skip
        queries = cuda.shared.array(query_size, float32)
        weights = cuda.shared.array(num_scores, float32)
        factors = cuda.shared.array(HEADS, float32)
        sums = cuda.local.array((HEADS, rounds), float32)
        value = cuda.local.array(1, float32)
        wait_for_previous_grid()
        launch_dependents()
        token, seq, thread = uint32(cuda.blockIdx.x), uint32(cuda.blockIdx.z), uint32(cuda.threadIdx.x)
        first_head = uint32(uint32(cuda.blockIdx.y) * uint32(HEADS))
        first_token = uint32(query_start[seq])
        query_len = uint32(uint32(query_start[uint32(seq + uint32(1))]) - first_token)
        if token >= query_len:
            return
        end = visible_end(uint32(seq_lens[seq]), query_len, token)
        row = uint64(uint32(first_token + token)) * uint64(num_heads) + uint64(first_head)
        table = uint64(seq) * uint64(table_width)
        index = thread
        while index < uint32(HEADS * width):
            number = float32(0)
            head = uint32(index // uint32(width))
            if uint32(first_head + head) < num_heads:
                number = load(q + (row * uint64(width) + uint64(index)) * item) * scale
            queries[uint32(index + head * uint32(pitch - width))] = number
            index = uint32(index + uint32(THREADS))
        for head in range(HEADS):
            for part in range(rounds):
                sums[head, part] = float32(0)
        own_head, own_key = uint32(thread // uint32(KEYS)), uint32(thread % uint32(KEYS))
        largest, total = MINUS_INFINITY, float32(0)
        sync_block()
        tile = uint32(0)
        while tile < end:
            key = uint32(tile + own_key)
            score = MINUS_INFINITY
            if key < end:
                block = uint32(block_tables[table + uint64(key // uint32(block_size))])
                slot = uint64(block) * uint64(block_size) + uint64(key % uint32(block_size))
                place = pages + slot * uint64(row_bytes)
                score = float32(0)
                column = uint32(0)
                while column < uint32(width):
                    score += queries[uint32(own_head * uint32(pitch) + column)] * load_number(place, column)
                    column = uint32(column + uint32(1))
            before = largest
            largest = maximum_f32(largest, group_max(score, KEYS))
            origin = origin_of(largest)
            weight = exp2(subtract(score, origin))
            factor = exp2(subtract(before, origin))
            total = total * factor + group_sum(weight, KEYS)
            weights[thread] = weight
            if own_key == uint32(0):
                factors[own_head] = factor
            sync_block()
            for head in range(HEADS):
                for part in range(rounds):
                    sums[head, part] = sums[head, part] * factors[head]
            key = uint32(0)
            while key < uint32(KEYS) and uint32(tile + key) < end:
                position = uint32(tile + key)
                block = uint32(block_tables[table + uint64(position // uint32(block_size))])
                slot = uint64(block) * uint64(block_size) + uint64(position % uint32(block_size))
                place = pages + slot * uint64(row_bytes)
                for part in range(rounds):
                    own = uint32(thread + uint32(part * THREADS))
                    if own < uint32(value_dim):
                        number = load_number(place, uint32(own + uint32(first_value)))
                        for head in range(HEADS):
                            sums[head, part] += weights[uint32(uint32(head * KEYS) + key)] * number
                key = uint32(key + uint32(1))
            sync_block()
            tile = uint32(tile + uint32(KEYS))
        if own_key == uint32(0):
            factors[own_head] = reciprocal_of(total)
        sync_block()
        for head in range(HEADS):
            if uint32(first_head + uint32(head)) < num_heads:
                for part in range(rounds):
                    own = uint32(thread + uint32(part * THREADS))
                    if own < uint32(value_dim):
                        value[0] = sums[head, part] * factors[head]
                        store(out + ((row + uint64(head)) * uint64(value_dim) + uint64(own)) * item, value)

    name = f"latent_float32_{dtype}_w{width}_v{value_dim}_b{block_size}{f'_{pages}' if pages else ''}"
    constants = {
        "dtype": dtype, "width": width, "value_dim": value_dim, "block_size": block_size, "pages": pages,
    }  # fmt: skip
    pointer = types.CPointer(types.int32)
    argument_types = (*(types.uint64,) * 3, pointer, pointer, pointer, types.uint32, types.uint32, types.float32)
    return Specialisation(name, latent_attention, argument_types, THREADS, constants=constants)
