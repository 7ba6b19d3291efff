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

from numba_kernels.cuda.attention.flash_parts import (
    Form,
    Held,
    lane_places,
    row_packer,
    rows_starter,
    score_multiplier,
    scores_masker,
    scores_scaler,
)
from numba_kernels.cuda.attention.online_softmax import MINUS_INFINITY, reciprocal_of
from numba_kernels.cuda.attention.parts import part_finder, parts_combiner, record_place, scratch_bytes
from numba_kernels.cuda.attention.tiles import (
    Variant,
    output_tile_copier,
    query_tile_copier,
    rows_of_tile,
    tile_shape,
)
from numba_kernels.cuda.attention.wide_tiles import (
    result_recorder,
    total_adder,
    weight_storer,
    wide_summer,
    wide_weigher,
)
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.math import minimum_u32
from numba_kernels.cuda.intrinsics.memory import (
    copy_async_16,
    copy_async_commit,
    copy_async_wait,
    copy_async_whole_16,
    shared_address,
    store_2xf32,
)
from numba_kernels.cuda.intrinsics.shared_memory import without_room
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import lane_index, shuffle_index_b32
from numba_kernels.cuda.latent.byte_tiles import tile_widener
from numba_kernels.cuda.specialisation import Specialisation
from numba_kernels.latent_rows import LatentBytes

NUM_ROWS = 16
WARPS = 4
THREADS = 32 * WARPS
TILE_KEYS = (64, 48, 32, 16)
MOST_VALUES = 768  # numbers of a value: a warp's sums take 96 registers
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
def latent_tensor_core(tiles: LatentTiles, block_size: int) -> Specialisation:
    """Grid: the parts of all sequences, as `parts` bounds them. Arguments: see `planning.LatentPlan.arguments`."""
    dtype, width, value_dim, num_keys = tiles.dtype, tiles.width, tiles.value_dim, tiles.num_keys
    pitch, weight_pitch, tile_bytes = tiles.pitch, tiles.weight_pitch, tiles.stage_bytes
    in_bytes = tiles.pages != ""
    widen = tile_widener(dtype, tiles.bytes, num_keys, tiles.stage_pitch, pitch, THREADS) if in_bytes else None
    first_value = tiles.first_value
    q_pitch, out_pitch = tile_shape(dtype, width).pitch, tile_shape(dtype, value_dim).pitch
    own_pairs, value_tiles = tiles.own_pairs, 2 * tiles.own_pairs
    form = Form(
        dtype, Variant(), 16, 1, -(-width // 16), 2, value_tiles, 0, 0, 1, own_pairs, False, q_pitch, out_pitch,
        pitch, pitch,
    )  # fmt: skip
    weigh, add_totals, places_of = wide_weigher(form, WARPS), total_adder(WARPS), lane_places(form)
    multiply_queries = score_multiplier(form)
    scale_scores, mask, start_rows = scores_scaler(form), scores_masker(form), rows_starter(form)
    store_weights, add_values = weight_storer(form, weight_pitch), wide_summer(form, num_keys)
    pack_row, record_result, score_warps = row_packer(form), result_recorder(form), num_keys // 16
    groups = num_keys // _COPIED_ROWS
    locate, copy_tile = _tile_copiers(tiles, block_size)
    find = part_finder(NUM_ROWS, num_keys, THREADS, False)
    copy_queries = query_tile_copier(dtype, width, NUM_ROWS, THREADS)
    copy_results = output_tile_copier(dtype, value_dim, NUM_ROWS, THREADS)
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
        warp = shuffle_index_b32(uint32(thread >> uint32(5)), uint32(0))  # so that ptxas knows it is uniform
        block = uint32(cuda.blockIdx.x)
        seq, tile, part, num_parts, _first_key, part_keys, first_token, query_len, seq_len = find(
            scratch, (query_start, seq_lens, num_seqs), num_heads, uint32(0), wanted, block, thread
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
        stages = uint32(scratch + uint32(tiles_at))

        first_pair = uint32(warp * uint32(own_pairs))
        query_place, key_place, value_place = places_of(
            q_tile, uint32(warp * uint32(16 * pitch)), uint32(uint32(first_value * 2) + first_pair * uint32(32)), lane
        )
        weight_place = uint32(weights + (lane & uint32(15)) * uint32(weight_pitch) + (lane >> uint32(4)) * uint32(16))
        # A lane's accumulators belong to rows `above` and 8 more, and to two neighbouring keys or columns.
        above = uint32(lane >> uint32(2))
        pair = uint32((lane & uint32(3)) * uint32(2))
        own_maxima = uint32(scratch + uint32(maxima_at) + above * uint32(4 * WARPS))
        own_weights = uint32(weights + above * uint32(weight_pitch) + uint32(warp * uint32(16) + pair) * uint32(2))

        blocks = cuda.local.array(groups, uint32)
        queries, packed = cuda.local.array((1, 1, 4), uint32), cuda.local.array((1, 4), uint32)
        scores, sums = cuda.local.array((1, 2, 4), float32), cuda.local.array((1, value_tiles, 4), float32)
        ends, own_ends = cuda.local.array((1, 2), uint32), cuda.local.array((1, 2), uint32)
        maxima, totals = cuda.local.array((1, 2), float32), cuda.local.array((1, 2), float32)
        factors, room = cuda.local.array((1, 2), float32), cuda.local.array(1, uint32)
        words, pairs = cuda.local.array(4, uint32), cuda.local.array(8, uint32)
        held = Held(queries, packed, scores, sums, ends, own_ends, maxima, totals, factors, words, pairs, room)
        chunk = block_tables, first_token, seq_len, query_len, uint32(0), wanted
        start_rows(held, chunk, uint32(first_row + above), num_heads)

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
            has_keys = score_warps == WARPS or warp < uint32(score_warps)
            if has_keys:
                multiply_queries(held, query_place, uint32(own_tile + key_place))
                scale_scores(held, uint32(0), scale)
                if uint32(key + uint32(num_keys)) > shortest_end:
                    mask(held, uint32(key + warp * uint32(16) + pair), uint32(0))
            else:
                for i in range(2):
                    for j in range(4):
                        scores[0, i, j] = MINUS_INFINITY
            weigh(held, own_maxima, uint32(1), warp, pair == uint32(0))
            if has_keys:
                store_weights(own_weights, scores[0])
            sync_block()
            add_values(held, weight_place, uint32(own_tile + value_place))
            sync_block()
            if not in_bytes:
                if later < stop:
                    copy_tile(own_tile, pages, later, stop, thread, blocks)
                copy_async_commit()
            odd = uint32(uint32(tile_bytes) - odd)
            key = uint32(key + uint32(num_keys))

        _wait_for_copies()
        add_totals(totals, own_maxima, warp, pair == uint32(0))
        if num_parts > uint32(1):
            for j in range(2):
                row = uint32(above + uint32(8 * j))
                if uint32(first_row + row) < rows:
                    record = place_of(workspace, block, uint32(0), uint32(1), row)
                    if thread < uint32(32) and pair == uint32(0):
                        store_2xf32(record + uint64(4 * record_columns), (maxima[0, j], totals[0, j]))
                    record_result(record + uint64(uint32(first_pair * uint32(64))), sums[0], j, lane & uint32(3))
            combine(
                scratch, (block, part, num_parts, first_token, first_row, rows),
                (workspace, arrivals, q, out, uint64(0)), (num_heads, uint32(1), num_heads, table_width), uint32(0),
                thread,
            )  # fmt: skip
            return
        place = uint32(q_tile + above * uint32(out_pitch) + first_pair * uint32(32))
        for j in range(2):
            pack_row(sums[0], j, reciprocal_of(totals[0, j]), uint32(place + uint32(8 * j * out_pitch)), pair)
        sync_block()
        copy_results(q_tile, out, place_of_tile, thread)

    name = f"latent_attention_{dtype}_w{width}_v{value_dim}_b{block_size}_k{num_keys}{f'_{tiles.pages}' * in_bytes}"
    constants = {
        "dtype": dtype, "width": width, "value_dim": value_dim, "block_size": block_size, "num_keys": num_keys,
        "shared_bytes": tiles.shared_bytes, "pages": tiles.pages,
    }  # fmt: skip
    pointer = types.CPointer(types.int32)
    argument_types = (*(types.uint64,) * 5, pointer, pointer, pointer, *(types.uint32,) * 4, types.float32)
    return Specialisation(
        name, kernel, argument_types, THREADS, _REGISTER_BLOCKS, constants=constants,
        spills_on=without_room(tiles.shared_bytes),
    )  # fmt: skip
