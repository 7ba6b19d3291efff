"""The inputs of a chunk of the chunk form: its tokens' convolved rows, as tiles of 16 bits in shared memory, and gates.

A thread slides over the tokens of 8 neighbouring channels, whose raw rows go from memory to registers. Tokens after a
sequence's last one count as zeros, with decay 1.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import cuda, float32, uint32, uint64

from numba_kernels.cuda.intrinsics.convert import (
    bits_from_f32,
    f32_from_bits,
    pack_bf16,
    pack_f16,
    unpack_bf16,
    unpack_f16,
)
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import element_loader
from numba_kernels.cuda.intrinsics.math import exp2, fma, reciprocal_sqrt, sigmoid
from numba_kernels.cuda.intrinsics.memory import (
    load_4xb32,
    load_4xf32,
    load_f32,
    shared_store_2xf32,
    shared_store_4xb32,
    store_4xb32,
)
from numba_kernels.cuda.intrinsics.mma import put_4
from numba_kernels.cuda.intrinsics.warp import lane_index, shuffle_index_f32, shuffle_up_b32, shuffle_xor_f32
from numba_kernels.cuda.recurrent.chunk import silu, softplus
from numba_kernels.cuda.recurrent.chunk_layout import CHUNK

THREADS = 128
LOG2_E = 1.4426950408889634
GATES_BYTES = 3 * 4 * CHUNK
"""Shared memory of a value head's gates."""


def tile_pitch(size: int) -> int:
    """Bytes of a tile's row of so many elements: an odd number of 16-byte pieces, so that 8 rows lie in different
    banks."""
    return (size // 8 | 1) * 16


@functools.cache
def row_finder(taps: int) -> Any:
    """A device function ``(row, channel, tokens, rows) -> address``, 0 for zeros: of the raw inputs of token ``row -
    (taps - 1)`` of a sequence, pending ones first.

    ``tokens``: `chunk_layout.sequence_of`'s; ``rows``: x, the pages' inputs, rows of a page, channels, elements of x's
    rows, x's column of channel 0."""

    @device_function
    def find(row, channel, tokens, rows):
        first_token, num_pending, num_tokens, position, read_page, _ = tokens
        x, inputs, page_rows, channels, stride, first_column = rows
        address = uint64(0)
        of_page = uint32(num_pending + uint32(taps - 1))
        if row < of_page:
            if position > uint32(0):
                at = (read_page * uint64(page_rows) + uint64(row)) * uint64(channels) + uint64(channel)
                address = inputs + at * uint64(2)
        elif row < uint32(num_tokens + uint32(taps - 1)):
            token = uint32(first_token + uint32(row - of_page))
            address = x + (uint64(token) * uint64(stride) + uint64(uint32(first_column + channel))) * uint64(2)
        return address

    return find


@functools.cache
def tail_keeper(taps: int) -> Any:
    """A device function ``(channel, pieces, thread, tokens, rows)`` for all threads: the last ``taps - 1`` raw rows of
    a sequence go to the page that it writes, so many pieces of 8 channels."""
    find = row_finder(taps)

    @device_function
    def keep(channel, pieces, thread, tokens, rows):
        _, _, num_tokens, _, _, write_page = tokens
        _, inputs, page_rows, channels, _, _ = rows
        words = cuda.local.array(4, uint32)
        index = thread
        while index < uint32(pieces * uint32(taps - 1)):
            row = uint32(index // pieces)
            own = uint32(channel + uint32(index - row * pieces) * uint32(8))
            for i in range(4):
                words[i] = uint32(0)
            address = find(uint32(num_tokens + row), own, tokens, rows)
            if address != uint64(0):
                put_4(words, load_4xb32(address))
            at = (write_page * uint64(page_rows) + uint64(row)) * uint64(channels) + uint64(own)
            store_4xb32(inputs + at * uint64(2), (words[0], words[1], words[2], words[3]))
            index = uint32(index + uint32(THREADS))

    return keep


@functools.cache
def slider(dtype: str, taps: int, has_bias: bool, norm_lanes: int) -> Any:
    """A device function ``(target, pitch, (token, count), channel, factor, (conv, bias), tokens, rows)``: SiLU of the
    convolution of 8 channels goes to the shared address `target`, for `count` tokens from `token` on.

    With `norm_lanes`, so many neighbouring lanes have a head's channels, and its row becomes of length `factor`."""
    unpack, pack = (unpack_bf16, pack_bf16) if dtype == "bf16" else (unpack_f16, pack_f16)
    find, window_size = row_finder(taps), 8 * taps

    @device_function
    def push(window, address):
        words = cuda.local.array(4, uint32)
        for i in range(8 * (taps - 1)):
            window[i] = window[i + 8]
        for i in range(4):
            words[i] = uint32(0)
        if address != uint64(0):
            put_4(words, load_4xb32(address))
        for i in range(4):
            low, high = unpack(words[i])
            window[8 * (taps - 1) + 2 * i] = low
            window[8 * (taps - 1) + 2 * i + 1] = high

    @device_function
    def slide(target, pitch, span, channel, factor, filters, tokens, rows):
        (token, count), (conv, bias), (_, _, num_tokens, _, _, _) = span, filters, tokens
        window = cuda.local.array(window_size, float32)
        weights = cuda.local.array(window_size, float32)
        biases = cuda.local.array(8, float32)
        result = cuda.local.array(8, float32)
        for i in range(2 * taps):
            a, b, c, d = load_4xf32(conv + uint64(channel) * uint64(4 * taps) + uint64(16 * i))
            weights[4 * i] = a
            weights[4 * i + 1] = b
            weights[4 * i + 2] = c
            weights[4 * i + 3] = d
        for i in range(8):
            biases[i] = float32(0)
            if has_bias:
                biases[i] = load_f32(bias + uint64(channel) * uint64(4) + uint64(4 * i))
        for i in range(window_size):
            window[i] = float32(0)
        for tap in range(taps - 1):
            push(window, find(uint32(token + uint32(tap)), channel, tokens, rows))
        end = uint32(token + count)
        while token < end:
            push(window, find(uint32(token + uint32(taps - 1)), channel, tokens, rows))
            squares = float32(0)
            for i in range(8):
                total = biases[i]
                for tap in range(taps):
                    total = fma(window[8 * tap + i], weights[taps * i + tap], total)
                result[i] = silu(total)
                squares = fma(result[i], result[i], squares)
            own_factor = factor
            if norm_lanes:
                distance = uint32(1)
                while distance < uint32(norm_lanes):
                    squares += shuffle_xor_f32(squares, distance)
                    distance = uint32(distance << uint32(1))
                own_factor = factor * reciprocal_sqrt(squares + float32(1e-6))
            if token >= num_tokens:
                own_factor = float32(0)
            for i in range(8):
                result[i] = result[i] * own_factor
            a, b = pack(result[0], result[1]), pack(result[2], result[3])
            c, d = pack(result[4], result[5]), pack(result[6], result[7])
            shared_store_4xb32(target, (a, b, c, d))
            target = uint32(target + pitch)
            token = uint32(token + uint32(1))

    return slide


@functools.cache
def gate_maker(dtype: str, has_delta: bool) -> Any:
    """A device function ``(target, first, head, x, tokens, gate_fields, weights, limits)`` for a warp: the gates of a
    value head's tokens from `first` on, to three shared arrays of 64 float32: G times log2 e; beta or dt; and
    e^(G_last - G), for Mamba-2 times dt.

    ``gate_fields``: the pages' gates, pending rows, x's column of gates, value heads, elements of x's rows;
    ``weights``: a and dt_bias; ``limits`` of dt."""
    load = element_loader(dtype)
    gates_of_head = 2 if has_delta else 1

    @device_function
    def gate(token, head, x, tokens, gate_fields, a, bias, limits):
        """The log2 of a token's decay, and beta or dt."""
        first_token, num_pending, num_tokens, _, read_page, _ = tokens
        gates, pending, column, value_heads, stride = gate_fields
        decay, factor = float32(0), float32(0)
        if token < num_tokens:
            row = uint64(uint32(uint32(first_token + token) - num_pending))
            address = x + (row * uint64(stride) + uint64(column)) * uint64(2)
            if token < num_pending:
                row = read_page * uint64(pending) + uint64(token)
                address = gates + row * uint64(value_heads) * uint64(2 * gates_of_head)
            address = address + uint64(head) * uint64(2)
            if has_delta:
                factor = sigmoid(load(address))
                decay = a * softplus(load(address + uint64(value_heads) * uint64(2)) + bias)
            else:
                factor = softplus(load(address) + bias)
                factor = limits[0] if factor < limits[0] else factor
                factor = limits[1] if factor > limits[1] else factor
                decay = a * factor
        return decay * float32(LOG2_E), factor

    @device_function
    def make(target, first, head, x, tokens, gate_fields, weights, limits):
        lane = lane_index()
        a = load_f32(weights[0] + uint64(head) * uint64(4))
        bias = load_f32(weights[1] + uint64(head) * uint64(4))
        token = uint32(first + lane * uint32(2))
        left, left_factor = gate(token, head, x, tokens, gate_fields, a, bias, limits)
        right, right_factor = gate(uint32(token + uint32(1)), head, x, tokens, gate_fields, a, bias, limits)
        total = left + right
        distance = uint32(1)
        while distance < uint32(32):
            below = f32_from_bits(shuffle_up_b32(bits_from_f32(total), distance))
            if lane >= distance:
                total = total + below
            distance = uint32(distance << uint32(1))
        left = total - right
        last = shuffle_index_f32(total, uint32(31))
        place = uint32(target + lane * uint32(8))
        shared_store_2xf32(place, (left, total))
        shared_store_2xf32(uint32(place + uint32(4 * CHUNK)), (left_factor, right_factor))
        left_rest, right_rest = exp2(last - left), exp2(last - total)
        if not has_delta:
            left_rest = left_rest * left_factor
            right_rest = right_rest * right_factor
        shared_store_2xf32(uint32(place + uint32(8 * CHUNK)), (left_rest, right_rest))

    return make
