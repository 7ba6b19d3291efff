"""Latent attention on the tensor cores of sm_80 on, f16 and bf16: 16 rows of queries a block, against latent rows.

Rows are as in `attention.tiles` with one KV head, which all query heads share; a block takes a tile of 16 rows and one
part of a sequence (`attention.parts`). A latent row lies in shared memory once, as its heads' key and as their value:
its last `value_dim` numbers. Tiles of up to 64 rows come by cp.async, the next one while this one is used.

For each tile the warps share out the keys, 16 a warp, for the scores (Q K^T), and then the value's columns for the sums
(P V): so largest scores and weights go through shared memory. Sums are rescaled only where a row has found a larger
score: else the factor is 1, and the bits are the same.

    a tile of 64 keys by a warp, rows of 64 + 512:   36 steps x 2 products for the scores, 4 x 16 for the sums
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from numba import cuda, float32, types, uint32, uint64

from numba_kernels.cuda.attention.online_softmax import MINUS_INFINITY, origin_of, reciprocal_of, subtract
from numba_kernels.cuda.attention.parts import part_finder, parts_combiner, record_place, scratch_bytes
from numba_kernels.cuda.attention.tiles import (
    output_tile_copier,
    query_tile_copier,
    rows_of_tile,
    tile_shape,
    visible_end,
)
from numba_kernels.cuda.intrinsics.convert import pack_bf16, pack_f16
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.math import divide_u32, exp2, minimum_u32
from numba_kernels.cuda.intrinsics.memory import (
    copy_async_16,
    copy_async_commit,
    copy_async_wait,
    copy_async_whole_16,
    shared_address,
    shared_load_4xf32,
    shared_store_b32,
    shared_store_f32,
    store_2xf32,
)
from numba_kernels.cuda.intrinsics.mma import load_matrix_x4, load_matrix_x4_transposed, product_adder
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import lane_index, maximum_f32, or_b32, shuffle_xor_f32
from numba_kernels.cuda.latent.byte_tiles import tile_widener
from numba_kernels.cuda.specialisation import Specialisation
from numba_kernels.latent_rows import LatentBytes

NUM_ROWS = 16
WARPS = 4
THREADS = 32 * WARPS
TILE_KEYS = (64, 48, 32, 16)
MOST_VALUES = 768  # numbers of a value: a warp's sums take 96 registers
SHARED_BYTES = {
    "sm_80": 166_912, "sm_86": 101_376, "sm_89": 101_376, "sm_90a": 232_448, "sm_100a": 232_448, "sm_120a": 101_376,
}  # fmt: skip
"""The most of a block by opt-in, by architecture: CUDA's programming guide, "Compute Capabilities"."""
_REGISTER_BLOCKS = 3  # of a multiprocessor's registers: at most 168 a thread
_COPIED_ROWS = THREADS // 8  # by one copy of all threads: eight lanes take 128 bytes of a row

_wait_for_tile = copy_async_wait(1)  # the next one was requested after it
_wait_for_copies = copy_async_wait(0)


@dataclass(frozen=True, slots=True)
class LatentTiles:
    """Shared memory of a block: for `part_finder`, queries (then results), weights, largest scores, two tiles of keys,
    and one that is widened if rows are of bytes.

    Attributes:
        width: numbers of a latent row; the last value_dim are the value.
        num_keys: of a tile.
        pages: "e4m3" for rows of `numba_kernels.latent_rows`, "" for the dtype's.
    """

    dtype: str
    width: int
    value_dim: int
    num_keys: int
    pages: str = ""

    @property
    def bytes(self) -> LatentBytes:
        """The layout of a row of bytes."""
        return LatentBytes(self.width, self.value_dim)

    @property
    def first_value(self) -> int:
        return self.width - self.value_dim

    @property
    def own_pairs(self) -> int:
        """A warp's steps of 16 columns."""
        return self.value_dim // (16 * WARPS)

    @property
    def pieces(self) -> int:
        """16-byte pieces of a row, so that both products find whole steps."""
        return 2 * -(-self.width // 16)

    @property
    def pitch(self) -> int:
        """Bytes from one row to the next: eight neighbours' pieces lie in different banks."""
        return (self.pieces | 1) * 16

    @property
    def weight_pitch(self) -> int:
        return (self.num_keys + 8) * 2

    @property
    def weights_at(self) -> int:
        return scratch_bytes(THREADS) + NUM_ROWS * tile_shape(self.dtype, self.width).pitch

    @property
    def maxima_at(self) -> int:
        return self.weights_at + NUM_ROWS * self.weight_pitch

    @property
    def tiles_at(self) -> int:
        return self.maxima_at + NUM_ROWS * WARPS * 4

    @property
    def tile_bytes(self) -> int:
        return self.num_keys * self.pitch

    @property
    def stage_pitch(self) -> int:
        """Bytes from one row to the next of a tile as it comes."""
        return (self.bytes.row_bytes // 16 | 1) * 16 if self.pages else self.pitch

    @property
    def stage_bytes(self) -> int:
        """Bytes of a tile as it comes."""
        return self.num_keys * self.stage_pitch

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory."""
        return self.tiles_at + 2 * self.stage_bytes + (self.tile_bytes if self.pages else 0)


def choose_tiles(dtype: str, width: int, value_dim: int, most_shared: int, pages: str = "") -> LatentTiles | None:
    """The largest tiles that a block's shared memory holds; None if the kernel has none for such rows. Each warp has
    as many columns of a value."""
    first_value = width - value_dim
    if dtype == "f32" or first_value % (16 if pages else 8) or value_dim % (16 * WARPS) or value_dim > MOST_VALUES:
        return None
    found = (LatentTiles(dtype, width, value_dim, num_keys, pages) for num_keys in TILE_KEYS)
    return next((tiles for tiles in found if tiles.shared_bytes <= most_shared), None)


def _tile_copiers(tiles: LatentTiles, block_size: int) -> tuple[Any, Any]:
    """Device functions that find the pages of a tile's rows, and that copy the tile."""
    num_keys, pieces, pitch, stored_pieces = tiles.num_keys, tiles.pieces, tiles.stage_pitch, -(-tiles.width // 8)
    if tiles.pages:
        pieces = stored_pieces = tiles.bytes.row_bytes // 16
    groups, turns, row_bytes = num_keys // _COPIED_ROWS, -(-pieces // 8), stored_pieces * 16

    @device_function
    def locate(block_tables, table, key, stop, thread, blocks):
        """The pages of the thread's rows of the tile at `key`."""
        for i in range(groups):
            own = uint32(key + uint32(i * _COPIED_ROWS) + (thread >> uint32(3)))
            blocks[i] = uint32(0)
            if own < stop:
                blocks[i] = uint32(block_tables[table + uint64(own // uint32(block_size))])

    @device_function
    def copy_tile(tile, pages, key, stop, thread, blocks):
        """The tile at `key`, of which rows from `stop` on become zeros. Asynchronous."""
        lane = uint32(thread & uint32(7))
        is_whole = uint32(key + uint32(num_keys)) <= stop
        for i in range(groups):
            row = uint32(uint32(i * _COPIED_ROWS) + (thread >> uint32(3)))
            own = uint32(key + row)
            slot = uint64(blocks[i]) * uint64(block_size) + uint64(own % uint32(block_size))
            source = pages + slot * uint64(row_bytes) + uint64(uint32(lane * uint32(16)))
            target = uint32(tile + row * uint32(pitch) + lane * uint32(16))
            for j in range(turns):
                at, place = source + uint64(128 * j), uint32(target + uint32(128 * j))
                if is_whole and 8 * (j + 1) <= stored_pieces:
                    copy_async_whole_16(place, at)
                elif 8 * (j + 1) <= pieces or uint32(lane + uint32(8 * j)) < uint32(pieces):
                    size = uint32(0)
                    if own < stop and uint32(lane + uint32(8 * j)) < uint32(stored_pieces):
                        size = uint32(16)
                    copy_async_16(place, at, size)

    return locate, copy_tile


@functools.cache
def _scorer(dtype: str, steps: int) -> Any:
    """A device function ``(scores, places, own_key, ends, is_edge, scale)``: a warp's scores of 16 rows and keys.
    `places` are those of queries and keys for `ldmatrix`; `own_key` is the lane's first."""
    add_product = product_adder(dtype)

    @device_function
    def score(scores, places, own_key, ends, is_edge, scale):
        query_place, key_place = places
        for side in range(2):
            for j in range(4):
                scores[side, j] = float32(0)
        for step in range(steps):
            a = load_matrix_x4(uint32(query_place + uint32(32 * step)))
            b = load_matrix_x4(uint32(key_place + uint32(32 * step)))
            add_product(scores[0], a, (b[0], b[1]))
            add_product(scores[1], a, (b[2], b[3]))
        for side in range(2):
            for j in range(4):
                scores[side, j] = scores[side, j] * scale
        if is_edge:
            for side in range(2):
                for j in range(4):
                    at = uint32(own_key + uint32(8 * side + j % 2))
                    if at >= ends[j // 2]:
                        scores[side, j] = MINUS_INFINITY

    return score


@functools.cache
def _weigher(dtype: str, weight_pitch: int) -> Any:
    """A device function ``(scores, totals, origins, place)``: weights, from the lane's place in shared memory on."""
    pack = pack_bf16 if dtype == "bf16" else pack_f16

    @device_function
    def weigh(scores, totals, origins, place):
        for side in range(2):
            for j in range(2):
                first = exp2(subtract(scores[side, 2 * j], origins[j]))
                second = exp2(subtract(scores[side, 2 * j + 1], origins[j]))
                totals[j] = totals[j] + (first + second)
                at = uint32(place + uint32(8 * j * weight_pitch + 16 * side))
                shared_store_b32(at, pack(first, second))

    return weigh


@functools.cache
def _result_keepers(tiles: LatentTiles) -> tuple[Any, Any]:
    """Device functions ``stage(sums, totals, place, first_pair)``, which writes a warp's results to shared memory, from
    the lane's place on, and ``record_sums(sums, record, half, first_pair, pair)`` of its upper or lower row."""
    pack, own_pairs = pack_bf16 if tiles.dtype == "bf16" else pack_f16, tiles.own_pairs
    out_pitch = tile_shape(tiles.dtype, tiles.value_dim).pitch

    @device_function
    def record_sums(sums, record, half, first_pair, pair):
        for i in range(own_pairs):
            column = uint32(uint32(first_pair + uint32(i)) * uint32(16) + pair)
            for side in range(2):
                at = record + uint64(uint32(uint32(column + uint32(8 * side)) * uint32(4)))
                store_2xf32(at, (sums[i, side, 2 * half], sums[i, side, 2 * half + 1]))

    @device_function
    def stage_results(sums, totals, place, first_pair):
        for j in range(2):
            factor = reciprocal_of(totals[j])
            for i in range(own_pairs):
                column = uint32(uint32(first_pair + uint32(i)) * uint32(16))
                at = uint32(place + uint32(8 * j * out_pitch) + column * uint32(2))
                for side in range(2):
                    both = pack(sums[i, side, 2 * j] * factor, sums[i, side, 2 * j + 1] * factor)
                    shared_store_b32(uint32(at + uint32(16 * side)), both)

    return stage_results, record_sums


@functools.cache
def latent_tensor_core(tiles: LatentTiles, block_size: int) -> Specialisation:
    """Grid: the parts of all sequences, as `parts` bounds them. Arguments: see `planning.LatentPlan.arguments`."""
    dtype, width, value_dim, num_keys = tiles.dtype, tiles.width, tiles.value_dim, tiles.num_keys
    pitch, weight_pitch, tile_bytes = tiles.pitch, tiles.weight_pitch, tiles.stage_bytes
    in_bytes = tiles.pages != ""
    widen = tile_widener(dtype, tiles.bytes, num_keys, tiles.stage_pitch, pitch, THREADS) if in_bytes else None
    first_value = tiles.first_value
    q_pitch = tile_shape(dtype, width).pitch
    score, (stage_results, record_sums) = _scorer(dtype, -(-width // 16)), _result_keepers(tiles)
    weigh, key_steps = _weigher(dtype, weight_pitch), num_keys // 16
    score_warps = num_keys // 16
    own_pairs = tiles.own_pairs
    groups = num_keys // _COPIED_ROWS
    locate, copy_tile = _tile_copiers(tiles, block_size)
    add_product, find = product_adder(dtype), part_finder(NUM_ROWS, num_keys, THREADS, False)
    copy_queries = query_tile_copier(dtype, width, NUM_ROWS, THREADS)
    copy_results = output_tile_copier(dtype, value_dim, NUM_ROWS, THREADS)
    out_pitch = tile_shape(dtype, value_dim).pitch
    place_of = record_place(value_dim, NUM_ROWS)
    combine = parts_combiner(dtype, value_dim, NUM_ROWS, THREADS, False)
    record_columns = tile_shape("f32", value_dim).columns
    q_at, weights_at, maxima_at, tiles_at = (
        scratch_bytes(THREADS), tiles.weights_at, tiles.maxima_at, tiles.tiles_at
    )  # fmt: skip

    @cuda.jit
    def kernel(
        q, pages, out, workspace, arrivals, query_start, seq_lens, block_tables, num_heads, table_width, num_seqs,
        wanted, scale,
    ):  # fmt: skip
        wait_for_previous_grid()
        launch_dependents()
        storage = cuda.shared.array(0, float32)
        scratch = shared_address(storage)
        thread = uint32(cuda.threadIdx.x)
        lane = lane_index()
        warp = uint32(thread >> uint32(5))
        block = uint32(cuda.blockIdx.x)
        seq, tile, part, num_parts, _first_key, part_keys, first_token, query_len, seq_len = find(
            scratch, query_start, seq_lens, num_seqs, num_heads, uint32(0), wanted, block, thread
        )
        if seq >= num_seqs:
            return
        rows, first_row, shortest_end, longest_end = rows_of_tile(tile, NUM_ROWS, seq_len, query_len, num_heads)
        place_of_tile = first_row, rows, num_heads, uint32(0), num_heads, first_token
        key = uint32(part * part_keys)
        stop = minimum_u32(uint32(key + part_keys), longest_end)
        table = uint64(seq) * uint64(table_width)
        q_tile = uint32(scratch + uint32(q_at))
        weights = uint32(scratch + uint32(weights_at))
        maxima = uint32(scratch + uint32(maxima_at))
        stages = uint32(scratch + uint32(tiles_at))

        # ldmatrix: rows of queries and weights by 16, keys by rows of 8 and halves of a step, values by rows of 16.
        low_row = uint32(lane & uint32(15))
        high_half = uint32((lane >> uint32(4)) * uint32(16))
        query_place = uint32(q_tile + low_row * uint32(q_pitch) + high_half)
        weight_place = uint32(weights + low_row * uint32(weight_pitch) + high_half)
        own_key = uint32((lane & uint32(7)) + (lane >> uint32(4)) * uint32(8) + warp * uint32(16))
        key_place = uint32(own_key * uint32(pitch) + ((lane >> uint32(3)) & uint32(1)) * uint32(16))
        first_pair = uint32(warp * uint32(own_pairs))
        value_place = uint32(low_row * uint32(pitch) + high_half + uint32(first_value * 2) + first_pair * uint32(32))
        # A lane's accumulators belong to rows `above` and 8 more, and to two neighbouring keys or columns.
        above = uint32(lane >> uint32(2))
        pair = uint32((lane & uint32(3)) * uint32(2))

        blocks = cuda.local.array(groups, uint32)
        sums = cuda.local.array((own_pairs, 2, 4), float32)
        scores = cuda.local.array((2, 4), float32)
        largest, totals = cuda.local.array(2, float32), cuda.local.array(2, float32)
        factors, origins = cuda.local.array(2, float32), cuda.local.array(2, float32)
        ends = cuda.local.array(2, uint32)
        for j in range(2):
            ends[j] = visible_end(seq_len, query_len, divide_u32(uint32(first_row + above + uint32(8 * j)), num_heads))
            largest[j] = MINUS_INFINITY
            totals[j] = float32(0)
            if pair == uint32(0):  # warps without keys leave it so
                at = uint32((above + uint32(8 * j)) * uint32(4 * WARPS) + warp * uint32(4))
                shared_store_f32(uint32(maxima + at), MINUS_INFINITY)
        for i in range(own_pairs):
            for side in range(2):
                for j in range(4):
                    sums[i, side, j] = float32(0)

        locate(block_tables, table, key, stop, thread, blocks)
        copy_queries(q_tile, q, place_of_tile, thread)
        copy_tile(stages, pages, key, stop, thread, blocks)
        copy_async_commit()
        following = uint32(key + uint32(num_keys))
        if following < stop:
            locate(block_tables, table, following, stop, thread, blocks)
            copy_tile(uint32(stages + uint32(tile_bytes)), pages, following, stop, thread, blocks)
        copy_async_commit()
        odd = uint32(0)
        while key < stop:
            own_tile = uint32(stages + odd)
            later = uint32(key + uint32(2 * num_keys))
            _wait_for_tile()
            sync_block()
            locate(block_tables, table, later, stop, thread, blocks)
            if in_bytes:
                stage = own_tile
                own_tile = uint32(stages + uint32(2 * tile_bytes))
                widen(stage, own_tile, thread)
                sync_block()
                if later < stop:
                    copy_tile(stage, pages, later, stop, thread, blocks)
                copy_async_commit()
            if score_warps == WARPS or warp < uint32(score_warps):
                places = query_place, uint32(own_tile + key_place)
                own_key = uint32(key + warp * uint32(16) + pair)
                is_edge = uint32(key + uint32(num_keys)) > shortest_end
                score(scores, places, own_key, ends, is_edge, scale)
                for j in range(2):
                    highest = maximum_f32(
                        maximum_f32(scores[0, 2 * j], scores[0, 2 * j + 1]),
                        maximum_f32(scores[1, 2 * j], scores[1, 2 * j + 1]),
                    )
                    highest = maximum_f32(highest, shuffle_xor_f32(highest, uint32(1)))
                    highest = maximum_f32(highest, shuffle_xor_f32(highest, uint32(2)))
                    if pair == uint32(0):
                        at = uint32((above + uint32(8 * j)) * uint32(4 * WARPS) + warp * uint32(4))
                        shared_store_f32(uint32(maxima + at), highest)
            sync_block()
            is_larger = uint32(0)
            for j in range(2):
                a, b, c, d = shared_load_4xf32(uint32(maxima + (above + uint32(8 * j)) * uint32(4 * WARPS)))
                highest = maximum_f32(largest[j], maximum_f32(maximum_f32(a, b), maximum_f32(c, d)))
                origins[j] = origin_of(highest)
                factors[j] = exp2(subtract(largest[j], origins[j]))
                if highest > largest[j]:
                    is_larger = uint32(1)
                largest[j] = highest
                totals[j] = totals[j] * factors[j]
            if score_warps == WARPS or warp < uint32(score_warps):
                place = uint32(weights + above * uint32(weight_pitch) + uint32(warp * uint32(16) + pair) * uint32(2))
                weigh(scores, totals, origins, place)
            if or_b32(is_larger) != uint32(0):
                for i in range(own_pairs):
                    for side in range(2):
                        for j in range(4):
                            sums[i, side, j] = sums[i, side, j] * factors[j // 2]
            sync_block()
            for step in range(key_steps):
                a = load_matrix_x4(uint32(weight_place + uint32(32 * step)))
                for i in range(own_pairs):
                    place = uint32(own_tile + value_place + uint32(16 * pitch * step + 32 * i))
                    b = load_matrix_x4_transposed(place)
                    add_product(sums[i, 0], a, (b[0], b[1]))
                    add_product(sums[i, 1], a, (b[2], b[3]))
            sync_block()
            if not in_bytes:
                if later < stop:
                    copy_tile(own_tile, pages, later, stop, thread, blocks)
                copy_async_commit()
            odd = uint32(uint32(tile_bytes) - odd)
            key = uint32(key + uint32(num_keys))

        _wait_for_copies()
        for j in range(2):
            total = totals[j] + shuffle_xor_f32(totals[j], uint32(1))
            totals[j] = total + shuffle_xor_f32(total, uint32(2))
            if pair == uint32(0):
                at = uint32((above + uint32(8 * j)) * uint32(4 * WARPS) + warp * uint32(4))
                shared_store_f32(uint32(maxima + at), totals[j])
        sync_block()
        for j in range(2):
            a, b, c, d = shared_load_4xf32(uint32(maxima + (above + uint32(8 * j)) * uint32(4 * WARPS)))
            totals[j] = a + b + c + d
        if num_parts > uint32(1):
            for j in range(2):
                row = uint32(above + uint32(8 * j))
                if uint32(first_row + row) < rows:
                    record = place_of(workspace, block, uint32(0), uint32(1), row)
                    if thread < uint32(32) and pair == uint32(0):
                        store_2xf32(record + uint64(4 * record_columns), (largest[j], totals[j]))
                    record_sums(sums, record, j, first_pair, pair)
            combine(
                scratch, workspace, arrivals, out, uint64(0), block, part, num_parts, uint32(0), uint32(1), num_heads,
                num_heads, first_token, first_row, rows, thread,
            )  # fmt: skip
            return
        place = uint32(q_tile + above * uint32(out_pitch) + pair * uint32(2))
        stage_results(sums, totals, place, first_pair)
        sync_block()
        copy_results(q_tile, out, place_of_tile, thread)

    name = f"latent_attention_{dtype}_w{width}_v{value_dim}_b{block_size}_k{num_keys}{f'_{tiles.pages}' * in_bytes}"
    constants = {
        "dtype": dtype, "width": width, "value_dim": value_dim, "block_size": block_size, "num_keys": num_keys,
        "shared_bytes": tiles.shared_bytes, "pages": tiles.pages,
    }  # fmt: skip
    pointer = types.CPointer(types.int32)
    argument_types = (*(types.uint64,) * 5, pointer, pointer, pointer, *(types.uint32,) * 4, types.float32)
    lacking = tuple(arch for arch, most in SHARED_BYTES.items() if tiles.shared_bytes > most)
    return Specialisation(
        name, kernel, argument_types, THREADS, _REGISTER_BLOCKS, constants=constants, spills_on=lacking
    )  # fmt: skip
