"""Causal attention of many query heads over latent pages, for chunks of any length (MLA, https://arxiv.org/abs/2405.04434).

    out[t, h] = sum_j softmax_j(scale q[t, h] . row[j]) row[j, width - value_dim:]      over positions j <= p_t

As `attention.kernel`: an online softmax over pages, segments that are merged in the order of positions, and row groups
of one sequence's tokens. All query heads share a row, so that a row of pages is read once for them (`tiles`).

Rows of bfloat16 meet queries and weights rounded to bfloat16 where the layout rounds products' rows, too (vdpbf16ps).
Other rows are float32, or widened once a chunk. A prompt's tokens take the same arithmetic as generated ones, so that a
token's bits depend neither on where a prompt was cut nor on whether it is computed again.

Status 1: a block table entry outside the pages. Status 2: a sequence longer than its row of the block table.
"""

from __future__ import annotations

import functools

import numpy as np
from numba import carray, njit

from numba_kernels.cpu.attention.kernel import BAD_BLOCK, BAD_LENGTH, find_sequence, hold, merge, triple, write
from numba_kernels.cpu.intrinsics.simd import LOG2_E
from numba_kernels.cpu.latent.tiles import (
    BLOCK_FOURS,
    CHUNK_TOKENS,
    EIGHT,
    FOUR,
    HALF_TOKENS,
    SCORE_BYTES,
    STEP_BYTES,
    VECTOR_BYTES,
    latent_scores,
    latent_softmax,
    latent_values,
    pack_row,
    widen_group,
    widen_row,
)
from numba_kernels.cpu.layout import ROUNDS_TO_BF16
from numba_kernels.cpu.quantised_rows import is_quantised, read_factor
from numba_kernels.cpu.running.launch import Fields, Kernel, address, copy_bytes, float32_at, int32_at, new_lines
from numba_kernels.cpu.target import LANES
from numba_kernels.latent_rows import GROUP

GROUP_ROWS = 64  # a group has so many rows, or one token's where there are more query heads
SEGMENT_TOKENS = 256

FIELDS = Fields(
    "*q *pages *query_start *seq_lens *block_table *group_starts *partial *out num_seqs heads width value_dim "
    "row_stride num_blocks block_size table_width group_tokens num_segments item_segments scales_at rotated_at",
    "scale",
)
_AHEAD_TOKENS = 24
"""How far before its scores a row is prefetched into the first-level cache."""
MOST_LANES = 16  # of any tile's vectors: what rows of bytes are filled up to
_HALVES = CHUNK_TOKENS // HALF_TOKENS


@njit(nogil=True)
def _compact(state, rows, target):
    """Copies the first of each FOUR equal numbers to ``target`` (addresses)."""
    spread, found = float32_at(state, rows * FOUR), float32_at(target, rows)
    for row in range(rows):
        found[row] = spread[row * FOUR]


@njit(nogil=True)
def _widen_bytes(stored, place, scales_at, rotated_at, width, num_values, target, read_scale):
    """A row of bytes as `width` floats, the rotated ones first; up to MOST_LANES more are overwritten."""
    rotary = width - num_values
    scales = float32_at(place + scales_at, -(-num_values // GROUP))
    widen_row(np.uint16, place + rotated_at, -(-rotary // MOST_LANES) * MOST_LANES, target)
    for start in range(0, num_values, GROUP):
        count = min(GROUP, num_values - start)
        scale = scales[start // GROUP] * read_scale
        widen_group(stored, place + start, count, target + (rotary + start) * 4, scale)


@functools.cache
def latent_attention_kernel(stored: type) -> Kernel:
    """The kernel for pages of ``stored``. A work item is one row group, or with ``num_segments > 1`` so many segments
    of it, ``item_segments``; then the sums of each segment go to ``partial [groups, num_segments, group_tokens * heads,
    value_dim rounded up to LANES + 2]``, for `attention.kernel.merge_kernel`.

    ``group_starts [num_seqs + 1]`` counts the row groups before each sequence; work items beyond the last group do
    nothing.
    """
    itemsize = np.dtype(stored).itemsize
    pairs = 1 if ROUNDS_TO_BF16 and stored is np.uint16 else 0
    is_widened = stored is not np.float32 and not pairs
    step_numbers = STEP_BYTES // (2 if pairs else 4)
    kept_size = 4 if is_widened else itemsize
    in_bytes, read_scale = is_quantised(stored), read_factor(stored)
    ahead_tokens = CHUNK_TOKENS if is_widened else _AHEAD_TOKENS  # that are prefetched while scores are computed
    near = 0 if is_widened else 1

    def attention(arguments, work_item):
        a = carray(arguments, 1)[0]
        items = -(-a.num_segments // a.item_segments)
        group = work_item // items
        group_starts = int32_at(a.group_starts, a.num_seqs + 1)
        if group >= group_starts[a.num_seqs]:
            return
        seq = find_sequence(group_starts, a.num_seqs, group)
        query_start = int32_at(a.query_start, a.num_seqs + 1)
        query_len = np.int64(query_start[seq + 1] - query_start[seq])
        first_token = (group - group_starts[seq]) * a.group_tokens
        tokens = min(a.group_tokens, query_len - first_token)
        rows = tokens * a.heads
        first_row = (query_start[seq] + first_token) * a.heads  # of this group's queries in the batch
        first_position = int32_at(a.seq_lens, a.num_seqs)[seq] - query_len + first_token
        last_key = first_position + tokens
        table = int32_at(a.block_table + seq * a.table_width * 4, a.table_width)
        if last_key > a.table_width * a.block_size:
            a.status = BAD_LENGTH
            return

        fours = -(-rows // FOUR)
        out_width = -(-a.value_dim // LANES) * LANES
        out_bytes = out_width * 4
        steps = -(-a.width // step_numbers)
        eights = -(-fours // 2)
        block_fours = min(fours, BLOCK_FOURS)
        out_size = fours * FOUR * out_width
        sizes = eights * steps * LANES, block_fours * SCORE_BYTES // 4, fours * LANES
        kept_stride = -(-a.width // MOST_LANES) * MOST_LANES if in_bytes else a.row_stride  # numbers
        widened_size = (CHUNK_TOKENS * kept_stride + MOST_LANES) if is_widened else 0
        part_size = out_size + -(-2 * rows // LANES) * LANES
        work = new_lines(sizes[0] + 2 * sizes[1] + 4 * sizes[2] + 2 * part_size + widened_size)
        queries_at = address(work)
        scores_at = queries_at + sizes[0] * 4
        weights_at = scores_at + sizes[1] * 4 if pairs else scores_at
        maxima_at = scores_at + 2 * sizes[1] * 4
        sums_at = maxima_at + sizes[2] * 4
        factors_at = sums_at + sizes[2] * 4
        ends_at = factors_at + sizes[2] * 4
        out_at = ends_at + sizes[2] * 4
        total_at = out_at + part_size * 4
        widened_at = total_at + part_size * 4
        maxima, sums = float32_at(maxima_at, sizes[2]), float32_at(sums_at, sizes[2])
        ends = int32_at(ends_at, sizes[2])
        part = out_at, out_at + out_size * 4, out_at + (out_size + rows) * 4
        total = total_at, total_at + out_size * 4, total_at + (out_size + rows) * 4
        tables = np.empty(4 * _HALVES, np.int64)
        rows_at = address(tables)  # where the rows of each half of a chunk begin
        values_at = rows_at + _HALVES * 8  # and their values
        stored_at = values_at + _HALVES * 8  # and the rows in pages, of this chunk and of the next one
        ahead_at = stored_at + ahead_tokens // HALF_TOKENS * 8

        first_segment, last_segment = 0, -(-last_key // SEGMENT_TOKENS)
        if a.num_segments > 1:
            first_segment = work_item % items * a.item_segments
            last_segment = min(first_segment + a.item_segments, a.num_segments)

        queries = float32_at(queries_at, sizes[0])
        for i in range((eights - 1) * steps * LANES, eights * steps * LANES):
            queries[i] = np.float32(0.0)  # rows that fill up the last four
        for row in range(rows):
            source, scale = a.q + (first_row + row) * a.width * 4, np.float32(a.scale * LOG2_E)
            target = queries_at + row // EIGHT * steps * VECTOR_BYTES + row % EIGHT * STEP_BYTES
            pack_row(pairs, source, a.width, target, steps, scale)
            if fours % 2 and row // FOUR == fours - 1:
                pack_row(pairs, source, a.width, target + FOUR * STEP_BYTES, steps, scale)

        for row in range(fours * FOUR):
            end = first_position + row // a.heads + 1 if row < rows else 0
            ends[row * FOUR : (row + 1) * FOUR] = end

        is_merged = a.num_segments == 1 and last_segment > 1
        for current in range(first_segment, last_segment):
            start, stop = current * SEGMENT_TOKENS, min(last_key, (current + 1) * SEGMENT_TOKENS)
            size = a.group_tokens * a.heads * (out_width + 2) * 4
            partial = triple(a.partial + (group * a.num_segments + current) * size, rows, out_width)
            found = part
            if is_merged and current == 0:
                found = total
            elif a.num_segments > 1 and rows % FOUR == 0:  # no row fills up the last four: sums arise in their place
                found = partial
            for i in range(sizes[2]):
                maxima[i], sums[i] = np.float32(-np.inf), np.float32(0.0)
            for chunk in range(start, stop, CHUNK_TOKENS):
                chunk_tokens = min(CHUNK_TOKENS, stop - chunk)
                entry, inside = chunk // a.block_size, chunk % a.block_size
                for half in range(2 * _HALVES):  # of this chunk and of the next one
                    place = np.int64(0)
                    if chunk + half * HALF_TOKENS < last_key:
                        block = np.int64(table[entry])
                        if block < 0 or block >= a.num_blocks:
                            a.status = BAD_BLOCK
                            return
                        place = a.pages + (block * a.block_size + inside) * a.row_stride * itemsize
                    tables[2 * _HALVES + half] = place
                    inside += HALF_TOKENS
                    if inside == a.block_size:
                        entry, inside = entry + 1, 0
                    if half >= _HALVES:
                        continue
                    if is_widened and place != 0:
                        kept = widened_at + half * HALF_TOKENS * kept_stride * 4
                        if in_bytes:
                            for line in range(HALF_TOKENS):
                                at = kept + line * kept_stride * 4
                                _widen_bytes(
                                    stored, place + line * a.row_stride, a.scales_at, a.rotated_at, a.width,
                                    a.value_dim, at, read_scale,
                                )  # fmt: skip
                        else:
                            widen_row(stored, place, HALF_TOKENS * a.row_stride, kept)
                        place = kept
                    tables[half] = place
                    tables[_HALVES + half] = place + (a.width - a.value_dim) * kept_size
                is_first = 1 if chunk == start else 0
                for four in range(0, fours, block_fours):
                    count = min(block_fours, fours - four)
                    state = four * VECTOR_BYTES
                    last_row = min(rows, (four + count) * FOUR) - 1
                    seen = max(0, min(ends[last_row * FOUR] - chunk, chunk_tokens))
                    if seen == 0 and is_first == 0:
                        continue
                    latent_scores(
                        pairs, near, queries_at + four // 2 * steps * VECTOR_BYTES, steps, rows_at,
                        kept_stride * kept_size, seen, scores_at, ahead_at if four == 0 else 0, count,
                    )  # fmt: skip
                    latent_softmax(
                        pairs, scores_at, ends_at + state, chunk, seen, maxima_at + state, sums_at + state,
                        factors_at + state, weights_at, count,
                    )  # fmt: skip
                    latent_values(
                        pairs, weights_at, values_at, kept_stride * kept_size, seen, factors_at + state, is_first,
                        found[0] + four * FOUR * out_bytes, out_bytes, a.value_dim, count,
                    )  # fmt: skip
            _compact(maxima_at, rows, found[1])
            _compact(sums_at, rows, found[2])
            if a.num_segments > 1 and rows % FOUR:
                if start < stop:
                    copy_bytes(partial[0], part[0], rows * out_bytes)
                copy_bytes(partial[1], part[1], 2 * rows * 4)
            if is_merged and current > 0:
                merge(total, part, rows, out_width)
        if a.num_segments == 1:
            target = a.out + first_row * a.value_dim * 4
            write(total if is_merged else part, target, tokens, a.heads, a.heads, a.value_dim, out_width, 0)
        hold(work, tables)

    return Kernel(attention, FIELDS)
