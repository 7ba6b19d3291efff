"""`mma.sync`: m16n8k4 … k64 of tf32, f16, bf16, e4m3, e5m2, s8, u8, s4, u4, with the arithmetic of products.py; and
m8n8k4 of f64.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

import functools
import re

from numba import types

from numba_kernels.pointers import f64_at, intrinsic
from runtime.emulator.execution.fault import FaultKind, report
from runtime.emulator.execution.state import DONE, FULL_MASK
from runtime.emulator.memory.pointers import address_of, copy_bytes, stack_longs
from runtime.emulator.tensor_cores.products import (
    ACC_F16,
    ACC_F32,
    ACC_S32,
    ACC_S32_SATURATED,
    ELEMENT_CODES,
    IS_INTEGER,
    PER_WORD,
    multiply_accumulate,
    scratch_floats,
    spread_a,
    spread_b,
)
from runtime.emulator.translation.lowering import Lowering, lowers
from runtime.emulator.translation.operations import OPERATIONS, made_from_name, operation
from runtime.emulator.translation.ptx import Instruction, Vector


@made_from_name("mma")
@functools.cache
def mma_operation(code_a: int, code_b: int, accumulator: int, k: int) -> str:
    """The name of the operation for a shape, registered at the first call.

    Arguments: d0 … d3, a0 … a3, b0, b1, c0 … c3, slots; those that the shape lacks are any slot.
    """
    name = f"mma_{code_a}_{code_b}_{accumulator}_{k}"
    two_registers = k // PER_WORD[code_a] == 8  # of B; A has twice as many
    size_a, size_b = 16 * k, 8 * k

    def mma(warp, mask, site, d0, d1, d2, d3, a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
        if mask != FULL_MASK:
            return report(warp, FaultKind.DIVERGENT_ALIGNED, site, 0, 0, mask, FULL_MASK, 0, 0)
        a, b = scratch_floats(size_a), scratch_floats(size_b)
        spread_a(code_a, 0, a0, a)
        spread_a(code_a, 1, a1, a)
        spread_b(code_b, 0, b0, b)
        if two_registers:
            spread_a(code_a, 2, a2, a)
            spread_a(code_a, 3, a3, a)
            spread_b(code_b, 1, b1, b)
        multiply_accumulate(code_a, accumulator, k, a, b, 0, 1, c0, c1, c2, c3, d0, d1, d2, d3)
        return DONE

    operation(name, "p" * 14)(mma)
    assert name in OPERATIONS
    return name


@intrinsic
def _fma(typing_context, x, y, z):
    """x y + z in float64, rounded once."""

    def generate(context, builder, signature, arguments):
        return builder.fma(*arguments)

    return types.float64(types.float64, types.float64, types.float64), generate


@operation("mma_f64", "qqqqqq")
def mma_f64(warp, mask, site, d0, d1, a, b, c0, c1):
    """8 x 8 += (8 x 4)(4 x 8): lane 4 g + t has row g, column t of A, row t, column g of B, and columns 2 t and 2 t + 1
    of row g of C."""
    if mask != FULL_MASK:
        return report(warp, FaultKind.DIVERGENT_ALIGNED, site, 0, 0, mask, FULL_MASK, 0, 0)
    sums = stack_longs(64)  # both results: D may be A, B or C
    left, right, total = f64_at(address_of(a)), f64_at(address_of(b)), f64_at(address_of(sums))
    first, second = f64_at(address_of(c0)), f64_at(address_of(c1))
    for lane in range(32):
        row, column = lane & ~3, 8 * (lane & 3)
        x, y = first[lane], second[lane]
        for k in range(4):
            x = _fma(left[row + k], right[column + k], x)
            y = _fma(left[row + k], right[column + 4 + k], y)
        total[lane], total[32 + lane] = x, y
    copy_bytes(address_of(d0), address_of(sums), 256)
    copy_bytes(address_of(d1), address_of(sums) + 256, 256)
    return DONE


_SHAPE = re.compile(r"m16n8k(\d+)")
_DOUBLE = ("mma", "sync", "aligned", "m8n8k4", "row", "col", "f64", "f64", "f64", "f64")
_DEPTHS = {1: (4, 8), 2: (8, 16), 4: (16, 32), 8: (32, 64)}  # by elements a word
_ACCUMULATORS = {"f32": ACC_F32, "f16": ACC_F16, "s32": ACC_S32}


def describe(parts: tuple[str, ...]) -> tuple[int, int, int, int] | None:
    """`mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32` → (code of A, of B, accumulator, k); None if not known."""
    rest = list(parts)
    is_saturated = "satfinite" in rest
    rest = [part for part in rest if part not in ("satfinite", "kind::f8f6f4")]
    if len(rest) != 10 or rest[:3] != ["mma", "sync", "aligned"] or rest[4:6] != ["row", "col"]:
        return None
    shape = _SHAPE.fullmatch(rest[3])
    d_type, a_type, b_type, c_type = rest[6:]
    if shape is None or d_type != c_type or a_type not in ELEMENT_CODES or b_type not in ELEMENT_CODES:
        return None
    code_a, code_b, k = ELEMENT_CODES[a_type], ELEMENT_CODES[b_type], int(shape[1])
    accumulator = _ACCUMULATORS.get(d_type)
    mixable = (
        PER_WORD[code_a] == PER_WORD[code_b] and PER_WORD[code_a] >= 4 and IS_INTEGER[code_a] == IS_INTEGER[code_b]
    )
    if accumulator is None or not (code_a == code_b or mixable) or k not in _DEPTHS[PER_WORD[code_a]]:
        return None
    if IS_INTEGER[code_a] != (accumulator == ACC_S32) or (is_saturated and not IS_INTEGER[code_a]):
        return None
    if accumulator == ACC_F16 and a_type not in ("f16", "e4m3", "e5m2"):
        return None
    return code_a, code_b, ACC_S32_SATURATED if is_saturated else accumulator, k


def slots_of(parts: tuple[str, ...]) -> tuple[int, int, int]:
    """Registers of D (and C), of A and of B in a described instruction."""
    found = describe(parts)
    assert found is not None
    code_a, _, accumulator, k = found
    words_b = k // PER_WORD[code_a] // 4
    return (2 if accumulator == ACC_F16 else 4), 2 * words_b, words_b


@lowers("mma.sync")
def lower_mma(low: Lowering, ins: Instruction) -> None:
    """mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 d, a, b, c"""
    found = describe(ins.parts)
    is_double = tuple(part for part in ins.parts if part != "rn") == _DOUBLE
    if found is None and not is_double:
        raise low.refuse("shape or types")
    counts = (2, 1, 1) if is_double else slots_of(ins.parts)
    operands = [list(operand.items) if isinstance(operand, Vector) else [operand] for operand in ins.operands]
    if [len(items) for items in operands] != [counts[0], counts[1], counts[2], counts[0]]:
        raise low.refuse("the number of registers")
    d, a, b, c = operands
    if found is None:
        read = [low.slot(item, 64) for item in (*a, *b, *c)]
        low.call("mma_f64", *(low.destination(item, 64) for item in d), *read)
        return
    a_slots, b_slots, c_slots = ([low.slot(item, 32) for item in items] for items in (a, b, c))
    d_slots = [low.destination(item, 32) for item in d]
    fill = [d_slots, a_slots, b_slots, c_slots]
    slots = [slot for items, count in zip(fill, (4, 4, 2, 4)) for slot in [*items, *[items[0]] * (count - len(items))]]
    low.call(mma_operation(*found), *slots)
