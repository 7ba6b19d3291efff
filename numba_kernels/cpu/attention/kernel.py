"""Causal attention over paged keys and values, for chunks of any length: prefill, decode and both in one batch.

    out[i] = sum_j softmax_j(scale q[i] . k[j]) v[j]      over positions  p_i - window < j <= p_i

or j < ``bidirectional_until[i]`` where a batch has it (tokens of pictures that see each other). With ``position_bias [2
R, Hq]`` (MPNet, https://arxiv.org/abs/2004.09297) a score is greater by row R + j - p_i of its head.

Flash attention's online softmax (https://arxiv.org/abs/2205.14135) over pages (https://arxiv.org/abs/2309.06180). The
query heads that share a KV head, and the tokens of one sequence, form the rows of a group, so that keys and values are
read once for all of them. Keys are summed in segments of SEGMENT_TOKENS, merged in the order of positions. Where a
batch has too few groups for the threads (a lone long decode), each segment is a work item of its own and a second
kernel merges; the arithmetic is the same, so that neither the batch nor the number of threads changes a result.

Pages of int8 and fp8 are widened as a tile loads them; their scales, one a token and head, multiply scores and
weights instead of keys and values.

Scores are in units of ln 2, since 2^x is cheaper than e^x: queries are multiplied by scale / ln 2.

Sinks (a logit of each query head) join a row's sum once, at its end. With a soft cap c > 0 (Gemma 2,
https://arxiv.org/abs/2408.00118) a score s becomes c tanh(s / c). Pages outside the window are not read. A row without
visible keys gives zeros. Status 1: a block table entry outside the pages. Status 2: a sequence longer than its row of
the block table.
"""

from __future__ import annotations

import functools

import numpy as np
from numba import carray, njit

from numba_kernels.cpu.activation import cap_floats
from numba_kernels.cpu.attention.amx_pairs import STEP_WORDS, begin_tiles
from numba_kernels.cpu.attention.pair_tile import (
    PRODUCT_ROWS,
    clear_last_keys,
    pair_keys,
    pair_rows,
    pair_values,
    round_floats,
    score_pairs,
    softmax_rows_of,
    value_pairs,
)
from numba_kernels.cpu.attention.tile import (
    CHUNK_TOKENS,
    FETCHING_ROWS,
    HALF_TOKENS,
    HALVES,
    IN_ORDER,
    PAIR_ORDER,
    score_tile,
    value_tile,
)
from numba_kernels.cpu.gemm.amx_tile import release_tiles
from numba_kernels.cpu.gemm.packed_words import arrange_words
from numba_kernels.cpu.intrinsics.float_mode import flush_subnormals, restore_mode
from numba_kernels.cpu.intrinsics.scalars import exp2_f32
from numba_kernels.cpu.intrinsics.simd import LOG2_E
from numba_kernels.cpu.layout import AMX_ROWS, ROUNDS_TO_BF16, TILE_ROWS
from numba_kernels.cpu.quantised_rows import is_quantised, read_factor
from numba_kernels.cpu.rows import scale_floats
from numba_kernels.cpu.running.launch import Fields, Kernel, address, float32_at, int32_at, int64_at, new_lines
from numba_kernels.cpu.target import LANES

GROUP_ROWS, WIDE_GROUP_ROWS = 64, 32  # a group has so many rows, or one token's where more heads share a KV head
_NARROW_HEAD = 64  # elements: queries and sums of GROUP_ROWS such rows stay in the first-level cache
SEGMENT_TOKENS = 1024
BAD_BLOCK, BAD_LENGTH = 1, 2
_LOG2_E = np.float32(LOG2_E)

FIELDS = Fields(
    "*q *k_cache *v_cache *k_scales *v_scales *query_start *seq_lens *block_table *group_starts *partial *out "
    "num_seqs q_heads kv_heads head_dim value_width num_blocks block_size table_width window "
    "group_tokens num_segments *sinks *bidirectional_until *position_bias bias_rows",
    "scale softcap",
)
MERGE_FIELDS = Fields(
    "*query_start *group_starts *partial *out *sinks num_seqs q_heads kv_heads value_dim value_width group_tokens "
    "num_segments"
)


@njit(nogil=True)
def height_of(rows):
    """The smallest tile (1, 2, 4, 8 rows) that holds ``rows``, or the largest there is."""
    height = 1
    while height < rows and height < TILE_ROWS:
        height *= 2
    return height


@njit(nogil=True)
def hold(work, tables):
    """A last use: numba frees an array after its last use by name, even if its address is in use."""


@njit(nogil=True)
def triple(start, rows, width):
    """Addresses of weighted values ``[rows, width]``, largest scores and sums ``[rows]``, one after the other."""
    return start, start + rows * width * 4, start + rows * (width + 1) * 4


@njit(nogil=True)
def clear(sums_of, rows, width):
    """Sets weighted values, largest scores and sums (addresses) of ``rows`` rows to their initial values."""
    out_at, maxima_at, sums_at = sums_of
    out = float32_at(out_at, rows * width)
    maxima, sums = float32_at(maxima_at, rows), float32_at(sums_at, rows)
    for i in range(rows * width):
        out[i] = np.float32(0.0)
    for i in range(rows):
        maxima[i] = np.float32(-np.inf)
        sums[i] = np.float32(0.0)


@njit(nogil=True)
def merge(total, segment, rows, width):
    """Brings one more segment into the total; each is (weighted values, largest scores, sums), as addresses. Weighted
    values are not read where the sum is 0."""
    maxima, sums = float32_at(total[1], rows), float32_at(total[2], rows)
    more_maxima, more_sums = float32_at(segment[1], rows), float32_at(segment[2], rows)
    for row in range(rows):
        if more_sums[row] == np.float32(0.0):
            continue
        before, added = maxima[row], more_maxima[row]
        largest = before if before > added else added
        origin = np.float32(0.0) if largest == np.float32(-np.inf) else largest
        keep, take = exp2_f32(before - origin), exp2_f32(added - origin)
        maxima[row] = largest
        sums[row] = sums[row] * keep + more_sums[row] * take
        out = float32_at(total[0] + row * width * 4, width)
        more = float32_at(segment[0] + row * width * 4, width)
        for i in range(width):
            out[i] = out[i] * keep + more[i] * take


@njit(nogil=True)
def write(total, target, tokens, share, q_heads, value_dim, width, sinks_at):
    """Divides by the sums; row ``t * share + g`` goes to token ``t``, head ``g`` of ``target`` (an address).

    ``sinks_at`` (an address; 0 for none) holds the logits ``[share]`` that join these heads' sums."""
    maxima, sums = float32_at(total[1], tokens * share), float32_at(total[2], tokens * share)
    sinks = float32_at(sinks_at, share)
    for row in range(tokens * share):
        token, head = row // share, row % share
        taken, weight = sums[row], np.float32(1.0)
        if sinks_at != 0:
            sink = sinks[head] * _LOG2_E
            largest = sink if sink > maxima[row] else maxima[row]
            origin = np.float32(0.0) if largest == np.float32(-np.inf) else largest
            weight = exp2_f32(maxima[row] - origin)
            taken = taken * weight + exp2_f32(sink - origin)
        inverse = np.float32(0.0) if taken == np.float32(0.0) else weight / taken
        scale_floats(total[0] + row * width * 4, target + (token * q_heads + head) * value_dim * 4, value_dim, inverse)


@njit(nogil=True)
def _pack_queries(source, target, tokens, share, token_stride, head_dim, scale):
    """Queries (at an address, tokens ``token_stride`` apart) times ``scale``, as tiles [head_dim][row of the tile]."""
    row = 0
    if share == 1:  # transposed in registers, where a tile has no rows but these
        height = height_of(tokens)
        while tokens - row >= height:
            at = target + row * head_dim * 4
            end = at + height * head_dim * 4
            for i in range(0, head_dim, LANES):
                arrange_words(
                    source + (row * token_stride + i) * 4, token_stride * 4, height, min(LANES, head_dim - i),
                    at + i * height * 4, end,
                )  # fmt: skip
            row += height
            height = height_of(tokens - row)
        whole = float32_at(target, row * head_dim)
        for i in range(row * head_dim):
            whole[i] *= scale
    source += row * token_stride * 4
    tokens -= row
    target += row * head_dim * 4
    row = 0
    tile, height = 0, height_of(tokens * share)
    for token in range(tokens):
        for sharer in range(share):
            if row - tile == TILE_ROWS:
                tile, height = row, height_of(tokens * share - row)
            values = float32_at(source + (token * token_stride + sharer * head_dim) * 4, head_dim)
            packed = float32_at(target + (tile * head_dim + row - tile) * 4, head_dim * height)
            place = 0
            for i in range(head_dim):
                packed[place] = values[i] * scale
                place += height
            row += 1


@njit(nogil=True)
def find_sequence(group_starts, num_seqs, group):
    """The sequence to which a row group belongs."""
    low, high = 0, num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if group_starts[middle] <= group:
            low = middle
        else:
            high = middle
    return low


@njit(nogil=True)
def _scale_columns(scores_at, rows, scales_at):
    """Multiplies the columns of ``scores [rows, CHUNK_TOKENS]`` by ``scales [CHUNK_TOKENS]`` (addresses)."""
    scales = float32_at(scales_at, CHUNK_TOKENS)
    for row in range(rows):
        scores = float32_at(scores_at + row * CHUNK_TOKENS * 4, CHUNK_TOKENS)
        for token in range(CHUNK_TOKENS):
            scores[token] *= scales[token]


@njit(nogil=True)
def add_bias(scores_at, rows, first_row, share, bias_at, bias_rows, q_heads, distance):
    """Adds its head's bias to each of the ``scores [rows, CHUNK_TOKENS]``; rows are those of a group from `first_row`
    on, ``distance`` the chunk's first position minus that of the group's first token."""
    biases = float32_at(bias_at, bias_rows * q_heads)
    for row in range(rows):
        token, sharer = (first_row + row) // share, (first_row + row) % share
        place = (bias_rows // 2 + distance - token) * q_heads + sharer
        scores = float32_at(scores_at + row * CHUNK_TOKENS * 4, CHUNK_TOKENS)
        for column in range(CHUNK_TOKENS):
            scores[column] += biases[place + column * q_heads] * _LOG2_E


@njit(nogil=True)
def end_pairs(mode):
    """Leaves the thread as it was before products of pairs: without tiles, in `mode`."""
    release_tiles()
    restore_mode(mode)


@functools.cache
def group_starts_kernel() -> Kernel:
    """Writes ``group_starts [num_seqs + 1]``: row groups of up to ``group_tokens`` tokens before each sequence of the
    batch whose tokens begin at ``query_start [num_seqs + 1]``; one work item."""

    def group_starts(arguments, work_item):
        a = carray(arguments, 1)[0]
        query_start = int32_at(a.query_start, a.num_seqs + 1)
        starts = int32_at(a.group_starts, a.num_seqs + 1)
        starts[0] = 0
        for seq in range(a.num_seqs):
            length = np.int64(query_start[seq + 1] - query_start[seq])
            starts[seq + 1] = starts[seq] + -(-length // a.group_tokens)

    return Kernel(group_starts, Fields("*query_start *group_starts num_seqs group_tokens"))


def group_rows(head_dim: int) -> int:
    """Rows of a group with heads of this size."""
    return GROUP_ROWS if head_dim <= _NARROW_HEAD else WIDE_GROUP_ROWS


def span_of(block_size: int) -> int:
    """The kernel's ``span`` for pages of so many tokens."""
    return LANES if block_size % LANES == 0 else HALF_TOKENS


def takes_pairs(stored: type, span: int, head_dim: int, may_round: bool) -> bool:
    """Whether `attention_kernel` multiplies pairs of bfloat16: where this kind of tile has such products, those of
    pages of bfloat16, and of float32 if it ``may_round`` and they can be read so."""
    if head_dim % 2 or not (ROUNDS_TO_BF16 or AMX_ROWS):
        return False
    return stored is np.uint16 or (may_round and stored is np.float32 and span == LANES)


@functools.cache
def attention_kernel(stored: type, span: int, rounds: bool = False) -> Kernel:
    """The kernel for pages of ``stored`` whose size is a multiple of ``span``, HALF_TOKENS or LANES. A work item is one
    row group and KV head, or with ``num_segments > 1`` one segment of them. With ``rounds``, where `takes_pairs`,
    operands are rounded to bfloat16 for `pair_tile`; a few rows take floats in the same order, to the same bits.

    Pages, and sums of values, have rows of ``value_width``, whole vectors.

    ``group_starts [num_seqs + 1]`` counts the row groups before each sequence, work items beyond the last group do
    nothing; ``window`` 0 = all. With segments, the sums of each work item go to ``partial [work items, group_tokens *
    share, value_width + 2]``.
    """
    itemsize = np.dtype(stored).itemsize
    has_scales, factor = is_quantised(stored), read_factor(stored)
    product_rows, order, keeps = (PRODUCT_ROWS, PAIR_ORDER, 1) if rounds else (TILE_ROWS, IN_ORDER, 0)
    least_pair_rows = FETCHING_ROWS + 1 if stored is np.uint16 else 1

    def attention(arguments, work_item):
        a = carray(arguments, 1)[0]
        share = a.q_heads // a.kv_heads
        width = a.value_width
        segment = work_item % a.num_segments
        head = work_item // a.num_segments % a.kv_heads
        group = work_item // a.num_segments // a.kv_heads
        group_starts = int32_at(a.group_starts, a.num_seqs + 1)
        if group >= group_starts[a.num_seqs]:
            return
        seq = find_sequence(group_starts, a.num_seqs, group)
        query_start = int32_at(a.query_start, a.num_seqs + 1)
        query_len = np.int64(query_start[seq + 1] - query_start[seq])
        first_token = (group - group_starts[seq]) * a.group_tokens
        tokens = min(a.group_tokens, query_len - first_token)
        rows = tokens * share
        token_row = query_start[seq] + first_token  # of this group's first token in the batch
        first_position = int32_at(a.seq_lens, a.num_seqs)[seq] - query_len + first_token
        last_key = first_position + tokens
        if a.bidirectional_until != 0:
            last_key = np.int64(int32_at(a.bidirectional_until + token_row * 4, tokens)[tokens - 1])
        first_key = max(0, first_position - a.window + 1) if a.window > 0 else 0
        table = int32_at(a.block_table + seq * a.table_width * 4, a.table_width)
        if last_key > a.table_width * a.block_size:
            a.status = BAD_LENGTH
            return

        in_pairs = rounds and rows >= least_pair_rows
        capacity = -(-rows // product_rows) * product_rows
        row_bytes = -(-a.head_dim // (2 * LANES)) * LANES * 4 if rounds else a.head_dim * 4  # of queries
        sizes = capacity * row_bytes // 4, product_rows * CHUNK_TOKENS, capacity * width
        size = sizes[0] + sizes[1] + 2 * sizes[2] + 5 * capacity + 2 * CHUNK_TOKENS
        pairs = -(-a.head_dim // (2 * STEP_WORDS)) * STEP_WORDS * CHUNK_TOKENS, CHUNK_TOKENS // 2 * width
        work = new_lines(size + (pairs[0] + pairs[1] if in_pairs else 0))
        q_at = address(work)
        scores_at = q_at + sizes[0] * 4
        out_at = scores_at + sizes[1] * 4
        maxima_at = out_at + 2 * sizes[2] * 4
        sums_at = maxima_at + capacity * 4
        factors_at = sums_at + capacity * 4
        k_scales_at = factors_at + 3 * capacity * 4  # of the chunk's tokens
        v_scales_at = k_scales_at + CHUNK_TOKENS * 4
        k_pairs = q_at + size * 4
        v_pairs = k_pairs + pairs[0] * 4
        key_stride = a.block_size * itemsize
        k_scales, v_scales = float32_at(k_scales_at, CHUNK_TOKENS), float32_at(v_scales_at, CHUNK_TOKENS)
        part = out_at, maxima_at, sums_at  # of this segment: weighted values, largest scores, sums
        tables = np.empty(3 * HALVES + 2 * capacity, np.int64)
        keys_at = address(tables)  # where the keys of each half of a chunk begin
        values_at = keys_at + HALVES * 8
        next_at = values_at + HALVES * 8  # the keys of the next chunk, or the same
        ends_at = next_at + HALVES * 8  # one past the last key that each row sees
        firsts_at = ends_at + capacity * 8  # the first that it sees, or an earlier one
        ends, firsts = int64_at(ends_at, rows), int64_at(firsts_at, rows)
        until = int32_at(a.bidirectional_until + token_row * 4, tokens)
        for row in range(rows):
            token = row if share == 1 else row // share
            end = first_position + token + 1
            firsts[row] = end - a.window if a.window > 0 else 0
            ends[row] = end
        if a.bidirectional_until != 0:
            for row in range(rows):
                ends[row] = np.int64(until[row if share == 1 else row // share])
        source = a.q + (token_row * a.q_heads + head * share) * a.head_dim * 4
        scale = np.float32(a.scale * LOG2_E)
        mode = flush_subnormals() if rounds else np.int32(0)
        if in_pairs:
            for token in range(tokens):
                at = source + token * a.q_heads * a.head_dim * 4
                place = q_at + token * share * row_bytes
                pair_rows(stored, at, a.head_dim * 4, share, a.head_dim, scale, place, row_bytes)
            clear_last_keys(k_pairs, a.head_dim // 2)
            begin_tiles(rows)
        else:
            _pack_queries(source, q_at, tokens, share, a.q_heads * a.head_dim, a.head_dim, scale)
            if rounds:
                round_floats(q_at, height_of(rows) * a.head_dim)
        first_segment, last_segment = 0, -(-last_key // SEGMENT_TOKENS)
        if a.num_segments > 1:
            first_segment, last_segment = segment, min(segment + 1, last_segment)
        is_merged = last_segment - first_segment > 1
        total = part  # a lone segment is the total
        if is_merged:
            total = out_at + sizes[2] * 4, factors_at + capacity * 4, factors_at + 2 * capacity * 4
        clear(total, capacity, width)
        for current in range(first_segment, last_segment):
            start = max(first_key // CHUNK_TOKENS * CHUNK_TOKENS, current * SEGMENT_TOKENS)
            stop = min(last_key, (current + 1) * SEGMENT_TOKENS)
            if start >= stop:
                continue
            if is_merged:
                clear(part, capacity, width)
            entry, inside = start // a.block_size, start % a.block_size
            for chunk in range(start, stop, CHUNK_TOKENS):
                for half in range(HALVES):
                    token = chunk + half * HALF_TOKENS
                    block = np.int64(0)  # keys there are masked; but a span is read from its first half's block
                    if token < last_key and token // span * span + span > first_key:
                        block = np.int64(table[entry])
                        if block < 0 or block >= a.num_blocks:
                            a.status = BAD_BLOCK
                            if rounds:
                                end_pairs(mode)
                            return
                    page = block * a.kv_heads + head
                    tables[half] = a.k_cache + (page * a.head_dim * a.block_size + inside) * itemsize
                    tables[HALVES + half] = a.v_cache + (page * a.block_size + inside) * width * itemsize
                    if has_scales:
                        of_keys = float32_at(a.k_scales + (page * a.block_size + inside) * 4, HALF_TOKENS)
                        of_values = float32_at(a.v_scales + (page * a.block_size + inside) * 4, HALF_TOKENS)
                        for i in range(HALF_TOKENS):
                            k_scales[half * HALF_TOKENS + i] = of_keys[i] * factor
                            v_scales[half * HALF_TOKENS + i] = of_values[i] * factor
                    inside += HALF_TOKENS
                    if inside == a.block_size:
                        entry, inside = entry + 1, 0
                ahead, ahead_inside = entry, inside
                for half in range(HALVES):
                    tables[2 * HALVES + half] = tables[half]
                    if chunk + CHUNK_TOKENS + half * HALF_TOKENS < stop:
                        page = np.int64(table[ahead]) * a.kv_heads + head  # only prefetched: need not exist
                        tables[2 * HALVES + half] = (
                            a.k_cache + (page * a.head_dim * a.block_size + ahead_inside) * itemsize
                        )
                    ahead_inside += HALF_TOKENS
                    if ahead_inside == a.block_size:
                        ahead, ahead_inside = ahead + 1, 0
                if in_pairs:
                    begin, end = max(0, first_key - chunk), min(CHUNK_TOKENS, last_key - chunk)
                    pair_keys(stored, span, keys_at, key_stride, a.head_dim, end, k_pairs)
                    pair_values(stored, values_at, width * itemsize, width // LANES, begin, end, v_pairs)
                for first in range(0, rows, product_rows):
                    here = min(product_rows, rows - first)
                    height = here if in_pairs and AMX_ROWS else height_of(here)
                    last = ends[first + here - 1] - chunk
                    if last <= 0:
                        continue
                    last = min(CHUNK_TOKENS, last)
                    query = q_at + first * row_bytes
                    if in_pairs:
                        score_pairs(query, row_bytes, k_pairs, a.head_dim, scores_at, last, height)
                    else:
                        score_tile(
                            stored, span, order, query, keys_at, key_stride, a.head_dim,
                            scores_at, last, values_at if first == 0 else 0, height,
                        )  # fmt: skip
                    if has_scales:
                        _scale_columns(scores_at, here, k_scales_at)
                    if a.position_bias != 0:
                        own = a.position_bias + head * share * 4
                        add_bias(scores_at, here, first, share, own, a.bias_rows, a.q_heads, chunk - first_position)
                    if a.softcap > 0.0:
                        cap_floats(scores_at, here * CHUNK_TOKENS, np.float32(1.0), np.float32(a.softcap * LOG2_E))
                    softmax_rows_of(
                        stored, keeps, in_pairs, scores_at, last, ends_at + first * 8, firsts_at + first * 8, chunk,
                        maxima_at + first * 4, sums_at + first * 4, factors_at + first * 4, here,
                    )  # fmt: skip
                    if has_scales:
                        _scale_columns(scores_at, here, v_scales_at)
                    begin = min(CHUNK_TOKENS, max(0, firsts[first] - chunk))
                    row_factors, row_sums = factors_at + first * 4, out_at + first * width * 4
                    if in_pairs:
                        value_pairs(scores_at, v_pairs, begin, last, row_factors, row_sums, width // LANES, height)
                    else:
                        value_tile(
                            stored, order, scores_at, values_at, width * itemsize, begin, last, row_factors, row_sums,
                            width // LANES, next_at if first == 0 else 0, height,
                        )  # fmt: skip
            if is_merged:
                merge(total, part, rows, width)
        if a.num_segments > 1:
            size = a.group_tokens * share * (width + 2)
            partial = triple(a.partial + work_item * size * 4, rows, width)
            clear(partial, rows, width)
            merge(partial, total, rows, width)
        else:
            target = a.out + (token_row * a.q_heads + head * share) * a.head_dim * 4
            sinks = a.sinks + head * share * 4 if a.sinks != 0 else 0
            write(total, target, tokens, share, a.q_heads, a.head_dim, width, sinks)
        if rounds:
            end_pairs(mode)
        hold(work, tables)

    return Kernel(attention, FIELDS)


@functools.cache
def merge_kernel() -> Kernel:
    """Merges the segments that `attention_kernel`, or latent attention, left in ``partial``; a work item is one row
    group and KV head."""

    def merge_segments(arguments, work_item):
        a = carray(arguments, 1)[0]
        share = a.q_heads // a.kv_heads
        width = a.value_width
        head, group = work_item % a.kv_heads, work_item // a.kv_heads
        group_starts = int32_at(a.group_starts, a.num_seqs + 1)
        if group >= group_starts[a.num_seqs]:
            return
        seq = find_sequence(group_starts, a.num_seqs, group)
        query_start = int32_at(a.query_start, a.num_seqs + 1)
        first_token = (group - group_starts[seq]) * a.group_tokens
        tokens = min(a.group_tokens, np.int64(query_start[seq + 1] - query_start[seq]) - first_token)
        rows = tokens * share
        work = new_lines(rows * (width + 2))
        total = triple(address(work), rows, width)
        clear(total, rows, width)
        size = a.group_tokens * share * (width + 2)
        for segment in range(a.num_segments):
            part = triple(a.partial + (work_item * a.num_segments + segment) * size * 4, rows, width)
            merge(total, part, rows, width)
        target = a.out + ((query_start[seq] + first_token) * a.q_heads + head * share) * a.value_dim * 4
        sinks = a.sinks + head * share * 4 if a.sinks != 0 else 0
        write(total, target, tokens, share, a.q_heads, a.value_dim, width, sinks)
        hold(work, work)

    return Kernel(merge_segments, MERGE_FIELDS)
