"""Elements of every dtype in memory, read as float32 or int64: what generic kernels compute in.

    load = wide_loader("e4m3")      # load(address) -> float32;   wide_loader("s8"): -> int64
    store = wide_storer("bf16", "f32")     # store(address, float32) -> None;   (dtype, "s64"): of an int64

dtypes are PTX's names: f32, f16, bf16, e4m3, e5m2, s8, u8, s32, s64, and "bool", a byte of 0 or 1. The conversions are
those of `runtime.cast`: floats round once to nearest even, and overflow to infinity (e4m3, which has none: to NaN);
floats become integers towards zero, clamped to the range, NaN 0; integers wrap, and become floats by way of float32;
anything but zero, NaN too, is True. fp8 is made by integer arithmetic, since sm_80 has no instruction for it.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import types

from numba_kernels.cuda.intrinsics import convert, memory
from numba_kernels.cuda.intrinsics.asm import instruction
from numba_kernels.cuda.intrinsics.device import device_function

FLOATS = ("f32", "f16", "bf16", "e4m3", "e5m2")
INTEGERS = ("s8", "u8", "s32", "s64", "bool")
DTYPES = FLOATS + INTEGERS
STORED_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1, "s32": 4, "s64": 8, "bool": 1}

_load_u8 = instruction("{ .reg .b16 t; ld.global.u8 t, [$1]; cvt.u32.u16 $0, t; }", "r", "l")
_store_u8 = instruction("{ .reg .b16 t; cvt.u16.u32 t, $1; st.global.u8 [$0], t; }", "", "l r")
_multiply = instruction("mul.rn.f32 $0, $1, $2;", "f", "f f", is_pure=True)  # keeps subnormals
_f32_from_s64 = instruction("cvt.rn.f32.s64 $0, $1;", "f", "l", is_pure=True)
_s64_from_f32 = instruction("cvt.rzi.s64.f32 $0, $1;", "l", "f", is_pure=True)  # clamps; NaN gives the lowest


def computes_in(dtype: str) -> str:
    """ "f32" for floating-point types, else "s64"."""
    return "f32" if dtype in FLOATS else "s64"


@device_function
def _f32_from_e4m3(code):
    magnitude = code & types.uint32(0x7F)
    value = _multiply(convert.f32_from_bits(magnitude << types.uint32(20)), types.float32(2.0**120))
    if magnitude == types.uint32(0x7F):
        value = convert.f32_from_bits(types.uint32(0x7FC00000))
    return convert.f32_from_bits(convert.bits_from_f32(value) | ((code & types.uint32(0x80)) << types.uint32(24)))


@device_function
def _f32_from_e5m2(code):
    return convert.f32_from_f16(types.uint16(code << types.uint32(8)))


@functools.cache
def _fp8_from_f32(mantissa_bits: int, bias: int, largest: int, overflow: int) -> Any:
    """A device function float32 -> uint32 code. `largest` is the greatest finite code, `overflow` what follows it."""
    dropped = 23 - mantissa_bits
    smallest_normal = (127 - bias + 1) << 23
    # A float whose last place is the smallest subnormal: adding it rounds to a multiple of that.
    magic = float(2.0 ** (1 - bias - mantissa_bits + 23))
    magic_bits = (127 + 1 - bias - mantissa_bits + 23) << 23
    rebias = (127 - bias) << mantissa_bits

    @device_function
    def narrow(value):
        bits = convert.bits_from_f32(value)
        sign = (bits >> types.uint32(24)) & types.uint32(0x80)
        bits = bits & types.uint32(0x7FFFFFFF)
        if bits > types.uint32(0x7F800000):
            code = types.uint32(0x7F)
        elif bits < types.uint32(smallest_normal):
            shifted = convert.f32_from_bits(bits) + types.float32(magic)
            code = types.uint32(convert.bits_from_f32(shifted) - types.uint32(magic_bits))
        else:
            odd = (bits >> types.uint32(dropped)) & types.uint32(1)
            rounded = (bits + types.uint32((1 << (dropped - 1)) - 1) + odd) >> types.uint32(dropped)
            code = types.uint32(rounded - types.uint32(rebias))
            if code > types.uint32(largest):
                code = types.uint32(overflow)
        return sign | code

    return narrow


_e4m3_from_f32 = _fp8_from_f32(3, 7, 0x7E, 0x7F)
_e5m2_from_f32 = _fp8_from_f32(2, 15, 0x7B, 0x7C)


@device_function
def _load_s8(address):
    return types.int64(types.int8(_load_u8(address)))


@device_function
def _load_small_unsigned(address):
    return types.int64(_load_u8(address))


@device_function
def _load_s32(address):
    return types.int64(types.int32(memory.load_b32(address)))


@device_function
def _load_s64(address):
    return types.int64(memory.load_b64(address))


_LOADERS = {
    "f32": memory.load_f32,
    "f16": device_function(lambda address: convert.f32_from_f16(memory.load_b16(address))),
    "bf16": device_function(lambda address: convert.f32_from_bf16(memory.load_b16(address))),
    "e4m3": device_function(lambda address: _f32_from_e4m3(_load_u8(address))),
    "e5m2": device_function(lambda address: _f32_from_e5m2(_load_u8(address))),
    "s8": _load_s8,
    "u8": _load_small_unsigned,
    "bool": _load_small_unsigned,
    "s32": _load_s32,
    "s64": _load_s64,
}

_FLOAT_STORERS = {
    "f32": memory.store_f32,
    "f16": device_function(lambda address, value: memory.store_b16(address, convert.f16_from_f32(value))),
    "bf16": device_function(lambda address, value: memory.store_b16(address, convert.bf16_from_f32(value))),
    "e4m3": device_function(lambda address, value: _store_u8(address, _e4m3_from_f32(value))),
    "e5m2": device_function(lambda address, value: _store_u8(address, _e5m2_from_f32(value))),
}

_INTEGER_STORERS = {
    "s8": device_function(lambda address, value: _store_u8(address, types.uint32(value))),
    "u8": device_function(lambda address, value: _store_u8(address, types.uint32(value))),
    "s32": device_function(lambda address, value: memory.store_b32(address, types.uint32(value))),
    "s64": device_function(lambda address, value: memory.store_b64(address, types.uint64(value))),
    "bool": device_function(lambda address, value: _store_u8(address, types.uint32(value != types.int64(0)))),
}

_RANGES = {"s8": (-128, 127), "u8": (0, 255), "s32": (-(2**31), 2**31 - 1)}


@functools.cache
def _clamped(dtype: str) -> Any:
    """A device function float32 -> int64 in the type's range."""
    low, high = _RANGES.get(dtype, (-(2**63), 2**63 - 1))

    @device_function
    def clamp(value):
        number = types.int64(_s64_from_f32(value))
        if value != value:
            number = types.int64(0)
        if number < types.int64(low):
            number = types.int64(low)
        if number > types.int64(high):
            number = types.int64(high)
        return number

    return clamp


@functools.cache
def wide_loader(dtype: str) -> Any:
    """A device function ``address -> float32`` or, for integers and bool, ``-> int64``."""
    return _LOADERS[dtype]


@functools.cache
def as_float(compute: str) -> Any:
    """A device function from "f32" or "s64" to float32."""
    if compute == "f32":
        return device_function(lambda value: value)
    return device_function(lambda value: _f32_from_s64(types.uint64(value)))


@functools.cache
def wide_storer(dtype: str, compute: str) -> Any:
    """A device function ``(address, value) -> None`` for a float32 ("f32") or an int64 ("s64")."""
    if compute == "s64":
        if dtype in _INTEGER_STORERS:
            return _INTEGER_STORERS[dtype]
        store_float, widen = _FLOAT_STORERS[dtype], as_float("s64")
        return device_function(lambda address, value: store_float(address, widen(value)))
    if dtype in _FLOAT_STORERS:
        return _FLOAT_STORERS[dtype]
    if dtype == "bool":
        return device_function(lambda address, value: _store_u8(address, types.uint32(value != types.float32(0))))
    store_integer, clamp = _INTEGER_STORERS[dtype], _clamped(dtype)
    return device_function(lambda address, value: store_integer(address, clamp(value)))
