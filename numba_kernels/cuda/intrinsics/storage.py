"""Elements of every dtype in memory, read as float32 or int64, the types of generic kernels' arithmetic.

    load, store = LOADERS["f32"], STORERS["s64"]
    value = load(code, address)     # float32 of any dtype; "s64": int64 of an integer or bool
    store(code, address, value)     # from float32 or from int64, to any dtype

A dtype is its number in `DTYPES` (PTX's names, and "bool", a byte of 0 or 1), the same for all threads of a launch, so
that one kernel serves all of them by a uniform branch. The conversions are those of `runtime.tensor.cast`: floats
round once to nearest even, and overflow to infinity (e4m3, which has none: to NaN); floats become integers towards
zero, clamped to the range, NaN 0; integers wrap, and become floats by way of float32; anything but zero, NaN too, is
True. fp8 is made by integer arithmetic, since sm_80 has no instruction for it.
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
F32, F16, BF16, E4M3, E5M2, S8, U8, S32, S64, BOOL = range(10)
CODES = {name: code for code, name in enumerate(DTYPES)}
STORED_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1, "s32": 4, "s64": 8, "bool": 1}

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
    """A device function float32 -> uint32 code. `largest` is the greatest finite code, `overflow` is for larger
    values."""
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
def _load_byte(code, address):
    """int8, uint8 or bool as int64."""
    value = types.int64(memory.load_u8(address))
    if code == types.uint32(S8):
        value = types.int64(types.int8(value))
    return value


@device_function
def _load_integer(code, address):
    value = types.int64(0)
    if code == types.uint32(S64):
        value = types.int64(memory.load_b64(address))
    elif code == types.uint32(S32):
        value = types.int64(types.int32(memory.load_b32(address)))
    else:
        value = _load_byte(code, address)
    return value


@device_function
def _load_float(code, address):
    value = types.float32(0)
    if code == types.uint32(F32):
        value = memory.load_f32(address)
    elif code == types.uint32(BF16):
        value = convert.f32_from_bf16(memory.load_b16(address))
    elif code == types.uint32(F16):
        value = convert.f32_from_f16(memory.load_b16(address))
    elif code == types.uint32(E4M3):
        value = _f32_from_e4m3(memory.load_u8(address))
    elif code == types.uint32(E5M2):
        value = _f32_from_e5m2(memory.load_u8(address))
    else:
        value = _f32_from_s64(types.uint64(_load_integer(code, address)))
    return value


@device_function
def _clamped(value, low, high):
    """float32 -> int64 in a range."""
    number = types.int64(_s64_from_f32(value))
    if value != value:
        number = types.int64(0)
    if number < low:
        number = low
    if number > high:
        number = high
    return number


@device_function
def _store_from_float(code, address, value):
    if code == types.uint32(F32):
        memory.store_f32(address, value)
    elif code == types.uint32(BF16):
        memory.store_b16(address, convert.bf16_from_f32(value))
    elif code == types.uint32(F16):
        memory.store_b16(address, convert.f16_from_f32(value))
    elif code == types.uint32(E4M3):
        _store_u8(address, _e4m3_from_f32(value))
    elif code == types.uint32(E5M2):
        _store_u8(address, _e5m2_from_f32(value))
    elif code == types.uint32(BOOL):
        _store_u8(address, types.uint32(value != types.float32(0)))
    else:
        low = types.int64(-(2**63))
        high = types.int64(2**63 - 1)
        if code == types.uint32(S32):
            low = types.int64(-(2**31))
            high = types.int64(2**31 - 1)
        elif code == types.uint32(S8):
            low = types.int64(-128)
            high = types.int64(127)
        elif code == types.uint32(U8):
            low = types.int64(0)
            high = types.int64(255)
        number = _clamped(value, low, high)
        if code == types.uint32(S64):
            memory.store_b64(address, types.uint64(number))
        elif code == types.uint32(S32):
            memory.store_b32(address, types.uint32(number))
        else:
            _store_u8(address, types.uint32(number))


@device_function
def _store_from_integer(code, address, value):
    if code == types.uint32(S64):
        memory.store_b64(address, types.uint64(value))
    elif code == types.uint32(S32):
        memory.store_b32(address, types.uint32(value))
    elif code == types.uint32(S8) or code == types.uint32(U8):
        _store_u8(address, types.uint32(value))
    elif code == types.uint32(BOOL):
        _store_u8(address, types.uint32(value != types.int64(0)))
    else:
        _store_from_float(code, address, _f32_from_s64(types.uint64(value)))


LOADERS = {"f32": _load_float, "s64": _load_integer}
"""By the type of the arithmetic: ``load(code, address) -> value``; "s64" only for integers and bool."""

STORERS = {"f32": _store_from_float, "s64": _store_from_integer}
"""By the type of the arithmetic: ``store(code, address, value)``."""
