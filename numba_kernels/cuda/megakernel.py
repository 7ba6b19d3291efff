"""A decode step of one sequence in one launch: all layers of a dense decoder, from the token to its logits.

An experiment (docs/kernels.md). Launches of a small model cost more than its bytes: each has a gap, a first byte and
ends. Here a grid of as many blocks as there are multiprocessors stays, and meets at a barrier of its own between
phases:

    embed | norm, q k v | attention | its parts, o, residual | norm, gate and up, their product | down, residual | ...
    ... | norm, logits

A product's rows are dealt out to warps, two at a time. Before a warp waits at the barrier it asks for its first rows of
the weights behind it, so that memory works on while the last blocks arrive. The vector that a phase multiplies lies in
each block's shared memory as float32; norms are taken on the way there. Between phases everything is float32, in
scratch that the second-level cache holds.

Attention: a block takes one query head and one of `PARTS` parts of the keys, each of its warps every
`WARPS`-th key of that part; their sums meet in shared memory, the parts' in the next phase. The block with the last key
of a group's first head writes the token's keys and values into their page; all read these from scratch.

The barrier is a counter that the launch begins with at zero: a release by one thread of each block behind a barrier of
the block, then an acquire until all are there. All blocks must run at once: the launch is cooperative. Decoders of
Llama's kind alone (`plan` lists the rest): RMS norms, SwiGLU, rotation of whole heads, no biases, windows or caps.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

from numba import cuda, float32, types, uint32, uint64

from numba_kernels.cuda.intrinsics import convert, memory
from numba_kernels.cuda.intrinsics.asm import instruction
from numba_kernels.cuda.intrinsics.block import block_sum
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import elements_loader, elements_storer
from numba_kernels.cuda.intrinsics.element_types import ITEM_BYTES, VECTOR_WIDTH
from numba_kernels.cuda.intrinsics.integer import divide_u32, minimum_u32
from numba_kernels.cuda.intrinsics.math import divide, exp2, maximum_nan, reciprocal_sqrt
from numba_kernels.cuda.intrinsics.memory import load_b32, load_b64, load_f32, store_b32, store_f32
from numba_kernels.cuda.intrinsics.sync import sync_block
from numba_kernels.cuda.intrinsics.warp import lane_index, warp_sum
from numba_kernels.cuda.kv_cache import check_pages, page_row, row_address
from numba_kernels.cuda.specialisation import Launch, Specialisation

WARPS = 8
THREADS = 32 * WARPS
TURNS = {80: 2, 90: 4}
"""Loads of each of a warp's two rows that a lane has on their way, by compute capability: there are registers for."""
PARTS = 8  # of the keys, at most
KEYS_A_PART = 32  # at least
LAYER_ADDRESSES = (
    "attention_norm", "qkv", "q_norm", "k_norm", "k_cache", "v_cache", "o", "mlp_norm", "gate_up", "down"
)  # fmt: skip
"""What the table of layers holds of each, uint64; norms of queries and keys 0 where there are none, those in front of
products 0 where their weights are in the matrix."""
PHASES_A_LAYER = 5
_LOWEST = -1e30

_add_release = instruction("red.release.gpu.global.add.u32 [$0], $1;", "", "l r")
_load_acquire = instruction("ld.acquire.gpu.global.u32 $0, [$1];", "r", "l")


@device_function
def _meet(counter, arrived):
    """All blocks have come here; what they wrote before is seen. `arrived`: what the counter shows then."""
    sync_block()
    if uint32(cuda.threadIdx.x) == uint32(0):
        _add_release(counter, uint32(1))
        while _load_acquire(counter) < arrived:
            pass
    sync_block()


@functools.cache
def _words(dtype: str) -> tuple[Any, Any]:
    """Device functions ``address -> 4 words`` of a weight, and ``words -> VECTOR_WIDTH float32``."""
    if dtype == "f32":
        return memory.stream_4xf32, device_function(lambda a, b, c, d: (a, b, c, d))
    unpack = {"f16": convert.unpack_f16, "bf16": convert.unpack_bf16}[dtype]

    @device_function
    def widen(a, b, c, d):
        a0, a1 = unpack(a)
        b0, b1 = unpack(b)
        c0, c1 = unpack(c)
        d0, d1 = unpack(d)
        return a0, a1, b0, b1, c0, c1, d0, d1

    return memory.stream_4xb32, widen


@functools.cache
def _kernel(dtype: str, head_dim: int, block_size: int, capability: int) -> Specialisation:
    """Arguments: addresses of the counter, layers, token ids, positions, lengths, slots, block table, cos, sin,
    embedding, final norm, head, x, qkv, parts, inner, logits, flag; then layers, hidden, inner size, query heads, KV
    heads, vocabulary, eps, scale of scores times log2(e)."""
    width, item_bytes, turns = VECTOR_WIDTH[dtype], ITEM_BYTES[dtype], TURNS[capability]
    turn, word = 32 * width, float32 if dtype == "f32" else uint32
    load_words, widen = _words(dtype)
    load_one = elements_loader(dtype, 1)
    store_one, address_of = elements_storer(dtype, 1), row_address(head_dim, block_size, dtype)
    registers, half = -(-head_dim // 32), head_dim // 2
    record = head_dim + 2
    reciprocal_dim = float32(1.0 / head_dim)
    lowest, minus_log2_e = float32(_LOWEST), float32(-math.log2(math.e))
    row_item_bytes, layer_bytes = uint64(item_bytes), uint64(8 * len(LAYER_ADDRESSES))
    padding = page_row(head_dim) - head_dim
    shared_quad, one_row = memory.shared_load_4xf32, uint32(1)

    @device_function
    def load_turn(first, second, position, depth, loaded):
        """The next loads of two rows, from `position` on."""
        for i in range(turns):
            at = uint32(position + uint32(i * turn))
            if at < depth:
                offset = uint64(at) * row_item_bytes
                low, high = load_words(first + offset), load_words(second + offset)
                for e in range(4):
                    loaded[i, 0, e] = low[e]
                    loaded[i, 1, e] = high[e]

    @device_function
    def begin(weight, pair, step, offset, end, depth, lane, loaded, places):
        """Asks for the first of a pair's rows, if there is such a pair: ``step * pair`` below `end`, and the one
        `offset` behind it; the last one for a row that is not there."""
        row = uint32(pair * step)
        if row < end:
            last = uint32(end - one_row) if offset == one_row else uint32(row + offset)
            other = minimum_u32(uint32(row + offset), last)
            row_bytes = uint64(depth) * row_item_bytes
            places[0], places[1] = weight + uint64(row) * row_bytes, weight + uint64(other) * row_bytes
            load_turn(places[0], places[1], uint32(lane * uint32(width)), depth, loaded)

    @device_function
    def multiply(staged, depth, lane, loaded, places, sums):
        """Two rows by the staged vector, whose first loads are under way."""
        sums[0], sums[1] = float32(0), float32(0)
        position = uint32(lane * uint32(width))
        while position < depth:
            for i in range(turns):
                at = uint32(position + uint32(i * turn))
                if at < depth:
                    low = widen(loaded[i, 0, 0], loaded[i, 0, 1], loaded[i, 0, 2], loaded[i, 0, 3])
                    high = widen(loaded[i, 1, 0], loaded[i, 1, 1], loaded[i, 1, 2], loaded[i, 1, 3])
                    for e in range(width // 4):
                        quad = shared_quad(uint32(staged + (at + uint32(4 * e)) * uint32(4)))
                        for f in range(4):
                            sums[0] += low[4 * e + f] * quad[f]
                            sums[1] += high[4 * e + f] * quad[f]
            position = uint32(position + uint32(turns * turn))
            load_turn(places[0], places[1], position, depth, loaded)
        sums[0], sums[1] = warp_sum(sums[0]), warp_sum(sums[1])

    @device_function
    def multiply_rows(weight, rows, depth, out, is_added, staged, warp, all_warps, lane, loaded, places, sums):
        """``weight [rows, depth]`` by the staged vector into ``out [rows]``, or added to it; the loads of the warp's
        first rows are under way."""
        one, two = uint32(1), uint32(2)
        pair = warp
        while pair * two < rows:
            multiply(staged, depth, lane, loaded, places, sums)
            if lane < two and pair * two + lane < rows:
                at = out + uint64(pair * two + lane) * uint64(4)
                value = sums[0] if lane == uint32(0) else sums[1]
                store_f32(at, load_f32(at) + value if is_added else value)
            pair = uint32(pair + all_warps)
            begin(weight, pair, two, one, rows, depth, lane, loaded, places)

    @device_function
    def stage_norm(x, weight, size, reciprocal_size, eps, staged, partials):
        """The norm of x, into shared memory; `weight` is 0 where the product's has the norm's weights in it."""
        thread = uint32(cuda.threadIdx.x)
        squares = float32(0)
        index = thread
        while index < size:
            value = load_f32(x + uint64(index) * uint64(4))
            squares += value * value
            index = uint32(index + uint32(THREADS))
        scale = reciprocal_sqrt(block_sum(squares, partials) * reciprocal_size + eps)
        index = thread
        while index < size:
            value = load_f32(x + uint64(index) * uint64(4)) * scale
            if weight != uint64(0):
                value *= load_f32(weight + uint64(index) * uint64(4))
            memory.shared_store_f32(uint32(staged + index * uint32(4)), value)
            index = uint32(index + uint32(THREADS))
        sync_block()

    @device_function
    def load_head(qkv, head, norm, cos, sin, eps, lane, values):
        """A head of a query or key: normalised, if it has a norm, and rotated."""
        source = qkv + uint64(head * uint32(head_dim)) * uint64(4)
        scale = float32(1)
        if norm != uint64(0):
            squares = float32(0)
            d = lane
            while d < uint32(head_dim):
                value = load_f32(source + uint64(d) * uint64(4))
                squares += value * value
                d = uint32(d + uint32(32))
            scale = reciprocal_sqrt(warp_sum(squares) * reciprocal_dim + eps)
        for r in range(registers):
            d = uint32(lane + uint32(32 * r))
            values[r] = float32(0)
            if d < uint32(head_dim):
                is_low = d < uint32(half)
                other = uint32(d + uint32(half)) if is_low else uint32(d - uint32(half))
                pair = d if is_low else other
                own = load_f32(source + uint64(d) * uint64(4)) * scale
                partner = load_f32(source + uint64(other) * uint64(4)) * scale
                if norm != uint64(0):
                    own *= load_f32(norm + uint64(d) * uint64(4))
                    partner *= load_f32(norm + uint64(other) * uint64(4))
                c, s = load_f32(cos + uint64(pair) * uint64(4)), load_f32(sin + uint64(pair) * uint64(4))
                values[r] = own * c - partner * s if is_low else own * c + partner * s

    @device_function
    def attend(
        qkv, layer, slot, table, length, parts, cos, sin, num_q_heads, num_kv_heads, eps, scale, num_parts, unit,
        gathered, lane, warp,
    ):  # fmt: skip
        """One query head over one part of the keys."""
        share = divide_u32(num_q_heads, num_kv_heads)
        head = divide_u32(unit, num_parts)
        part = uint32(unit - head * num_parts)
        kv_head = divide_u32(head, share)
        keys_a_part = divide_u32(uint32(length + num_parts - uint32(1)), num_parts)
        last = minimum_u32(uint32((part + uint32(1)) * keys_a_part), length)
        query = cuda.local.array(registers, float32)
        key = cuda.local.array(registers, float32)
        value = cuda.local.array(registers, float32)
        total = cuda.local.array(registers, float32)
        load_head(qkv, head, load_b64(layer + uint64(16)), cos, sin, eps, lane, query)
        k_cache, v_cache = load_b64(layer + uint64(32)), load_b64(layer + uint64(40))
        largest, sum_of = lowest, float32(0)
        for r in range(registers):
            total[r] = float32(0)
        index = uint32(part * keys_a_part + warp)
        while index < last:
            if index + uint32(1) == length:  # the token's own
                load_head(
                    qkv, uint32(num_q_heads + kv_head), load_b64(layer + uint64(24)), cos, sin, eps, lane, key
                )  # fmt: skip
                source = qkv + uint64((num_q_heads + num_kv_heads + kv_head) * uint32(head_dim)) * uint64(4)
                for r in range(registers):
                    d = uint32(lane + uint32(32 * r))
                    value[r] = float32(0)
                    if d < uint32(head_dim):
                        value[r] = load_f32(source + uint64(d) * uint64(4))
                if head == uint32(kv_head * share) and slot != uint64(0xFFFFFFFFFFFFFFFF):
                    block = uint32(uint64(slot) // uint64(block_size))
                    offset = uint32(uint64(slot) % uint64(block_size))
                    k_row = address_of(k_cache, block, offset, kv_head, num_kv_heads)
                    v_row = address_of(v_cache, block, offset, kv_head, num_kv_heads)
                    for r in range(registers):
                        d = uint32(lane + uint32(32 * r))
                        if d < uint32(head_dim):
                            store_one(k_row + uint64(d) * row_item_bytes, (key[r],))
                            store_one(v_row + uint64(d) * row_item_bytes, (value[r],))
                    if padding > 0 and lane < uint32(padding):
                        store_one(k_row + uint64(lane + uint32(head_dim)) * row_item_bytes, (float32(0),))
                        store_one(v_row + uint64(lane + uint32(head_dim)) * row_item_bytes, (float32(0),))
            else:
                block = load_b32(table + uint64(index // uint32(block_size)) * uint64(4))
                offset = uint32(index % uint32(block_size))
                k_row = address_of(k_cache, block, offset, kv_head, num_kv_heads)
                v_row = address_of(v_cache, block, offset, kv_head, num_kv_heads)
                for r in range(registers):
                    d = uint32(lane + uint32(32 * r))
                    key[r], value[r] = float32(0), float32(0)
                    if d < uint32(head_dim):
                        key[r] = load_one(k_row + uint64(d) * row_item_bytes)[0]
                        value[r] = load_one(v_row + uint64(d) * row_item_bytes)[0]
            score = float32(0)
            for r in range(registers):
                score += query[r] * key[r]
            score = warp_sum(score) * scale
            before, largest = largest, maximum_nan(largest, score)
            shrink, grown = exp2(before - largest), exp2(score - largest)
            sum_of = sum_of * shrink + grown
            for r in range(registers):
                total[r] = total[r] * shrink + grown * value[r]
            index = uint32(index + uint32(WARPS))

        at = uint32(gathered + warp * uint32(4 * record))
        for r in range(registers):
            d = uint32(lane + uint32(32 * r))
            if d < uint32(head_dim):
                memory.shared_store_f32(uint32(at + d * uint32(4)), total[r])
        if lane == uint32(0):
            memory.shared_store_f32(uint32(at + uint32(4 * head_dim)), largest)
            memory.shared_store_f32(uint32(at + uint32(4 * head_dim + 4)), sum_of)
        sync_block()
        target = parts + uint64(unit) * uint64(4 * record)
        d = uint32(cuda.threadIdx.x)
        if d < uint32(head_dim):
            largest = lowest
            for w in range(WARPS):
                largest = maximum_nan(
                    largest, memory.shared_load_f32(uint32(gathered + uint32(4 * (w * record + head_dim))))
                )  # fmt: skip
            added, sum_of = float32(0), float32(0)
            for w in range(WARPS):
                at = uint32(gathered + uint32(4 * w * record))
                factor = exp2(memory.shared_load_f32(uint32(at + uint32(4 * head_dim))) - largest)
                sum_of += factor * memory.shared_load_f32(uint32(at + uint32(4 * head_dim + 4)))
                added += factor * memory.shared_load_f32(uint32(at + d * uint32(4)))
            store_f32(target + uint64(d) * uint64(4), added)
            if d == uint32(0):
                store_f32(target + uint64(4 * head_dim), largest)
                store_f32(target + uint64(4 * head_dim + 4), sum_of)
        sync_block()

    @device_function
    def stage_attended(parts, num_parts, num_q_heads, staged):
        """The parts of each head together, into shared memory."""
        index, end = uint32(cuda.threadIdx.x), uint32(num_q_heads * uint32(head_dim))
        while index < end:
            head = uint32(index // uint32(head_dim))
            d = uint32(index - head * uint32(head_dim))
            first = parts + uint64(head * num_parts) * uint64(4 * record)
            largest = lowest
            part = uint32(0)
            while part < num_parts:
                at = first + uint64(part) * uint64(4 * record)
                largest = maximum_nan(largest, load_f32(at + uint64(4 * head_dim)))
                part = uint32(part + uint32(1))
            added, sum_of = float32(0), float32(0)
            part = uint32(0)
            while part < num_parts:
                at = first + uint64(part) * uint64(4 * record)
                factor = exp2(load_f32(at + uint64(4 * head_dim)) - largest)
                sum_of += factor * load_f32(at + uint64(4 * head_dim + 4))
                added += factor * load_f32(at + uint64(d) * uint64(4))
                part = uint32(part + uint32(1))
            memory.shared_store_f32(uint32(staged + index * uint32(4)), divide(added, sum_of))
            index = uint32(index + uint32(THREADS))
        sync_block()

    @device_function
    def stage(source, size, staged):
        index = uint32(cuda.threadIdx.x)
        while index < size:
            memory.shared_store_f32(uint32(staged + index * uint32(4)), load_f32(source + uint64(index) * uint64(4)))
            index = uint32(index + uint32(THREADS))
        sync_block()

    @cuda.jit
    def megakernel(
        counter, layers, token_ids, positions, lengths, slots, table, cos, sin, embedding, final_norm, head, x, qkv,
        parts, inner, logits, flag, num_layers, hidden, inner_size, num_q_heads, num_kv_heads, vocabulary, eps, scale,
    ):  # fmt: skip
        gathered = memory.shared_address(cuda.shared.array(0, float32))
        staged = uint32(gathered + uint32(4 * WARPS * record))
        partials = cuda.shared.array(32, float32)
        loaded = cuda.local.array((turns, 2, 4), word)
        places = cuda.local.array(2, uint64)
        sums = cuda.local.array(2, float32)
        thread, lane = uint32(cuda.threadIdx.x), lane_index()
        warp = thread >> uint32(5)
        num_blocks = uint32(cuda.gridDim.x)
        first, all_warps = uint32(uint32(cuda.blockIdx.x) * uint32(WARPS) + warp), uint32(num_blocks * uint32(WARPS))
        q_size = uint32(num_q_heads * uint32(head_dim))
        qkv_rows = uint32(q_size + uint32(2) * num_kv_heads * uint32(head_dim))
        reciprocal_hidden = divide(float32(1), float32(hidden))
        arrived = num_blocks
        one, two = uint32(1), uint32(2)
        length, slot = load_b32(lengths), load_b64(slots)
        position = uint64(load_b32(positions)) * uint64(4 * half)
        cos, sin = cos + position, sin + position
        num_parts = minimum_u32(
            uint32(PARTS), divide_u32(uint32(length + uint32(KEYS_A_PART - 1)), uint32(KEYS_A_PART))
        )  # fmt: skip

        token = load_b32(token_ids)
        if token >= vocabulary:
            if thread == uint32(0) and uint32(cuda.blockIdx.x) == uint32(0):
                store_b32(flag, one)
            token = uint32(0)
        index = uint32(uint32(cuda.blockIdx.x) * uint32(THREADS) + thread)
        row = embedding + uint64(token) * uint64(hidden) * row_item_bytes
        while index < hidden:
            store_f32(x + uint64(index) * uint64(4), load_one(row + uint64(index) * row_item_bytes)[0])
            index = uint32(index + num_blocks * uint32(THREADS))
        begin(load_b64(layers + uint64(8)), first, two, one, qkv_rows, hidden, lane, loaded, places)
        _meet(counter, arrived)

        number, layer = uint32(0), layers
        while number < num_layers:
            qkv_weight, o_weight = load_b64(layer + uint64(8)), load_b64(layer + uint64(48))
            gate_up, down = load_b64(layer + uint64(64)), load_b64(layer + uint64(72))
            stage_norm(x, load_b64(layer), hidden, reciprocal_hidden, eps, staged, partials)
            multiply_rows(
                qkv_weight, qkv_rows, hidden, qkv, False, staged, first, all_warps, lane, loaded, places, sums
            )  # fmt: skip
            begin(o_weight, first, two, one, hidden, q_size, lane, loaded, places)
            arrived = uint32(arrived + num_blocks)
            _meet(counter, arrived)

            unit = uint32(cuda.blockIdx.x)
            while unit < num_q_heads * num_parts:
                attend(
                    qkv, layer, slot, table, length, parts, cos, sin, num_q_heads, num_kv_heads, eps, scale, num_parts,
                    unit, gathered, lane, warp,
                )  # fmt: skip
                unit = uint32(unit + num_blocks)
            arrived = uint32(arrived + num_blocks)
            _meet(counter, arrived)

            stage_attended(parts, num_parts, num_q_heads, staged)
            multiply_rows(o_weight, hidden, q_size, x, True, staged, first, all_warps, lane, loaded, places, sums)
            begin(gate_up, first, one, inner_size, inner_size, hidden, lane, loaded, places)
            arrived = uint32(arrived + num_blocks)
            _meet(counter, arrived)

            stage_norm(x, load_b64(layer + uint64(56)), hidden, reciprocal_hidden, eps, staged, partials)
            pair = first
            while pair < inner_size:
                multiply(staged, hidden, lane, loaded, places, sums)
                if lane == uint32(0):
                    gate = divide(sums[0], float32(1) + exp2(sums[0] * minus_log2_e))
                    store_f32(inner + uint64(pair) * uint64(4), gate * sums[1])
                pair = uint32(pair + all_warps)
                begin(gate_up, pair, one, inner_size, inner_size, hidden, lane, loaded, places)
            begin(down, first, two, one, hidden, inner_size, lane, loaded, places)
            arrived = uint32(arrived + num_blocks)
            _meet(counter, arrived)

            stage(inner, inner_size, staged)
            multiply_rows(down, hidden, inner_size, x, True, staged, first, all_warps, lane, loaded, places, sums)
            number = uint32(number + one)
            layer += layer_bytes
            if number < num_layers:
                begin(load_b64(layer + uint64(8)), first, two, one, qkv_rows, hidden, lane, loaded, places)
            else:
                begin(head, first, two, one, vocabulary, hidden, lane, loaded, places)
            arrived = uint32(arrived + num_blocks)
            _meet(counter, arrived)

        stage_norm(x, final_norm, hidden, reciprocal_hidden, eps, staged, partials)
        multiply_rows(head, vocabulary, hidden, logits, False, staged, first, all_warps, lane, loaded, places, sums)

    return Specialisation(
        name=f"megakernel_{dtype}_d{head_dim}_b{block_size}_sm{capability}",
        kernel=megakernel,
        argument_types=(*(types.uint64,) * 18, *(types.uint32,) * 6, types.float32, types.float32),
        max_threads=THREADS,
        min_blocks=1,
        constants={"dtype": dtype, "head_dim": head_dim, "block_size": block_size, "turns": turns},
        min_capability=capability,
    )


def scratch_floats(hidden: int, inner: int, num_q_heads: int, num_kv_heads: int, head_dim: int) -> dict[str, int]:
    """Float32 that x, qkv, parts and inner take."""
    return {
        "x": hidden, "qkv": (num_q_heads + 2 * num_kv_heads) * head_dim,
        "parts": num_q_heads * PARTS * (head_dim + 2), "inner": inner,
    }  # fmt: skip


def shared_bytes(head_dim: int, largest: int) -> int:
    """Bytes of a block's shared memory: its warps' sums of attention, and the longest vector that is multiplied."""
    return 4 * (WARPS * (head_dim + 2) + largest)


def plan(
    *, hidden: int, inner: int, num_q_heads: int, num_kv_heads: int, head_dim: int, block_size: int, vocabulary: int,
    dtype: str, num_sms: int, capability: int,
) -> Launch:  # fmt: skip
    """The launch for a model of these sizes, on as many blocks as there are multiprocessors or the largest phase has
    work for; `capability` as 80 or 90. Raises ValueError for sizes that no kernel has, naming the size and its
    limit."""
    check_pages(head_dim, block_size, dtype)
    width = VECTOR_WIDTH[dtype]
    for name, size in (("hidden", hidden), ("inner", inner), ("query heads' size", num_q_heads * head_dim)):
        if size % width:
            raise ValueError(f"{name} is {size}, must be a multiple of {width}")
    if head_dim % 2 or head_dim > 128:
        raise ValueError(f"head_dim is {head_dim}, must be even and at most 128")
    pairs = max(vocabulary // 2, inner, hidden // 2, num_q_heads * PARTS * WARPS)
    shared = shared_bytes(head_dim, max(hidden, inner, num_q_heads * head_dim))
    blocks = min(num_sms, -(-pairs // WARPS))
    kernel = _kernel(dtype, head_dim, block_size, max(each for each in TURNS if each <= capability))
    return Launch(kernel, (blocks, 1, 1), (THREADS, 1, 1), shared, is_cooperative=True)


def specialisations() -> Iterator[Specialisation]:
    """For the usual head dims, pages of 16 tokens."""
    for head_dim in (64, 128):
        for capability in TURNS:
            yield _kernel("bf16", head_dim, 16, capability)
