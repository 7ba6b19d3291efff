"""Prepares q, k and v between their projection and attention, in one pass over the tokens.

Each row of ``qkv [T, (Hq + 2 Hkv) D]`` is split into heads (``[T, (Hq + Hkv) D]`` where values are made of keys). q
and k are normalised (RMSNorm, over each head as Qwen3 does, or over all heads together as OLMo 2 does; LayerNorm over
each head as Cohere does) and rotated by their position (RoPE, https://arxiv.org/abs/2104.09864; the first ``rotary``
dimensions, as two halves or as interleaved pairs, or ``rotary / 2`` and as many at a distance), or rotated first and
normalised then, as Hunyuan does; values may have an RMSNorm without weights, as in Gemma 4; q is multiplied by its
position's scale. q goes out as ``[T, Hq, D]``, k and v into the pages at the token's slot: K ``[block, head, dim,
token]``, V ``[block, head, token, dim padded]``, quantised where pages are of int8 or fp8 (`quantised_rows`). A slot of
-1 is not written. In pages of float32 the keys of neighbouring slots are written together, transposed in registers.

Status 1: a position without a row in the rotation table. Status 2: a slot beyond the pages.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numba import carray, njit

from numba_kernels.cpu.gemm.packed_words import transpose_words
from numba_kernels.cpu.intrinsics.scalars import store_f32
from numba_kernels.cpu.quantised_rows import is_quantised, largest_number, store_row
from numba_kernels.cpu.rows import rotate_halves
from numba_kernels.cpu.running.launch import Fields, Kernel, address, float32_at, int32_at, int64_at
from numba_kernels.cpu.target import LANES

FIELDS = Fields(
    "*qkv *positions *cos *sin *q_scales *q_norm *k_norm *k_cache *v_cache *k_scales *v_scales *slots *q "
    "num_tokens q_heads kv_heads head_dim norm values rotary distance interleaved num_positions num_blocks block_size "
    "value_stride tokens_a_work_item",
    "eps",
)
BAD_POSITION, BAD_SLOT = 1, 2
NORMS = ("", "head", "row", "centred", "after")  # the argument is the place of one
_NO_NORM, _BY_HEAD, _BY_ROW, _CENTRED, _AFTER = range(5)
VALUES = ("own", "normed", "keys")  # likewise; the latter are normalised, too
_OWN, _NORMED, _KEYS = range(3)


@njit(nogil=True)
def copy_floats(source, target):
    """Copies as many floats as the target has."""
    for i in range(target.shape[0]):
        target[i] = source[i]


@njit(nogil=True, fastmath={"reassoc"})
def norm_scale(source, eps):
    """RMSNorm's factor of ``source``, whose squares LLVM adds up in lanes."""
    total = np.float32(0.0)
    for i in range(source.shape[0]):
        total += source[i] * source[i]
    return np.float32(1.0 / math.sqrt(total / source.shape[0] + eps))


@njit(nogil=True)
def _prepare_head(source, target, weight, norm, scale, eps, cos, sin, rotary, distance, interleaved):
    """``target [D]`` = the normalised (one of `NORMS`; by row with the row's ``scale``) and rotated ``source [D]``."""
    head_dim = target.shape[0]
    if norm in (_BY_HEAD, _BY_ROW):
        if norm == _BY_HEAD:
            scale = norm_scale(source, eps)
        for i in range(head_dim):
            target[i] = source[i] * scale * weight[i]
    else:
        mean = np.float32(0.0)
        if norm == _CENTRED:
            for i in range(head_dim):
                mean += source[i]
            mean = np.float32(mean / head_dim)
        for i in range(head_dim):
            target[i] = source[i] - mean
        if norm == _CENTRED:
            _normalise(target, weight, eps)
    rotate(target, cos, sin, rotary, distance, interleaved)
    if norm == _AFTER:
        _normalise(target, weight, eps)


@njit(nogil=True)
def _normalise(target, weight, eps):
    scale = norm_scale(target, eps)
    for i in range(target.shape[0]):
        target[i] = target[i] * scale * weight[i]


@njit(nogil=True)
def rotate(target, cos, sin, rotary, distance, interleaved):
    """Rotates ``rotary`` elements by these angles: the first, neighbours together, or the first half and those at a
    distance."""
    half = rotary // 2
    if interleaved:
        for i in range(half):
            even, odd = target[2 * i], target[2 * i + 1]
            target[2 * i] = even * cos[i] - odd * sin[i]
            target[2 * i + 1] = odd * cos[i] + even * sin[i]
    else:
        rotate_halves(address(target), address(cos), address(sin), half, distance)


@njit(nogil=True)
def hold(keys):
    """A last use: numba frees an array after its last use by name, even if its address is in use."""


@functools.cache
def qkv_kernel(stored: type) -> Kernel:
    """The kernel for pages of ``stored``; a work item is some tokens."""
    itemsize = np.dtype(stored).itemsize
    has_scales, largest = is_quantised(stored), largest_number(stored)
    is_word = stored is np.float32

    def qkv(arguments, work_item):
        a = carray(arguments, 1)[0]
        d, block_size, value_stride = a.head_dim, a.block_size, a.value_stride
        half, rotary, distance, interleaved = a.rotary // 2, a.rotary, a.distance, a.interleaved != 0
        first_value = a.q_heads if a.values == _KEYS else a.q_heads + a.kv_heads
        heads = first_value + a.kv_heads
        positions = int32_at(a.positions, a.num_tokens)
        slots = int64_at(a.slots, a.num_tokens)
        norm, eps = a.norm, a.eps
        has_own = norm in (_BY_ROW, _CENTRED)  # weights of each head
        q_scale = k_scale = np.float32(0.0)
        normed = np.empty(d, np.float32)
        first = work_item * a.tokens_a_work_item
        last = min(a.num_tokens, first + a.tokens_a_work_item)
        for token in range(first, last):
            if half > 0 and (positions[token] < 0 or positions[token] >= a.num_positions):
                a.status = BAD_POSITION
                return
            if a.kv_heads > 0 and slots[token] >= a.num_blocks * block_size:
                a.status = BAD_SLOT
                return

        row_bytes = heads * d * 4
        is_plain = norm == _NO_NORM and half == 0
        keys = np.empty((LANES if is_word else 1, d), np.float32)
        run = 0  # tokens whose keys are written together
        for token in range(first, last):
            cos = float32_at(a.cos + positions[token] * half * 4, half)
            sin = float32_at(a.sin + positions[token] * half * 4, half)
            row = a.qkv + token * row_bytes
            if norm == _BY_ROW:
                q_scale = norm_scale(float32_at(row, a.q_heads * d), eps)
            if is_plain:
                copy_floats(float32_at(row, a.q_heads * d), float32_at(a.q + token * a.q_heads * d * 4, a.q_heads * d))
            for head in range(a.q_heads if a.q_scales != 0 or not is_plain else 0):
                target = float32_at(a.q + (token * a.q_heads + head) * d * 4, d)
                source = float32_at(row + head * d * 4, d)
                weight = float32_at(a.q_norm + head * d * 4 if has_own else a.q_norm, d)
                _prepare_head(source, target, weight, norm, q_scale, eps, cos, sin, rotary, distance, interleaved)
                if a.q_scales != 0:
                    factor = float32_at(a.q_scales, a.num_positions)[positions[token]]
                    for i in range(d):
                        target[i] *= factor
            if a.kv_heads == 0 or slots[token] < 0:
                continue
            block, inside = slots[token] // block_size, slots[token] % block_size
            if run == 0:  # of one block
                run = 1
                while (
                    is_word and run < min(LANES, last - token, block_size - inside)
                    and slots[token + run] == slots[token] + run
                ):  # fmt: skip
                    run += 1
                for head in range(a.kv_heads):
                    weight = float32_at(a.k_norm + head * d * 4 if has_own else a.k_norm, d)
                    from_row, stride = row + (a.q_heads + head) * d * 4, row_bytes
                    if not is_plain:
                        for i in range(run):
                            place = positions[token + i] * half * 4
                            if norm == _BY_ROW:
                                all_keys = float32_at(row + i * row_bytes + a.q_heads * d * 4, a.kv_heads * d)
                                k_scale = norm_scale(all_keys, eps)
                            _prepare_head(
                                float32_at(from_row + i * row_bytes, d), keys[i], weight, norm, k_scale, eps,
                                float32_at(a.cos + place, half), float32_at(a.sin + place, half), rotary, distance,
                                interleaved,
                            )  # fmt: skip
                        from_row, stride = address(keys), d * 4
                    page = block * a.kv_heads + head
                    k_at = a.k_cache + (page * d * block_size + inside) * itemsize
                    if is_word:
                        for i in range(0, d, LANES):
                            transpose_words(
                                from_row + i * 4, stride, run, min(LANES, d - i), k_at + i * block_size * 4,
                                block_size * 4,
                            )  # fmt: skip
                    elif has_scales:
                        key = float32_at(from_row, d)
                        store_row(k_at, block_size, key, largest, a.k_scales + (page * block_size + inside) * 4)
                    else:
                        key = float32_at(from_row, d)
                        for i in range(d):
                            store_f32(stored, k_at, i * block_size, key[i])
            run -= 1
            for head in range(a.kv_heads):
                page = block * a.kv_heads + head
                value = float32_at(row + (first_value + head) * d * 4, d)
                if a.values != _OWN:
                    scale = norm_scale(value, eps)
                    for i in range(d):
                        normed[i] = value[i] * scale
                    value = normed
                v_at = a.v_cache + (page * block_size + inside) * value_stride * itemsize
                if is_word:
                    copy_floats(value, float32_at(v_at, d))
                elif has_scales:
                    store_row(v_at, 1, value, largest, a.v_scales + (page * block_size + inside) * 4)
                else:
                    for i in range(d):
                        store_f32(stored, v_at, i, value[i])
        hold(keys)

    return Kernel(qkv, FIELDS)
