"""`riding` on tensor cores, for products of up to 32 rows (`skinny`): rows of one adapter are multiplied together.

Rows are ordered by adapter, those without one last, and cut into *groups* of up to 8 of one adapter. A block that
shrinks takes a group and 16 ranks at a time: ``down`` is the first factor of `mma.sync`, the group's rows of x the
second, and the warps (of `hopper_few` those of a cluster's y axis) share K, so that each adapter's ``down`` is read
once for 8 rows. A warp that expands takes a group and 16 or 32 columns: ``up`` is the first factor, the group's sums
the second.

``between`` holds each row's sums, by the row's place in the order. A sum is two numbers of bfloat16: the rounded one,
and what rounding left. The order itself follows, a word a place: the row, its number in the group from bit 5 on, its
slot from bit 8 on. A normalised row's products with the norm's weights are cut into two such numbers, too. In float16
both could be too large, so there a sum is a float32, and tf32, which holds each float16, multiplies two parts of it.

An element's sums are added up in an order of K and of ranks alone, and rows of a second factor never mix: a row has the
same bits beside any others.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from numba import cuda, float32, uint32, uint64

from numba_kernels.cuda.gemm.adapters.riding import COLUMNS, count_up, leader_of, ranks_of
from numba_kernels.cuda.gemm.epilogue import norm_scale
from numba_kernels.cuda.intrinsics import cluster, convert, memory
from numba_kernels.cuda.intrinsics.device import device_function, in_turn
from numba_kernels.cuda.intrinsics.element import floats_loader
from numba_kernels.cuda.intrinsics.fragments import load_all, multiply_all
from numba_kernels.cuda.intrinsics.math import divide_u32, maximum_u32, minimum_u32
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import ballot, count_b32, shuffle_index_b32, shuffle_xor_f32, sync_warp

GROUP = 8  # rows of one adapter that are multiplied together
RANKS = 16  # at a time
TILE = 16  # columns
_MOST_GROUPS, _LEAST_BLOCKS = 8, 4
_STEP = 32  # elements of K of two `mma.sync`
_SUM_STRIDE = 20  # floats of a row's sums of RANKS ranks in shared memory: no bank conflicts
PAD = 8  # floats between rows of expanded sums


@dataclass(frozen=True, slots=True)
class _Halves:
    """Device functions of a 16-bit type: two numbers into a word and back, a number's code and its value."""

    pack: Any
    unpack: Any
    code: Any
    value: Any


_HALVES = {
    "bf16": _Halves(convert.pack_bf16, convert.unpack_bf16, convert.bf16_from_f32, convert.f32_from_bf16),
    "f16": _Halves(convert.pack_f16, convert.unpack_f16, convert.f16_from_f32, convert.f32_from_f16),
}


@functools.cache
def _widener(first_sums: int, second_sums: int) -> Any:
    """A device function ``(sums, wide, low_word, high_word)``: two elements of float16 of rows g and g + 8, times two
    numbers, of which ``wide[4:8]`` has the codes of tf32 (`_split_pair`), in two chains of sums."""
    multiply = multiply_all("tf32", ((first_sums, (0, 1, 2, 3), (4, 5)), (second_sums, (0, 1, 2, 3), (6, 7))))

    @device_function
    def widen(sums, wide, low_word, high_word):
        for half in range(2):
            word = high_word if half else low_word
            first, second = convert.unpack_f16(word)
            wide[half], wide[2 + half] = convert.bits_from_f32(first), convert.bits_from_f32(second)
        multiply(sums, wide, wide)

    return widen


@device_function
def _split_pair(wide, first, second):
    wide[4], wide[6] = convert.split_tf32(first)
    wide[5], wide[7] = convert.split_tf32(second)


def shrinking_blocks(rows: int, ranks: int, idle: int, cluster: int, parts: int = 1) -> int:
    """The blocks that shrink, each so many a part of K, in whole clusters: as many as are `idle`, but a few at least,
    and no more than eight groups of rows keep busy."""
    most = min(rows, _MOST_GROUPS) * -(-ranks // RANKS) * parts
    return max(1, min(most, max(idle, _LEAST_BLOCKS)) // cluster) * cluster


def steps_in_flight(row_tiles: int) -> int:
    """Steps of K that a warp has in flight: kernels of 16 rows have half of a multiprocessor's registers."""
    return 3 if row_tiles == 1 else 8


def shrinking_bytes(warps: int) -> int:
    """Dynamic shared memory of a block that shrinks: the order, each warp's sums, and sums of squares, and the block's
    of both, twice."""
    return (32 + warps * GROUP * (_SUM_STRIDE + 1) + 4 * GROUP * RANKS) * 4


def expanded_bytes(rows: int, columns: int) -> int:
    """Shared memory of a block's expanded sums."""
    return rows * (columns + PAD) * 4


@functools.cache
def _k_adder(dtype: str, warps: int, steps: int) -> Any:
    """A device function that adds up a warp's elements of K, of which it has `steps` steps in flight."""
    halves, load_weights, stride, is_wide = _HALVES[dtype], floats_loader(8), warps * _STEP, dtype == "f16"
    pack, unpack = halves.pack, halves.unpack

    def products(step: int, first_word: int) -> list[Any]:
        """A step's, whose words of x begin there; its sums are two of four chains."""
        return [
            (
                8 * (step % 2) + 4 * q,
                (8 * step + 2 * q, 8 * step + 4 + 2 * q, 8 * step + 2 * q + 1, 8 * step + 5 + 2 * q),
                (first_word + 2 * q, first_word + 2 * q + 1),
            )
            for q in range(2)
        ]  # fmt: skip

    def normaliser(step: int) -> Any:
        """A step of x times the norm's weights, rounded, and products of what rounding leaves; of float16 all of its
        products."""
        multiply, first = multiply_all(dtype, tuple(products(step, 0))), 8 * (step % 2)
        widen = _widener(first, first + 4)

        @device_function
        def normalise(state):
            sums, squares, down, rows, lows, _, norm_place = state
            weights = load_weights(norm_place + uint64(4 * stride * step))
            for w in range(4):
                a, b = unpack(rows[4 * step + w])
                squares[0] += a * a
                squares[0] += b * b
                a *= weights[2 * w]
                b *= weights[2 * w + 1]
                if is_wide:
                    _split_pair(lows, a, b)
                    widen(sums, lows, down[8 * step + w], down[8 * step + 4 + w])
                else:
                    word = pack(a, b)
                    high_a, high_b = unpack(word)
                    rows[4 * step + w], lows[w] = word, pack(a - high_a, b - high_b)
            if not is_wide:
                multiply(sums, down, lows)

        return normalise

    def taker(count: int, *, is_last: bool) -> Any:
        """``count`` steps: both factors from device memory, then their products, in four chains of sums."""
        load = load_all("global", tuple((8 * i + 4 * h, h, 2 * stride * i) for i in range(count) for h in range(2)))
        load_rows = load_all("global", tuple((4 * i, 2, 2 * stride * i) for i in range(count)))
        multiply = multiply_all(dtype, tuple(each for i in range(count) for each in products(i, 4 * i)))
        normalise = in_turn([normaliser(i) for i in range(count)])

        @device_function
        def take(state, is_there):
            sums, _, down, rows, _, places, norm_place = state
            load(down, places)
            load_rows(rows, places)
            if is_last:
                for i in range(4):
                    rows[i] = rows[i] if is_there else uint32(0)
            if norm_place != uint64(0):
                normalise(state)
            if not is_wide or norm_place == uint64(0):
                multiply(sums, down, rows)

        return take

    take_steps, take_last = taker(steps, is_last=False), taker(1, is_last=True)
    num_words, num_down, num_lows = 4 * steps, 8 * steps, 8 if is_wide else 4

    @device_function
    def add_k(sums, squares, down_rows, x_row, norm, warp, t, span):
        start, k = span
        down, rows = cuda.local.array(num_down, uint32), cuda.local.array(num_words, uint32)
        lows, places = cuda.local.array(num_lows, uint32), cuda.local.array(3, uint64)
        step, norm_place = uint32(start + warp * uint32(_STEP)), norm  # all lanes' at once, for `mma.sync`
        while step < k:
            at, is_whole = uint32(step + t * uint32(8)), uint32(step + uint32((steps - 1) * stride + _STEP)) <= k
            is_there = at < k
            at = minimum_u32(at, uint32(k - uint32(8)))
            places[0], places[1] = down_rows[0] + uint64(at) * uint64(2), down_rows[1] + uint64(at) * uint64(2)
            places[2] = x_row + uint64(at) * uint64(2)
            if norm != uint64(0):
                norm_place = norm + uint64(at) * uint64(4)
            state = sums, squares, down, rows, lows, places, norm_place
            if is_whole:
                take_steps(state, True)
                step = uint32(step + uint32(steps * stride))
            else:
                take_last(state, is_there)
                step = uint32(step + uint32(stride))

    return add_k


@functools.cache
def shrinker(dtype: str, warps: int, steps: int, *, in_parts: bool = False) -> Any:
    """A device function of a block that shrinks (`riding`), whose rows of 16 bits lie on 16-byte bounds. Its warps have
    `steps` steps of K in flight. With `in_parts` the blocks of a cluster's y axis have a part of K each."""
    halves, add_k = _HALVES[dtype], _k_adder(dtype, warps, steps)
    code_of, value_of, is_wide = halves.code, halves.value, dtype == "f16"
    sums_bytes = (32 + warps * GROUP * (_SUM_STRIDE + 1)) * 4  # the order, and each warp's sums, and sums of squares

    @device_function
    def order_rows(shared, block, warp, lane, m, riding):
        """Each lane's row: its slot, its place in the order, and its number among those of its adapter."""
        adapters, between, ranks, num_slots = riding.adapters, riding.between, riding.ranks, riding.num_slots
        own, before, place, index = uint32(num_slots + uint32(1)), uint32(0), uint32(0), uint32(0)
        if lane < m:
            own = minimum_u32(memory.load_b32(adapters + uint64(lane) * uint64(4)), num_slots)  # -1 is large
        while index < m:
            other = shuffle_index_b32(own, index)
            if other == own and index < lane:
                before = uint32(before + uint32(1))
            if other < own:
                place = uint32(place + uint32(1))
            index = uint32(index + uint32(1))
        place = uint32(place + before)
        if lane >= m:
            place = lane
        if warp == uint32(0):
            word = uint32((own << uint32(8)) | ((before & uint32(GROUP - 1)) << uint32(5)) | lane)
            memory.shared_store_b32(uint32(shared + place * uint32(4)), word)
            if block == uint32(0) and lane < m:
                order = between + uint64(m) * uint64(ranks) * uint64(4)
                memory.store_b32(order + uint64(place) * uint64(4), word)
        return own, place, before

    @device_function
    def leave_sums(shared, sums, squares, warp, lane):
        """A warp's sums of K, and of squares, to shared memory."""
        g, t = lane >> uint32(2), lane & uint32(3)
        for i in range(4):
            sums[i] = (sums[i] + sums[4 + i]) + (sums[8 + i] + sums[12 + i])
        own = uint32(shared + uint32(128) + warp * uint32(GROUP * _SUM_STRIDE * 4) + g * uint32(4))
        for e in range(2):
            row = uint32(own + uint32(t * uint32(2) + uint32(e)) * uint32(_SUM_STRIDE * 4))
            for h in range(2):
                memory.shared_store_f32(uint32(row + uint32(32 * h)), sums[2 * h + e])
        total = squares[0]
        for i in range(2):
            total += shuffle_xor_f32(total, uint32(1 << i))
        if t == uint32(0):
            at = uint32(warps * GROUP * _SUM_STRIDE * 4 + 128)
            memory.shared_store_f32(uint32(shared + at + uint32(warp * uint32(GROUP) + g) * uint32(4)), total)

    @device_function
    def add_warps(shared, thread):
        """A row's sum of one rank, of all warps, and the row's sum of squares; a thread each."""
        row, total, squared = thread >> uint32(4), float32(0), float32(0)
        at = uint32(shared + uint32(128) + uint32(row * uint32(_SUM_STRIDE) + (thread & uint32(15))) * uint32(4))
        of_squares = uint32(shared + uint32(warps * GROUP * _SUM_STRIDE * 4 + 128) + row * uint32(4))
        for w in range(warps):
            total += memory.shared_load_f32(uint32(at + uint32(w * GROUP * _SUM_STRIDE * 4)))
            squared += memory.shared_load_f32(uint32(of_squares + uint32(w * GROUP * 4)))
        return total, squared

    @device_function
    def add_parts(shared, thread, turn, share, shares, parts):
        """The same of all blocks of the cluster's y axis, for the first one. Others may still be read when a block
        leaves its next ones, so these have another place: all have met again before it leaves those after them."""
        own = uint32(shared + uint32(sums_bytes) + turn * uint32(2 * GROUP * RANKS * 4) + thread * uint32(4))
        if thread < uint32(GROUP * RANKS):
            total, squared = add_warps(shared, thread)
            memory.shared_store_f32(own, total)
            memory.shared_store_f32(uint32(own + uint32(GROUP * RANKS * 4)), squared)
        cluster.release_shared()
        sync_warp()
        cluster.arrive_relaxed()
        cluster.wait()
        total, squared, other = float32(0), float32(0), share
        while cluster.rank() == share and thread < uint32(GROUP * RANKS) and other < uint32(shares * parts):
            there = cluster.address_in(own, other)
            total += cluster.load_f32(there)
            squared += cluster.load_f32(uint32(there + uint32(GROUP * RANKS * 4)))
            other = uint32(other + shares)
        return total, squared

    @device_function
    def store_between(thread, sums, first, count, rank, k, eps, m, riding):
        """A thread has a row's sum of one rank, and its sum of squares."""
        norm, between, ranks, (total, squared) = riding.norm, riding.between, riding.ranks, sums
        row, own_rank = thread >> uint32(4), uint32(rank + (thread & uint32(15)))
        if row < count and own_rank < ranks:
            if norm != uint64(0):
                total *= norm_scale(squared, k, eps)
            place = between + uint64(first + row) * uint64(ranks) * uint64(4)
            if is_wide:
                memory.store_f32(place + uint64(own_rank) * uint64(4), total)
            else:
                code, at_rank = code_of(total), uint64(own_rank) * uint64(2)
                memory.store_b16(place + at_rank, code)
                memory.store_b16(place + uint64(ranks) * uint64(2) + at_rank, code_of(total - value_of(code)))

    @device_function
    def shrink(block, warp, lane, m, k, eps, riding):
        x, norm, counters, ranks, num_slots, num_blocks = (
            riding.x, riding.norm, riding.counters, riding.ranks, riding.num_slots, riding.num_shrinking,
        )  # fmt: skip
        shared = memory.shared_address(cuda.shared.array(0, uint32))
        sums, squares = cuda.local.array(16, float32), cuda.local.array(1, float32)
        down_rows = cuda.local.array(2, uint64)
        share, shares, part, parts, start, end = uint32(0), uint32(1), uint32(0), uint32(1), uint32(0), k
        if in_parts:
            part, parts = uint32(cuda.blockIdx.y), uint32(cuda.gridDim.y)
            shares, num_blocks = divide_u32(cluster.size(), parts), divide_u32(num_blocks, parts)
            share = uint32(cluster.rank() - part * shares)
            end = divide_u32(uint32(uint32(k + uint32(_STEP - 1)) // uint32(_STEP) + parts - uint32(1)), parts)
            start, end = uint32(part * end * uint32(_STEP)), uint32((part + uint32(1)) * end * uint32(_STEP))
            end = minimum_u32(end, k)
        num_parts, row_bytes = uint32(ranks + uint32(RANKS - 1)) // uint32(RANKS), uint64(k) * uint64(2)
        of_lane = ranks_of(lane, block, num_parts, RANKS, row_bytes, riding)  # of a slot, for the first item
        wait_for_previous_grid()
        launch_dependents()
        own, place, before = order_rows(shared, uint32(block + part), warp, lane, m, riding)
        sync_block()
        leads = uint32(0)
        if own < num_slots and before % uint32(GROUP) == uint32(0):
            leads = uint32(1)
        leaders = ballot(leads)
        number = count_b32(leaders & uint32((uint32(1) << lane) - uint32(1)))
        g, t, item, turn = lane >> uint32(2), lane & uint32(3), block, uint32(0)
        num_items = uint32(count_b32(leaders) * num_parts)
        while uint32(item - share) < num_items:  # the same in a whole cluster, whose last blocks may have no item
            group = divide_u32(minimum_u32(item, uint32(num_items - uint32(1))), num_parts)
            rank = uint32(uint32(item - divide_u32(item, num_parts) * num_parts) * uint32(RANKS))
            leader = leader_of(leads, number, group)
            slot, first = shuffle_index_b32(own, leader), shuffle_index_b32(place, leader)
            word = memory.shared_load_b32(uint32(shared + (uint32(first + g) & uint32(31)) * uint32(4)))
            is_row = uint32(0)
            if uint32(first + g) < m and word >> uint32(8) == slot and item < num_items:
                is_row = uint32(1)
            else:
                word = leader
            count = count_b32(ballot(is_row)) >> uint32(2)
            for i in range(16):
                sums[i] = float32(0)
            squares[0] = float32(0)
            if item != block or slot >= uint32(32):
                of_lane = ranks_of(slot, item, num_parts, RANKS, row_bytes, riding)
            is_any, low, high = (
                shuffle_index_b32(of_lane[0], slot & uint32(31)),
                shuffle_index_b32(of_lane[1], slot & uint32(31)),
                shuffle_index_b32(of_lane[2], slot & uint32(31)),
            )
            if is_any != uint32(0) and count != uint32(0):
                down = (uint64(high) << uint64(32)) | uint64(low)
                second = minimum_u32(uint32(8), uint32(ranks - uint32(8) - rank))
                down_rows[0] = down + uint64(g) * row_bytes
                down_rows[1] = down + uint64(second + g) * row_bytes
                add_k(sums, squares, down_rows, x + uint64(word & uint32(31)) * row_bytes, norm, warp, t, (start, end))
            leave_sums(shared, sums, squares, warp, lane)
            sync_block()
            thread = uint32(warp * uint32(32) + lane)
            found = float32(0), float32(0)
            if in_parts:
                found = add_parts(shared, thread, turn, share, shares, parts)
                turn ^= uint32(1)
            elif thread < uint32(GROUP * RANKS):
                found = add_warps(shared, thread)
            if part == uint32(0):
                store_between(thread, found, first, count, rank, k, eps, m, riding)
            sync_block()
            item = uint32(item + num_blocks)
        if warp == uint32(0) and lane == uint32(0):
            count_up(counters, uint32(1))
        if in_parts:
            sync_warp()
            cluster.arrive_relaxed()  # no block exits while others read its sums
            cluster.wait()

    return shrink


@device_function
def _ranks_of_part(slot, part, columns, ranges, num_ranges):
    """The first rank and, from bit 16 on, the end of those that a block's columns of a part of ``up`` have."""
    column, step, num_tiles, end = columns
    begin, past = uint32(column + part * end), uint32(end + part * end)
    last = minimum_u32(uint32(begin + uint32(num_tiles - uint32(1)) * step + uint32(TILE)), past)
    entries = ranges + uint64(slot) * uint64(num_ranges) * uint64(8)
    first, last = begin // uint32(COLUMNS), uint32(last - uint32(1)) // uint32(COLUMNS)
    rank, past = memory.load_2xb32(entries + uint64(first) * uint64(8))
    if last != first:
        other, other_past = memory.load_2xb32(entries + uint64(last) * uint64(8))
        if past == uint32(0):
            rank = other
        elif other_past != uint32(0):
            rank = minimum_u32(rank, other)
        past = maximum_u32(past, other_past)
    return uint32(rank | (past << uint32(16)))


@functools.cache
def preparer(num_parts: int) -> Any:
    """A device function ``(warp, warps, lane, m, columns, riding)`` that asks for what a block will expand with, before
    it multiplies: so its end waits for no device memory. ``columns`` is a tuple: the first, from one tile of TILE
    columns to the next, the number of tiles, and where a part's columns end, of `num_parts` (a gated unit's two), which
    is where the next one's begin."""

    @device_function
    def prepare(warp, warps, lane, m, columns, riding):
        adapters, ups, ranges, ranks, num_slots, num_ranges = (
            riding.adapters, riding.ups, riding.ranges, riding.ranks, riding.num_slots, riding.num_ranges,
        )  # fmt: skip
        first, step, num_tiles, end = columns
        slot, last = num_slots, uint32(end - uint32(1))
        if lane < m:
            slot = memory.load_b32(adapters + uint64(lane) * uint64(4))
        # Loops, none of which is unrolled: the weight's first loads leave few registers.
        part, parts = uint32(0), uint32(uint32(num_parts) + (end >> uint32(31)))
        while slot < num_slots and part < parts:  # -1 is large
            up = memory.load_b64(ups + uint64(slot) * uint64(8))
            packed = _ranks_of_part(slot, part, columns, ranges, num_ranges)
            index = uint32(0)
            while index < minimum_u32(uint32(num_tiles * uint32(2)), uint32(4)):  # most blocks have no more
                own = uint32(first + (index >> uint32(1)) * step + (index & uint32(1)) * warps + warp)
                own = uint32(minimum_u32(own, last) + part * end)
                rank = packed & uint32(0xFFFF)
                while rank < packed >> uint32(16):
                    memory.prefetch(up + (uint64(own) * uint64(ranks) + uint64(rank)) * uint64(2))
                    rank = uint32(rank + uint32(RANKS))
                index = uint32(index + uint32(1))
            part = uint32(part + uint32(1))

    return prepare


@functools.cache
def expander(dtype: str) -> Any:
    """A device function ``(target, stride, warp, warps, lane, m, columns, part, riding)``: this warp's share of a
    block's expanded sums of a part, to shared memory, float32 ``[m, stride]``. The rest is `preparer`'s."""
    multiply = multiply_all(
        dtype,
        tuple(
            (8 * i + 4 * j, (4 * i, 4 * i + 2, 4 * i + 1, 4 * i + 3), (2 * j, 2 * j + 1))
            for i in range(2) for j in range(2)
        ),
    )  # fmt: skip
    load_pair, is_wide, num_wide = memory.load_2xb32, dtype == "f16", 8 if dtype == "f16" else 1
    widen_first, widen_second = _widener(0, 4), _widener(8, 12)

    @device_function
    def add_ranks(sums, packed, up, place, column, step, last, row_bytes, lane):
        """Two tiles of columns, times a group's sums."""
        words, pairs = cuda.local.array(8, uint32), cuda.local.array(4, uint32)
        wide = cuda.local.array(num_wide, uint32)
        g, rank, past = lane >> uint32(2), packed & uint32(0xFFFF), packed >> uint32(16)
        own = uint32(rank + (lane & uint32(3)) * uint32(4))
        first, second = uint32(column + g), uint32(column + step + g)
        rows_0 = up + uint64(minimum_u32(first, last)) * row_bytes
        rows_1 = up + uint64(minimum_u32(uint32(first + uint32(8)), last)) * row_bytes
        rows_2 = up + uint64(minimum_u32(second, last)) * row_bytes
        rows_3 = up + uint64(minimum_u32(uint32(second + uint32(8)), last)) * row_bytes
        while rank < past:
            is_there = own < past
            at = uint64(own if is_there else rank) * uint64(2)
            words[0], words[1] = load_pair(rows_0 + at)
            words[2], words[3] = load_pair(rows_1 + at)
            words[4], words[5] = load_pair(rows_2 + at)
            words[6], words[7] = load_pair(rows_3 + at)
            if is_wide:
                a, b, c, d = memory.load_4xf32(place + at + at)
                _split_pair(wide, a if is_there else float32(0), b if is_there else float32(0))
                widen_first(sums, wide, words[0], words[2])
                widen_second(sums, wide, words[4], words[6])
                _split_pair(wide, c if is_there else float32(0), d if is_there else float32(0))
                widen_first(sums, wide, words[1], words[3])
                widen_second(sums, wide, words[5], words[7])
            else:
                pairs[0], pairs[1] = load_pair(place + at)
                pairs[2], pairs[3] = load_pair(place + row_bytes + at)
                for i in range(4):
                    pairs[i] = pairs[i] if is_there else uint32(0)
                multiply(sums, words, pairs)
            rank, own = uint32(rank + uint32(RANKS)), uint32(own + uint32(RANKS))

    @device_function
    def add_bias(sums, bias, column, step, last, g):
        for i in range(4):
            own = uint32(column + uint32(i // 2) * step + uint32(i % 2 * 8) + g)
            value = memory.load_f32(bias + uint64(minimum_u32(own, last)) * uint64(4))
            sums[8 * (i // 2) + 2 * (i % 2)] += value
            sums[8 * (i // 2) + 2 * (i % 2) + 1] += value

    @device_function
    def expand(target, stride, warp, warps, lane, m, columns, part, riding):
        ups, ranges, between, ranks, num_slots, num_ranges = (
            riding.ups, riding.ranges, riding.between, riding.ranks, riding.num_slots, riding.num_ranges,
        )  # fmt: skip
        first_column, step, num_tiles, end = columns
        first_column, last = uint32(first_column + part * end), uint32(uint32(part + uint32(1)) * end - uint32(1))
        sums, word, leads = cuda.local.array(16, float32), uint32(0xFFFFFFFF), uint32(0)
        g, t, row_bytes = lane >> uint32(2), lane & uint32(3), uint64(ranks) * uint64(2)
        if lane < m:
            word = memory.load_b32(between + (uint64(m) * uint64(ranks) + uint64(lane)) * uint64(4))
        if (word >> uint32(5)) & uint32(GROUP - 1) == uint32(0):
            leads = uint32(1)
        low, high, packed = uint32(0), uint32(0), uint32(0)
        if word >> uint32(8) < num_slots and num_tiles != uint32(0):
            up = memory.load_b64(ups + uint64(word >> uint32(8)) * uint64(8))
            low, high = uint32(up), uint32(up >> uint64(32))
            packed = _ranks_of_part(word >> uint32(8), part, columns, ranges, num_ranges)
        leaders = ballot(leads)
        number, num_groups = count_b32(leaders & uint32((uint32(1) << lane) - uint32(1))), count_b32(leaders)
        tile = uint32(0)
        while tile < num_tiles:
            group = warp
            while group < num_groups:
                first = leader_of(leads, number, group)
                behind = uint32(leaders & uint32(uint32(0xFFFFFFFE) << first))
                past = count_b32(uint32(behind & uint32(uint32(0) - behind)) - uint32(1))  # 32 if there is none
                count = uint32(minimum_u32(past, m) - first)
                slot = shuffle_index_b32(word, first) >> uint32(8)
                for i in range(16):
                    sums[i] = float32(0)
                own_ranks = shuffle_index_b32(packed, first)
                own_low, own_high = shuffle_index_b32(low, first), shuffle_index_b32(high, first)
                if slot < num_slots:
                    column = uint32(first_column + tile * step)
                    place = between + uint64(first + minimum_u32(g, uint32(count - uint32(1)))) * row_bytes * uint64(2)
                    own_up = (uint64(own_high) << uint64(32)) | uint64(own_low)
                    add_ranks(sums, own_ranks, own_up, place, column, step, last, row_bytes, lane)
                    for i in range(4):
                        sums[i] += sums[4 + i]
                        sums[8 + i] += sums[12 + i]
                    flag = ranges + (uint64(slot + uint32(1)) * uint64(num_ranges) - uint64(1)) * uint64(8)
                    if memory.load_b32(flag) != uint32(0):
                        bias = memory.load_b64(ups + uint64(slot + num_slots) * uint64(8))
                        add_bias(sums, bias, column, step, last, g)
                for e in range(2):
                    at = uint32(t * uint32(2) + uint32(e))
                    row = shuffle_index_b32(word, uint32(first + at) & uint32(31)) & uint32(31)
                    if at < count:
                        own_place = uint32(target + uint32(row * stride + tile * uint32(TILE) + g) * uint32(4))
                        memory.shared_store_f32(own_place, sums[e])
                        memory.shared_store_f32(uint32(own_place + uint32(32)), sums[2 + e])
                        if uint32(tile + uint32(1)) < num_tiles:
                            memory.shared_store_f32(uint32(own_place + uint32(64)), sums[8 + e])
                            memory.shared_store_f32(uint32(own_place + uint32(96)), sums[10 + e])
                group = uint32(group + warps)
            tile = uint32(tile + uint32(2))

    return expand
