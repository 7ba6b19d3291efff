"""Prepares queries and a token's latent row between their projections and attention (MLA, DeepSeek-V2,
https://arxiv.org/abs/2405.04434), in one pass over the tokens.

    out[t, h] = [rotated q[t, h, -R:] | out[t, h, R:]] * q_scales[position]
    row[t]   = [rotated k[t] | RMSNorm(c[t]) * weight]        written to the token's slot

``latent [T, C + R]`` holds c, then k, as the projection gives them; ``q [T, H, key + R]`` ends with the part to be
rotated. Queries ``out [T, H, R + C]`` begin with it, and so do rows of pages; their other numbers are there already
(`head_maps`). `q_scales` may be 0 for none. A slot of -1 is not written.

Status 1: a position without a row in the rotation table. Status 2: a slot beyond the pages.
"""

from __future__ import annotations

import functools

import numpy as np
from numba import carray

from numba_kernels.cpu.intrinsics.scalars import store_f32
from numba_kernels.cpu.qkv import BAD_POSITION, BAD_SLOT, copy_floats, norm_scale, rotate
from numba_kernels.cpu.quantised_rows import is_quantised, largest_number, store_row
from numba_kernels.cpu.running.launch import Fields, Kernel, float32_at, int32_at, int64_at
from numba_kernels.latent_rows import GROUP

FIELDS = Fields(
    "*q *out *latent *positions *cos *sin *q_scales *norm *pages *slots num_tokens heads key width rotary interleaved "
    "num_positions num_blocks block_size row_stride scales_at rotated_at tokens_a_work_item",
    "eps",
)


@functools.cache
def latent_kernel(stored: type) -> Kernel:
    """The kernel for pages of ``stored``; a work item is some tokens. `scales_at` and `rotated_at` are offsets in rows
    of bytes (`numba_kernels.latent_rows`)."""
    itemsize, in_bytes, largest = np.dtype(stored).itemsize, is_quantised(stored), largest_number(stored)

    def latent(arguments, work_item):
        a = carray(arguments, 1)[0]
        half, rest = a.rotary // 2, a.width - a.rotary
        interleaved = a.interleaved != 0
        positions, slots = int32_at(a.positions, a.num_tokens), int64_at(a.slots, a.num_tokens)
        weight = float32_at(a.norm, rest)
        row = np.empty(a.width, np.float32)
        first = work_item * a.tokens_a_work_item
        last = min(a.num_tokens, first + a.tokens_a_work_item)
        for token in range(first, last):
            if positions[token] < 0 or positions[token] >= a.num_positions:
                a.status = BAD_POSITION
                return
            if slots[token] >= a.num_blocks * a.block_size:
                a.status = BAD_SLOT
                return
        for token in range(first, last):
            cos = float32_at(a.cos + positions[token] * half * 4, half)
            sin = float32_at(a.sin + positions[token] * half * 4, half)
            for head in range(a.heads):
                pair = token * a.heads + head
                query = float32_at(a.out + pair * a.width * 4, a.width)
                copy_floats(float32_at(a.q + (pair * (a.key + a.rotary) + a.key) * 4, a.rotary), query[: a.rotary])
                rotate(query, cos, sin, a.rotary, a.rotary // 2, interleaved)
                if a.q_scales != 0:
                    factor = float32_at(a.q_scales, a.num_positions)[positions[token]]
                    for i in range(a.width):
                        query[i] *= factor
            if slots[token] < 0:
                continue
            source = float32_at(a.latent + token * a.width * 4, a.width)
            copy_floats(source[rest:], row[: a.rotary])
            rotate(row, cos, sin, a.rotary, a.rotary // 2, interleaved)
            scale = norm_scale(source[:rest], a.eps)
            for i in range(rest):
                row[a.rotary + i] = source[i] * scale * weight[i]
            at = a.pages + slots[token] * a.row_stride * itemsize
            if in_bytes:
                for start in range(0, rest, GROUP):
                    values = row[a.rotary + start : a.rotary + min(rest, start + GROUP)]
                    store_row(at + start, 1, values, largest, at + a.scales_at + start // GROUP * 4)
                for i in range(a.rotary):
                    store_f32(np.uint16, at + a.rotated_at, i, row[i])
            else:
                for i in range(a.width):
                    store_f32(stored, at, i, row[i])

    return Kernel(latent, FIELDS)
