"""Packed matrices (`packing.py`) as rows of numbers: whole ones for kernels that multiply no packed weight, and rows of
a tied table for token ids.

    dequantize    out[r] = weight[r]                       out [N, K]
    lookup        out[t] = weight[ids[t]] multiplier       ids int32 [T], out [T, K]
    experts       out[e] = weight e                        table [2, E], out [E, N, K]

out is f32, f16 or bf16, rounded once. A thread has 16 bytes of a row, and leaves 16 bytes at a time. An id outside the
table sets the flag (int32, 0 before) and is read as row 0.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from numba import cuda, types

from numba_kernels.cuda.intrinsics import convert, memory
from numba_kernels.cuda.intrinsics.device import device_function, in_turn
from numba_kernels.cuda.intrinsics.element import element_loader, elements_storer
from numba_kernels.cuda.intrinsics.element_types import (
    BITS,
    E4M3_SCALE_SHIFT,
    INTEGERS,
    ITEM_BYTES,
    SHIFTS,
    VECTOR_WIDTH,
    offset_of,
)
from numba_kernels.cuda.intrinsics.sync import launch_dependents, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.unpack import unpack_all
from numba_kernels.cuda.packed_sections import sections_of
from numba_kernels.cuda.packing import PACKINGS, STEP, TILE_BYTES, TILE_ROWS, Packing, packing_of
from numba_kernels.cuda.specialisation import Launch, Specialisation

uint32, uint64, float32 = types.uint32, types.uint64, types.float32

THREADS = 128
MAX_GRID_ROWS = 65535
LAUNCH_S = 2e-6


@functools.cache
def _scale_loader(packing: Packing, dtype: str) -> Any:
    """A device function ``address -> float32``: a group's scale as it is kept."""
    load_u8, from_bits = memory.load_u8, convert.f32_from_bits
    if packing.scale == "value":
        return element_loader(dtype)
    if packing.scale == "e4m3":
        return device_function(lambda at: from_bits(load_u8(at) << uint32(20)) * float32(2.0**120))
    rebias = 127 - 15 if dtype == "f16" else 0

    @device_function
    def load_power(at):
        field = load_u8(at)
        return from_bits((field + uint32(rebias)) << uint32(23)) if field > uint32(0) else float32(0.0)

    return load_power


def _scale_index(packing: Packing, step: int) -> int:
    """The index of a step's scale among a thread's, in their order in memory."""
    return step if packing.halves == 2 else step * packing.lane_scales // packing.steps


@functools.cache
def _scales_loader(packing: Packing, dtype: str) -> tuple[Any, int]:
    """A device function that reads each of a thread's scales and zero points once, and how many there are."""
    load_scale, load_zero = _scale_loader(packing, dtype), element_loader(dtype)
    element, group, has_zeros = packing.element, packing.group, packing.has_zeros
    scale_step, zero_step = 2 * packing.scale_bytes(dtype), 2 * ITEM_BYTES[dtype]
    lacking = SHIFTS.get((element, "f16"), 0)
    if packing.scale in ("value", "exponent"):
        lacking -= SHIFTS.get((element, dtype), 0)
    elif packing.scale == "e4m3":
        lacking -= E4M3_SCALE_SHIFT
    factor = 2.0**lacking
    middle = 1 << (BITS[element] - 1)
    from_zero = middle - offset_of(element, dtype if dtype != "f32" else "f16", 0) if element in INTEGERS else 0.0
    count = _scale_index(packing, packing.steps - 1) + 1 if group else 1

    @device_function
    def load_scales(scales_at, zeros_at, scales, zeros):
        for i in range(count):
            scale, zero = float32(factor), float32(0.0)
            if group > 0:
                scale = load_scale(scales_at + uint64(i * scale_step)) * float32(factor)
            if has_zeros:
                zero = load_zero(zeros_at + uint64(i * zero_step)) + float32(from_zero)
            scales[i], zeros[i] = scale, zero

    return load_scales, count


@functools.cache
def _step(packing: Packing, dtype: str, width: int, step: int) -> Any:
    """A device function that leaves a thread's 8 elements of a step of 32."""
    unpack = unpack_all(packing.element, "f16", ((0, packing.lane_words * step, -1, -1),), False)
    unpack_pair, store = convert.unpack_f16, elements_storer(dtype, width)
    index = _scale_index(packing, step) if packing.group else 0
    item_bytes, count = ITEM_BYTES[dtype], 8 // width

    @device_function
    def leave(state):
        words, scales, zeros, row_scale, column, k, out = state
        pairs = cuda.local.array(4, uint32)
        values = cuda.local.array(8, float32)
        part = cuda.local.array(width, float32)
        unpack(pairs, words, words, words)
        scale, zero = scales[index], zeros[index]
        for i in range(4):
            low, high = unpack_pair(pairs[i])
            values[2 * i] = (low + zero) * scale * row_scale
            values[2 * i + 1] = (high + zero) * scale * row_scale
        for i in range(count):
            at = uint32(column + uint32(step * STEP + i * width))
            if at < k:
                for e in range(width):
                    part[e] = values[i * width + e]
                store(out + uint64(at) * uint64(item_bytes), part)

    return leave


@functools.cache
def _kernel(packing: Packing, dtype: str, width: int, kind: str) -> Specialisation:
    """Arguments: packed, ids, out, flag addresses; rows of out, of the matrix; k; multiplier. For experts a block's z
    is the expert, and `packed` the address of their table (`experts.tiled`)."""
    is_lookup, is_experts = kind == "lookup", kind == "dequantize_experts"
    find = sections_of(packing, dtype)
    leave_steps = in_turn([_step(packing, dtype, width, step) for step in range(packing.steps)])
    load_scales, num_scales = _scales_loader(packing, dtype)
    load, load_row_scale, store_flag = memory.stream_4xb32, memory.load_f32, memory.store_b32
    load_id, load_address, halves = memory.load_b32, memory.load_b64, packing.halves
    chunk, zeros_chunk = packing.chunk_bytes(dtype), packing.zeros_bytes(dtype)
    scale_bytes, item_bytes, slot_elements = packing.scale_bytes(dtype), ITEM_BYTES[dtype], packing.slot
    rows_at_once = 1 if is_lookup else TILE_ROWS

    def dequantize(packed, ids, out, flag, num_rows, table_rows, k, multiplier):
        wait_for_previous_grid()
        launch_dependents()
        if is_experts:
            expert = uint32(cuda.blockIdx.z)
            packed = load_address(packed + uint64(expert) * uint64(8))
            out += uint64(expert) * uint64(table_rows) * uint64(k) * uint64(item_bytes)
        words_at, scales_at, zeros_at, row_scales_at, slots = find(packed, table_rows, k)
        item = uint32(uint32(cuda.blockIdx.x) * uint32(THREADS) + uint32(cuda.threadIdx.x))
        t, slot = item & uint32(3), item >> uint32(2)
        inside = uint32(0)
        if not is_lookup:
            inside, slot = slot & uint32(TILE_ROWS - 1), slot >> uint32(3)
        target = uint32(uint32(cuda.blockIdx.y) * uint32(rows_at_once) + inside)
        words = cuda.local.array(4, uint32)
        scales, zeros = cuda.local.array(num_scales, float32), cuda.local.array(num_scales, float32)
        while target < num_rows and slot < slots:
            row = target
            if is_lookup:
                row = load_id(ids + uint64(target) * uint64(4))
                if row >= table_rows:  # negative ids are large ones
                    store_flag(flag, uint32(1))
                    row = uint32(0)
            tile, g = row >> uint32(3), row & uint32(7)
            place = uint64(tile) * uint64(slots) + uint64(slot)
            a, b, c, d = load(words_at + place * uint64(TILE_BYTES) + uint64((g * uint32(4) + t) * uint32(16)))
            words[0], words[1], words[2], words[3] = a, b, c, d
            pair = (uint64(tile >> uint32(1)) * uint64(slots) + uint64(slot)) * uint64(8) + uint64(g)
            if halves == 2:
                pair = pair * uint64(2) + uint64(t >> uint32(1))
            odd = uint64(tile & uint32(1))
            scale_at = scales_at + pair * uint64(chunk) + odd * uint64(scale_bytes)
            zero_at = zeros_at + pair * uint64(zeros_chunk) + odd * uint64(item_bytes)
            row_scale = load_row_scale(row_scales_at + uint64(row) * uint64(4))
            if is_lookup:
                row_scale *= multiplier
            column = uint32(slot * uint32(slot_elements) + t * uint32(8))
            at = out + uint64(target) * uint64(k) * uint64(item_bytes)
            load_scales(scale_at, zero_at, scales, zeros)
            leave_steps((words, scales, zeros, row_scale, column, k, at))
            target = uint32(target + uint32(cuda.gridDim.y) * uint32(rows_at_once))

    return Specialisation(
        name=f"{kind}_{packing.name}_{dtype}_x{width}",
        kernel=cuda.jit(dequantize),
        argument_types=(types.uint64,) * 4 + (types.uint32,) * 3 + (types.float32,),
        max_threads=THREADS,
        constants={"packing": packing.name, "dtype": dtype, "width": width},
    )


def plan(
    packing: Packing, rows: int, depth: int, dtype: str, *, is_lookup: bool = False, alignment: int = 16
) -> Launch:
    """The launch for out [rows, depth], both at least 1.

    Arguments: packed, ids or 0, out, flag or 0, rows, rows of the matrix, depth, multiplier.
    """
    width = VECTOR_WIDTH[dtype] if depth % VECTOR_WIDTH[dtype] == 0 and alignment % 16 == 0 else 1
    items = -(-depth // packing.slot) * 4 * (1 if is_lookup else TILE_ROWS)
    rows_at_once = 1 if is_lookup else TILE_ROWS
    grid = -(-items // THREADS), min(MAX_GRID_ROWS, -(-rows // rows_at_once)), 1
    return Launch(_kernel(packing, dtype, width, "lookup" if is_lookup else "dequantize"), grid, (THREADS, 1, 1))


def plan_experts(packing: Packing, num_experts: int, rows: int, depth: int, dtype: str) -> Launch:
    """The launch for out [experts, rows, depth], on a 16-byte bound, each size at least 1.

    Arguments: table, 0, out, 0, rows, rows, depth, 1.0.
    """
    launch = plan(packing, rows, depth, dtype)
    width = launch.specialisation.constants["width"]
    grid = launch.grid[0], launch.grid[1], num_experts
    return Launch(_kernel(packing, dtype, width, "dequantize_experts"), grid, launch.block)


def seconds(packing: Packing, rows: int, depth: int, dtype: str, memory_bytes: float) -> float:
    """Seconds of a whole matrix, by the bytes read and written, and a launch. With an H200's sustained bandwidth this
    is within an eighth of INT4's and INT8's measured times; MXFP4 takes less."""
    num_bytes = packing.size_bytes(rows, depth, dtype) + rows * depth * ITEM_BYTES[dtype]
    return LAUNCH_S + num_bytes / memory_bytes


def specialisations() -> Iterator[Specialisation]:
    """The launches of bf16, and of the other types for a matrix in 8 bits."""
    for name in PACKINGS:
        packing = packing_of(name)
        assert packing is not None
        for dtype in ("bf16", "f16", "f32") if name == "u8" else ("bf16",):
            for kind in ("dequantize", "lookup"):
                yield _kernel(packing, dtype, VECTOR_WIDTH[dtype], kind)
        yield _kernel(packing, "bf16", VECTOR_WIDTH["bf16"], "dequantize_experts")
