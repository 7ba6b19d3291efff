"""`cp.async.bulk.tensor` (tiled mode, 1 to 5 dimensions), `tensormap.replace` and the fences of tensor maps."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

from numba import types

from numba_kernels.cache import njit
from numba_kernels.pointers import i64_at
from runtime.emulator.async_copies.bulk_copy import (
    HINT,
    MBARRIER,
    MULTICAST,
    NO_REDUCTION,
    claim_shared_source,
    claim_shared_target,
    last_operands,
    reducer_of,
    set_mbarrier,
    start_record,
)
from runtime.emulator.async_copies.bulk_queue import TENSOR_LOAD, TENSOR_REDUCE, TENSOR_STORE, count_tile
from runtime.emulator.async_copies.reduction import REDUCTIONS, may_reduce
from runtime.emulator.async_copies.tensor_map import (
    MAP_ADDRESS,
    MAP_BOX,
    MAP_BYTES,
    MAP_KINDS,
    MAP_MARK,
    MAP_SIZES,
    MAP_STEPS,
    MAP_STRIDES,
    MARK,
    REPLACE_ELEMENT_TYPES,
    SWIZZLE_BYTES,
    element_bytes,
    map_bytes,
    map_extent,
    map_rank,
    map_swizzle,
    map_type,
)
from runtime.emulator.execution.fault import FaultKind, report
from runtime.emulator.execution.state import DONE, FAILED, block_at
from runtime.emulator.memory.careful_access import read_any, write_any
from runtime.emulator.memory.locate import aligned, block_of_rank, landed, shared_block, shared_host
from runtime.emulator.memory.pointers import address_of, copy_bytes
from runtime.emulator.synchronisation.mbarrier_state import mbarrier_at
from runtime.emulator.translation.lowering import Lowering
from runtime.emulator.translation.operations import operation
from runtime.emulator.translation.ptx import Address, Instruction, Integer, Operand, Vector

# The fault of a map: the field of the fault's message.
_NOT_A_MAP, _WRONG_RANK, _WRONG_TYPE, _WRONG_ADDRESS, _WRONG_STRIDE, _WRONG_ROW, _WRONG_SWIZZLE, _WRONG_INTERLEAVE = (
    range(8)
)


@njit
def _usable_map(warp, site, lane, address, rank):
    """The host address of a map after all checks; 0 and a fault otherwise."""
    if aligned(warp, site, lane, address, 64):
        return 0
    host = read_any(warp, site, lane, address, MAP_BYTES)
    if host == 0:
        return 0
    launch = warp.launch
    in_device_memory = launch.arena <= host < launch.arena + launch.arena_bytes
    if in_device_memory and warp.block.has_map_fence == 0:
        report(warp, FaultKind.MISSING_TENSOR_MAP_FENCE, site, lane, host, 0, 0, 0, 0)
        return 0
    words = i64_at(host)
    field, value = -1, types.int64(0)
    row = map_extent(words, 0) * element_bytes(map_type(words))
    width = 16 << map_swizzle(words)
    if words[MAP_MARK] != MARK:
        field, value = _NOT_A_MAP, words[MAP_MARK]
    elif map_rank(words) != rank:
        field, value = _WRONG_RANK, map_rank(words)
    elif element_bytes(map_type(words)) == 0:
        field, value = _WRONG_TYPE, map_type(words)
    elif words[MAP_ADDRESS] == 0 or words[MAP_ADDRESS] % 16:
        field, value = _WRONG_ADDRESS, words[MAP_ADDRESS]
    elif (words[MAP_KINDS] >> 24) & 0xFF:
        field, value = _WRONG_INTERLEAVE, (words[MAP_KINDS] >> 24) & 0xFF
    elif map_swizzle(words) >= 4 or (map_swizzle(words) > 0 and row > width):
        field, value = _WRONG_SWIZZLE, map_swizzle(words)
    elif row % 16:
        field, value = _WRONG_ROW, row
    for dimension in range(1, rank):
        stride = words[MAP_STRIDES + dimension - 1]
        if field < 0 and (stride <= 0 or stride % 16):
            field, value = _WRONG_STRIDE, stride
    if field >= 0:
        report(warp, FaultKind.TENSOR_MAP, site, lane, host, field, value, 0, 0)
        return 0
    return host


@njit
def _fill(record, map_host, coordinates, offset, mover):
    for dimension in range(5):
        record.coordinates[dimension] = coordinates[dimension]
    copy_bytes(address_of(record.map), map_host, MAP_BYTES)
    record.offset, record.mover = offset, mover


@njit
def _load_into(warp, site, lane, block, target, map_host, coordinates, mbarrier, mover):
    host = shared_host(block, target)
    size = map_bytes(i64_at(map_host))
    if aligned(warp, site, lane, target, 128) or claim_shared_target(warp, site, lane, block, host, size, 0):
        return 1
    record = start_record(warp, site, lane, TENSOR_LOAD, size)
    record.target, record.target_block = host, block
    _fill(record, map_host, coordinates, host - block_at(block).shared, mover)
    set_mbarrier(warp, record, mbarrier)
    return 0


@njit
def _lane_coordinates(lane, c0, c1, c2, c3, c4):
    """A lane's five signed coordinates."""
    return (
        types.int64(types.int32(c0[lane])), types.int64(types.int32(c1[lane])), types.int64(types.int32(c2[lane])),
        types.int64(types.int32(c3[lane])), types.int64(types.int32(c4[lane])),
    )  # fmt: skip


@operation("tensor_load", "qlqlppppplqlpl")
def tensor_load(
    warp, mask, site, targets, target_offset, maps, map_offset, c0, c1, c2, c3, c4, rank, mbarriers, mbarrier_offset,
    cluster_mask, mover,
):  # fmt: skip
    for lane in range(32):
        if not (mask >> lane) & 1:
            continue
        map_host = _usable_map(warp, site, lane, maps[lane] + map_offset, rank)
        target = targets[lane] + target_offset
        block = shared_block(warp, site, lane, target)
        mbarrier = mbarrier_at(warp, site, lane, mbarriers[lane] + mbarrier_offset, False)
        if map_host == 0 or block == 0 or mbarrier == 0:
            return FAILED
        coordinates = _lane_coordinates(lane, c0, c1, c2, c3, c4)
        if warp.launch.traffic:
            count_tile(warp, site, i64_at(map_host), coordinates)
        ranks, at = types.int64(cluster_mask[lane]), mbarrier - block_at(block).shared
        if ranks >> warp.launch.cluster_size:
            return report(warp, FaultKind.CLUSTER_RANK, site, lane, target, ranks, warp.launch.cluster_size, 0, 0)
        for index in range(16 if ranks else 1):
            if ranks == 0 or (ranks >> index) & 1:
                other = block_of_rank(warp, site, lane, index) if ranks else block
                if other == 0:
                    return FAILED
                there = block_at(other).shared + at if ranks else mbarrier
                if _load_into(warp, site, lane, other, target, map_host, coordinates, there, mover):
                    return FAILED
    return DONE


@operation("tensor_store", "qlppppplqllll")
def tensor_store(
    warp, mask, site, maps, map_offset, c0, c1, c2, c3, c4, rank, sources, source_offset, reduction, mover, reducer
):
    for lane in range(32):
        if not (mask >> lane) & 1:
            continue
        map_host = _usable_map(warp, site, lane, maps[lane] + map_offset, rank)
        source = sources[lane] + source_offset
        block = shared_block(warp, site, lane, source)
        if map_host == 0 or block == 0:
            return FAILED
        element_type = map_type(i64_at(map_host))
        if reduction != NO_REDUCTION and not may_reduce(reduction, element_type):
            return report(warp, FaultKind.TENSOR_MAP, site, lane, map_host, _WRONG_TYPE, element_type, 0, 0)
        size, host = map_bytes(i64_at(map_host)), shared_host(block, source)
        if aligned(warp, site, lane, source, 128) or claim_shared_source(warp, site, lane, block, host, size):
            return FAILED
        coordinates = _lane_coordinates(lane, c0, c1, c2, c3, c4)
        if warp.launch.traffic:
            count_tile(warp, site, i64_at(map_host), coordinates)
        record = start_record(warp, site, lane, TENSOR_STORE if reduction == NO_REDUCTION else TENSOR_REDUCE, size)
        record.source, record.source_block = host, block
        record.operation, record.reducer = reduction, reducer
        _fill(record, map_host, coordinates, host - block_at(block).shared, mover)
    return DONE


@operation("tensor_map_prefetch", "ql")
def tensor_map_prefetch(warp, mask, site, maps, map_offset):
    """Checks a map; there is no descriptor cache."""
    for lane in range(32):
        if (mask >> lane) & 1:
            address = maps[lane] + map_offset
            if aligned(warp, site, lane, address, 64) or read_any(warp, site, lane, address, MAP_BYTES) == 0:
                return FAILED
    return DONE


@operation("tensor_map_replace", "qlllq")
def tensor_map_replace(warp, mask, site, maps, map_offset, field, dimension, values):
    """Writes one field. `field`: a word of the map, or for MAP_KINDS a shift of 0, 8, 16, 24 or 32 in `dimension`."""
    for lane in range(32):
        if (mask >> lane) & 1:
            address = maps[lane] + map_offset
            if aligned(warp, site, lane, address, 64) or read_any(warp, site, lane, address, MAP_BYTES) == 0:
                return FAILED
            host = write_any(warp, site, lane, address, MAP_BYTES, 0)
            if host == 0:
                return FAILED
            words, value = i64_at(host), values[lane]
            if field == MAP_KINDS:
                words[field] = words[field] & ~(0xFF << dimension) | (value & 0xFF) << dimension
            elif field in (MAP_BOX, MAP_STEPS):
                words[field] = words[field] & ~(0xFF << 8 * dimension) | ((value - 1) & 0xFF) << 8 * dimension
            else:
                words[field + dimension] = value
            words[MAP_MARK] = MARK
    return DONE


@operation("tensor_map_publish", "qlql")
def tensor_map_publish(warp, mask, site, targets, target_offset, sources, source_offset):
    """tensormap.cp_fenceproxy: one copy of 128 bytes by the warp."""
    for lane in range(32):
        if (mask >> lane) & 1:
            target = targets[lane] + target_offset
            source = sources[lane] + source_offset
            if aligned(warp, site, lane, target, 128) or aligned(warp, site, lane, source, 128):
                return FAILED
            source = read_any(warp, site, lane, source, MAP_BYTES)
            if source == 0 or write_any(warp, site, lane, target, MAP_BYTES, source) == 0:
                return FAILED
            copy_bytes(target, source, MAP_BYTES)
            landed(warp, 0, target, MAP_BYTES)
            break
    return DONE


@operation("tensor_map_acquire", "")
def tensor_map_acquire(warp, mask, site):
    if mask:
        warp.block.has_map_fence = 1
    return DONE


_RANKS = {f"{rank}d": rank for rank in range(1, 6)}


def _coordinates(low: Lowering, operand: Operand, rank: int) -> list[object]:
    if not isinstance(operand, Address) or not isinstance(operand.coordinates, Vector | type(None)):
        raise low.refuse("a tensor operand is [map, {coordinates}]")
    items = list(operand.coordinates.items) if isinstance(operand.coordinates, Vector) else []
    if len(items) != rank:
        raise low.refuse(f"{len(items)} coordinates of {rank}")
    return [low.slot(item, 32) for item in [*items, *[Integer(0)] * (5 - rank)]]


def _map_address(low: Lowering, operand: Operand) -> tuple[object, int]:
    assert isinstance(operand, Address)
    return low.address(Address(operand.base, operand.offset))


def lower_tensor(low: Lowering, ins: Instruction) -> None:
    """cp.async.bulk.tensor.Nd.<to>.<from>{.tile}.…; cp.reduce.async.bulk.tensor.Nd.<to>.<from>.op{.tile}.bulk_group"""
    parts = [part for part in ins.parts[4 if ins.parts[1] == "async" else 5 :] if part != "tile"]
    rank = _RANKS.get(parts[0], 0)
    if rank == 0:
        raise low.refuse(f".{parts[0]}")
    rest = set(parts[3:])
    mover = low.operation_address("move_tile")
    if parts[1] in ("shared::cluster", "shared::cta") and parts[2] == "global" and ins.parts[1] == "async":
        if not {MBARRIER} <= rest <= {MBARRIER, MULTICAST, HINT}:
            raise low.refuse("modifiers (only tiled mode is emulated)")
        target, tensor, mbarrier = ins.operands[:3]
        ranks = low.slot(last_operands(low, ins, 3), 32)
        coordinates = _coordinates(low, tensor, rank)
        addresses = (*low.address(target), *_map_address(low, tensor))
        low.call("tensor_load", *addresses, *coordinates, rank, *low.address(mbarrier), ranks, mover)
        return
    if parts[1] != "global" or parts[2] != "shared::cta":
        raise low.refuse("state spaces")
    reductions = [part for part in parts[3:] if part in REDUCTIONS]
    if len(reductions) != (ins.parts[1] == "reduce") or not rest <= {"bulk_group", HINT, *reductions}:
        raise low.refuse("modifiers (only tiled mode is emulated)")
    last_operands(low, ins, 2)
    tensor, source = ins.operands[:2]
    coordinates = _coordinates(low, tensor, rank)
    reduction = REDUCTIONS[reductions[0]] if reductions else NO_REDUCTION
    place = (*_map_address(low, tensor), *coordinates, rank, *low.address(source))
    low.call("tensor_store", *place, reduction, mover, reducer_of(low, reduction))


_FIELDS = {
    "global_address": (MAP_ADDRESS, "b64", 0), "global_dim": (MAP_SIZES, "b32", 5),
    "global_stride": (MAP_STRIDES, "b64", 4), "box_dim": (MAP_BOX, "b32", 5), "element_stride": (MAP_STEPS, "b32", 5),
}  # fmt: skip
_KINDS = {"elemtype": 0, "rank": 8, "swizzle_mode": 16, "interleave_layout": 24, "fill_mode": 32}


def lower_replace(low: Lowering, ins: Instruction) -> None:
    """tensormap.replace.tile.field{.space}.b1024.type [map], {dimension,} value"""
    name, rest = ins.parts[3], [p for p in ins.parts[4:] if p not in ("global", "shared::cta", "shared")]
    base, offset = low.address(ins.operands[0])
    if name in _FIELDS:
        field, kind, dimensions = _FIELDS[name]
        dimension = low.uniform(ins.operands[1]) if dimensions else 0
        if rest != ["b1024", kind] or not 0 <= dimension < max(1, dimensions):
            raise low.refuse("type or dimension")
        low.call("tensor_map_replace", base, offset, field, dimension, low.slot(ins.operands[-1], 64))
        return
    if name not in _KINDS or rest != ["b1024", "b32"]:
        raise low.refuse(f"field .{name}")
    value = ins.operands[1]
    if name == "elemtype":
        number = low.uniform(value)
        if number not in REPLACE_ELEMENT_TYPES:
            raise low.refuse(f"element type {number}")
        value = Integer(REPLACE_ELEMENT_TYPES[number])
    elif name == "swizzle_mode" and not 0 <= low.uniform(value) < len(SWIZZLE_BYTES):
        raise low.refuse("swizzle mode")
    elif name in ("interleave_layout", "fill_mode") and low.uniform(value) not in (
        (0, 1) if name == "fill_mode" else (0,)
    ):
        raise low.refuse(f"{name} {low.uniform(value)}")
    low.call("tensor_map_replace", base, offset, MAP_KINDS, _KINDS[name], low.slot(value, 64))
