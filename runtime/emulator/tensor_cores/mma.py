"""`mma.sync`, and `ldmatrix`, `stmatrix` and `movmatrix`, which move its operands.

mma: m16n8k4 … k64 of tf32, f16, bf16, e4m3, e5m2, s8, u8, s4, u4, with the arithmetic of products.py; and m8n8k4 of
f64. The others move 8 x 8 matrices of 16-bit elements between shared memory and registers: lane 8 i + r names the
address of row r of matrix i; lane l holds elements 2 (l % 4) and 2 (l % 4) + 1 of row l // 4, or with `.trans` of
column l // 4 (PTX ISA, "Warp-level matrix load instruction: ldmatrix").
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

import functools
import re

from numba import types

from numba_kernels.cache import njit
from numba_kernels.pointers import f64_at, intrinsic, u16_at, u32_at
from runtime.emulator.async_copies.proxy import wrote
from runtime.emulator.execution.counters import count_access
from runtime.emulator.execution.fault import FaultKind, report
from runtime.emulator.execution.state import CHECK_RACES, DONE, FAILED, FULL_MASK
from runtime.emulator.memory.careful_access import shared_range
from runtime.emulator.memory.locate import SHARED, aligned, landed, shared_block, shared_host
from runtime.emulator.memory.pointers import address_of, bytes_equal, copy_bytes, stack_longs
from runtime.emulator.races.clocks import LOAD, STORE
from runtime.emulator.tensor_cores.products import (
    ACC_F16,
    PER_WORD,
    multiply_accumulate,
    scratch_floats,
    scratch_words,
    spread_a,
    spread_b,
    types_of,
)
from runtime.emulator.translation.lowering import Lowering
from runtime.emulator.translation.operations import OPERATIONS, made_from_name, operation
from runtime.emulator.translation.ptx import Instruction, Operand, Vector


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


def describe(parts: tuple[str, ...]) -> tuple[int, int, int, int] | None:
    """`mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32` → (code of A, of B, accumulator, k); None if not known."""
    rest = list(parts)
    is_saturated = "satfinite" in rest
    rest = [part for part in rest if part not in ("satfinite", "kind::f8f6f4")]
    if len(rest) != 10 or rest[:3] != ["mma", "sync", "aligned"] or rest[4:6] != ["row", "col"]:
        return None
    shape, (d_type, a_type, b_type, c_type) = _SHAPE.fullmatch(rest[3]), rest[6:]
    found = types_of(d_type, a_type, b_type, is_saturated)
    if shape is None or found is None or d_type != c_type or int(shape[1]) not in _DEPTHS[PER_WORD[found[0]]]:
        return None
    return *found, int(shape[1])


def slots_of(parts: tuple[str, ...]) -> tuple[int, int, int]:
    """Registers of D (and C), of A and of B in a described instruction."""
    found = describe(parts)
    assert found is not None
    code_a, _, accumulator, k = found
    words_b = k // PER_WORD[code_a] // 4
    return (2 if accumulator == ACC_F16 else 4), 2 * words_b, words_b


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


@njit
def _row_address(warp, site, lane, address, action, source):
    """The host address of a row of 16 bytes of this block, which a store takes from `source`; 0 and a fault."""
    if aligned(warp, site, lane, address, 16):
        return 0
    block = shared_block(warp, site, lane, address)
    if block == 0 or shared_range(warp, site, lane, block, shared_host(block, address), 16, action, source):
        return 0
    return shared_host(block, address)


@njit
def _transpose(words, out):
    """Fragments (32 words) of a matrix → those of its transpose."""
    source, target = u16_at(address_of(words)), u16_at(address_of(out))
    for row in range(8):
        for column in range(8):
            target[row * 8 + column] = source[column * 8 + row]


@njit
def _count(warp, site, addresses, offset, count):
    """Counts `count` matrices of eight rows, all of addresses that have been found good."""
    if not warp.launch.traffic:
        return
    places, blocks = stack_longs(32), stack_longs(32)
    for lane in range(8 * count):
        address = addresses[lane] + offset
        blocks[lane] = shared_block(warp, site, lane, address)
        places[lane] = shared_host(blocks[lane], address)
    count_access(warp, site, (1 << (8 * count)) - 1, address_of(places), address_of(blocks), 16)


@operation("ldmatrix", "ppppqlll")
def ldmatrix(warp, mask, site, d0, d1, d2, d3, addresses, offset, count, is_transposed):
    if mask != FULL_MASK:
        return report(warp, FaultKind.DIVERGENT_ALIGNED, site, 0, 0, mask, FULL_MASK, 0, 0)
    words = scratch_words(128)
    for lane in range(8 * count):
        host = _row_address(warp, site, lane, addresses[lane] + offset, LOAD, 0)
        if host == 0:
            return FAILED
        copy_bytes(address_of(words) + lane * 16, host, 16)
    _count(warp, site, addresses, offset, count)
    for matrix in range(count):
        target = d0 if matrix == 0 else d1 if matrix == 1 else d2 if matrix == 2 else d3
        source = u32_at(address_of(words) + matrix * 128)
        if is_transposed:
            _transpose(source, target)
        else:
            copy_bytes(address_of(target), address_of(source), 128)
    return DONE


@operation("stmatrix", "qlppppll")
def stmatrix(warp, mask, site, addresses, offset, s0, s1, s2, s3, count, is_transposed):
    if mask != FULL_MASK:
        return report(warp, FaultKind.DIVERGENT_ALIGNED, site, 0, 0, mask, FULL_MASK, 0, 0)
    words, hosts = scratch_words(128), stack_longs(32)
    for matrix in range(count):
        source = s0 if matrix == 0 else s1 if matrix == 1 else s2 if matrix == 2 else s3
        rows = u32_at(address_of(words) + matrix * 128)
        if is_transposed:
            _transpose(source, rows)
        else:
            copy_bytes(address_of(rows), address_of(source), 128)
    for lane in range(8 * count):
        address, row = addresses[lane] + offset, address_of(words) + lane * 16
        hosts[lane] = _row_address(warp, site, lane, address, STORE, row)
        if hosts[lane] == 0:
            return FAILED
        copy_bytes(hosts[lane], row, 16)
        landed(warp, address_of(warp.block), hosts[lane], 16)
        wrote(address_of(warp.block), warp, address & 0xFFFFFF, 16)
    if warp.launch.checks & CHECK_RACES:
        for lane in range(8 * count):
            if not bytes_equal(hosts[lane], address_of(words) + lane * 16, 16):
                shown = addresses[lane] + offset
                return report(warp, FaultKind.LANES_DIFFER, site, lane, shown, STORE, 16, SHARED, shown)
    _count(warp, site, addresses, offset, count)
    return DONE


@operation("movmatrix", "pp")
def movmatrix(warp, mask, site, target, source):
    if mask != FULL_MASK:
        return report(warp, FaultKind.DIVERGENT_ALIGNED, site, 0, 0, mask, FULL_MASK, 0, 0)
    words = scratch_words(32)
    _transpose(source, words)
    copy_bytes(address_of(target), address_of(words), 128)
    return DONE


_COUNTS = {"x1": 1, "x2": 2, "x4": 4}


def _shape(low: Lowering, ins: Instruction) -> tuple[int, int]:
    """ldmatrix.sync.aligned.m8n8.x4{.trans}{.shared{::cta}}.b16 → (matrices, is transposed)."""
    parts = [part for part in ins.parts[1:] if part not in ("shared", "shared::cta")]
    count = _COUNTS.get(parts[3], 0)
    rest = parts[4:]
    if parts[:3] != ["sync", "aligned", "m8n8"] or count == 0 or rest not in (["b16"], ["trans", "b16"]):
        raise low.refuse("only m8n8 matrices of .b16 are emulated")
    return count, 1 if rest[0] == "trans" else 0


def _registers(low: Lowering, operand: Operand, count: int) -> list[Operand]:
    """The registers of a vector, or the single one; `count` of them."""
    items: list[Operand] = [*operand.items] if isinstance(operand, Vector) else [operand]
    if len(items) != count:
        raise low.refuse(f"{len(items)} registers")
    return items


def lower_ldmatrix(low: Lowering, ins: Instruction) -> None:
    count, is_transposed = _shape(low, ins)
    items = _registers(low, ins.operands[0], count)
    base, offset = low.address(ins.operands[1])
    slots = [low.destination(item, 32) for item in items]
    low.call("ldmatrix", *slots, *[slots[0]] * (4 - count), base, offset, count, is_transposed)


def lower_stmatrix(low: Lowering, ins: Instruction) -> None:
    count, is_transposed = _shape(low, ins)
    slots = [low.slot(item, 32) for item in _registers(low, ins.operands[1], count)]
    slots += [slots[0]] * (4 - count)
    low.call("stmatrix", *low.address(ins.operands[0]), *slots, count, is_transposed)
