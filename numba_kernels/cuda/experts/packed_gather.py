"""Few tokens and experts that stay quantised: `gather`'s two launches, straight over the bytes of the chosen experts.

What it teaches: which factor is unpacked to what. Unpacking costs more than memory does where each pair of numbers is
shifted, masked, centred and scaled (`gemm.few_rows`). Here

- x becomes float16, times a power of two that brings its largest number to 2^14: nothing is lost that is at least
  2^-31 of that. For float16 4 and 8 bits need no more than fields moved or a unit's exponent in front (`raise_all`);
- integers are not centred: x times the unit and the zero point is added up by tensor cores, too, by ones, and taken
  from the sum of a group;
- a group's scale multiplies its sum in float32, not its numbers;
- the weight is the first factor of `mma.sync`, 16 rows of it, x the second, the same in all 8 columns: no register
  moves before it is multiplied.

A warp takes 16 rows of a packed weight and a part of K, with `AHEAD` slots on their way in registers.

    gate and up   a block takes 16 columns of one choice of a token: a tile of the gate's rows, one of up's, K in
                  `STREAMS` parts
    down          a block takes 16 columns of a token, its warps the token's choices and parts of K. They meet in shared
                  memory, as in `gather`: the row is complete.

A token's sum depends on no other token; it is not that of the other tiers. Rows are bfloat16; groups of 16 and packings
with zero points of their own have no such kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from numba import cuda, types

from numba_kernels.cuda.experts.combine import adder
from numba_kernels.cuda.gemm.epilogue import scale_element
from numba_kernels.cuda.gemm.gating import ACTIVATIONS
from numba_kernels.cuda.intrinsics import convert, memory
from numba_kernels.cuda.intrinsics.asm import instruction
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import element_storer
from numba_kernels.cuda.intrinsics.element_types import INTEGERS, SHIFTS
from numba_kernels.cuda.intrinsics.fragments import load_all, multiply_all
from numba_kernels.cuda.intrinsics.integer import divide_u32, minimum_u32
from numba_kernels.cuda.intrinsics.memory import load_b32, load_b64, load_f32, store_f32
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.unpack import RAISED, raise_all
from numba_kernels.cuda.intrinsics.warp import lane_index, maximum_u32_of_warp, shuffle_xor_f32
from numba_kernels.cuda.packed_sections import sections_of
from numba_kernels.cuda.packing import PACKINGS, TILE_BYTES, TILE_ROWS, Packing, packing_of
from numba_kernels.cuda.specialisation import Launch, Specialisation

uint32, uint64, float32 = types.uint32, types.uint64, types.float32

DTYPE = "bf16"  # of rows
ROWS = 16  # of a weight, that a warp multiplies
AHEAD = 4
_NUM_WORDS = 8 * AHEAD  # of a lane, on their way
WARPS = 8
STREAMS = WARPS // 2  # parts of K of a block that multiplies gate and up
MAX_CHOICES = 16  # of a token
MOST_SHARED_BYTES = 96 << 10
SQUARE_COLUMNS = 4
_STEP_BYTES = 64  # of 32 numbers of x
_LARGEST = 14  # the exponent of x's largest number
_ONES = 0x3C003C00

_as_float = instruction("mov.b32 $0, $1;", "f", "r", is_pure=True)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Device functions of a packing, and the registers of a lane.

    Attributes:
        num_scale_words: of all slots, at least 1.
        begin: ``(words, scales, rows, scale_rows, weight, tile, n, k, first, last, lane)``: asks for the first slots.
        multiply: ``(sums, words, scales, rows, scale_rows, x, first, last)``: sums[0] and sums[1] are those of rows g
            and g + 8 of the tile, without the rows' scales; x is the shared address of the lane's numbers.
        row_scale: ``(weight, n, k, row) -> number``.
        slots: ``k -> slots``.
        shift: a power of two that sums lack.
    """

    num_scale_words: int
    begin: Any
    multiply: Any
    row_scale: Any
    slots: Any
    shift: int


@functools.cache
def _reader(weight_name: str) -> _Reader:
    packing = packing_of(weight_name)
    assert packing is not None
    find, steps, is_grouped = sections_of(packing, DTYPE), packing.steps, packing.group > 0
    scale_words, scale_step = packing.chunk_bytes(DTYPE) // 4, TILE_ROWS * packing.chunk_bytes(DTYPE)
    is_integer, slot_elements = packing.element in INTEGERS, packing.slot
    offset = -float(RAISED[packing.element] + (1 << (8 if packing.element == "u8" else 4)) // 2) if is_integer else 0.0
    of_scale = 2.0 ** -SHIFTS.get((packing.element, DTYPE), 0)  # what a kept scale is too large by
    is_exponent = packing.scale == "exponent"

    def loader(i: int) -> Any:
        load_words = load_all("stream", tuple((8 * i + 4 * r, r, i * TILE_BYTES) for r in range(2)))
        load_scales = load_all("stream", ((i * scale_words, 0, i * scale_step),), scale_words) if is_grouped else None

        @device_function
        def load(words, scales, rows, scale_rows):
            if is_grouped:
                load_scales(scales, scale_rows)
            load_words(words, rows)

        return load

    @device_function
    def settle(sums, parts, totals, upper, lower):
        """A group's sums, times the scales of rows g and g + 8."""
        if is_integer:
            sums[0] += (parts[0] + totals[0] * float32(offset)) * upper
            sums[1] += (parts[2] + totals[0] * float32(offset)) * lower
        else:
            sums[0] += parts[0] * upper
            sums[1] += parts[2] * lower
        for e in range(4):
            parts[e] = float32(0.0)
            totals[e] = float32(0.0)

    def scale_reader(i: int, group: int) -> Any:
        """Of the slot's group of that number: the scales of rows g and g + 8."""
        if is_exponent:
            word, up = i * scale_words + group // 2, (16 * (group % 2), 16 * (group % 2) + 8)

            @device_function
            def read(scales):
                upper = _as_float(uint32((scales[word] >> uint32(up[0])) & uint32(0xFF)) << uint32(23))
                lower = _as_float(uint32((scales[word] >> uint32(up[1])) & uint32(0xFF)) << uint32(23))
                return upper * float32(of_scale), lower * float32(of_scale)

        else:
            word = i * scale_words + group

            @device_function
            def read(scales):
                upper = _as_float(uint32(scales[word] << uint32(16)))
                lower = _as_float(uint32(scales[word] & uint32(0xFFFF0000)))
                return upper * float32(of_scale), lower * float32(of_scale)

        return read

    def step_taker(i: int, step: int) -> Any:
        raise_pairs = raise_all(
            packing.element, tuple((4 * r, 8 * i + 4 * r + packing.lane_words * step) for r in range(2))
        )
        load_x = load_all("shared", ((0, 0, step * _STEP_BYTES),))
        multiply_tile = multiply_all("f16", ((0, (0, 4, 1, 5), (0, 1)), (0, (2, 6, 3, 7), (2, 3))))
        add_up = multiply_all("f16", ((0, (0, 0, 0, 0), (0, 1)), (0, (0, 0, 0, 0), (2, 3))))
        ends_group = is_grouped and (step + 1) * 32 % packing.kept_group == 0
        read = scale_reader(i, step * 32 // packing.kept_group) if ends_group else None

        @device_function
        def take_step(sums, parts, totals, pairs, ones, x_words, words, scales, x_at):
            load_x(x_words, x_at)
            raise_pairs(pairs, words)
            multiply_tile(parts, pairs, x_words)
            if is_integer:
                add_up(totals, ones, x_words)
            if ends_group:
                upper, lower = read(scales)
                settle(sums, parts, totals, upper, lower)

        return take_step

    def slot_taker(i: int) -> Any:
        takers: list[Any] = [step_taker(i, step) for step in range(steps)] + [None] * (4 - steps)
        take_0, take_1, take_2, take_3 = takers
        has_four = steps == 4

        @device_function
        def take_slot(sums, parts, totals, pairs, ones, x_words, words, scales, x_at):
            take_0(sums, parts, totals, pairs, ones, x_words, words, scales, x_at)
            take_1(sums, parts, totals, pairs, ones, x_words, words, scales, x_at)
            if has_four:
                take_2(sums, parts, totals, pairs, ones, x_words, words, scales, x_at)
                take_3(sums, parts, totals, pairs, ones, x_words, words, scales, x_at)

        return take_slot

    load_0, load_1, load_2, load_3 = (loader(i) for i in range(AHEAD))
    slot_0, slot_1, slot_2, slot_3 = (slot_taker(i) for i in range(AHEAD))
    slot_bytes = slot_elements * 2  # of x

    @device_function
    def begin(words, scales, rows, scale_rows, weight, tile, n, k, first, last, lane):
        all_words, all_scales, _, _, slots = find(weight, n, k)
        for r in range(2):
            at = (uint64(tile * uint32(2) + uint32(r)) * uint64(slots) + uint64(first)) * uint64(TILE_BYTES)
            rows[r] = all_words + at + uint64(lane * uint32(16))
        at = (uint64(tile) * uint64(slots) + uint64(first)) * uint64(scale_step)
        scale_rows[0] = all_scales + at + uint64(lane >> uint32(2)) * uint64(4 * scale_words)
        if first < last:
            load_0(words, scales, rows, scale_rows)
        if first + uint32(1) < last:
            load_1(words, scales, rows, scale_rows)
        if first + uint32(2) < last:
            load_2(words, scales, rows, scale_rows)
        if first + uint32(3) < last:
            load_3(words, scales, rows, scale_rows)

    @device_function
    def multiply(sums, words, scales, rows, scale_rows, x, first, last):
        parts, totals = cuda.local.array(4, float32), cuda.local.array(4, float32)
        pairs, ones, x_words = cuda.local.array(8, uint32), cuda.local.array(1, uint32), cuda.local.array(4, uint32)
        x_at = cuda.local.array(1, uint32)
        ones[0] = uint32(_ONES)
        for e in range(4):
            parts[e] = float32(0.0)
            totals[e] = float32(0.0)
        sums[0] = float32(0.0)
        sums[1] = float32(0.0)
        x_at[0] = uint32(x + first * uint32(slot_bytes))
        slot = first
        while slot < last:
            rows[0] += uint64(AHEAD * TILE_BYTES)
            rows[1] += uint64(AHEAD * TILE_BYTES)
            scale_rows[0] += uint64(AHEAD * scale_step)
            left = uint32(last - slot)
            slot_0(sums, parts, totals, pairs, ones, x_words, words, scales, x_at)
            x_at[0] = uint32(x_at[0] + uint32(slot_bytes))
            if left > uint32(AHEAD):
                load_0(words, scales, rows, scale_rows)
            if left > uint32(1):
                slot_1(sums, parts, totals, pairs, ones, x_words, words, scales, x_at)
                x_at[0] = uint32(x_at[0] + uint32(slot_bytes))
                if left > uint32(AHEAD + 1):
                    load_1(words, scales, rows, scale_rows)
            if left > uint32(2):
                slot_2(sums, parts, totals, pairs, ones, x_words, words, scales, x_at)
                x_at[0] = uint32(x_at[0] + uint32(slot_bytes))
                if left > uint32(AHEAD + 2):
                    load_2(words, scales, rows, scale_rows)
            if left > uint32(3):
                slot_3(sums, parts, totals, pairs, ones, x_words, words, scales, x_at)
                x_at[0] = uint32(x_at[0] + uint32(slot_bytes))
                if left > uint32(AHEAD + 3):
                    load_3(words, scales, rows, scale_rows)
            slot = uint32(slot + uint32(AHEAD))
        if not is_grouped:
            settle(sums, parts, totals, float32(1.0), float32(1.0))

    @device_function
    def row_scale(weight, n, k, row):
        return load_f32(find(weight, n, k)[3] + uint64(row) * uint64(4))

    slots_of = device_function(lambda k: uint32(k + uint32(slot_elements - 1)) // uint32(slot_elements))
    shift = SHIFTS.get((packing.element, "f16"), 0)
    return _Reader(max(1, AHEAD * scale_words), begin, multiply, row_scale, slots_of, shift)


@device_function
def _largest(x_row, part, parts, k, lane):
    """The largest magnitude's bits, among the chunks of 8 numbers of a row that are this warp's of so many."""
    most = uint32(0)
    at = uint32((part * uint32(32) + lane) * uint32(8))
    while at < k:
        words = memory.load_4xb32(x_row + uint64(at) * uint64(2))
        for e in range(4):
            most = max(most, words[e] & uint32(0x7FFF))
            most = max(most, (words[e] >> uint32(16)) & uint32(0x7FFF))
        at = uint32(at + parts * uint32(256))
    return maximum_u32_of_warp(most)


@device_function
def _factors(most):
    """(the power of two that x is multiplied by, what sums are multiplied by) for a largest magnitude's bits."""
    field = minimum_u32(uint32(uint32(254 + _LARGEST) - (most >> uint32(7))), uint32(253))
    return _as_float(uint32(field << uint32(23))), _as_float(uint32(uint32(uint32(254) - field) << uint32(23)))


@device_function
def _stage(x_row, target, part, parts, k, padded, factor, lane):
    """This warp's chunks of a row go to shared memory as float16, zeros behind k."""
    at = uint32((part * uint32(32) + lane) * uint32(8))
    while at < padded:
        a, b, c, d = uint32(0), uint32(0), uint32(0), uint32(0)
        if at < k:
            words = memory.load_4xb32(x_row + uint64(at) * uint64(2))
            low, high = convert.unpack_bf16(words[0])
            a = convert.pack_f16(low * factor, high * factor)
            low, high = convert.unpack_bf16(words[1])
            b = convert.pack_f16(low * factor, high * factor)
            low, high = convert.unpack_bf16(words[2])
            c = convert.pack_f16(low * factor, high * factor)
            low, high = convert.unpack_bf16(words[3])
            d = convert.pack_f16(low * factor, high * factor)
        memory.shared_store_4xb32(uint32(target + at * uint32(2)), (a, b, c, d))
        at = uint32(at + parts * uint32(256))


@functools.cache
def _gate_up(weight_name: str, activation: str) -> Specialisation:
    """Arguments: x [T, K], table [2, E], ids [T, k], out [T k, I] addresses; I, K, E, k."""
    reader, gated, store = _reader(weight_name), ACTIVATIONS[activation], element_storer(DTYPE)
    begin, multiply, row_scale, slots_of = reader.begin, reader.multiply, reader.row_scale, reader.slots
    num_scale_words, shift = reader.num_scale_words, float(2.0**reader.shift)
    packing = packing_of(weight_name)
    assert packing is not None
    slot_elements = packing.slot

    def experts(x, table, ids, out, n, k, num_experts, top_k):
        shared = memory.shared_address(cuda.shared.array(0, uint32))
        largest = cuda.shared.array(WARPS, uint32)
        partial = cuda.shared.array((2, STREAMS, ROWS), float32)
        words, scales = cuda.local.array(_NUM_WORDS, uint32), cuda.local.array(num_scale_words, uint32)
        rows, scale_rows, sums = cuda.local.array(2, uint64), cuda.local.array(1, uint64), cuda.local.array(2, float32)
        thread, lane, draw = uint32(cuda.threadIdx.x), lane_index(), uint32(cuda.blockIdx.y)
        warp, tile = uint32(thread >> uint32(5)), uint32(cuda.blockIdx.x)
        half, stream = uint32(warp // uint32(STREAMS)), uint32(warp % uint32(STREAMS))
        wait_for_previous_grid()
        launch_dependents()
        expert = load_b32(ids + uint64(draw) * uint64(4))
        weight = load_b64(table + uint64(expert) * uint64(8))
        bias = load_b64(table + uint64(uint32(num_experts + expert)) * uint64(8))
        both, slots = uint32(n * uint32(2)), slots_of(k)
        length = uint32(slots + uint32(STREAMS - 1)) // uint32(STREAMS)
        first = minimum_u32(uint32(stream * length), slots)
        last = minimum_u32(uint32(first + length), slots)
        own_tile = uint32(tile + half * (n >> uint32(4)))
        begin(words, scales, rows, scale_rows, weight, own_tile, both, k, first, last, lane)
        x_row = x + uint64(divide_u32(draw, top_k)) * uint64(k) * uint64(2)
        most = _largest(x_row, warp, uint32(WARPS), k, lane)
        if lane == uint32(0):
            largest[warp] = most
        sync_block()
        for other in range(WARPS):
            most = max(most, largest[other])
        factor, unfactor = _factors(most)
        _stage(x_row, shared, warp, uint32(WARPS), k, uint32(slots * uint32(slot_elements)), factor, lane)
        sync_block()
        at = uint32(shared + (lane & uint32(3)) * uint32(16))
        multiply(sums, words, scales, rows, scale_rows, at, first, last)
        if (lane & uint32(3)) == uint32(0):
            partial[half, stream, lane >> uint32(2)] = sums[0]
            partial[half, stream, uint32((lane >> uint32(2)) + uint32(8))] = sums[1]
        sync_block()
        if thread < uint32(ROWS):
            column = uint32(tile * uint32(ROWS) + thread)
            gate, up = float32(0.0), float32(0.0)
            for i in range(STREAMS):
                gate += partial[0, i, thread]
                up += partial[1, i, thread]
            whole = unfactor * float32(shift)
            gate = scale_element(scale_element(gate, whole), row_scale(weight, both, k, column))
            up = scale_element(scale_element(up, whole), row_scale(weight, both, k, uint32(column + n)))
            if bias != uint64(0):
                gate += load_f32(bias + uint64(column) * uint64(4))
                up += load_f32(bias + uint64(uint32(column + n)) * uint64(4))
            store(out + (uint64(draw) * uint64(n) + uint64(column)) * uint64(2), gated(gate, up))

    return Specialisation(
        name=f"experts_packed_gather_{weight_name}_{activation}",
        kernel=cuda.jit(experts),
        argument_types=(types.uint64,) * 4 + (types.uint32,) * 4,
        max_threads=WARPS * 32,
        min_blocks=2,
        constants={"dtype": DTYPE, "weight": weight_name, "activation": activation},
    )


@functools.cache
def _down(weight_name: str) -> Specialisation:
    """Arguments: h [T k, I], table [2, E], ids [T, k], weights [T, k] float32, shared, gate, residual (0 without), out
    [T, H], squares [T, H / 4] float32 or 0; H, I, E, k."""
    reader, add, store = _reader(weight_name), adder(DTYPE, 1), element_storer(DTYPE)
    begin, multiply, row_scale, slots_of = reader.begin, reader.multiply, reader.row_scale, reader.slots
    num_scale_words, shift = reader.num_scale_words, float(2.0**reader.shift)
    packing = packing_of(weight_name)
    assert packing is not None
    slot_elements = packing.slot

    def experts(h, table, ids, weights, shared, gate, residual, out, squares, n, k, num_experts, top_k):
        staged = memory.shared_address(cuda.shared.array(0, uint32))
        largest = cuda.shared.array(MAX_CHOICES, uint32)
        partial = cuda.shared.array((MAX_CHOICES, ROWS), float32)
        finished = cuda.shared.array((MAX_CHOICES, ROWS), float32)
        words, scales = cuda.local.array(_NUM_WORDS, uint32), cuda.local.array(num_scale_words, uint32)
        rows, scale_rows, sums = cuda.local.array(2, uint64), cuda.local.array(1, uint64), cuda.local.array(2, float32)
        values = cuda.local.array(1, float32)
        thread, lane, row = uint32(cuda.threadIdx.x), lane_index(), uint32(cuda.blockIdx.y)
        warp, tile = uint32(thread >> uint32(5)), uint32(cuda.blockIdx.x)
        streams = divide_u32(uint32(cuda.blockDim.x) >> uint32(5), top_k)
        rank = divide_u32(warp, streams)
        stream = uint32(warp - rank * streams)
        wait_for_previous_grid()
        launch_dependents()
        draw = uint32(row * top_k + rank)
        expert = load_b32(ids + uint64(draw) * uint64(4))
        weight = load_b64(table + uint64(expert) * uint64(8))
        bias = load_b64(table + uint64(uint32(num_experts + expert)) * uint64(8))
        slots = slots_of(k)
        length = divide_u32(uint32(slots + streams - uint32(1)), streams)
        first = minimum_u32(uint32(stream * length), slots)
        last = minimum_u32(uint32(first + length), slots)
        begin(words, scales, rows, scale_rows, weight, tile, n, k, first, last, lane)
        h_row, padded = h + uint64(draw) * uint64(k) * uint64(2), uint32(slots * uint32(slot_elements))
        most = _largest(h_row, stream, streams, k, lane)
        if lane == uint32(0):
            largest[warp] = most
        sync_block()
        other = uint32(rank * streams)
        while other < uint32(rank + uint32(1)) * streams:
            most = max(most, largest[other])
            other = uint32(other + uint32(1))
        factor, unfactor = _factors(most)
        staged = uint32(staged + rank * padded * uint32(2))
        _stage(h_row, staged, stream, streams, k, padded, factor, lane)
        sync_block()
        at = uint32(staged + (lane & uint32(3)) * uint32(16))
        multiply(sums, words, scales, rows, scale_rows, at, first, last)
        if (lane & uint32(3)) == uint32(0):
            partial[warp, lane >> uint32(2)] = sums[0]
            partial[warp, uint32((lane >> uint32(2)) + uint32(8))] = sums[1]
        sync_block()
        column = uint32(tile * uint32(ROWS) + lane)
        if stream == uint32(0) and lane < uint32(ROWS):
            total = float32(0.0)
            other = warp
            while other < warp + streams:
                total += partial[other, lane]
                other = uint32(other + uint32(1))
            total = scale_element(scale_element(total, unfactor * float32(shift)), row_scale(weight, n, k, column))
            if bias != uint64(0) and column < n:
                total += load_f32(bias + uint64(column) * uint64(4))
            finished[rank, lane] = scale_element(total, load_f32(weights + uint64(draw) * uint64(4)))
        sync_block()
        if warp == uint32(0):
            values[0] = float32(0.0)
            if lane < uint32(ROWS) and column < n:
                index = uint32(0)
                while index < top_k:
                    values[0] += finished[index, lane]
                    index = uint32(index + uint32(1))
                at_column = (uint64(row) * uint64(n) + uint64(column)) * uint64(2)
                add(values, shared, gate, residual, row, at_column)
                store(out + at_column, values[0])
            if squares != uint64(0):
                squared = values[0] * values[0]
                squared += shuffle_xor_f32(squared, uint32(1))
                squared += shuffle_xor_f32(squared, uint32(2))
                if (lane & uint32(SQUARE_COLUMNS - 1)) == uint32(0) and lane < uint32(ROWS):
                    part = uint64(row) * uint64(n >> uint32(2)) + uint64(column >> uint32(2))
                    store_f32(squares + part * uint64(4), squared)

    return Specialisation(
        name=f"experts_packed_gather_{weight_name}",
        kernel=cuda.jit(experts),
        argument_types=(types.uint64,) * 9 + (types.uint32,) * 4,
        max_threads=MAX_CHOICES * 32,
        min_blocks=1,
        constants={"dtype": DTYPE, "weight": weight_name, "activation": ""},
    )


def _row_bytes(packing: Packing, depth: int) -> int:
    """Of a row in shared memory."""
    return -(-depth // packing.slot) * packing.slot * 2


def can_plan(packing: Packing, dtype: str, inner: int, hidden: int, top_k: int) -> bool:
    """Whether it multiplies rows on 16-byte bounds by experts of these sizes."""
    is_whole = inner % ROWS == 0 and hidden % 8 == 0 and packing.group != 16 and not packing.has_zeros
    most = max(_row_bytes(packing, hidden), top_k * _row_bytes(packing, inner))
    return dtype == DTYPE and is_whole and top_k <= MAX_CHOICES and most <= MOST_SHARED_BYTES


def plan_gate_up(num_choices: int, columns: int, depth: int, packing: Packing, activation: str) -> Launch:
    """For at least one choice, and what `can_plan` allows."""
    return Launch(
        _gate_up(packing.name, activation), (columns // ROWS, num_choices, 1), (WARPS * 32, 1, 1),
        _row_bytes(packing, depth),
    )  # fmt: skip


def plan_down(num_tokens: int, top_k: int, columns: int, depth: int, packing: Packing) -> Launch:
    """For at least one token, and what `can_plan` allows."""
    num_warps = top_k * max(1, WARPS // top_k)
    return Launch(
        _down(packing.name), (-(-columns // ROWS), num_tokens, 1), (num_warps * 32, 1, 1),
        top_k * _row_bytes(packing, depth),
    )  # fmt: skip


def specialisations() -> Iterator[Specialisation]:
    """Those that models come with."""
    for weight in PACKINGS:
        packing = packing_of(weight)
        if packing is not None and can_plan(packing, DTYPE, ROWS, 8, 1):
            for activation in ("silu", *(("clamped_silu",) if weight == "e2m1_g32_exponents" else ())):
                yield _gate_up(weight, activation)
            yield _down(weight)
