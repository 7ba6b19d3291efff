"""The work of a warp of `decode_tensor_core` on one tile of keys and its values.

The queries are columns: S^T = K Q^T and O^T = V^T P^T. A lane's accumulators belong to two neighbouring queries of each
group of 8, and to two keys or columns; `movmatrix` turns scores into the second product's operand.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import cuda, float32, uint32

from numba_kernels.cuda.attention.decode_block import NUM_KEYS, DecodeBlock
from numba_kernels.cuda.attention.online_softmax import MINUS_INFINITY, next_origin, score_scaler, subtract
from numba_kernels.cuda.attention.tiles import Variant, is_hidden
from numba_kernels.cuda.intrinsics.convert import pack_bf16, pack_f16
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.math import exp2
from numba_kernels.cuda.intrinsics.memory import shared_load_f32
from numba_kernels.cuda.intrinsics.mma import (
    load_matrix_x2,
    load_matrix_x4,
    load_matrix_x4_transposed,
    product_adder,
    put_4,
    transpose_matrix,
)
from numba_kernels.cuda.intrinsics.warp import maximum_f32, or_b32, shuffle_xor_f32
from numba_kernels.cuda.quantised_pages import fragment_unpacker, page_factor


@functools.cache
def query_keeper(block: DecodeBlock) -> tuple[Any, Any]:
    """``keep(queries, place)`` loads a block's queries, rows of 8 and halves of a step, from the shared address
    `place`, if registers have room; ``pair(queries, place, step, n)`` gives the operand of a step and group."""
    steps, groups, pitch, keeps = block.steps, block.groups, block.pitch, block.keeps_queries

    @device_function
    def keep(queries, place):
        if keeps:
            for step in range(steps):
                for n in range(groups):
                    a, b = load_matrix_x2(uint32(place + uint32(n * 8 * pitch + step * 32)))
                    queries[step, n, 0] = a
                    queries[step, n, 1] = b

    if keeps:
        return keep, device_function(lambda queries, place, step, n: (queries[step, n, 0], queries[step, n, 1]))
    read = device_function(
        lambda queries, place, step, n: load_matrix_x2(uint32(place + uint32(n * 8 * pitch + step * 32)))
    )
    return keep, read


@functools.cache
def tile_scorer(block: DecodeBlock, variant: Variant) -> Any:
    """``score(scores, queries, query_place, k_tile, key_place, below, scale)``: a tile's scores, in units of log 2."""
    steps, groups, pages = block.steps, block.groups, block.pages
    step_pairs = -(-steps // 2)  # steps of bytes, which are loaded two at a time
    scales_offset = NUM_KEYS * block.key_pitch
    unpack, factor = fragment_unpacker(pages or "s8", block.dtype, 4), float32(1)
    if pages:
        factor = float32(page_factor(pages, block.dtype))
    pair_of, add_product, scaled = query_keeper(block)[1], product_adder(block.dtype), score_scaler(variant.softcap)

    @device_function
    def score(scores, queries, query_place, k_tile, key_place, below, scale):
        for n in range(groups):
            for j in range(4):
                scores[n, j] = float32(0)
        for step in range(steps):
            keys = load_matrix_x4(uint32(k_tile + key_place + uint32(step * 32)))
            for n in range(groups):
                pair = pair_of(queries, query_place, step, n)
                add_product(scores[n], keys, pair)
        for n in range(groups):
            for j in range(4):
                scores[n, j] = scaled(scores[n, j], scale)

    @device_function
    def score_bytes(scores, queries, query_place, k_tile, key_place, below, scale):
        words = cuda.local.array(4, uint32)
        pairs = cuda.local.array(8, uint32)
        room = cuda.local.array(1, uint32)
        for n in range(groups):
            for j in range(4):
                scores[n, j] = float32(0)
        for two in range(step_pairs):
            put_4(words, load_matrix_x4(uint32(k_tile + key_place + uint32(two * 32))))
            unpack(pairs, words, room)
            for side in range(2):
                step = 2 * two + side  # of an odd number of steps the last one's other half is none
                if step < steps:
                    keys = pairs[4 * side], pairs[4 * side + 2], pairs[4 * side + 1], pairs[4 * side + 3]
                    for n in range(groups):
                        pair = pair_of(queries, query_place, step, n)
                        add_product(scores[n], keys, pair)
        for side in range(2):
            place = uint32(k_tile + uint32(scales_offset + 32 * side) + below * uint32(4))
            key_scale = shared_load_f32(place) * factor * scale
            for n in range(groups):
                for j in range(2):
                    scores[n, 2 * side + j] = scaled(scores[n, 2 * side + j], key_scale)

    return score_bytes if pages else score


@functools.cache
def tile_softmax(block: DecodeBlock, has_window: bool) -> Any:
    """``soften(scores, results, ends, key, below, window)``: scores become weights, of hidden ones 0; `results`, the
    sums and the rows' largest scores and totals, go on. `ends` are the rows' own, the shortest, and the longest."""
    steps, groups, hidden = block.steps, block.groups, is_hidden(has_window)

    @device_function
    def hide(scores, ends, key, below, window):
        for n in range(groups):
            for j in range(2):
                if hidden(uint32(key + below), ends[n, j], window):
                    scores[n, j] = MINUS_INFINITY
                if hidden(uint32(key + below + uint32(8)), ends[n, j], window):
                    scores[n, 2 + j] = MINUS_INFINITY

    @device_function
    def soften(scores, results, ends, key, below, window):
        (sums, maxima, totals), (own_ends, shortest_end, longest_end) = results, ends
        factors = cuda.local.array((groups, 2), float32)
        if uint32(key + uint32(NUM_KEYS)) > shortest_end or (has_window and uint32(key + window) < longest_end):
            hide(scores, own_ends, key, below, window)
        is_larger = uint32(0)
        for n in range(groups):
            for j in range(2):
                largest = maximum_f32(maxima[n, j], maximum_f32(scores[n, j], scores[n, 2 + j]))
                largest = maximum_f32(largest, shuffle_xor_f32(largest, uint32(4)))
                largest = maximum_f32(largest, shuffle_xor_f32(largest, uint32(8)))
                largest = maximum_f32(largest, shuffle_xor_f32(largest, uint32(16)))
                origin, factors[n, j], is_larger = next_origin(largest, maxima[n, j], is_larger)
                maxima[n, j] = largest
                scores[n, j] = exp2(subtract(scores[n, j], origin))
                scores[n, 2 + j] = exp2(subtract(scores[n, 2 + j], origin))
                totals[n, j] = totals[n, j] * factors[n, j] + (scores[n, j] + scores[n, 2 + j])
        if or_b32(is_larger) != uint32(0):
            for i in range(steps):
                for n in range(groups):
                    for j in range(4):
                        sums[i, n, j] = sums[i, n, j] * factors[n, j % 2]

    return soften


@functools.cache
def value_adder(block: DecodeBlock) -> Any:
    """``add(sums, scores, v_tile, value_place, below)``: the weighted values of a tile."""
    steps, groups, pages = block.steps, block.groups, block.pages
    step_pairs = -(-steps // 2)
    scales_offset = NUM_KEYS * block.key_pitch
    unpack, factor = fragment_unpacker(pages or "s8", block.dtype, 4), float32(1)
    if pages:
        factor = float32(page_factor(pages, block.dtype))
    add_product, pack = product_adder(block.dtype), pack_bf16 if block.dtype == "bf16" else pack_f16

    @device_function
    def add(sums, scores, v_tile, value_place, below):
        weights = cuda.local.array((groups, 2), uint32)
        for n in range(groups):
            weights[n, 0] = transpose_matrix(pack(scores[n, 0], scores[n, 1]))
            weights[n, 1] = transpose_matrix(pack(scores[n, 2], scores[n, 3]))
        for i in range(steps):
            v = load_matrix_x4_transposed(uint32(v_tile + value_place + uint32(i * 32)))
            for n in range(groups):
                add_product(sums[i, n], v, (weights[n, 0], weights[n, 1]))

    @device_function
    def add_bytes(sums, scores, v_tile, value_place, below):
        words = cuda.local.array(4, uint32)
        pairs = cuda.local.array(8, uint32)
        room = cuda.local.array(1, uint32)
        weights = cuda.local.array((groups, 2), uint32)
        place = uint32(v_tile + uint32(scales_offset) + below * uint32(4))
        upper = shared_load_f32(place) * factor
        lower = shared_load_f32(uint32(place + uint32(32))) * factor
        for n in range(groups):
            weights[n, 0] = transpose_matrix(pack(scores[n, 0] * upper, scores[n, 1] * upper))
            weights[n, 1] = transpose_matrix(pack(scores[n, 2] * lower, scores[n, 3] * lower))
        for two in range(step_pairs):
            put_4(words, load_matrix_x4_transposed(uint32(v_tile + value_place + uint32(two * 32))))
            unpack(pairs, words, room)
            for side in range(2):
                i = 2 * two + side
                if i < steps:
                    v = pairs[4 * side], pairs[4 * side + 1], pairs[4 * side + 2], pairs[4 * side + 3]
                    for n in range(groups):
                        add_product(sums[i, n], v, (weights[n, 0], weights[n, 1]))

    return add_bytes if pages else add
