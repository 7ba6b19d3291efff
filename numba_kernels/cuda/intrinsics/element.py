"""Reading and writing elements of f32, f16 or bf16 as float32, for kernels made by a factory over the dtype.

    load8, store8 = vector_loader("bf16"), vector_storer("bf16")    # 8 neighbours at a 16-byte address, as a tuple

Addresses are uint64; the vector forms move 16 bytes: `VECTOR_WIDTH` elements.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import types

from numba_kernels.cuda.intrinsics import convert, memory
from numba_kernels.cuda.intrinsics.device import device_function


@functools.cache
def element_loader(dtype: str) -> Any:
    """A device function ``address -> float32``."""
    if dtype == "f32":
        return memory.load_f32
    widen = {"f16": convert.f32_from_f16, "bf16": convert.f32_from_bf16}[dtype]
    load = memory.load_b16
    return device_function(lambda address: widen(load(address)))


@functools.cache
def element_storer(dtype: str) -> Any:
    """A device function ``(address, float32) -> None``."""
    if dtype == "f32":
        return memory.store_f32
    narrow = {"f16": convert.f16_from_f32, "bf16": convert.bf16_from_f32}[dtype]
    store = memory.store_b16
    return device_function(lambda address, value: store(address, narrow(value)))


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
def vector_loader(dtype: str) -> Any:
    """A device function ``address -> tuple of VECTOR_WIDTH float32``; the address is a multiple of 16."""
    if dtype == "f32":
        return memory.load_4xf32
    unpack = {"f16": convert.unpack_f16, "bf16": convert.unpack_bf16}[dtype]
    load = memory.load_4xb32

    @device_function
    def load_vector(address):
        a, b, c, d = load(address)
        a0, a1 = unpack(a)
        b0, b1 = unpack(b)
        c0, c1 = unpack(c)
        d0, d1 = unpack(d)
        return a0, a1, b0, b1, c0, c1, d0, d1

    return load_vector


@functools.cache
def elements_loader(dtype: str, width: int) -> Any:
    """A device function ``address -> tuple of `width` float32``, where `width` is 1 or `VECTOR_WIDTH`."""
    if width > 1:
        return vector_loader(dtype)
    load = element_loader(dtype)
    return device_function(lambda address: (load(address),))


@functools.cache
def elements_storer(dtype: str, width: int) -> Any:
    """A device function ``(address, values) -> None``, where `width` is 1 or `VECTOR_WIDTH`."""
    if width > 1:
        return vector_storer(dtype)
    store = element_storer(dtype)
    return device_function(lambda address, values: store(address, values[0]))


@functools.cache
def floats_loader(width: int) -> Any:
    """A device function ``address -> tuple of `width` (1, 4 or 8) float32`` out of float32 memory."""
    if width < 8:
        return elements_loader("f32", width)
    load = memory.load_4xf32

    @device_function
    def load_eight(address):
        a = load(address)
        b = load(address + types.uint64(16))
        return a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]

    return load_eight


@functools.cache
def quad_storer(dtype: str) -> Any:
    """A device function ``(address, 4 float32) -> None``; the address is a multiple of 4 elements."""
    if dtype == "f32":
        return memory.store_4xf32
    pack = {"f16": convert.pack_f16, "bf16": convert.pack_bf16}[dtype]
    store = memory.store_2xb32

    @device_function
    def store_quad(address, values):
        store(address, (pack(values[0], values[1]), pack(values[2], values[3])))

    return store_quad


@functools.cache
def vector_storer(dtype: str) -> Any:
    """A device function ``(address, VECTOR_WIDTH float32 in a tuple or local array) -> None``; the address is a
    multiple of 16."""
    if dtype == "f32":
        store_floats = memory.store_4xf32
        return device_function(
            lambda address, values: store_floats(address, (values[0], values[1], values[2], values[3]))
        )
    pack = {"f16": convert.pack_f16, "bf16": convert.pack_bf16}[dtype]
    store = memory.store_4xb32

    @device_function
    def store_vector(address, values):
        store(
            address,
            (
                pack(values[0], values[1]),
                pack(values[2], values[3]),
                pack(values[4], values[5]),
                pack(values[6], values[7]),
            ),
        )

    return store_vector
