"""`wgmma.mma_async` and its fence, commit_group and wait_group.

Each of a warpgroup's four warps computes its own 16 rows of the 64, so no data crosses warps. An instruction is
recorded; operands are read and accumulators written at the `wait_group` that covers it. In between its registers may
not be touched (registers.py), and its shared memory must not change: a digest of it is compared.

Shared operands are described by 64 bits (PTX ISA, "Matrix descriptor format"): address, leading and stride byte offset
each / 16 in bits 0-13, 16-29, 32-45, base offset 49-51 (only 0 here), swizzle 62-63 (0 none, 1 128, 2 64, 3 32 bytes).
Matrices consist of rows of 16-byte chunks. "K major": chunks run along K; eight rows of M or N, as wide as the swizzle
(16 bytes without), lie together, the next eight SBO further; without swizzle the second chunk of K is LBO further.
"MN major" (16-bit types): chunks run along M or N; eight rows of K lie together, each as wide as the swizzle; the next
eight rows of K are SBO further (LBO without swizzle), the next chunks of M or N LBO further (SBO without swizzle).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

import functools
import re
from typing import Any

from numba import types

from numba_kernels.cache import njit
from numba_kernels.pointers import f32_at, i32_at, u8_at, u16_at, u32_at, u64_at
from runtime.emulator.async_copies.proxy import check_read
from runtime.emulator.async_copies.tensor_map import swizzled
from runtime.emulator.execution.fault import FaultKind, report
from runtime.emulator.execution.state import CHECK_ASYNC, DONE, FAILED, FULL_MASK, block_at
from runtime.emulator.memory.careful_access import shared_range
from runtime.emulator.memory.locate import free, make_room, zeroed
from runtime.emulator.memory.pointers import address_of, copy_bytes
from runtime.emulator.races.clocks import LOAD
from runtime.emulator.records import Ints, Long, Record, To, at
from runtime.emulator.tensor_cores.products import (
    ACC_F16,
    ELEMENT_CODES,
    IS_INTEGER,
    PER_WORD,
    multiply_accumulate,
    scratch_floats,
    scratch_words,
    spread_a,
    spread_b,
    spread_b_row,
    types_of,
)
from runtime.emulator.translation.lowering import Lowering
from runtime.emulator.translation.operations import call_operation, compiled_once, made_from_name, operation
from runtime.emulator.translation.ptx import Instruction, Integer, Register, Vector
from runtime.emulator.translation.registers import ACCUMULATES, IS_READ, WRITTEN


class Wgmma(Record):
    """An instruction in flight."""

    site = Long()
    group = Long()
    run = Long()  # address of the operation that carries it out
    table = Ints()  # see T_…
    a, b = Long(), Long()  # descriptors
    keep = Long()  # whether it adds to its accumulators
    flags = Long()
    columns = Long()
    digest = Long()  # of the shared memory that it reads


class WgmmaList(Record):
    """A warp's instructions in flight."""

    count, capacity = Long(), Long()
    entries = To("Wgmma")
    groups = Long()  # committed
    fences = Long()  # executed


wgmma_at = at(Wgmma)
_WGMMA_BYTES, _LIST_BYTES = Wgmma.size_bytes, WgmmaList.size_bytes
_A_IN_REGISTERS, _A_MN_MAJOR, _B_MN_MAJOR, _NEGATED = 1, 2, 4, 8

# The table of an instruction (int32): accumulators, A registers (4 or 0), offset of the state bytes, then the
# accumulators' and A registers' offsets in the register file, then their state bytes' numbers.
T_ACCUMULATORS, T_A, T_STATE, T_OFFSETS = 0, 1, 2, 3


@njit
def _chunk(descriptor, row, chunk):
    """The shared address of a 16-byte chunk of a K-major operand: `row` of M or N, `chunk` 0 or 1 along K."""
    mode = (4 - ((descriptor >> 62) & 3)) & 3
    leading, stride = (descriptor >> 12) & 0x3FFF0, (descriptor >> 28) & 0x3FFF0
    address = ((descriptor << 4) & 0x3FFF0) + (row >> 3) * stride + (row & 7) * (16 << mode)
    return swizzled(address + chunk * (leading if mode == 0 else 16), mode)


@njit
def _chunk_mn(descriptor, chunk, k):
    """The same of an MN-major operand: `chunk` counts eights of M or N, `k` is a row."""
    mode = (4 - ((descriptor >> 62) & 3)) & 3
    leading, stride = (descriptor >> 12) & 0x3FFF0, (descriptor >> 28) & 0x3FFF0
    if mode == 0:
        leading, stride = stride, leading
    address = ((descriptor << 4) & 0x3FFF0) + (k >> 3) * stride + (k & 7) * (16 << mode)
    return swizzled(address + (chunk >> mode) * leading + (chunk & ((1 << mode) - 1)) * 16, mode)


@njit
def _place(descriptor, is_mn_major, index, first_row):
    """The shared address of the `index`-th chunk of 16 K-deep rows from `first_row` on (of M or N)."""
    if is_mn_major:
        return _chunk_mn(descriptor, first_row // 8 + index // 16, index % 16)
    return _chunk(descriptor, first_row + index // 2, index % 2)


@compiled_once("l")
def digest_of(warp, record_address):
    """A digest of the shared memory that a warp answers for: its rows of A, a quarter of B."""
    record, shared = wgmma_at(record_address), warp.block.shared
    part, flags = warp.index & 3, record.flags
    digest = types.uint64(0)
    for operand in range(2):
        if operand == 0 and flags & _A_IN_REGISTERS:
            continue
        mn_major = (flags & (_A_MN_MAJOR if operand == 0 else _B_MN_MAJOR)) != 0
        descriptor = record.a if operand == 0 else record.b
        rows = 16 if operand == 0 else record.columns
        first = 16 * part if operand == 0 else 0
        for block in range(rows // 8):
            if operand == 1 and (block & 3) != part:
                continue
            for index in range(16):
                words = u64_at(shared + _place(descriptor, mn_major, index, first + 8 * block))
                digest = (digest ^ words[0]) * types.uint64(0x9E3779B97F4A7C15)
                digest = (digest ^ words[1] ^ (digest >> types.uint64(29))) * types.uint64(0xBF58476D1CE4E5B9)
    return types.int64(digest)


@njit
def _check_operand(warp, site, record, operand):
    """Bounds always; life, initialisation, races and the proxy fence by the launch's checks."""
    block = address_of(warp.block)
    fields = block_at(block)
    checks = warp.launch.checks
    part, flags = warp.index & 3, record.flags
    mn_major = (flags & (_A_MN_MAJOR if operand == 0 else _B_MN_MAJOR)) != 0
    descriptor = record.a if operand == 0 else record.b
    rows = 64 if operand == 0 else record.columns
    if (descriptor >> 49) & 7:
        return report(warp, FaultKind.WGMMA_DESCRIPTOR, site, 0, 0, descriptor, 0, 0, 0)
    for block_row in range(rows // 8):
        mine = block_row // 2 == part if operand == 0 else (block_row & 3) == part
        if not mine:
            continue
        for index in range(16):
            address = _place(descriptor, mn_major, index, 8 * block_row)
            if address + 16 > fields.shared_bytes:
                return report(warp, FaultKind.WGMMA_DESCRIPTOR, site, 0, address, descriptor, 0, 0, 0)
            if checks:
                host = fields.shared + address
                if shared_range(warp, site, 0, block, host, 16, LOAD, 0) or check_read(warp, site, 0, block, host, 16):
                    return 1
    return 0


@njit
def _list_of(warp):
    if not warp.wgmma:
        warp.wgmma = zeroed(_LIST_BYTES)
    return warp.wgmma


@njit
def _set_state(warp, table, set_bits):
    """Marks an instruction's registers as used by it, or (0) as free."""
    states = u8_at(warp.registers + table[T_STATE])
    count, fragments = table[T_ACCUMULATORS], table[T_A]
    numbers = T_OFFSETS + count + fragments
    for index in range(count + fragments):
        bit = ACCUMULATES if index < count else IS_READ
        number = table[numbers + index]
        states[number] = states[number] | bit if set_bits else states[number] & ~(ACCUMULATES | IS_READ)


@operation("wgmma_issue", "llqqpll")
def wgmma_issue(warp, mask, site, run, table_address, a, b, keep, flags, columns):
    """Records one instruction. `a` is A's descriptor, unless in registers; `keep` is the mask of lanes with scale-d."""
    if mask != FULL_MASK:
        return report(warp, FaultKind.DIVERGENT_ALIGNED, site, 0, 0, mask, FULL_MASK, 0, 0)
    block = warp.block
    if block.num_warps % 4:
        return report(warp, FaultKind.WARPGROUP, site, 0, 0, warp.index, block.num_warps, 0, 0)
    table = i32_at(table_address)
    states = u8_at(warp.registers + table[T_STATE])
    count, fragments = table[T_ACCUMULATORS], table[T_A]
    numbers = T_OFFSETS + count + fragments
    fences = _list_of(warp).fences
    for index in range(count + fragments):
        state = states[table[numbers + index]]
        if state & WRITTEN or fences == 0:
            return report(warp, FaultKind.MISSING_WGMMA_FENCE, site, 0, 0, index, 0, 0, 0)
        if state & (IS_READ if index < count else ACCUMULATES):
            return report(warp, FaultKind.ACCUMULATOR_IN_FLIGHT, site, 0, 0, index, 0, 0, 0)
    header = _list_of(warp)
    make_room(header, _WGMMA_BYTES)
    record = header.entries[header.count]
    record.site, record.group, record.run, record.table = site, header.groups, run, table_address
    record.a, record.b = a[0], b[0]
    record.keep, record.flags, record.columns = keep[0] & 1, flags, columns
    for operand in range(1 if flags & _A_IN_REGISTERS else 0, 2):
        if _check_operand(warp, site, record, operand):
            return FAILED
    if warp.launch.checks & CHECK_ASYNC:
        record.digest = digest_of(warp, address_of(record))
    header.count += 1
    _set_state(warp, table, True)
    return DONE


@operation("wgmma_fence", "ll")
def wgmma_fence(warp, mask, site, offset, count):
    if mask != FULL_MASK:
        return report(warp, FaultKind.DIVERGENT_ALIGNED, site, 0, 0, mask, FULL_MASK, 0, 0)
    _list_of(warp).fences += 1
    states = u8_at(warp.registers + offset)
    for index in range(count):
        states[index] &= ~WRITTEN
    return DONE


@operation("wgmma_commit", "")
def wgmma_commit(warp, mask, site):
    if mask != FULL_MASK:
        return report(warp, FaultKind.DIVERGENT_ALIGNED, site, 0, 0, mask, FULL_MASK, 0, 0)
    _list_of(warp).groups += 1
    return DONE


@operation("wgmma_wait", "l")
def wgmma_wait(warp, mask, site, pending):
    if mask != FULL_MASK:
        return report(warp, FaultKind.DIVERGENT_ALIGNED, site, 0, 0, mask, FULL_MASK, 0, 0)
    header = _list_of(warp)
    checked = warp.launch.checks & CHECK_ASYNC
    done = 0
    while done < header.count and header.entries[done].group < header.groups - pending:
        record = header.entries[done]
        if checked and digest_of(warp, address_of(record)) != record.digest:
            return report(warp, FaultKind.SOURCE_IN_FLIGHT, record.site, 0, (record.b << 4) & 0x3FFF0, site, 0, 0, 0)
        if call_operation(record.run, warp, record.site, address_of(record)):
            return FAILED
        _set_state(warp, record.table, False)
        done += 1
    for index in range(done, header.count):
        copy_bytes(address_of(header.entries[index - done]), address_of(header.entries[index]), _WGMMA_BYTES)
        _set_state(warp, header.entries[index - done].table, True)
    header.count -= done
    return DONE


@operation("wgmma_touched", "")
def wgmma_touched(warp, mask, site):
    return report(warp, FaultKind.ACCUMULATOR_IN_FLIGHT, site, 0, 0, 0, 0, 0, 0)


@njit
def close_wgmma(warp):
    """Frees the list. The site of an instruction that was never waited for, or -1."""
    site = -1
    if warp.wgmma:
        if _list_of(warp).count != 0:
            site = warp.wgmma.entries[0].site
        free(address_of(warp.wgmma.entries))
        free(address_of(warp.wgmma))
        warp.wgmma = 0
    return site


@njit
def _gather_a(descriptor, is_mn_major, shared, first_row, words):
    """16 rows of A as the four registers of a fragment, in `words`."""
    at = address_of(words)
    if not is_mn_major:
        for row in range(16):
            for chunk in range(2):
                source = shared + _chunk(descriptor, first_row + row, chunk)
                copy_bytes(at + ((row >> 3) + 2 * chunk) * 128 + (row & 7) * 16, source, 16)
        return
    halves = u16_at(at)
    for half in range(2):
        for k in range(16):
            source = u16_at(shared + _chunk_mn(descriptor, first_row // 8 + half, k))
            place = ((half + 2 * (k >> 3)) * 32 + ((k & 7) >> 1)) * 2 + (k & 1)
            for g in range(8):
                halves[place + 8 * g] = source[g]


@made_from_name("wgmma_run")
@functools.cache
def run_operation(code_a: int, code_b: int, accumulator: int) -> str:
    """The operation that carries a recorded instruction out, for types of A, B and D."""
    name = f"wgmma_run_{code_a}_{code_b}_{accumulator}"
    depth = 8 * PER_WORD[code_a]
    size_a, size_b = 16 * depth, 8 * depth
    is_half = PER_WORD[code_a] == 2
    row_code = code_b if is_half else ELEMENT_CODES["bf16"]
    slots = 2 if accumulator == ACC_F16 else 4

    def run(warp, mask, site, record_address):
        record = wgmma_at(record_address)
        table, flags = record.table, record.flags
        shared, registers = warp.block.shared, warp.registers
        a, b, words = scratch_floats(size_a), scratch_floats(size_b), scratch_words(128)
        if flags & _A_IN_REGISTERS:
            for index in range(4):
                offset = types.int64(table[T_OFFSETS + table[T_ACCUMULATORS] + index])
                copy_bytes(address_of(words) + index * 128, registers + offset, 128)
        else:
            _gather_a(record.a, (flags & _A_MN_MAJOR) != 0, shared, 16 * (warp.index & 3), words)
        for index in range(4):
            spread_a(code_a, index, u32_at(address_of(words) + index * 128), a)
        negate = types.int32(1 if flags & _NEGATED else 0)
        keep = types.int32(record.keep)
        for block in range(record.columns // 8):
            if is_half and flags & _B_MN_MAJOR:
                for k in range(16):
                    row = u16_at(shared + _chunk_mn(record.b, block, k))
                    spread_b_row(row_code, row, f32_at(address_of(b) + k * 32))
            else:
                for column in range(8):
                    for chunk in range(2):
                        source = shared + _chunk(record.b, 8 * block + column, chunk)
                        copy_bytes(address_of(words) + chunk * 128 + column * 16, source, 16)
                spread_b(code_b, 0, words, b)
                spread_b(code_b, 1, u32_at(address_of(words) + 128), b)
            first = T_OFFSETS + block * slots
            d0 = u32_at(registers + table[first])
            d1 = u32_at(registers + table[first + 1])
            d2 = u32_at(registers + table[first + slots - 2])
            d3 = u32_at(registers + table[first + slots - 1])
            multiply_accumulate(code_a, accumulator, depth, a, b, negate, keep, d0, d1, d2, d3, d0, d1, d2, d3)
        return DONE

    operation(name, "l")(run)
    return name


_SHAPE = re.compile(r"m64n(\d+)k(\d+)")


def describe(parts: tuple[str, ...]) -> tuple[int, int, int, int] | None:
    """`wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16` → (code of A, of B, accumulator, N), or None."""
    rest = [part for part in parts[2:] if part != "satfinite"]
    if len(rest) != 6 or rest[:2] != ["sync", "aligned"]:
        return None
    shape, (d_type, a_type, b_type) = _SHAPE.fullmatch(rest[2]), rest[3:]
    found = types_of(d_type, a_type, b_type, "satfinite" in parts)
    if shape is None or found is None:
        return None
    columns, per_word = int(shape[1]), PER_WORD[found[0]]
    if columns % 8 or not 8 <= columns <= 256 or int(shape[2]) != 8 * per_word or per_word > 4:
        return None
    return *found, columns


def lower_mma_async(low: Lowering, ins: Instruction) -> None:
    """wgmma.mma_async… d, a-desc | a-regs, b-desc, scale-d{, imm-scale-a, imm-scale-b{, imm-trans-a}{, imm-trans-b}}"""
    found = describe(ins.parts)
    if found is None:
        raise low.refuse("shape or types")
    code_a, code_b, accumulator, columns = found
    d, a, b, scale, *immediates = ins.operands
    numbers = [low.uniform(operand) for operand in immediates]
    if not isinstance(d, Vector) or len(d.items) != columns // (4 if accumulator == ACC_F16 else 2):
        raise low.refuse("the number of accumulators")
    fragments = list(a.items) if isinstance(a, Vector) else []
    registers: list[Any] = [*d.items, *fragments]
    if any(not isinstance(item, Register) for item in registers) or len(fragments) not in (0, 4):
        raise low.refuse("registers")
    flags = _A_IN_REGISTERS if fragments else 0
    if not IS_INTEGER[code_a]:
        if len(numbers) < 2 or not set(numbers[:2]) <= {1, -1}:
            raise low.refuse("scales of A and B")
        flags |= _NEGATED if numbers[0] * numbers[1] < 0 else 0
        numbers = numbers[2:]
    majors = [] if PER_WORD[code_a] != 2 else [_B_MN_MAJOR] if fragments else [_A_MN_MAJOR, _B_MN_MAJOR]
    if len(numbers) != len(majors) or not set(numbers) <= {0, 1}:
        raise low.refuse("transpositions")
    flags |= sum(major for major, number in zip(majors, numbers) if number)

    offsets = [low.pinned_offset(register) for register in registers]
    states = [low.wgmma.index[register.name] for register in registers]
    table = low.constant_table([len(d.items), len(fragments), low.wgmma.offset, *offsets, *states])
    run = low.operation_address(run_operation(code_a, code_b, accumulator))
    keep = low.slot(Integer(1 if scale.value else 0), 32) if isinstance(scale, Integer) else low.predicate_slot(scale)
    descriptor_a = low.slot(Integer(0) if fragments else a, 64)
    low.call("wgmma_issue", run, table, descriptor_a, low.slot(b, 64), keep, flags, columns)
    for register in registers[: len(d.items)]:
        low.invalidate(register)


def lower_fence(low: Lowering, ins: Instruction) -> None:
    low.call("wgmma_fence", low.wgmma.offset, len(low.wgmma.index))
    low.wgmma.forget()


def lower_wait(low: Lowering, ins: Instruction) -> None:
    low.call("wgmma_wait", low.uniform(ins.operands[0]))
    low.wgmma.forget()
