"""What happens to q, k and v between their projection and attention, in one pass over the tokens.

Each row of ``qkv [T, (Hq + 2 Hkv) D]`` is split into heads; q and k heads are normalised over D (RMSNorm with a weight
of D, Qwen3's) and rotated by their position (RoPE, https://arxiv.org/abs/2104.09864; the first ``rotary`` dimensions,
as two halves or as interleaved pairs); q goes out as ``[T, Hq, D]``, k and v into the pages at the token's slot:
K ``[block, head, dim, token]``, V ``[block, head, token, dim padded]``. A slot of -1 is not written.

Status 1: a position without a row in the rotation table. Status 2: a slot beyond the pages.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numba import carray, njit

from numba_kernels.cpu.launch import Fields, Kernel, float32_at, int32_at, int64_at
from numba_kernels.cpu.scalars import store_f32

FIELDS = Fields(
    "qkv positions cos sin q_norm k_norm k_cache v_cache slots q "
    "num_tokens q_heads kv_heads head_dim rotary interleaved num_positions num_blocks block_size value_stride "
    "tokens_a_ticket",
    "eps",
)
BAD_POSITION, BAD_SLOT = 1, 2


@njit(nogil=True)
def _prepare_head(source, target, weight, has_norm, eps, cos, sin, rotary, interleaved):
    """``target [D]`` = the normalised and rotated ``source [D]``."""
    head_dim = target.shape[0]
    if has_norm:
        total = np.float32(0.0)
        for i in range(head_dim):
            total += source[i] * source[i]
        scale = np.float32(1.0 / math.sqrt(total / head_dim + eps))
        for i in range(head_dim):
            target[i] = source[i] * scale * weight[i]
    else:
        for i in range(head_dim):
            target[i] = source[i]
    half = rotary // 2
    if interleaved:
        for i in range(half):
            even, odd = target[2 * i], target[2 * i + 1]
            target[2 * i] = even * cos[i] - odd * sin[i]
            target[2 * i + 1] = odd * cos[i] + even * sin[i]
    else:
        for i in range(half):
            low, high = target[i], target[half + i]
            target[i] = low * cos[i] - high * sin[i]
            target[half + i] = high * cos[i] + low * sin[i]


@functools.cache
def qkv_kernel(stored: type) -> Kernel:
    """For pages of ``stored``; a ticket is some tokens."""
    itemsize = np.dtype(stored).itemsize

    def qkv(arguments, ticket):
        a = carray(arguments, 1)[0]
        d, block_size, value_stride = a.head_dim, a.block_size, a.value_stride
        half, rotary, interleaved = a.rotary // 2, a.rotary, a.interleaved != 0
        heads = a.q_heads + 2 * a.kv_heads
        positions = int32_at(a.positions, a.num_tokens)
        slots = int64_at(a.slots, a.num_tokens)
        q_norm, k_norm = float32_at(a.q_norm, d), float32_at(a.k_norm, d)
        has_q_norm, has_k_norm, eps = a.q_norm != 0, a.k_norm != 0, a.eps
        key = np.empty(d, np.float32)
        first = ticket * a.tokens_a_ticket
        last = min(a.num_tokens, first + a.tokens_a_ticket)
        for token in range(first, last):
            if half > 0 and (positions[token] < 0 or positions[token] >= a.num_positions):
                a.status = BAD_POSITION
                return
            if slots[token] >= a.num_blocks * block_size:
                a.status = BAD_SLOT
                return

        for token in range(first, last):
            cos = float32_at(a.cos + positions[token] * half * 4, half)
            sin = float32_at(a.sin + positions[token] * half * 4, half)
            row = a.qkv + token * heads * d * 4
            for head in range(a.q_heads):
                target = float32_at(a.q + (token * a.q_heads + head) * d * 4, d)
                source = float32_at(row + head * d * 4, d)
                _prepare_head(source, target, q_norm, has_q_norm, eps, cos, sin, rotary, interleaved)
            if slots[token] < 0:
                continue
            block, inside = slots[token] // block_size, slots[token] % block_size
            for head in range(a.kv_heads):
                source = float32_at(row + (a.q_heads + head) * d * 4, d)
                _prepare_head(source, key, k_norm, has_k_norm, eps, cos, sin, rotary, interleaved)
                page = block * a.kv_heads + head
                k_at = a.k_cache + (page * d * block_size + inside) * itemsize
                for i in range(d):
                    store_f32(stored, k_at, i * block_size, key[i])
                value = float32_at(row + (a.q_heads + a.kv_heads + head) * d * 4, d)
                v_at = a.v_cache + (page * block_size + inside) * value_stride * itemsize
                for i in range(d):
                    store_f32(stored, v_at, i, value[i])

    return Kernel(qkv, FIELDS)
