"""Latent attention on a GPU (MLA, DeepSeek-V2, https://arxiv.org/abs/2405.04434): pages of one row a token, and
attention over them.

    q[t, h]  = [rotated q[t, h, :R] | q[t, h, R:]],    row[t] = [rotated k[t] | RMSNorm(c[t]) * weight]
    out[t, h] = sum_j softmax_j(scale q[t, h] . row[j]) c[j]      over positions  j <= p_t

Pages are ``[blocks, block size, width rounded up to 8]`` of the activations' type: a row is the key of all heads, and
all but its first R numbers are their value. Arithmetic is float32.

A block of attention takes one query and up to HEADS heads, with which it goes over the keys KEYS at a time: each thread
has one score of a tile, then some columns of all heads' sums. So a row is read from memory once for these heads. It is
the first tier, without tensor cores, and a long sequence is one block's; a row's bits depend on its token alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

from numba import cuda, float32, types, uint32, uint64

from numba_kernels.cuda.attention.online_softmax import (
    MINUS_INFINITY,
    group_max,
    group_sum,
    origin_of,
    reciprocal_of,
    subtract,
)
from numba_kernels.cuda.attention.tiles import visible_end
from numba_kernels.cuda.intrinsics.block import block_sum
from numba_kernels.cuda.intrinsics.element import element_loader, elements_storer
from numba_kernels.cuda.intrinsics.element_types import DTYPES, ITEM_BYTES
from numba_kernels.cuda.intrinsics.math import exp2, reciprocal_sqrt
from numba_kernels.cuda.intrinsics.memory import load_f32
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import maximum_f32
from numba_kernels.cuda.specialisation import Launch, Specialisation

THREADS = 128
HEADS, KEYS = 8, 16  # of a tile of scores: one a thread
LOG2_E = math.log2(math.e)
MAX_WIDTH = 1024  # queries of HEADS heads take 32 KB of shared memory
ROW_MULTIPLE = 8


def row_elements(width: int) -> int:
    """Elements of a row in the pages."""
    return -(-width // ROW_MULTIPLE) * ROW_MULTIPLE


@functools.cache
def _prepare(dtype: str, width: int, rotary: int, interleaved: bool) -> Specialisation:
    """Arguments: see `plan_prepare`."""
    load, store = element_loader(dtype), elements_storer(dtype, 1)
    item, half, rest = uint64(ITEM_BYTES[dtype]), rotary // 2, width - rotary
    padded = row_elements(width)
    reciprocal_rest = float32(1.0 / rest)

    @cuda.jit
    def latent_prepare(q, latent, positions, cos, sin, norm, slot_mapping, pages, num_heads, eps):
        partials = cuda.shared.array(32, float32)
        value = cuda.local.array(1, float32)
        wait_for_previous_grid()
        launch_dependents()
        token, thread = uint32(cuda.blockIdx.x), uint32(cuda.threadIdx.x)
        table = uint64(uint32(positions[token])) * uint64(4 * half)
        slot = slot_mapping[token]
        source = latent + uint64(token) * uint64(width) * item
        row = pages + uint64(slot) * uint64(padded) * item
        index = thread
        while index < uint32(uint32(num_heads + uint32(1)) * uint32(half)):  # the last head is the token's own row
            head = uint32(index // uint32(half))
            pair = uint32(index - head * uint32(half))
            low = pair
            high = uint32(pair + uint32(half))
            if interleaved:
                low = uint32(uint32(2) * pair)
                high = uint32(low + uint32(1))
            place = q + (uint64(token) * uint64(num_heads) + uint64(head)) * uint64(width) * item
            target = place
            is_written = True
            if head == num_heads:
                place = source + uint64(rest) * item
                target = row
                is_written = slot >= 0
            if is_written:
                first = load(place + uint64(low) * item)
                second = load(place + uint64(high) * item)
                c = load_f32(cos + table + uint64(pair) * uint64(4))
                s = load_f32(sin + table + uint64(pair) * uint64(4))
                value[0] = first * c - second * s
                store(target + uint64(low) * item, value)
                value[0] = second * c + first * s
                store(target + uint64(high) * item, value)
            index = uint32(index + uint32(THREADS))
        if slot >= 0:
            squares = float32(0)
            index = thread
            while index < uint32(rest):
                number = load(source + uint64(index) * item)
                squares += number * number
                index = uint32(index + uint32(THREADS))
            scale = reciprocal_sqrt(block_sum(squares, partials) * reciprocal_rest + eps)
            index = thread
            while index < uint32(padded - rotary):
                value[0] = float32(0)
                if index < uint32(rest):
                    weight = load_f32(norm + uint64(index) * uint64(4))
                    value[0] = load(source + uint64(index) * item) * scale * weight
                store(row + uint64(uint32(index + uint32(rotary))) * item, value)
                index = uint32(index + uint32(THREADS))

    name = f"latent_prepare_{dtype}_w{width}_r{rotary}{'_interleaved' if interleaved else ''}"
    constants = {"dtype": dtype, "width": width, "rotary": rotary, "interleaved": interleaved}
    argument_types = (
        types.uint64, types.uint64, types.CPointer(types.int32), *(types.uint64,) * 3, types.CPointer(types.int64),
        types.uint64, types.uint32, types.float32,
    )  # fmt: skip
    return Specialisation(name, latent_prepare, argument_types, THREADS, constants=constants)


@functools.cache
def _attention(dtype: str, width: int, value_dim: int, block_size: int) -> Specialisation:
    """Arguments: see `plan_attention`."""
    load, store = element_loader(dtype), elements_storer(dtype, 1)
    item, padded, first_value = uint64(ITEM_BYTES[dtype]), row_elements(width), width - value_dim
    rounds = -(-value_dim // THREADS)
    query_size, num_scores = HEADS * width, HEADS * KEYS

    @cuda.jit
    def latent_attention(
        q, pages, out, query_start, seq_lens, block_tables, num_heads, table_width, scale
    ):  # fmt: skip
        queries = cuda.shared.array(query_size, float32)
        weights = cuda.shared.array(num_scores, float32)
        factors = cuda.shared.array(HEADS, float32)
        sums = cuda.local.array((HEADS, rounds), float32)
        value = cuda.local.array(1, float32)
        wait_for_previous_grid()
        launch_dependents()
        token, seq, thread = uint32(cuda.blockIdx.x), uint32(cuda.blockIdx.z), uint32(cuda.threadIdx.x)
        first_head = uint32(uint32(cuda.blockIdx.y) * uint32(HEADS))
        first_token = uint32(query_start[seq])
        query_len = uint32(uint32(query_start[uint32(seq + uint32(1))]) - first_token)
        if token >= query_len:
            return
        end = visible_end(uint32(seq_lens[seq]), query_len, token)
        row = uint64(uint32(first_token + token)) * uint64(num_heads) + uint64(first_head)
        table = uint64(seq) * uint64(table_width)
        index = thread
        while index < uint32(query_size):
            number = float32(0)
            if uint32(first_head + index // uint32(width)) < num_heads:
                number = load(q + (row * uint64(width) + uint64(index)) * item) * scale
            queries[index] = number
            index = uint32(index + uint32(THREADS))
        for head in range(HEADS):
            for part in range(rounds):
                sums[head, part] = float32(0)
        own_head, own_key = uint32(thread // uint32(KEYS)), uint32(thread % uint32(KEYS))
        largest, total = MINUS_INFINITY, float32(0)
        sync_block()
        tile = uint32(0)
        while tile < end:
            key = uint32(tile + own_key)
            score = MINUS_INFINITY
            if key < end:
                block = uint32(block_tables[table + uint64(key // uint32(block_size))])
                slot = uint64(block) * uint64(block_size) + uint64(key % uint32(block_size))
                place = pages + slot * uint64(padded) * item
                score = float32(0)
                column = uint32(0)
                while column < uint32(width):
                    score += queries[uint32(own_head * uint32(width) + column)] * load(place + uint64(column) * item)
                    column = uint32(column + uint32(1))
            before = largest
            largest = maximum_f32(largest, group_max(score, KEYS))
            origin = origin_of(largest)
            weight = exp2(subtract(score, origin))
            factor = exp2(subtract(before, origin))
            total = total * factor + group_sum(weight, KEYS)
            weights[thread] = weight
            if own_key == uint32(0):
                factors[own_head] = factor
            sync_block()
            for head in range(HEADS):
                for part in range(rounds):
                    sums[head, part] = sums[head, part] * factors[head]
            key = uint32(0)
            while key < uint32(KEYS) and uint32(tile + key) < end:
                position = uint32(tile + key)
                block = uint32(block_tables[table + uint64(position // uint32(block_size))])
                slot = uint64(block) * uint64(block_size) + uint64(position % uint32(block_size))
                place = pages + (slot * uint64(padded) + uint64(first_value)) * item
                for part in range(rounds):
                    own = uint32(thread + uint32(part * THREADS))
                    if own < uint32(value_dim):
                        number = load(place + uint64(own) * item)
                        for head in range(HEADS):
                            sums[head, part] += weights[uint32(uint32(head * KEYS) + key)] * number
                key = uint32(key + uint32(1))
            sync_block()
            tile = uint32(tile + uint32(KEYS))
        if own_key == uint32(0):
            factors[own_head] = reciprocal_of(total)
        sync_block()
        for head in range(HEADS):
            if uint32(first_head + uint32(head)) < num_heads:
                for part in range(rounds):
                    own = uint32(thread + uint32(part * THREADS))
                    if own < uint32(value_dim):
                        value[0] = sums[head, part] * factors[head]
                        store(out + ((row + uint64(head)) * uint64(value_dim) + uint64(own)) * item, value)

    name = f"latent_attention_{dtype}_w{width}_v{value_dim}_b{block_size}"
    constants = {"dtype": dtype, "width": width, "value_dim": value_dim, "block_size": block_size}
    pointer = types.CPointer(types.int32)
    argument_types = (*(types.uint64,) * 3, pointer, pointer, pointer, types.uint32, types.uint32, types.float32)
    return Specialisation(name, latent_attention, argument_types, THREADS, constants=constants)


def why_not(width: int) -> str:
    """Why rows of so many numbers are not supported on a GPU; "" if they are."""
    return "" if width <= MAX_WIDTH else f"{width} numbers a row, limit {MAX_WIDTH}"


def plan_prepare(num_tokens: int, width: int, dtype: str, *, rotary: int, interleaved: bool) -> Launch:
    """The launch for at least one token, and at least one head.

    Arguments: q [T, H, width], latent [T, width], positions (int32 [T]), cos, sin (float32 [P, rotary / 2]), norm
    (float32 [width - rotary]), slot_mapping (int64 [T]; negative if not stored), pages; H, eps.
    """
    return Launch(_prepare(dtype, width, rotary, interleaved), (num_tokens, 1, 1), (THREADS, 1, 1))


def plan_attention(
    max_query_len: int, num_heads: int, num_seqs: int, width: int, value_dim: int, block_size: int, dtype: str
) -> Launch:
    """The launch for at least one query and sequence.

    Arguments: q [T, H, width], pages, out [T, H, value_dim], query_start (int32 [S + 1]), seq_lens (int32 [S]), block
    tables (int32 [S, table_width]); H, table_width, scale times log2 e.
    """
    kernel = _attention(dtype, width, value_dim, block_size)
    return Launch(kernel, (max_query_len, -(-num_heads // HEADS), num_seqs), (THREADS, 1, 1))


def specialisations() -> Iterator[Specialisation]:
    """Specialisations of DeepSeek's models, with rows of 512 and 64."""
    for dtype in DTYPES:
        for interleaved in (False, True):
            yield _prepare(dtype, 576, 64, interleaved)
        yield _attention(dtype, 576, 512, 16)
