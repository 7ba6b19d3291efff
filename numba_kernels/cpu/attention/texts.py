"""Attention within whole texts, from the rows of their projection: an encoder's, where each token sees its whole text.

    out[i] = sum_j softmax_j(scale q[i] . k[j] + bias[j - i]) v[j]      over all tokens j of the text of i

Queries, keys and values are read where the product wrote them, ``qkv [T, 3 H D]``: nothing lies in pages. Otherwise as
`attention.kernel`: flash attention over chunks of keys, in their order, whatever the batch. With ``rounds`` pairs of
bfloat16 are multiplied (`pair_tile`).
"""

from __future__ import annotations

import functools

import numpy as np
from numba import carray

from numba_kernels.cpu.attention.amx_pairs import STEP_WORDS, begin_tiles
from numba_kernels.cpu.attention.kernel import add_bias, clear, find_sequence, height_of, hold
from numba_kernels.cpu.attention.pair_tile import (
    PRODUCT_ROWS,
    clear_last_keys,
    pair_rows,
    pair_values,
    score_pairs,
    value_pairs,
)
from numba_kernels.cpu.attention.text_tile import (
    scale_queries,
    score_floats,
    softmax_text,
    turn_keys,
    write_texts,
)
from numba_kernels.cpu.attention.tile import CHUNK_TOKENS, HALF_TOKENS, HALVES, IN_ORDER, value_tile
from numba_kernels.cpu.gemm.amx_tile import release_tiles
from numba_kernels.cpu.intrinsics.simd import LOG2_E
from numba_kernels.cpu.layout import AMX_ROWS, ROUNDS_TO_BF16, TILE_ROWS
from numba_kernels.cpu.running.launch import Fields, Kernel, address, int32_at, new_lines
from numba_kernels.cpu.target import LANES

FIELDS = Fields(
    "*qkv *query_start *group_starts *position_bias *out num_seqs heads head_dim group_tokens heads_a_work_item "
    "bias_rows",
    "scale",
)


def takes(head_dim: int) -> bool:
    """Whether there is a kernel for heads of this size: values are whole vectors."""
    return head_dim % LANES == 0


def rounds_text(may_round: bool) -> bool:
    """Whether the kernel ``rounds``: this kind of tile multiplies pairs of bfloat16."""
    return may_round and (ROUNDS_TO_BF16 or AMX_ROWS > 0)


@functools.cache
def text_attention_kernel(rounds: bool) -> Kernel:
    """Writes ``out [T, H D]``. A work item is a row group, up to ``group_tokens`` tokens of one text, and some heads;
    ``group_starts [num_seqs + 1]`` counts the row groups before each text. ``position_bias`` as `attention_kernel`."""

    as_pairs = int(rounds)  # a literal
    product_rows = PRODUCT_ROWS if rounds else TILE_ROWS

    def text_attention(arguments, work_item):
        a = carray(arguments, 1)[0]
        d, heads = a.head_dim, a.heads
        parts = -(-heads // a.heads_a_work_item)
        group, first_head = work_item // parts, work_item % parts * a.heads_a_work_item
        group_starts = int32_at(a.group_starts, a.num_seqs + 1)
        if group >= group_starts[a.num_seqs]:
            return
        seq = find_sequence(group_starts, a.num_seqs, group)
        query_start = int32_at(a.query_start, a.num_seqs + 1)
        start, length = np.int64(query_start[seq]), np.int64(query_start[seq + 1] - query_start[seq])
        first = (group - group_starts[seq]) * a.group_tokens
        rows = min(a.group_tokens, length - first)
        stride = 3 * heads * d * 4
        row_bytes = -(-d // (2 * LANES)) * LANES * 4 if rounds else d * 4
        capacity = -(-rows // product_rows) * product_rows
        depth = -(-d // (2 * STEP_WORDS)) * STEP_WORDS if rounds else d
        q_size, k_size, score_size = capacity * row_bytes // 4, depth * CHUNK_TOKENS, product_rows * CHUNK_TOKENS
        v_size = CHUNK_TOKENS // 2 * d if rounds else 0
        work = new_lines(q_size + k_size + v_size + score_size + capacity * (d + 2) + product_rows)
        q_at = address(work)
        k_at = q_at + q_size * 4
        v_at = k_at + k_size * 4
        scores_at = v_at + v_size * 4
        out_at = scores_at + score_size * 4
        maxima_at = out_at + capacity * d * 4
        sums_at = maxima_at + capacity * 4
        factors_at = sums_at + capacity * 4
        sums_of = out_at, maxima_at, sums_at
        values = np.empty(HALVES, np.int64)
        values_at = address(values)
        scale = np.float32(a.scale * LOG2_E)
        text = a.qkv + start * stride
        if rounds:
            clear_last_keys(k_at, d // 2)
            begin_tiles(rows)
        for head in range(first_head, min(heads, first_head + a.heads_a_work_item)):
            source = text + first * stride + head * d * 4
            if rounds:
                pair_rows(np.float32, source, stride, rows, d, scale, q_at, row_bytes)
            else:
                scale_queries(source, stride, rows, d, scale, q_at, row_bytes)
            clear(sums_of, capacity, d)
            for chunk in range(0, length, CHUNK_TOKENS):
                tokens = min(CHUNK_TOKENS, length - chunk)
                keys = text + chunk * stride + (heads + head) * d * 4
                for half in range(HALVES):
                    values[half] = keys + heads * d * 4 + half * HALF_TOKENS * stride
                turn_keys(as_pairs, keys, stride, d, tokens, k_at)
                if rounds:
                    pair_values(np.float32, values_at, stride, d // LANES, 0, tokens, v_at)
                for first_row in range(0, rows, product_rows):
                    here = min(product_rows, rows - first_row)
                    height = here if rounds and AMX_ROWS else height_of(here)
                    query, of_tile = q_at + first_row * row_bytes, out_at + first_row * d * 4
                    if rounds:
                        score_pairs(query, row_bytes, k_at, d, scores_at, tokens, height)
                    else:
                        score_floats(query, row_bytes, k_at, d, scores_at, tokens, height)
                    if a.position_bias != 0:
                        own = a.position_bias + head * 4
                        add_bias(scores_at, here, first_row, 1, own, a.bias_rows, heads, chunk - first)
                    for tile in range(0, here, TILE_ROWS):
                        softmax_text(
                            as_pairs, scores_at + tile * CHUNK_TOKENS * 4, tokens, maxima_at + (first_row + tile) * 4,
                            sums_at + (first_row + tile) * 4, factors_at + tile * 4, height_of(here - tile),
                        )  # fmt: skip
                    if rounds:
                        value_pairs(scores_at, v_at, 0, tokens, factors_at, of_tile, d // LANES, height)
                    else:
                        value_tile(
                            np.float32, IN_ORDER, scores_at, values_at, stride, 0, tokens, factors_at, of_tile,
                            d // LANES, 0, height,
                        )  # fmt: skip
            target = a.out + ((start + first) * heads + head) * d * 4
            write_texts(out_at, sums_at, rows, d, target, heads * d * 4)
        if rounds:
            release_tiles()
        hold(work, values)

    return Kernel(text_attention, FIELDS)
