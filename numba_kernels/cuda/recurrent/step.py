"""The recurrence of a gated delta rule and of Mamba-2 with their convolution, gates and norms of keys, token by token.

For each value head, with decay e, step size b, key k, query q and value v of a token, and a state S ``[keys, values]``:

    d = b (v - e S^T k)   (mamba: d = b v)      o = e S^T q + d (k . q)      S = e S + k d^T

Rows of S^T, which memory holds, are independent. A warp keeps `rows` of them in registers over all tokens of its
sequence's chunk, lanes along the keys, so S is read once and written once, whatever the number of tokens. The block's
threads convolve a token's key and query together, a channel each; a barrier a token, and each warp normalises them.
First come the tokens that are pending in the page that is read, which give no output.

The sums S^T k and S^T q of all rows go through `exchange` together. Lane i has those of row i modulo `rows`, with its
value and d; the other lanes get d by shuffles.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from numba import cuda, float32, int32, types, uint32, uint64

from numba_kernels.cuda.intrinsics import convert, memory
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import quad_storer
from numba_kernels.cuda.intrinsics.element_types import DTYPES, ITEM_BYTES
from numba_kernels.cuda.intrinsics.math import divide_u32, minimum_u32
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import lane_index
from numba_kernels.cuda.recurrent.chunk import covered, find_chunk, run_loader
from numba_kernels.cuda.recurrent.step_parts import (
    Channels,
    Chunk,
    Columns,
    columns_of,
    convolver,
    input_finder,
    input_keeper,
    row_stepper,
    rows_of,
    token_taker,
)
from numba_kernels.cuda.specialisation import Launch, Specialisation

MOST_WARPS = 4  # of a block, four of which fit a multiprocessor of Hopper, which then reads 64 KB at a time


@functools.cache
def _row_mover(stored: str, columns: Columns) -> tuple[Any, Any]:
    """Device functions ``load(address, lane, row)`` and ``store(address, lane, row)`` of a lane's part of a row."""
    width, runs, size, is_whole = columns.width, columns.runs, columns.size, columns.is_whole
    item_bytes = ITEM_BYTES[stored]
    load_run, step = run_loader(stored, width), uint64(32 * width * item_bytes)
    store_quad, narrow, pack = quad_storer(stored), convert.bf16_from_f32, convert.pack_bf16
    is_float = stored == "f32"
    store_f32, store_two, store_b16, store_b32 = (
        memory.store_f32,
        memory.store_2xf32,
        memory.store_b16,
        memory.store_b32,
    )

    @device_function
    def load(address, lane, row):
        at = address + uint64(lane) * uint64(width * item_bytes)
        for run in range(runs):
            if is_whole or uint32(lane + uint32(32 * run)) < uint32(size):
                loaded = load_run(at + uint64(run) * step)
                for i in range(width):
                    row[run * width + i] = loaded[i]

    @device_function
    def store(address, lane, row):
        at = address + uint64(lane) * uint64(width * item_bytes)
        for run in range(runs):
            if is_whole or uint32(lane + uint32(32 * run)) < uint32(size):
                target, first = at + uint64(run) * step, run * width
                if width == 4:
                    store_quad(target, (row[first], row[first + 1], row[first + 2], row[first + 3]))
                elif width == 2 and is_float:
                    store_two(target, (row[first], row[first + 1]))
                elif width == 2:
                    store_b32(target, pack(row[first], row[first + 1]))
                elif is_float:
                    store_f32(target, row[first])
                else:
                    store_b16(target, narrow(row[first]))

    return load, store


@functools.cache
def _step(is_delta: bool, dtype: str, stored: str, taps: int, columns: Columns) -> Specialisation:
    """Arguments: see `plan`."""
    rows, elements, key_dim = rows_of(columns), columns.elements, columns.size
    item_bytes = uint64(ITEM_BYTES[dtype])
    column_bytes = uint64(columns.size * ITEM_BYTES[stored])
    load_f32, store_f32, store_b32 = memory.load_f32, memory.store_f32, memory.store_b32
    convolve, inputs_of = convolver(dtype, taps), input_finder(taps)
    padded, is_whole, store_shared = 32 * elements, columns.is_whole, memory.shared_store_f32
    shared_floats = 4 * padded
    take_token, step_rows = token_taker(is_delta, dtype, columns), row_stepper(is_delta, stored, columns)
    keep_inputs = input_keeper(is_delta, dtype, taps, key_dim)
    load_row, store_row = _row_mover(stored, columns)

    @cuda.jit
    def step(
        x, conv, conv_bias, a, dt_bias, skip, out, query_start, seq_lens, table, lengths, inputs, gates, state,
        table_width, stride, x_first, gates_first, channels, pending, most_steps, num_gates, key_heads, value_heads,
        value_dim, q_first, k_first, v_first, is_tiled, parts, least, most,
    ):  # fmt: skip
        wait_for_previous_grid()
        launch_dependents()
        lane, warp = lane_index(), uint32(uint32(cuda.threadIdx.x) >> uint32(5))
        head = divide_u32(uint32(cuda.blockIdx.x), parts)
        part = uint32(uint32(cuda.blockIdx.x) - head * parts)
        seq = uint32(cuda.blockIdx.y)
        block_rows = uint32(uint32(uint32(cuda.blockDim.x) >> uint32(5)) * uint32(rows))
        block_first = uint32(part * block_rows)
        first_row = uint32(block_first + warp * uint32(rows))
        out_bytes = uint64(value_heads) * uint64(value_dim) * uint64(4)
        start, count, before, read, written, length = find_chunk(
            query_start, seq_lens, table, table_width, lengths, seq
        )
        own = uint32(lane & uint32(rows - 1))  # the row whose sums the lane gets
        own_row = uint32(first_row + own)
        stores = lane < uint32(rows) and own_row < value_dim
        out += (uint64(uint32(start)) * uint64(value_heads) + uint64(head)) * uint64(value_dim) * uint64(4)
        out += uint64(own_row) * uint64(4)
        if before < int32(0):
            while stores and count > int32(0):
                store_f32(out, float32(0))
                out += out_bytes
                count = int32(count - int32(1))
            return
        if count > int32(most_steps):
            return
        ratio = divide_u32(value_heads, key_heads)
        key_head = divide_u32(head, ratio)
        is_owner = uint32(key_head * ratio) == head
        if is_tiled != uint32(0):
            key_head = uint32(head - divide_u32(head, key_heads) * key_heads)
            is_owner = head < key_heads
        k_channel = uint32(k_first + key_head * uint32(key_dim))
        q_channel = uint32(q_first + key_head * uint32(key_dim))
        v_channel = uint32(v_first + head * value_dim)

        x_bytes = uint64(stride) * item_bytes
        input_bytes = uint64(channels) * item_bytes
        page_rows = uint32(uint32(taps - 1) + pending)
        given = inputs + uint64(uint32(read)) * uint64(page_rows) * input_bytes
        pending_gates = gates + uint64(uint32(read)) * uint64(pending) * uint64(num_gates) * item_bytes
        head_bytes = uint64(value_dim) * column_bytes
        first_bytes = uint64(head) * head_bytes + uint64(first_row) * column_bytes
        page_bytes = uint64(value_heads) * head_bytes
        source = state + uint64(uint32(read)) * page_bytes + first_bytes
        target = state + uint64(uint32(written)) * page_bytes + first_bytes

        mixed = memory.shared_address(
            cuda.shared.array(shared_floats, float32)
        )  # of even and odd tokens: key, then query
        if not is_whole:  # the ends of keys and queries stay 0
            thread = uint32(cuda.threadIdx.x)
            while thread < uint32(4 * padded):
                store_shared(uint32(mixed + thread * uint32(4)), float32(0))
                thread = uint32(thread + uint32(cuda.blockDim.x))
            sync_block()
        held = cuda.local.array((rows, elements), float32)
        key = cuda.local.array(elements, float32)
        query = cuda.local.array(elements, float32)
        tokens = cuda.local.array(taps, uint64)
        for i in range(rows):
            for e in range(elements):
                held[i, e] = float32(0)
            if before > int32(0) and uint32(first_row + uint32(i)) < value_dim:
                load_row(source + uint64(i) * column_bytes, lane, held[i])
        rate = load_f32(a + uint64(head) * uint64(4))
        bias = load_f32(dt_bias + uint64(head) * uint64(4))
        skipped = float32(0)
        if not is_delta:
            skipped = load_f32(skip + uint64(head) * uint64(4))

        token = before
        if before > int32(0):
            token = length
        end = int32(before + count)
        now = covered(count, before, pending)
        chunk = Chunk(
            x, given, pending_gates, x_bytes, input_bytes, uint64(num_gates) * item_bytes, uint64(x_first) * item_bytes,
            uint64(gates_first) * item_bytes, start, before, length, now, end,
        )  # fmt: skip
        channels, limits = Channels(head, k_channel, q_channel, v_channel, value_heads), (rate, bias, least, most)
        while token < end:
            for tap in range(taps):
                tokens[tap] = inputs_of(chunk, int32(token - int32(taps - 1) + int32(tap)))
            token_gates = x + uint64(uint32(start + token - before)) * x_bytes + chunk.gates_at
            if token < before:
                token_gates = pending_gates + uint64(uint32(token - length)) * chunk.gate_bytes
            keys_at = uint32(mixed + (uint32(token) & uint32(1)) * uint32(8 * padded))
            thread = uint32(cuda.threadIdx.x)
            while thread < uint32(key_dim):
                place = uint32(keys_at + thread * uint32(4))
                store_shared(place, convolve(tokens, conv, conv_bias, uint32(k_channel + thread)))
                store_shared(
                    uint32(place + uint32(4 * padded)), convolve(tokens, conv, conv_bias, uint32(q_channel + thread))
                )
                thread = uint32(thread + uint32(cuda.blockDim.x))
            value = float32(0)
            if own_row < value_dim:
                value = convolve(tokens, conv, conv_bias, uint32(v_channel + own_row))

            sync_block()  # a warp that is a token ahead writes the other half
            sizes = take_token(key, query, keys_at, lane, token_gates, channels, limits)
            result = step_rows(held, key, query, sizes, value, skipped, lane)
            if token >= before:
                if stores:
                    store_f32(out, result)
                out += out_bytes
            token = int32(token + int32(1))
            if token == now:
                for i in range(rows):
                    if uint32(first_row + uint32(i)) < value_dim:
                        store_row(target + uint64(i) * column_bytes, lane, held[i])

        kept = inputs + uint64(uint32(written)) * uint64(page_rows) * input_bytes
        kept_gates = gates + uint64(uint32(written)) * uint64(pending) * chunk.gate_bytes
        values = block_first, minimum_u32(uint32(value_dim - block_first), block_rows)
        keep_inputs(
            chunk, channels, kept, kept_gates, values, (is_owner and part == uint32(0), part == uint32(0)), warp
        )
        if part == uint32(0) and warp == uint32(0) and head == uint32(0) and lane == uint32(0):
            store_b32(lengths + uint64(uint32(written)) * uint64(4), uint32(now))

    rule = "delta_step" if is_delta else "mamba_step"
    name = f"{rule}_{dtype}_{stored}_t{taps}_k{columns.size}_x{columns.width}"
    constants = {"dtype": dtype, "state": stored, "taps": taps, "rows": columns.size, "width": columns.width}
    argument_types = (types.uint64,) * 14 + (types.uint32,) * 16 + (types.float32,) * 2
    return Specialisation(name, step, argument_types, 32 * MOST_WARPS, constants=constants)


def plan(
    num_seqs: int, value_heads: int, value_dim: int, key_dim: int, taps: int, dtype: str, state_dtype: str, *,
    is_delta: bool,
) -> tuple[Launch, int]:  # fmt: skip
    """A batch of so many sequences, padding included; and the number of blocks that share a head, an argument.

    Arguments: addresses of x, the convolution's weights ``[channels, taps]`` and bias (0 without), a, dt_bias, d (0 for
    a delta rule), the results (float32 ``[T, value_heads * value_dim]``), query_start, seq_lens, the block table, and
    the pages' lengths, inputs, gates (0 without) and states; the table's width, elements of a row of x, x's first
    column of channels and of gates, channels, pending rows, the most tokens of a sequence that this launch serves
    (`chunk_form` serves the others), gates of a row, key_heads, value_heads, value_dim, the
    first channels of q, k and v, whether heads are tiled, blocks a head; the limits of mamba's dt.
    """
    columns = columns_of(key_dim)
    warps = min(2 if num_seqs <= 4 else MOST_WARPS, -(-value_dim // rows_of(columns)))
    parts = -(-value_dim // (rows_of(columns) * warps))
    kernel = _step(is_delta, dtype, state_dtype, taps, columns)
    return Launch(kernel, (value_heads * parts, num_seqs, 1), (32 * warps, 1, 1)), parts


def specialisations() -> Iterator[Specialisation]:
    """Heads of 128 and 64 keys, convolutions of 4 taps."""
    for dtype in DTYPES:
        for is_delta, size in ((True, 128), (False, 128), (True, 64)):
            yield _step(is_delta, dtype, "f32", 4, columns_of(size))
    for is_delta in (True, False):
        yield _step(is_delta, "bf16", "bf16", 4, columns_of(128))
