"""Causal attention over paged keys and values, for chunks of any length: prefill, decode and both in one batch.

    out[i] = sum_j softmax_j(scale q[i] . k[j]) v[j]      over positions  p_i - window < j <= p_i

Flash attention's online softmax (https://arxiv.org/abs/2205.14135) over pages (https://arxiv.org/abs/2309.06180). The query
heads that share a KV head, and the tokens of one sequence, form the rows of a group, so that keys and values are read
once for all of them. Keys are summed in segments of SEGMENT_TOKENS, merged in the order of positions. Where a batch has
too few groups for the threads (a lone long decode), each segment is a ticket of its own and a second kernel merges; the
arithmetic is the same, so that neither the batch nor the number of threads changes a result.

A row that may attend to nothing gives zeros. Status 1: a block table entry outside the pages.
"""

from __future__ import annotations

import functools

import numpy as np
from numba import carray, njit

from numba_kernels.cpu.attention_tile import CHUNK_TOKENS, HALF_TOKENS, score_tile, softmax_row, value_tile
from numba_kernels.cpu.launch import Fields, Kernel, address, float32_at, int32_at
from numba_kernels.cpu.scalars import exp_f32
from numba_kernels.cpu.target import TILE_ROWS

GROUP_ROWS = 32  # a group has so many rows, or one token's where more query heads share a KV head
SEGMENT_TOKENS = 1024
BAD_BLOCK = 1

FIELDS = Fields(
    "q k_cache v_cache query_start seq_lens block_table group_starts partial out "
    "num_seqs q_heads kv_heads head_dim value_width num_blocks block_size table_width window group_tokens num_segments",
    "scale",
)


@njit(nogil=True)
def _height(rows):
    """The smallest tile (1, 2, 4, 8 rows) that holds ``rows``, or the largest there is."""
    height = 1
    while height < rows and height < TILE_ROWS:
        height *= 2
    return height


@njit(nogil=True)
def _merge(state, out, segment_state, segment_out, rows, width):
    """Brings the sums of one more segment into ``state [rows, 2]`` (largest score, sum) and ``out [rows, width]``."""
    minus_infinity = np.float32(-np.inf)
    for row in range(rows):
        before, added = state[2 * row], segment_state[2 * row]
        largest = before if before > added else added
        origin = np.float32(0.0) if largest == minus_infinity else largest
        keep = exp_f32(before - origin)
        take = exp_f32(added - origin)
        state[2 * row] = largest
        state[2 * row + 1] = state[2 * row + 1] * keep + segment_state[2 * row + 1] * take
        for i in range(row * width, (row + 1) * width):
            out[i] = out[i] * keep + segment_out[i] * take


@njit(nogil=True)
def _clear(state, out):
    for i in range(out.shape[0]):
        out[i] = np.float32(0.0)
    for i in range(state.shape[0] // 2):
        state[2 * i] = np.float32(-np.inf)
        state[2 * i + 1] = np.float32(0.0)


@njit(nogil=True)
def _write(state, out, target, rows, share, q_heads, head_dim, width):
    """Divides by the sums; row ``t * share + g`` goes to token ``t``, head ``g`` of ``target`` (an address)."""
    for row in range(rows):
        total = state[2 * row + 1]
        inverse = np.float32(0.0) if total == np.float32(0.0) else np.float32(1.0) / total
        result = float32_at(target + (row // share * q_heads + row % share) * head_dim * 4, head_dim)
        for i in range(head_dim):
            result[i] = out[row * width + i] * inverse


@njit(nogil=True)
def _find_sequence(group_starts, num_seqs, group):
    """The sequence to which a row group belongs."""
    low, high = 0, num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if group_starts[middle] <= group:
            low = middle
        else:
            high = middle
    return low


@functools.cache
def attention_kernel(stored: type) -> Kernel:
    """For pages of ``stored``. A ticket is one row group and KV head, or with ``num_segments > 1`` one segment of them.

    ``group_starts [num_seqs + 1]`` counts the row groups before each sequence; ``window`` 0 = all. With segments, the
    sums of each ticket go to ``partial [tickets, group_tokens * share, value_width + 2]``.
    """
    itemsize = np.dtype(stored).itemsize

    def attention(arguments, ticket):
        a = carray(arguments, 1)[0]
        share = a.q_heads // a.kv_heads
        width = a.value_width
        segment = ticket % a.num_segments
        head = ticket // a.num_segments % a.kv_heads
        group = ticket // a.num_segments // a.kv_heads
        group_starts = int32_at(a.group_starts, a.num_seqs + 1)
        seq = _find_sequence(group_starts, a.num_seqs, group)
        query_start = int32_at(a.query_start, a.num_seqs + 1)
        query_len = np.int64(query_start[seq + 1] - query_start[seq])
        first_token = (group - group_starts[seq]) * a.group_tokens
        tokens = min(a.group_tokens, query_len - first_token)
        rows = tokens * share
        token_row = query_start[seq] + first_token  # of this group's first token in the batch
        first_position = int32_at(a.seq_lens, a.num_seqs)[seq] - query_len + first_token
        last_key = first_position + tokens
        first_key = max(0, first_position - a.window + 1) if a.window > 0 else 0
        table = int32_at(a.block_table + seq * a.table_width * 4, a.table_width)

        capacity = -(-rows // TILE_ROWS) * TILE_ROWS
        q = np.zeros(capacity * a.head_dim, np.float32)  # [tile][head_dim][row of the tile]
        for row in range(rows):
            tile = row // TILE_ROWS * TILE_ROWS
            height = _height(rows - tile)
            source = (token_row + row // share) * a.q_heads + head * share + row % share
            values = float32_at(a.q + source * a.head_dim * 4, a.head_dim)
            for i in range(a.head_dim):
                q[tile * a.head_dim + i * height + row - tile] = values[i] * np.float32(a.scale)
        scores = np.empty(capacity * CHUNK_TOKENS, np.float32)
        factors = np.ones(capacity, np.float32)
        segment_out = np.empty(capacity * width, np.float32)
        segment_state = np.empty(capacity * 2, np.float32)
        total_out = np.empty(capacity * width, np.float32)
        total_state = np.empty(capacity * 2, np.float32)
        keys = np.empty(CHUNK_TOKENS // HALF_TOKENS, np.int64)
        values_at = np.empty(CHUNK_TOKENS // HALF_TOKENS, np.int64)
        _clear(total_state, total_out)

        first_segment, last_segment = 0, -(-last_key // SEGMENT_TOKENS)
        if a.num_segments > 1:
            first_segment, last_segment = segment, min(segment + 1, last_segment)
        for current in range(first_segment, last_segment):
            start = max(first_key // CHUNK_TOKENS * CHUNK_TOKENS, current * SEGMENT_TOKENS)
            stop = min(last_key, (current + 1) * SEGMENT_TOKENS)
            if start >= stop:
                continue
            _clear(segment_state, segment_out)
            for chunk in range(start, stop, CHUNK_TOKENS):
                for half in range(CHUNK_TOKENS // HALF_TOKENS):
                    token = chunk + half * HALF_TOKENS
                    block = np.int64(0)  # whatever lies there is masked
                    if token < last_key and token + HALF_TOKENS > first_key:
                        block = np.int64(table[token // a.block_size])
                        if block < 0 or block >= a.num_blocks:
                            a.status = BAD_BLOCK
                            return
                    page = block * a.kv_heads + head
                    inside = token % a.block_size
                    keys[half] = a.k_cache + (page * a.head_dim * a.block_size + inside) * itemsize
                    values_at[half] = a.v_cache + (page * a.block_size + inside) * width * itemsize
                for tile in range(0, rows, TILE_ROWS):
                    height = _height(rows - tile)
                    tile_rows = min(height, rows - tile)
                    tile_last = first_position + (tile + tile_rows - 1) // share + 1 - chunk
                    if tile_last <= 0:
                        continue
                    tile_scores = address(scores) + tile * CHUNK_TOKENS * 4
                    score_tile(
                        stored, address(q) + tile * a.head_dim * 4, address(keys), a.block_size * itemsize,
                        a.head_dim, tile_scores, height,
                    )  # fmt: skip
                    for row in range(tile, tile + tile_rows):
                        last = first_position + row // share + 1 - chunk
                        first = last - a.window if a.window > 0 else np.int64(0)
                        factors[row] = softmax_row(
                            address(scores) + row * CHUNK_TOKENS * 4, first, last, address(segment_state) + row * 8
                        )
                for tile in range(0, rows, TILE_ROWS):
                    height = _height(rows - tile)
                    tile_rows = min(height, rows - tile)
                    tile_last = first_position + (tile + tile_rows - 1) // share + 1 - chunk
                    if tile_last <= 0:
                        continue
                    tile_first = first_position + tile // share + 1 - a.window - chunk if a.window > 0 else np.int64(0)
                    value_tile(
                        stored, address(scores) + tile * CHUNK_TOKENS * 4, address(values_at), width * itemsize,
                        min(CHUNK_TOKENS, max(0, tile_first)), min(CHUNK_TOKENS, tile_last),
                        address(factors) + tile * 4, address(segment_out) + tile * width * 4, width // 16, height,
                    )  # fmt: skip
            _merge(total_state, total_out, segment_state, segment_out, rows, width)

        if a.num_segments > 1:
            size = a.group_tokens * share * (width + 2)
            partial = float32_at(a.partial + ticket * size * 4, size)
            for i in range(2 * rows):
                partial[i] = total_state[i]
            for i in range(rows * width):
                partial[2 * rows + i] = total_out[i]
        else:
            target = a.out + (token_row * a.q_heads + head * share) * a.head_dim * 4
            _write(total_state, total_out, target, rows, share, a.q_heads, a.head_dim, width)

    return Kernel(attention, FIELDS)


@functools.cache
def merge_kernel() -> Kernel:
    """Merges the segments that `attention_kernel` left in ``partial``; a ticket is one row group and KV head."""

    def merge(arguments, ticket):
        a = carray(arguments, 1)[0]
        share = a.q_heads // a.kv_heads
        width = a.value_width
        head, group = ticket % a.kv_heads, ticket // a.kv_heads
        group_starts = int32_at(a.group_starts, a.num_seqs + 1)
        seq = _find_sequence(group_starts, a.num_seqs, group)
        query_start = int32_at(a.query_start, a.num_seqs + 1)
        first_token = (group - group_starts[seq]) * a.group_tokens
        rows = min(a.group_tokens, np.int64(query_start[seq + 1] - query_start[seq]) - first_token) * share
        out = np.empty(rows * width, np.float32)
        state = np.empty(rows * 2, np.float32)
        _clear(state, out)
        size = a.group_tokens * share * (width + 2)
        for segment in range(a.num_segments):
            partial = float32_at(a.partial + (ticket * a.num_segments + segment) * size * 4, size)
            _merge(state, out, partial[: 2 * rows], partial[2 * rows :], rows, width)
        target = a.out + ((query_start[seq] + first_token) * a.q_heads + head * share) * a.head_dim * 4
        _write(state, out, target, rows, share, a.q_heads, a.head_dim, width)

    return Kernel(merge, FIELDS)
