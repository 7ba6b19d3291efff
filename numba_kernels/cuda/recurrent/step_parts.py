"""A token's step of `step`, in parts: what a block's threads and a warp's lanes do between its barriers."""

from __future__ import annotations

import functools
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

from numba import cuda, float32, int32, uint32, uint64

from numba_kernels.cuda.intrinsics import convert, memory
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import element_loader
from numba_kernels.cuda.intrinsics.element_types import ITEM_BYTES
from numba_kernels.cuda.intrinsics.math import exp, fma, reciprocal_sqrt, sigmoid
from numba_kernels.cuda.intrinsics.warp import exchange, lane_index, shuffle_index_f32, shuffle_xor_f32, warp_sum
from numba_kernels.cuda.recurrent.chunk import copier, silu, softplus

MOST_ROWS = 8
ROW_REGISTERS = 64  # of a lane, for its part of the rows

_SHARED_LOADS = {
    1: device_function(lambda address: (memory.shared_load_f32(address),)),
    2: memory.shared_load_2xf32,
    4: memory.shared_load_4xf32,
}


@dataclass(frozen=True, slots=True)
class Columns:
    """How lanes share ``size`` columns: runs of ``width`` (1, 2 or 4) neighbours, ``runs`` of them a lane."""

    size: int
    width: int

    @property
    def runs(self) -> int:
        return -(-self.size // (32 * self.width))

    @property
    def is_whole(self) -> bool:
        """Every lane has all its runs."""
        return self.size % (32 * self.width) == 0

    @property
    def elements(self) -> int:
        """Registers of a lane."""
        return self.runs * self.width


def columns_of(size: int) -> Columns:
    """The widest runs."""
    return Columns(size, next((width for width in (4, 2) if size % (32 * width) == 0), 1))


def rows_of(columns: Columns) -> int:
    """Rows of a warp: from the size of a head alone, so that a token's bits do not depend on the batch."""
    return max(1, min(MOST_ROWS, 1 << (ROW_REGISTERS // columns.elements).bit_length() - 1))


@device_function
def _decay(x):
    """e^x for x <= 0; near 0 by its series, since a decay's error is multiplied by the tokens that it remembers."""
    series = fma(x, float32(1 / 5040), float32(1 / 720))
    series = fma(x, series, float32(1 / 120))
    series = fma(x, series, float32(1 / 24))
    series = fma(x, series, float32(1 / 6))
    series = fma(x, series, float32(0.5))
    series = fma(x, series, float32(1))
    series = fma(x, series, float32(1))
    return series if x > float32(-0.25) else exp(x)


@functools.cache
def convolver(dtype: str, taps: int) -> Any:
    """A device function ``(rows, conv, bias, channel) -> float32``: one channel's convolution and SiLU. ``rows
    [taps]``: addresses of tokens' inputs, 0 for zeros; conv's rows of 4 taps lie on bounds of 16 bytes."""
    load, load_f32, item_bytes = element_loader(dtype), memory.load_f32, uint64(ITEM_BYTES[dtype])
    load_quad, has_quads = memory.load_4xf32, taps == 4

    @device_function
    def convolve(rows, conv, bias, channel):
        filters = cuda.local.array(taps, float32)
        given = cuda.local.array(taps, float32)
        at = conv + uint64(channel) * uint64(4 * taps)
        if has_quads:
            quad = load_quad(at)
            for tap in range(4):
                filters[tap] = quad[tap]
        else:
            for tap in range(taps):
                filters[tap] = load_f32(at + uint64(4 * tap))
        for tap in range(taps):
            given[tap] = float32(0)
            if rows[tap] != uint64(0):
                given[tap] = load(rows[tap] + uint64(channel) * item_bytes)
        total = float32(0)
        if bias != uint64(0):
            total = load_f32(bias + uint64(channel) * uint64(4))
        for tap in range(taps):
            total = fma(given[tap], filters[tap], total)
        return silu(total)

    return convolve


@functools.cache
def _rounder(stored: str) -> Any:
    """A device function float32 -> float32: what the state's type keeps."""
    if stored == "f32":
        return device_function(lambda value: value)
    narrow, widen = convert.bf16_from_f32, convert.f32_from_bf16
    return device_function(lambda value: widen(narrow(value)))


Chunk = namedtuple(
    "Chunk",
    "x given pending_gates x_bytes input_bytes gate_bytes x_at gates_at start before length now end",
)
"""A sequence's chunk: the addresses of x, of the inputs that its page has, and of the pending gates there; bytes of
a row of each; the first column of inputs and of gates in x, bytes; the chunk's first row of x; the sequence's
tokens before it, and those that the page's state has seen; the number that the written state has seen, and the
chunk's end."""


Channels = namedtuple("Channels", "head keys queries values value_heads")
"""The head, its first channels of keys, queries and values, and the number of value heads."""


@functools.cache
def input_finder(taps: int) -> Any:
    """A device function ``(chunk, token)``: the address of a token's inputs; 0 for those before the sequence."""

    @device_function
    def inputs_of(chunk, token):
        origin = uint64(0)
        if token >= chunk.before:
            origin = chunk.x + uint64(uint32(chunk.start + token - chunk.before)) * chunk.x_bytes + chunk.x_at
        elif chunk.before > int32(0):
            origin = chunk.given + uint64(uint32(int32(taps - 1) + token - chunk.length)) * chunk.input_bytes
        return origin

    return inputs_of


@functools.cache
def token_taker(is_delta: bool, dtype: str, columns: Columns) -> Any:
    """A device function ``(key, query, keys_at, lane, gates, channels, limits)``: loads a token's convolved key and
    query, and returns (key . query, step size, decay). `limits` is (rate, bias, least, most) of the step size."""
    load_one, item_bytes, elements = element_loader(dtype), uint64(ITEM_BYTES[dtype]), columns.elements
    width, runs, padded, load_shared = columns.width, columns.runs, 32 * columns.elements, _SHARED_LOADS[columns.width]
    query_scale = float32(columns.size**-0.5)

    @device_function
    def take_token(key, query, keys_at, lane, gates, channels, limits):
        rate, bias, least, most = limits
        for run in range(runs):
            place = uint32(keys_at + lane * uint32(4 * width) + uint32(128 * width * run))
            loaded = load_shared(place)
            for i in range(width):
                key[run * width + i] = loaded[i]
            loaded = load_shared(uint32(place + uint32(4 * padded)))
            for i in range(width):
                query[run * width + i] = loaded[i]
        product = float32(0)
        for e in range(elements):
            product = fma(key[e], query[e], product)
        if is_delta:
            of_keys = float32(0)
            of_queries = float32(0)
            for e in range(elements):
                of_keys = fma(key[e], key[e], of_keys)
                of_queries = fma(query[e], query[e], of_queries)
            key_scale = reciprocal_sqrt(warp_sum(of_keys) + float32(1e-6))
            scale = reciprocal_sqrt(warp_sum(of_queries) + float32(1e-6)) * query_scale
            for e in range(elements):
                key[e] = key[e] * key_scale
                query[e] = query[e] * scale
            product = product * (key_scale * scale)
            size = sigmoid(load_one(gates + uint64(channels.head) * item_bytes))
            at_decay = gates + uint64(uint32(channels.value_heads + channels.head)) * item_bytes
            decay = _decay(rate * softplus(load_one(at_decay) + bias))
        else:
            size = softplus(load_one(gates + uint64(channels.head) * item_bytes) + bias)
            size = least if size < least else size
            size = most if size > most else size
            decay = _decay(rate * size)
        return warp_sum(product), size, decay

    return take_token


@functools.cache
def row_stepper(is_delta: bool, stored: str, columns: Columns) -> Any:
    """A device function ``(held, key, query, token, value, skipped, lane)``: a token's step of all rows, `token` being
    what `token_taker` returned. It returns the result of the row whose sums the lane gets."""
    rows, elements, rounded = rows_of(columns), columns.elements, _rounder(stored)
    num_sums = 2 * rows if is_delta else rows
    exchange_sums = exchange(num_sums)

    @device_function
    def step_rows(held, key, query, token, value, skipped, lane):
        product, size, decay = token
        sums = cuda.local.array(num_sums, float32)
        for i in range(num_sums):
            sums[i] = float32(0)
        for i in range(rows):
            for e in range(elements):
                if is_delta:
                    sums[i] = fma(held[i, e], key[e], sums[i])
                    sums[rows + i] = fma(held[i, e], query[e], sums[rows + i])
                else:
                    sums[i] = fma(held[i, e], query[e], sums[i])
        exchange_sums(sums, lane)
        read_out = sums[0]
        change = value
        if is_delta:
            other = shuffle_xor_f32(read_out, uint32(rows))
            of_key = read_out
            if (lane & uint32(rows)) == uint32(0):
                read_out = other
            else:
                of_key = other
            change = fma(-decay, of_key, value)
        change = size * change
        result = fma(change, product, decay * read_out)
        if not is_delta:
            result = fma(skipped, value, result)
        for i in range(rows):
            own_change = shuffle_index_f32(change, uint32(i))
            for e in range(elements):
                held[i, e] = rounded(fma(key[e], own_change, decay * held[i, e]))
        return result

    return step_rows


@functools.cache
def input_keeper(is_delta: bool, dtype: str, taps: int, key_dim: int) -> Any:
    """A device function ``(chunk, channels, kept, kept_gates, values, owns, warp)`` that writes what the next chunk
    needs of this one's inputs, a row a warp, and of its gates, to these addresses. `values` is (the block's first, how
    many); `owns` whether the block has the keys and queries of its head, and whether it is the head's first."""
    inputs_of, copy, item_bytes = input_finder(taps), copier(dtype), uint64(ITEM_BYTES[dtype])

    @device_function
    def keep_inputs(chunk, channels, kept, kept_gates, values, owns, warp):
        lane, num_warps = lane_index(), uint32(uint32(cuda.blockDim.x) >> uint32(5))
        first_value, num_values = values
        has_keys, is_first = owns
        kept += uint64(warp) * chunk.input_bytes
        at = int32(chunk.now - int32(taps - 1) + int32(warp))
        while at < chunk.end:
            origin = inputs_of(chunk, at)
            v_bytes = uint64(uint32(channels.values + first_value)) * item_bytes
            k_bytes = uint64(channels.keys) * item_bytes
            q_bytes = uint64(channels.queries) * item_bytes
            is_given = uint64(1) if origin != uint64(0) else uint64(0)
            copy(kept + v_bytes, origin + v_bytes * is_given, num_values, lane)
            if has_keys:
                copy(kept + k_bytes, origin + k_bytes * is_given, uint32(key_dim), lane)
                copy(kept + q_bytes, origin + q_bytes * is_given, uint32(key_dim), lane)
            kept += uint64(num_warps) * chunk.input_bytes
            at = int32(at + int32(num_warps))
        if is_first and warp == uint32(0):
            at = chunk.now
            while at < chunk.end:
                origin = chunk.x + uint64(uint32(chunk.start + at - chunk.before)) * chunk.x_bytes + chunk.gates_at
                head_at = uint64(channels.head) * item_bytes
                copy(kept_gates + head_at, origin + head_at, uint32(1), lane)
                if is_delta:
                    head_at = uint64(uint32(channels.value_heads + channels.head)) * item_bytes
                    copy(kept_gates + head_at, origin + head_at, uint32(1), lane)
                kept_gates += chunk.gate_bytes
                at = int32(at + int32(1))

    return keep_inputs
