"""Products of a chunk's keys with its queries and keys, with decays: 16 rows a warp of `chunk_factors`' A and P."""

from __future__ import annotations

import functools
from typing import Any

from numba import cuda, float32, uint32, uint64

from numba_kernels.cuda.intrinsics.convert import pack_bf16, pack_f16
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.math import exp2
from numba_kernels.cuda.intrinsics.memory import shared_load_2xf32, shared_load_f32, shared_store_2xf32, store_4xb32
from numba_kernels.cuda.intrinsics.mma import load_matrix_x4, load_matrix_x4_transposed, product_adder, put_4
from numba_kernels.cuda.recurrent.chunk_inputs import tile_pitch
from numba_kernels.cuda.recurrent.chunk_layout import CHUNK, FRAGMENT, STRIPS, ChunkForm
from numba_kernels.cuda.recurrent.triangular_inverse import PITCH

TILES = CHUNK // 8


@device_function
def own_fragment(warp, strip):
    """The number in a triangle of a warp's strip of rows, and an earlier strip of columns."""
    return uint32(uint32(uint32(warp * uint32(warp + uint32(1))) >> uint32(1)) + strip)


@functools.cache
def key_products(form: ChunkForm) -> Any:
    """A device function ``(products, squares, q_tile, k_tile, place, stores, target)``: a warp's 16 rows of Q K^T and
    K K^T, without the tiles above the diagonal; Q's and K's fragments go to `target`, if it `stores` them."""
    steps, pitch, matrix, has_delta = form.rows // 16, tile_pitch(form.rows), form.matrix, form.has_delta
    add_product = product_adder(form.dtype)

    @device_function
    def multiply(products, squares, q_tile, k_tile, warp, place, stores, target):
        q = cuda.local.array(4, uint32)
        k = cuda.local.array(4, uint32)
        other = cuda.local.array(4, uint32)
        own = uint32(place + warp * uint32(16 * pitch))
        target = target + uint64(uint32(warp * uint32(steps * FRAGMENT)))
        for i in range(TILES):
            for j in range(4):
                products[i, j] = float32(0)
                squares[i, j] = float32(0)
        for step in range(steps):
            put_4(q, load_matrix_x4(uint32(q_tile + own + uint32(step * 32))))
            put_4(k, load_matrix_x4(uint32(k_tile + own + uint32(step * 32))))
            q_four, k_four = (q[0], q[1], q[2], q[3]), (k[0], k[1], k[2], k[3])
            if stores:
                store_4xb32(target + uint64(step * FRAGMENT), (q[0], q[2], q[1], q[3]))
                words = load_matrix_x4_transposed(uint32(k_tile + own + uint32(step * 32)))
                store_4xb32(target + uint64(matrix + step * FRAGMENT), words)
            for pair in range(STRIPS):
                if uint32(pair) <= warp:
                    put_4(other, load_matrix_x4(uint32(k_tile + place + uint32(pair * 16 * pitch + step * 32))))
                    add_product(products[2 * pair], q_four, (other[0], other[2]))
                    add_product(products[2 * pair + 1], q_four, (other[1], other[3]))
                    if has_delta:
                        add_product(squares[2 * pair], k_four, (other[0], other[2]))
                        add_product(squares[2 * pair + 1], k_four, (other[1], other[3]))

    return multiply


@functools.cache
def decayer(form: ChunkForm) -> Any:
    """A device function ``(products, squares, matrix, gates, warp, lane, d, target)``: a warp's 16 rows of A, in shared
    memory, and of P, as fragments."""
    has_delta, pack = form.has_delta, pack_bf16 if form.dtype == "bf16" else pack_f16

    @device_function
    def decay(products, squares, matrix, gates, warp, lane, d, target):
        words = cuda.local.array(4, uint32)
        row = uint32(uint32(warp * uint32(16)) + uint32(lane >> uint32(2)))
        column = uint32(uint32(lane & uint32(3)) * uint32(2))
        for pair in range(STRIPS):
            if uint32(pair) <= uint32(warp | uint32(1)):  # A has zeros in the blocks of 32 of the diagonal
                for h in range(2):
                    i = uint32(row + uint32(8 * h))
                    total = shared_load_f32(uint32(gates + i * uint32(4)))
                    beta = shared_load_f32(uint32(gates + uint32(4 * CHUNK) + i * uint32(4)))
                    for side in range(2):
                        tile = 2 * pair + side
                        j = uint32(column + uint32(8 * tile))
                        at = uint32(gates + j * uint32(4))
                        totals = shared_load_2xf32(at)
                        left, right = float32(0), float32(0)
                        if j <= i:
                            left = exp2(total - totals[0])
                        if j < i:
                            right = exp2(total - totals[1])
                        left_p, right_p = products[tile, 2 * h] * left, products[tile, 2 * h + 1] * right
                        if has_delta:
                            left_a = squares[tile, 2 * h] * left * beta if j < i else float32(0)
                            right_a = float32(0)
                            if uint32(j + uint32(1)) < i:
                                right_a = squares[tile, 2 * h + 1] * right * beta
                            place = uint32(matrix + uint32(i * uint32(PITCH) + j) * uint32(4))
                            shared_store_2xf32(place, (left_a, right_a))
                        else:
                            steps = shared_load_2xf32(uint32(at + uint32(4 * CHUNK)))
                            left_p = left_p * steps[0] + (d if i == j else float32(0))
                            right_p = right_p * steps[1] + (d if i == uint32(j + uint32(1)) else float32(0))
                        words[2 * h + side] = pack(left_p, right_p)
                if uint32(pair) <= warp:
                    fragment = uint64(uint32(own_fragment(warp, uint32(pair)) * uint32(FRAGMENT)))
                    store_4xb32(target + fragment, (words[0], words[1], words[2], words[3]))

    return decay
