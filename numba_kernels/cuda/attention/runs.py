"""Runs of keys: how `decode_tensor_core` shares a batch's keys out to blocks.

The grid has as many blocks for a KV head as run at once, `wanted`. If equal parts of sequences, one a block at most,
are nearly as short as an even share of all keys, each block takes one. Else the tiles of rows of all sequences lie one
after the other and each block takes a run of equal length: the end of one tile, whole ones, the beginning of another.
So no block waits for another to end, and the rest of a multiprocessor is left to the next kernel.

Both are runs over turns (of keys that all warps take at once). A tile's `pieces` are its turns over `divisor`, rounded
up; a run has `length` pieces. Runs of turns have the divisor 1, equal parts the length 1. A tile that several runs
share has a part in each, whose records are added (`parts.records_adder`): that of tile t of the batch in run r lies in
place r + t, so a tile's places follow one another, and no two parts have one place.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import uint32

from numba_kernels.cuda.attention.parts import MIN_PART_KEYS, extent_reader, word_at
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.math import divide_u32, minimum_u32
from numba_kernels.cuda.intrinsics.memory import shared_store_b32
from numba_kernels.cuda.intrinsics.warp import lane_index, shuffle_index_b32, sum_to_lane_u32, sum_u32_of_warp

FIRST_SLOT, STATE_BYTES = 32, 128
SLOTS = FIRST_SLOT + 80  # a slot is at the other one's distance from it
"""A warp's shared memory: the run, then two segments. They lie there, not in registers, which are few, and ptxas knows
that numbers from there are the same in all lanes."""
RUN_WORDS = 7
SLACK = 2  # turns: to begin another tile and to add records up takes about as long
LEAST_TURNS = 2  # of a tile in the count: a tile with fewer keys takes as long


@device_function
def _pieces_of(amount, size):
    pieces = amount
    if size > uint32(1):
        pieces = divide_u32(uint32(uint32(amount + size) - uint32(1)), size)
    return pieces


@functools.cache
def run_finder(num_rows: int, turn_keys: int, has_window: bool, is_early: bool) -> Any:
    """A device function that the lanes of one warp call.

    ``find(state, query_start, seq_lens, num_seqs, share, window, wanted, run)`` leaves where the run begins in shared
    memory at `state`: `RUN_WORDS` of each warp's state.
    """
    least = max(1, MIN_PART_KEYS // turn_keys)
    extent = extent_reader(num_rows, turn_keys, LEAST_TURNS, has_window, is_early)

    @device_function
    def count(query_start, seq_lens, num_seqs, share, window, divisor):
        """Pieces and tiles of the batch."""
        pieces, all_tiles = uint32(0), uint32(0)
        if num_seqs == uint32(1):
            tiles, turns, _, _, _, _ = extent(query_start, seq_lens, uint32(0), share, window)
            pieces, all_tiles = uint32(tiles * _pieces_of(turns, divisor)), tiles
        else:
            base = uint32(0)
            while base < num_seqs:
                seq = uint32(base + lane_index())
                if seq < num_seqs:
                    tiles, turns, _, _, _, _ = extent(query_start, seq_lens, seq, share, window)
                    pieces = uint32(pieces + tiles * _pieces_of(turns, divisor))
                    all_tiles = uint32(all_tiles + tiles)
                base = uint32(base + uint32(32))
            pieces, all_tiles = sum_u32_of_warp(pieces), sum_u32_of_warp(all_tiles)
        return pieces, all_tiles

    @device_function
    def locate(state, query_start, seq_lens, num_seqs, share, window, divisor, place):
        """The lane that has a piece's sequence leaves it, its first piece, and the tiles before."""
        before, tiles_before, base = uint32(0), uint32(0), uint32(0)
        while base < num_seqs and before <= place:
            seq = uint32(base + lane_index())
            pieces, own_tiles = uint32(0), uint32(0)
            if seq < num_seqs:
                tiles, turns, _, _, _, _ = extent(query_start, seq_lens, seq, share, window)
                pieces, own_tiles = uint32(tiles * _pieces_of(turns, divisor)), tiles
            behind = uint32(before + sum_to_lane_u32(pieces))
            tiles_behind = uint32(tiles_before + sum_to_lane_u32(own_tiles))
            if place < behind and uint32(place + pieces) >= behind:
                shared_store_b32(uint32(state + uint32(12)), seq)
                shared_store_b32(uint32(state + uint32(16)), uint32(behind - pieces))
                shared_store_b32(uint32(state + uint32(20)), uint32(tiles_behind - own_tiles))
            before, tiles_before = shuffle_index_b32(behind, uint32(31)), shuffle_index_b32(tiles_behind, uint32(31))
            base = uint32(base + uint32(32))

    @device_function
    def find(state, query_start, seq_lens, num_seqs, share, window, wanted, run):
        divisor = uint32(1)
        pieces, tiles = count(query_start, seq_lens, num_seqs, share, window, divisor)
        length = _pieces_of(pieces, wanted)
        if length < uint32(least):
            length = uint32(least)
        tried, parts = length, uint32(wanted + uint32(1))
        while tiles <= wanted and parts > wanted and tried <= uint32(length + uint32(SLACK)):
            parts, tiles = count(query_start, seq_lens, num_seqs, share, window, tried)
            tried = uint32(tried + uint32(1))
        if parts <= wanted:
            pieces, divisor, length = parts, uint32(tried - uint32(1)), uint32(1)
        place = uint32(run * length)
        if num_seqs > uint32(1):
            locate(state, query_start, seq_lens, num_seqs, share, window, divisor, place)
        if lane_index() == uint32(0):
            if num_seqs == uint32(1) or place >= pieces:
                for word in range(3, 6):
                    shared_store_b32(uint32(state + uint32(4 * word)), uint32(0))
            shared_store_b32(state, divisor)
            shared_store_b32(uint32(state + uint32(4)), length)
            shared_store_b32(uint32(state + uint32(8)), minimum_u32(uint32(place + length), pieces))
            shared_store_b32(uint32(state + uint32(24)), place)

    return find


@functools.cache
def segment_reader(num_rows: int, turn_keys: int, has_window: bool, is_early: bool) -> Any:
    """A device function ``read(state, slot, query_start, seq_lens, share, window, run)`` of a warp's lanes: (whether
    the run has another segment, what to give `move` after the warp's next barrier). It leaves the segment in a slot of
    the warp's state for `segment_in`, after that barrier, too.

    A segment is (sequence, query length, sequence length, first key, keys, the tile). The tile is (the records' place,
    part, number of parts, first token, first row, rows).
    """
    extent = extent_reader(num_rows, turn_keys, LEAST_TURNS, has_window, is_early)

    @device_function
    def read(state, slot, query_start, seq_lens, share, window, run):
        divisor, length, end = word_at(state, 0), word_at(state, 1), word_at(state, 2)
        seq, base, tiles_before, place = word_at(state, 3), word_at(state, 4), word_at(state, 5), word_at(state, 6)
        has_segment = place < end
        if has_segment:
            tiles, turns, first, first_token, query_len, seq_len = extent(query_start, seq_lens, seq, share, window)
            pieces = _pieces_of(turns, divisor)
            while place >= uint32(base + tiles * pieces):  # sequences without tokens have no tiles
                base = uint32(base + tiles * pieces)
                tiles_before = uint32(tiles_before + tiles)
                seq = uint32(seq + uint32(1))
                tiles, turns, first, first_token, query_len, seq_len = extent(query_start, seq_lens, seq, share, window)
                pieces = _pieces_of(turns, divisor)
            index = divide_u32(uint32(place - base), pieces)
            begin = uint32(base + index * pieces)
            stop = minimum_u32(uint32(begin + pieces), end)
            piece_keys = uint32(_pieces_of(turns, pieces) * uint32(turn_keys))
            first_run = divide_u32(begin, length)
            num_parts = uint32(divide_u32(uint32(begin + pieces - uint32(1)), length) - first_run + uint32(1))
            if lane_index() == uint32(0):
                words = (
                    seq, query_len, seq_len, uint32(first + uint32(place - begin) * piece_keys),
                    uint32(uint32(stop - place) * piece_keys), uint32(run + tiles_before + index),
                    uint32(run - first_run), num_parts, first_token, uint32(index * uint32(num_rows)),
                    uint32(query_len * share),
                )  # fmt: skip
                for i in range(11):
                    shared_store_b32(uint32(state + slot + uint32(4 * i)), words[i])
            place = stop
        return has_segment, (seq, base, tiles_before, place)

    return read


@device_function
def move(state, moved):
    """Goes on to what follows the segment that was read."""
    if lane_index() == uint32(0):
        for i in range(4):
            shared_store_b32(uint32(state + uint32(12 + 4 * i)), moved[i])


@device_function
def tile_in(state, slot):
    """The tile of a slot's segment."""
    at = uint32(state + slot + uint32(20))
    return word_at(at, 0), word_at(at, 1), word_at(at, 2), word_at(at, 3), word_at(at, 4), word_at(at, 5)


@device_function
def segment_in(state, slot):
    """A slot's segment, without its tile."""
    at = uint32(state + slot)
    return word_at(at, 0), word_at(at, 1), word_at(at, 2), word_at(at, 3), word_at(at, 4)
