"""Attention by its definition: all scores, then their softmax, then the weighted sum. The baseline, and an
instrument.

A block takes one query and head. Its scores go to the workspace, which ends as the softmax weights

    weights [T, Hq, columns] float32,     zeros beyond what the query sees (columns >= the longest sequence)

for `tools/plot_attention.py` to draw (with sinks, a row's sum to less than 1). Lesson: the weights are
T * Hq * L floats written once and read and written twice more, keys are read again by every query, and a thread that
owns a key reads memory a whole row away from its neighbour. The other tiers differ in the order of the work alone.
"""

from __future__ import annotations

import functools
from dataclasses import asdict

from numba import cuda, float32, uint32, uint64

from numba_kernels.cuda.attention.online_softmax import (
    MINUS_INFINITY,
    load_sink,
    origin_of,
    reciprocal_of,
    score_scaler,
    share_of_keys,
    subtract,
)
from numba_kernels.cuda.attention.tiles import ARGUMENT_TYPES, Variant, visible_end, visible_first
from numba_kernels.cuda.intrinsics.block import block_max, block_sum
from numba_kernels.cuda.intrinsics.element import element_loader, elements_storer
from numba_kernels.cuda.intrinsics.element_types import ITEM_BYTES
from numba_kernels.cuda.intrinsics.math import divide_u32, exp2
from numba_kernels.cuda.intrinsics.memory import load_f32, store_f32
from numba_kernels.cuda.intrinsics.sync import sync_block
from numba_kernels.cuda.intrinsics.warp import maximum_f32
from numba_kernels.cuda.kv_cache import PAGE_BYTES, check_pages, row_address
from numba_kernels.cuda.quantised_pages import page_element_loader, scale_address
from numba_kernels.cuda.specialisation import Specialisation

THREADS = 128


@functools.cache
def naive(dtype: str, head_dim: int, block_size: int, variant: Variant) -> Specialisation:
    """Grid: (tokens of the longest chunk, query heads, sequences)."""
    check_pages(head_dim, block_size, dtype)
    load, store = element_loader(dtype), elements_storer(dtype, 1)
    pages, has_scales = variant.pages or dtype, variant.pages != ""
    load_page = page_element_loader(pages) if has_scales else load
    address, address_of_scale = row_address(head_dim, block_size, pages), scale_address(block_size)
    page_item = uint64(PAGE_BYTES[pages])
    item_bytes = uint64(ITEM_BYTES[dtype])
    rounds = -(-head_dim // THREADS)
    has_window, has_sinks, scaled = variant.has_window, variant.has_sinks, score_scaler(variant.softcap)

    @cuda.jit
    def kernel(
        q, k_cache, v_cache, out, workspace, arrivals, sinks, k_scales, v_scales, query_start, seq_lens, block_tables,
        bidirectional_until, num_q_heads, num_kv_heads, share, table_width, window, num_seqs, columns, scale,
    ):  # fmt: skip
        partials = cuda.shared.array(32, float32)
        value = cuda.local.array(1, float32)
        seq = uint32(cuda.blockIdx.z)
        head = uint32(cuda.blockIdx.y)
        token = uint32(cuda.blockIdx.x)
        thread = uint32(cuda.threadIdx.x)
        first_token = uint32(query_start[seq])
        query_len = uint32(uint32(query_start[uint32(seq + uint32(1))]) - first_token)
        if token >= query_len:
            return
        kv_head = divide_u32(head, share)
        end = visible_end(uint32(seq_lens[seq]), query_len, token)
        first = uint32(0)
        if has_window:
            first = visible_first(end, window)
        row = uint64(uint32(first_token + token)) * uint64(num_q_heads) + uint64(head)
        query = q + row * uint64(head_dim) * item_bytes
        weights = workspace + row * uint64(columns) * uint64(4)
        table = uint64(seq) * uint64(table_width)

        largest = MINUS_INFINITY
        key = uint32(first + thread)
        while key < end:
            block = uint32(block_tables[table + uint64(key // uint32(block_size))])
            offset = uint32(key % uint32(block_size))
            keys = address(k_cache, block, offset, kv_head, num_kv_heads)
            score = float32(0)
            column = uint64(0)
            while column < uint64(head_dim):
                score += load(query + column * item_bytes) * load_page(keys + column * page_item)
                column += uint64(1)
            if has_scales:
                score = score * load_f32(address_of_scale(k_scales, block, offset, kv_head, num_kv_heads))
            score = scaled(score, scale)
            store_f32(weights + uint64(key) * uint64(4), score)
            largest = maximum_f32(largest, score)
            key = uint32(key + uint32(THREADS))
        largest = block_max(largest, partials)
        origin = origin_of(largest)

        total = float32(0)
        key = uint32(first + thread)
        while key < end:
            place = weights + uint64(key) * uint64(4)
            weight = exp2(subtract(load_f32(place), origin))
            store_f32(place, weight)
            total += weight
            key = uint32(key + uint32(THREADS))
        total = block_sum(total, partials)
        reciprocal = reciprocal_of(total)
        if has_sinks:
            reciprocal = share_of_keys(largest, total, load_sink(sinks, head))

        key = thread
        while key < columns:
            place = weights + uint64(key) * uint64(4)
            weight = float32(0)
            if key >= first and key < end:
                weight = load_f32(place) * reciprocal
            store_f32(place, weight)
            key = uint32(key + uint32(THREADS))
        sync_block()

        for i in range(rounds):
            own = uint32(thread + uint32(i * THREADS))
            if own < uint32(head_dim):
                result = float32(0)
                key = first
                while key < end:
                    block = uint32(block_tables[table + uint64(key // uint32(block_size))])
                    offset = uint32(key % uint32(block_size))
                    values = address(v_cache, block, offset, kv_head, num_kv_heads)
                    weight = load_f32(weights + uint64(key) * uint64(4))
                    if has_scales:
                        weight = weight * load_f32(address_of_scale(v_scales, block, offset, kv_head, num_kv_heads))
                    result += weight * load_page(values + uint64(own) * page_item)
                    key = uint32(key + uint32(1))
                value[0] = result
                store(out + (row * uint64(head_dim) + uint64(own)) * item_bytes, value)

    name = f"attention_naive_{dtype}_d{head_dim}_b{block_size}{variant.suffix}"
    constants = {"dtype": dtype, "head_dim": head_dim, "block_size": block_size} | asdict(variant)
    return Specialisation(name, kernel, ARGUMENT_TYPES, THREADS, constants=constants)
