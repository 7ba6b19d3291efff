"""What every tier does with a finished sum: add bias and residual in float32, round once, store.

Bias and residual are addresses, 0 where there is none. The residual has the output's dtype and may be the output
itself: the thread that writes an element is the one that has read it. The bias is float32 or of the weight's dtype,
which the kernel's argument `bias_is_f32` says.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import types

from numba_kernels.cuda.intrinsics import convert, memory
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import ITEM_BYTES

DTYPE_PAIRS = (("f32", "f32"), ("f16", "f16"), ("f16", "f32"), ("bf16", "bf16"), ("bf16", "f32"))
"""Of x and weight, and of the output."""

# x, weight, bias, residual, out, m, n, k, bias_is_f32: the arguments of every kernel of the family.
ARGUMENT_TYPES = (types.uint64,) * 5 + (types.uint32,) * 4


@functools.cache
def element_loader(dtype: str) -> Any:
    """A device function ``address -> float32``."""
    if dtype == "f32":
        return memory.load_f32
    widen = {"f16": convert.f32_from_f16, "bf16": convert.f32_from_bf16}[dtype]
    load = memory.load_b16
    return device_function(lambda address: widen(load(address)))


@functools.cache
def quad_loader(dtype: str) -> Any:
    """A device function ``address -> 4 float32``; the address is a multiple of 4 elements."""
    if dtype == "f32":
        return memory.load_4xf32
    unpack = {"f16": convert.unpack_f16, "bf16": convert.unpack_bf16}[dtype]
    load = memory.load_2xb32

    @device_function
    def load_quad(address):
        low, high = load(address)
        a, b = unpack(low)
        c, d = unpack(high)
        return a, b, c, d

    return load_quad


@functools.cache
def _element_storer(dtype: str) -> Any:
    if dtype == "f32":
        return memory.store_f32
    narrow = {"f16": convert.f16_from_f32, "bf16": convert.bf16_from_f32}[dtype]
    store = memory.store_b16

    @device_function
    def store_element(address, value):
        store(address, narrow(value))

    return store_element


@functools.cache
def _quad_storer(dtype: str) -> Any:
    if dtype == "f32":
        return memory.store_4xf32
    pack = {"f16": convert.pack_f16, "bf16": convert.pack_bf16}[dtype]
    store = memory.store_2xb32

    @device_function
    def store_quad(address, values):
        store(address, (pack(values[0], values[1]), pack(values[2], values[3])))

    return store_quad


@functools.cache
def finisher(dtype: str, out_dtype: str) -> Any:
    """A device function that finishes the element at ``[row, column]`` of ``out [m, n]``."""
    load_bias, load_bias_f32 = element_loader(dtype), memory.load_f32
    load_residual, store = element_loader(out_dtype), _element_storer(out_dtype)
    bias_bytes, out_bytes = types.uint64(ITEM_BYTES[dtype]), types.uint64(ITEM_BYTES[out_dtype])
    uint64 = types.uint64

    @device_function
    def finish(bias, bias_is_f32, residual, out, n, row, column, value):
        if bias != uint64(0):
            if bias_is_f32 != types.uint32(0):
                value += load_bias_f32(bias + uint64(column) * uint64(4))
            else:
                value += load_bias(bias + uint64(column) * bias_bytes)
        place = (uint64(row) * uint64(n) + uint64(column)) * out_bytes
        if residual != uint64(0):
            value += load_residual(residual + place)
        store(out + place, value)

    return finish


@functools.cache
def quad_finisher(dtype: str, out_dtype: str) -> Any:
    """A device function that finishes 4 neighbours of a row, where `can_finish_quads` holds and 4 divides `column`."""
    load_bias, load_bias_f32 = quad_loader(dtype), memory.load_4xf32
    load_residual, store = quad_loader(out_dtype), _quad_storer(out_dtype)
    bias_bytes, out_bytes = types.uint64(ITEM_BYTES[dtype]), types.uint64(ITEM_BYTES[out_dtype])
    uint64 = types.uint64

    @device_function
    def finish_quad(bias, bias_is_f32, residual, out, n, row, column, values):
        a, b, c, d = values
        if bias != uint64(0):
            if bias_is_f32 != types.uint32(0):
                added = load_bias_f32(bias + uint64(column) * uint64(4))
            else:
                added = load_bias(bias + uint64(column) * bias_bytes)
            a += added[0]
            b += added[1]
            c += added[2]
            d += added[3]
        place = (uint64(row) * uint64(n) + uint64(column)) * out_bytes
        if residual != uint64(0):
            before = load_residual(residual + place)
            a += before[0]
            b += before[1]
            c += before[2]
            d += before[3]
        store(out + place, (a, b, c, d))

    return finish_quad


@device_function
def can_finish_quads(bias, residual, out, n):
    """Whether rows may be finished 4 elements at a time: 4 divides their length, and all lies on 16-byte bounds."""
    return (n & types.uint32(3)) | types.uint32((bias | residual | out) & types.uint64(15)) == types.uint32(0)
