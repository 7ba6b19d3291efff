"""A warp's part of a turn of `flash_tensor_core`, whose registers are `Held`: scores of a tile of keys, their softmax,
and the product of the weights with the values. `flash_wide` has some of them, for a warp's own keys and columns.

A lane's accumulators belong to two rows of each strip of 16, eight apart, and to two neighbouring columns of 8.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from typing import Any

from numba import float32, uint32

from numba_kernels.cuda.attention import segments
from numba_kernels.cuda.attention.online_softmax import (
    MINUS_INFINITY,
    group_sum,
    load_sink,
    next_origin,
    reciprocal_of,
    score_scaler,
    share_of_keys,
    subtract,
)
from numba_kernels.cuda.attention.tiles import Variant, is_outside, sink_head, tile_shape, visible_end
from numba_kernels.cuda.intrinsics.convert import pack_bf16, pack_f16
from numba_kernels.cuda.intrinsics.device import device_function, in_turn
from numba_kernels.cuda.intrinsics.math import divide_u32, exp2
from numba_kernels.cuda.intrinsics.memory import shared_load_2xf32, shared_store_2xb32, shared_store_b32
from numba_kernels.cuda.intrinsics.mma import (
    load_matrix_x2_transposed,
    load_matrix_x4,
    load_matrix_x4_transposed,
    product_adder,
    put_4,
)
from numba_kernels.cuda.intrinsics.warp import maximum_f32, or_b32, shuffle_xor_f32
from numba_kernels.cuda.quantised_pages import fragment_unpacker, page_factor

NUM_WARPS = 4
_MOST_UNROLLED = 18  # steps: LLVM leaves a loop of more as it is, with its counter and addresses


Form = namedtuple(
    "Form",
    "dtype variant keys strips steps key_tiles value_tiles key_fours value_fours key_pairs value_pairs keeps_queries "
    "pitch result_pitch key_pitch value_pitch",
)
"""A kernel's sizes: keys of a tile; a warp's strips of 16 rows; steps of the tensor core along the head dim; tiles of 8
columns of scores and of results; tiles of bytes that are loaded at once, four each, and of 16 bits, two each; whether
queries stay in registers, or else are read again for each tile of keys; bytes of a row of queries, results, keys and
values."""


@functools.cache
def form_of(dtype: str, qk_dim: int, v_dim: int, tile_rows: int, keys: int, variant: Variant) -> Form:
    shape, values, pages = tile_shape(dtype, qk_dim), tile_shape(dtype, v_dim), variant.pages
    strips, key_tiles, value_tiles = tile_rows // NUM_WARPS // 16, keys // 8, values.columns // 8
    key_fours, value_fours = (key_tiles // 4, -(-value_tiles // 4)) if pages else (0, 0)
    key_pairs, value_pairs = (0, 0) if pages else (key_tiles // 2, value_tiles // 2)
    return Form(
        dtype, variant, keys, strips, shape.columns // 16, key_tiles, value_tiles, key_fours, value_fours,
        key_pairs, value_pairs, shape.columns * strips <= 128, shape.pitch, values.pitch,
        tile_shape(pages or dtype, qk_dim).pitch, tile_shape(pages or dtype, v_dim).pitch,
    )  # fmt: skip


Held = namedtuple("Held", "queries weights scores sums ends own_ends maxima totals factors words pairs room")
"""A lane's registers: queries, scores and sums; of each of its rows the end of its keys, the largest score, the sum
of weights and the factor of what was summed before; and those of `fragment_unpacker`."""


@functools.cache
def lane_places(form: Form) -> Any:
    """A device function ``(q_tile, k_tile, v_tile, lane)`` of a lane's addresses for `ldmatrix`: queries and values by
    rows of 16, keys by rows of 8 and halves, keys of bytes by rows of 32, a step of the tensor core each."""
    pitch, key_pitch, value_pitch, has_scales = form.pitch, form.key_pitch, form.value_pitch, form.variant.pages != ""

    @device_function
    def places_of(q_tile, k_tile, v_tile, lane):
        row_place = uint32((lane & uint32(15)) * uint32(pitch) + (lane >> uint32(4)) * uint32(16))
        value_place = uint32((lane & uint32(15)) * uint32(value_pitch) + (lane >> uint32(4)) * uint32(16))
        key_place = uint32(
            ((lane & uint32(7)) + (lane >> uint32(4)) * uint32(8)) * uint32(key_pitch)
            + ((lane >> uint32(3)) & uint32(1)) * uint32(16)
        )
        if has_scales:
            key_place = uint32(lane * uint32(key_pitch))
        return uint32(q_tile + row_place), uint32(k_tile + key_place), uint32(v_tile + value_place)

    return places_of


@functools.cache
def rows_starter(form: Form) -> Any:
    """A device function ``(held, chunk, first_row, share)`` before the first tile of keys; `chunk` is a tuple of what
    `segments.end_finder_of` takes, without the token, and `first_row` the lane's first."""
    end_of, has_spans = segments.end_finder_of(form.variant), form.variant.has_spans
    strips, value_tiles = form.strips, form.value_tiles

    @device_function
    def start_rows(held, chunk, first_row, share):
        bidirectional_until, first_token, seq_len, query_len, window, most_keys = chunk
        for m in range(strips):
            for h in range(2):
                token = divide_u32(uint32(first_row + uint32(16 * m + 8 * h)), share)
                end = end_of(bidirectional_until, first_token, seq_len, query_len, token, window, most_keys)
                held.ends[m, h] = end
                if has_spans:
                    held.own_ends[m, h] = visible_end(seq_len, query_len, token)
                held.maxima[m, h] = MINUS_INFINITY
                held.totals[m, h] = float32(0)
            for i in range(value_tiles):
                for j in range(4):
                    held.sums[m, i, j] = float32(0)

    return start_rows


@functools.cache
def _steps_multiplier(form: Form, first: int) -> Any:
    """A device function of ``(held, q_place, k_place)``: adds products of some steps, from `first` on, to scores."""
    add_product, unpack = product_adder(form.dtype), fragment_unpacker(form.variant.pages or "s8", form.dtype, 4)
    strips, keeps_queries, key_fours, key_pairs = form.strips, form.keeps_queries, form.key_fours, form.key_pairs
    pitch, key_pitch, count = form.pitch, form.key_pitch, min(_MOST_UNROLLED, form.steps - first)

    @device_function
    def multiply_steps(state):
        held, q_place, k_place = state
        queries, scores = held.queries, held.scores
        for turn in range(count):
            step = first + turn
            at = step if keeps_queries else 0
            if not keeps_queries:
                for m in range(strips):
                    put_4(queries[m, 0], load_matrix_x4(uint32(q_place + uint32(m * 16 * pitch + step * 32))))
            for four in range(key_fours):
                put_4(held.words, load_matrix_x4(uint32(k_place + uint32(four * 32 * key_pitch + step * 16))))
                unpack(held.pairs, held.words, held.room)
                for m in range(strips):
                    query = (queries[m, at, 0], queries[m, at, 1], queries[m, at, 2], queries[m, at, 3])
                    for each in range(4):
                        half = (held.pairs[2 * each], held.pairs[2 * each + 1])
                        add_product(scores[m, 4 * four + each], query, half)
            for pair in range(key_pairs):
                k0, k1, k2, k3 = load_matrix_x4(uint32(k_place + uint32(pair * 16 * key_pitch + step * 32)))
                for m in range(strips):
                    query = (queries[m, at, 0], queries[m, at, 1], queries[m, at, 2], queries[m, at, 3])
                    add_product(scores[m, 2 * pair], query, (k0, k1))
                    add_product(scores[m, 2 * pair + 1], query, (k2, k3))

    return multiply_steps


@functools.cache
def score_multiplier(form: Form) -> Any:
    """A device function ``(held, q_place, k_place)``: scores, unscaled."""
    strips, key_tiles = form.strips, form.key_tiles
    multiply_steps = in_turn([_steps_multiplier(form, first) for first in range(0, form.steps, _MOST_UNROLLED)])

    @device_function
    def multiply_queries(held, q_place, k_place):
        for m in range(strips):
            for i in range(key_tiles):
                for j in range(4):
                    held.scores[m, i, j] = float32(0)
        multiply_steps((held, q_place, k_place))

    return multiply_queries


@functools.cache
def scores_scaler(form: Form) -> Any:
    """A device function ``(held, scales_place, scale)``: scores times the scale and those of the keys."""
    scaled, pages, has_scales = score_scaler(form.variant.softcap), form.variant.pages, form.variant.pages != ""
    factor = float32(page_factor(pages, form.dtype) if pages else 1)
    strips, key_tiles = form.strips, form.key_tiles

    @device_function
    def scale_scores(held, scales_place, scale):
        scores = held.scores
        for i in range(key_tiles):
            even_scale, odd_scale = scale, scale
            if has_scales:
                a, b = shared_load_2xf32(uint32(scales_place + uint32(32 * i)))
                even_scale, odd_scale = a * factor * scale, b * factor * scale
            for m in range(strips):
                for h in range(2):
                    scores[m, i, 2 * h] = scaled(scores[m, i, 2 * h], even_scale)
                    scores[m, i, 2 * h + 1] = scaled(scores[m, i, 2 * h + 1], odd_scale)

    return scale_scores


@functools.cache
def scores_masker(form: Form) -> Any:
    """A device function ``(held, key, window)`` that hides keys from the rows that do not see them; `key` is that of
    the lane's first score."""
    outside, has_spans = is_outside(form.variant.has_window), form.variant.has_spans
    strips, key_tiles = form.strips, form.key_tiles

    @device_function
    def mask_scores(held, key, window):
        for m in range(strips):
            for i in range(key_tiles):
                for j in range(4):
                    at_key = uint32(key + uint32(8 * i + j % 2))
                    own_end = held.ends[m, j // 2]
                    if has_spans:
                        own_end = held.own_ends[m, j // 2]
                    if outside(at_key, held.ends[m, j // 2], own_end, window):
                        held.scores[m, i, j] = MINUS_INFINITY

    return mask_scores


@functools.cache
def score_weigher(form: Form) -> Any:
    """A device function ``(held)``: scores become weights. The sums are rescaled where a warp has found a larger score:
    else the factor is 1."""
    strips, key_tiles, value_tiles = form.strips, form.key_tiles, form.value_tiles

    @device_function
    def weigh(held):
        scores, sums, maxima, totals, factors = held.scores, held.sums, held.maxima, held.totals, held.factors
        is_larger = uint32(0)
        for m in range(strips):
            for h in range(2):
                largest = maxima[m, h]
                for i in range(key_tiles):
                    largest = maximum_f32(largest, maximum_f32(scores[m, i, 2 * h], scores[m, i, 2 * h + 1]))
                largest = maximum_f32(largest, shuffle_xor_f32(largest, uint32(1)))
                largest = maximum_f32(largest, shuffle_xor_f32(largest, uint32(2)))
                origin, factors[m, h], is_larger = next_origin(largest, maxima[m, h], is_larger)
                maxima[m, h] = largest
                total = totals[m, h] * factors[m, h]
                for i in range(key_tiles):
                    for j in range(2):
                        scores[m, i, 2 * h + j] = exp2(subtract(scores[m, i, 2 * h + j], origin))
                        total = total + scores[m, i, 2 * h + j]
                totals[m, h] = total
        if or_b32(is_larger) != uint32(0):
            for m in range(strips):
                for i in range(value_tiles):
                    for j in range(4):
                        sums[m, i, j] = sums[m, i, j] * factors[m, j // 2]

    return weigh


@functools.cache
def weights_scaler(form: Form) -> Any:
    """A device function ``(held, scales_place)``: weights times the scales of the values, if pages have scales."""
    factor = float32(page_factor(form.variant.pages, form.dtype) if form.variant.pages else 1)
    strips, key_tiles = form.strips, form.key_tiles if form.variant.pages else 0

    @device_function
    def scale_weights(held, scales_place):
        scores = held.scores
        for i in range(key_tiles):
            a, b = shared_load_2xf32(uint32(scales_place + uint32(32 * i)))
            even_scale, odd_scale = a * factor, b * factor
            for m in range(strips):
                for h in range(2):
                    scores[m, i, 2 * h] = scores[m, i, 2 * h] * even_scale
                    scores[m, i, 2 * h + 1] = scores[m, i, 2 * h + 1] * odd_scale

    return scale_weights


@functools.cache
def values_adder(form: Form) -> Any:
    """A device function ``(held, at)``: adds the products of packed weights and the values of 16 keys, at the lane's
    shared address."""
    add_product, unpack = product_adder(form.dtype), fragment_unpacker(form.variant.pages or "s8", form.dtype, 4)
    strips, value_tiles, value_fours, value_pairs = form.strips, form.value_tiles, form.value_fours, form.value_pairs

    @device_function
    def add_values(held, at):
        weights, sums, words, pairs = held.weights, held.sums, held.words, held.pairs
        for four in range(value_fours):
            if 4 * four + 4 <= value_tiles:
                put_4(words, load_matrix_x4_transposed(uint32(at + uint32(32 * four))))
            else:  # the other 16 columns are another warp's, or padding
                words[0], words[1] = load_matrix_x2_transposed(uint32(at + uint32(32 * four)))
            unpack(pairs, words, held.room)
            for m in range(strips):
                weight = (weights[m, 0], weights[m, 1], weights[m, 2], weights[m, 3])
                for each in range(4):
                    if 4 * four + each < value_tiles:
                        first = each // 2 * 4 + each % 2
                        add_product(sums[m, 4 * four + each], weight, (pairs[first], pairs[first + 2]))
        for pair in range(value_pairs):
            v0, v1, v2, v3 = load_matrix_x4_transposed(uint32(at + uint32(32 * pair)))
            for m in range(strips):
                weight = (weights[m, 0], weights[m, 1], weights[m, 2], weights[m, 3])
                add_product(sums[m, 2 * pair], weight, (v0, v1))
                add_product(sums[m, 2 * pair + 1], weight, (v2, v3))

    return add_values


@functools.cache
def value_multiplier(form: Form) -> Any:
    """A device function ``(held, v_place, scales_place)``: adds the weights times a tile of values."""
    scale_weights, add_values = weights_scaler(form), values_adder(form)
    pack = pack_bf16 if form.dtype == "bf16" else pack_f16
    strips, key_tiles, value_pitch = form.strips, form.key_tiles, form.value_pitch

    @device_function
    def multiply_values(held, v_place, scales_place):
        scores, weights = held.scores, held.weights
        scale_weights(held, scales_place)
        for step in range(key_tiles // 2):
            for m in range(strips):
                for side in range(2):
                    for h in range(2):
                        left, right = scores[m, 2 * step + side, 2 * h], scores[m, 2 * step + side, 2 * h + 1]
                        weights[m, 2 * side + h] = pack(left, right)
            add_values(held, uint32(v_place + uint32(step * 16 * value_pitch)))

    return multiply_values


@functools.cache
def row_packer(form: Form) -> Any:
    """A device function ``(sums, h, factor, place, column)``: a lane's upper (0) or lower row of a strip, times a
    factor, goes to shared memory; `place` is that of the row."""
    pack, value_pairs, evens = pack_bf16 if form.dtype == "bf16" else pack_f16, form.value_pairs, form.value_tiles // 2

    @device_function
    def pack_row(sums, h, factor, place, column):
        for i in range(evens - value_pairs):  # even columns of 16, then the odd ones
            a, b = sums[2 * i, 2 * h] * factor, sums[2 * i + 1, 2 * h] * factor
            c, d = sums[2 * i, 2 * h + 1] * factor, sums[2 * i + 1, 2 * h + 1] * factor
            shared_store_2xb32(uint32(place + column * uint32(4) + uint32(32 * i)), (pack(a, b), pack(c, d)))
        for i in range(2 * value_pairs):
            two = pack(sums[i, 2 * h] * factor, sums[i, 2 * h + 1] * factor)
            shared_store_b32(uint32(place + column * uint32(2) + uint32(16 * i)), two)

    return pack_row


@functools.cache
def row_stager(form: Form) -> Any:
    """A device function ``(held, sinks, own_row, share, kv_head, first_place, column)`` that writes a warp's finished
    rows to shared memory; row and place are those of the lane's first row."""
    pack_row, has_sinks, is_expanded = row_packer(form), form.variant.has_sinks, form.variant.is_expanded
    strips, result_pitch = form.strips, form.result_pitch

    @device_function
    def stage_rows(held, sinks, own_row, share, kv_head, first_place, column):
        for m in range(strips):
            for h in range(2):
                total = held.totals[m, h]
                if not is_expanded:
                    total = group_sum(total, 4)
                reciprocal = reciprocal_of(total)
                if has_sinks:
                    sink = load_sink(sinks, sink_head(uint32(own_row + uint32(16 * m + 8 * h)), share, kv_head))
                    reciprocal = share_of_keys(held.maxima[m, h], total, sink)
                place = uint32(first_place + uint32((16 * m + 8 * h) * result_pitch))
                pack_row(held.sums[m], h, reciprocal, place, column)

    return stage_rows
