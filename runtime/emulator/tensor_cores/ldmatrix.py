"""`ldmatrix`, `stmatrix` and `movmatrix`: 8 x 8 matrices of 16-bit elements between shared memory and registers.

Lane 8 i + r names the address of row r of matrix i; lane l holds elements 2 (l % 4) and 2 (l % 4) + 1 of row l // 4,
or with `.trans` of column l // 4 (PTX ISA, "Warp-level matrix load instruction: ldmatrix").
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

from numba_kernels.cache import njit
from numba_kernels.pointers import u16_at, u32_at
from runtime.emulator.async_copies.proxy import wrote
from runtime.emulator.execution.counters import count_access
from runtime.emulator.execution.fault import FaultKind, report
from runtime.emulator.execution.state import CHECK_RACES, DONE, FAILED, FULL_MASK
from runtime.emulator.memory.careful_access import shared_range
from runtime.emulator.memory.locate import SHARED, aligned, landed, shared_block, shared_host
from runtime.emulator.memory.pointers import address_of, bytes_equal, copy_bytes, stack_longs
from runtime.emulator.races.clocks import LOAD, STORE
from runtime.emulator.tensor_cores.products import scratch_words
from runtime.emulator.translation.lowering import Lowering, lowers
from runtime.emulator.translation.operations import operation
from runtime.emulator.translation.ptx import Instruction, Operand, Vector


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


@lowers("ldmatrix")
def lower_ldmatrix(low: Lowering, ins: Instruction) -> None:
    count, is_transposed = _shape(low, ins)
    items = _registers(low, ins.operands[0], count)
    base, offset = low.address(ins.operands[1])
    slots = [low.destination(item, 32) for item in items]
    low.call("ldmatrix", *slots, *[slots[0]] * (4 - count), base, offset, count, is_transposed)


@lowers("stmatrix")
def lower_stmatrix(low: Lowering, ins: Instruction) -> None:
    count, is_transposed = _shape(low, ins)
    slots = [low.slot(item, 32) for item in _registers(low, ins.operands[1], count)]
    slots += [slots[0]] * (4 - count)
    low.call("stmatrix", *low.address(ins.operands[0]), *slots, count, is_transposed)


@lowers("movmatrix")
def lower_movmatrix(low: Lowering, ins: Instruction) -> None:
    if ins.opcode != "movmatrix.sync.aligned.m8n8.trans.b16":
        raise low.refuse("form")
    source = low.slot(ins.operands[1], 32)
    low.call("movmatrix", low.destination(ins.operands[0], 32), source)
