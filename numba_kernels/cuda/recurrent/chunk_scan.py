"""The serial part of the chunk form: a sequence's chunks one after another, with the state in registers.

    V' = U - W S;  O = e^G (Q S) + P V';  S = e^(G_last) S + K^T (e^(G_last - G) V')        Mamba-2: V' = U

All of it is computed transposed. A warp has 16 columns of the state (of dv), all its rows (dk), as accumulators of
`mma.sync`: packed to 16 bits these are the first factor of the next product, so that neither S nor V' nor O goes
through shared memory, and no warp waits for another but for the copies. The second factors come as fragments
(`chunk_layout`), two chunks in shared memory: one is copied while the other is used. U goes to registers, a chunk
ahead. Eight lanes store O's whole sectors, float32, not normalised yet.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import cuda, float32, types, uint32, uint64

from numba_kernels.cuda.intrinsics.convert import pack_bf16, pack_f16, unpack_bf16, unpack_f16
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.memory import (
    copy_async_commit,
    copy_async_wait,
    copy_async_whole_16,
    load_2xf32,
    load_4xb32,
    load_b32,
    shared_address,
    shared_load_2xf32,
    shared_load_4xb32,
    shared_load_f32,
    store_2xf32,
    store_b32,
    store_f32,
)
from numba_kernels.cuda.intrinsics.mma import product_adder, put_4
from numba_kernels.cuda.intrinsics.shared_memory import without_room
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import lane_index
from numba_kernels.cuda.recurrent.chunk_layout import (
    CHUNK,
    FRAGMENT,
    STRIPS,
    ChunkForm,
    first_slot,
    sequence_of,
)
from numba_kernels.cuda.specialisation import Specialisation

ARGUMENT_TYPES = (
    types.uint64,  # workspace
    types.uint64,  # out [T, value heads * columns] float32
    types.uint64,  # query_start [S + 1] int32
    types.uint64,  # seq_lens [S] int32
    types.uint64,  # block_tables [S, table_width] int32
    types.uint64,  # the pages' length [pages] int32
    types.uint64,  # their states [pages, value heads, columns, rows]
    types.uint32,  # table_width
    types.uint32,  # pending
    types.uint32,  # most_steps
    types.uint32,  # num_slots
    types.uint32,  # key heads
    types.uint32,  # value heads
    types.uint32,  # key head of value head h: h divided by this ...
    types.uint32,  # ... modulo this
)

TILES = CHUNK // 8
_wait_for_copies = copy_async_wait(0)


def shared_bytes(form: ChunkForm) -> int:
    """Dynamic shared memory: two chunks."""
    return 2 * (form.key_part + form.copied)


@functools.cache
def _run_copier(threads: int) -> Any:
    """A device function ``(target, source, size, thread)`` of so many threads: bytes to shared memory."""

    @device_function
    def copy_run(target, source, size, thread):
        index = uint32(thread * uint32(16))
        while index < size:
            copy_async_whole_16(uint32(target + index), source + uint64(index))
            index = uint32(index + uint32(threads * 16))

    return copy_run


@functools.cache
def _state_mover(state_dtype: str, tiles: int) -> tuple[Any, Any]:
    """Device functions ``load(sums, address, row_bytes)`` and ``store(sums, address, row_bytes)`` of a lane's part of
    the state: two rows, 8 apart, and two neighbours of each 8 columns."""
    is_f32, item_bytes = state_dtype == "f32", 4 if state_dtype == "f32" else 2

    @device_function
    def load(sums, address, row_bytes):
        for i in range(tiles):
            for h in range(2):
                at = address + uint64(8 * h) * row_bytes + uint64(8 * i * item_bytes)
                if is_f32:
                    low, high = load_2xf32(at)
                else:
                    low, high = unpack_bf16(load_b32(at))
                sums[i, 2 * h] = low
                sums[i, 2 * h + 1] = high

    @device_function
    def store(sums, address, row_bytes):
        for i in range(tiles):
            for h in range(2):
                at = address + uint64(8 * h) * row_bytes + uint64(8 * i * item_bytes)
                if is_f32:
                    store_2xf32(at, (sums[i, 2 * h], sums[i, 2 * h + 1]))
                else:
                    store_b32(at, pack_bf16(sums[i, 2 * h], sums[i, 2 * h + 1]))

    return load, store


@functools.cache
def chunk_scan(form: ChunkForm, num_warps: int, state_dtype: str) -> Specialisation:
    """The kernel, for blocks of 16 columns a warp. Grid: (columns / (16 num_warps), value heads, sequences)."""
    dtype, rows, columns, has_delta = form.dtype, form.rows, form.columns, form.has_delta
    threads, steps, tiles = 32 * num_warps, rows // 16, rows // 8
    key_part, value_part, copied, matrix = form.key_part, form.value_part, form.copied, form.matrix
    stage_bytes = key_part + copied
    triangle_at, decays_at, own_columns_at = key_part + matrix * has_delta, key_part + form.decays, form.copied
    state_item = 4 if state_dtype == "f32" else 2
    add_product = product_adder(dtype)
    pack, unpack = (pack_bf16, unpack_bf16) if dtype == "bf16" else (pack_f16, unpack_f16)

    copy_run, (load_state, store_state) = _run_copier(threads), _state_mover(state_dtype, tiles)

    @cuda.jit
    def kernel(
        workspace, out, query_start, seq_lens, block_tables, lengths, states, table_width, pending, most_steps,
        num_slots, key_heads, value_heads, head_divisor, head_modulus,
    ):  # fmt: skip
        wait_for_previous_grid()
        launch_dependents()
        seq, head = uint32(cuda.blockIdx.z), uint32(cuda.blockIdx.y)
        first_token, num_pending, num_tokens, position, read_page, write_page = sequence_of(
            seq, query_start, seq_lens, block_tables, table_width, lengths, pending, most_steps
        )
        if num_tokens == uint32(0):
            return
        thread, lane = uint32(cuda.threadIdx.x), lane_index()
        warp = uint32(thread >> uint32(5))
        strip = uint32(uint32(cuda.blockIdx.x) * uint32(num_warps) + warp)  # of 16 columns
        key_head = uint32(uint32(head // head_divisor) % head_modulus)
        slot = uint64(first_slot(first_token, seq, pending))
        keys_source = workspace + (slot * uint64(key_heads) + uint64(key_head)) * uint64(key_part)
        values_source = workspace + uint64(num_slots) * uint64(key_heads) * uint64(key_part)
        values_source = values_source + (slot * uint64(value_heads) + uint64(head)) * uint64(value_part)
        keys_step, values_step = uint64(key_heads) * uint64(key_part), uint64(value_heads) * uint64(value_part)
        columns_source = values_source + uint64(own_columns_at) + uint64(uint32(lane * uint32(16)))
        columns_source = columns_source + uint64(uint32(strip * uint32(STRIPS * FRAGMENT)))

        storage = cuda.shared.array(0, float32)
        stages = shared_address(storage)
        own_lane = uint32(lane * uint32(16))
        column = uint32((lane & uint32(3)) * uint32(2))  # of the accumulators
        own_row = uint64(uint32(uint32(strip * uint32(16)) + uint32(lane >> uint32(2))))  # of the page, and 8 further
        of_head = uint64(head) * uint64(columns)
        row_bytes = uint64(rows * state_item)
        page_bytes = uint64(value_heads) * uint64(columns) * row_bytes
        own_state = states + (of_head + own_row) * row_bytes + uint64(uint32(column * uint32(state_item)))

        own_out, out_step = out + (of_head + own_row) * uint64(4), uint64(value_heads) * uint64(columns) * uint64(4)
        sums = cuda.local.array((tiles, 4), float32)
        given = cuda.local.array((STRIPS, 4), uint32)
        news = cuda.local.array((TILES, 4), float32)
        results = cuda.local.array((TILES, 4), float32)
        factors = cuda.local.array(4, uint32)
        others = cuda.local.array(4, uint32)
        copy_run(stages, keys_source, uint32(key_part), thread)
        copy_run(uint32(stages + uint32(key_part)), values_source, uint32(copied), thread)
        copy_async_commit()
        for i in range(STRIPS):
            put_4(given[i], load_4xb32(columns_source + uint64(i * FRAGMENT)))
        for i in range(tiles):
            for j in range(4):
                sums[i, j] = float32(0)
        if position > uint32(0):
            load_state(sums, own_state + read_page * page_bytes, row_bytes)

        token = uint32(0)
        odd = uint32(0)
        while token < num_tokens:
            following = uint32(token + uint32(CHUNK))
            stage = uint32(stages + odd)
            _wait_for_copies()
            sync_block()  # the chunk is there, and the other one's place is free
            odd = uint32(uint32(stage_bytes) - odd)
            keys_source = keys_source + keys_step
            values_source = values_source + values_step
            columns_source = columns_source + values_step
            if following < num_tokens:
                copy_run(uint32(stages + odd), keys_source, uint32(key_part), thread)
                copy_run(uint32(stages + odd + uint32(key_part)), values_source, uint32(copied), thread)
            copy_async_commit()
            decays = uint32(stage + uint32(decays_at))
            for tile in range(TILES):
                for j in range(4):
                    results[tile, j] = float32(0)
                for h in range(2):
                    if has_delta:
                        low, high = unpack(given[tile // 2, 2 * (tile % 2) + h])
                        news[tile, 2 * h] = low
                        news[tile, 2 * h + 1] = high
            # V' = U - W S, O = Q S
            for step in range(steps):
                factors[0] = pack(sums[2 * step, 0], sums[2 * step, 1])
                factors[1] = pack(sums[2 * step, 2], sums[2 * step, 3])
                factors[2] = pack(sums[2 * step + 1, 0], sums[2 * step + 1, 1])
                factors[3] = pack(sums[2 * step + 1, 2], sums[2 * step + 1, 3])
                four = (factors[0], factors[1], factors[2], factors[3])
                for i in range(STRIPS):
                    place = uint32(stage + own_lane + uint32((i * steps + step) * FRAGMENT))
                    if has_delta:
                        put_4(others, shared_load_4xb32(uint32(place + uint32(key_part))))
                        add_product(news[2 * i], four, (others[0], others[1]))
                        add_product(news[2 * i + 1], four, (others[2], others[3]))
                    put_4(others, shared_load_4xb32(place))
                    add_product(results[2 * i], four, (others[0], others[1]))
                    add_product(results[2 * i + 1], four, (others[2], others[3]))
            for tile in range(TILES):
                left, right = shared_load_2xf32(uint32(decays + uint32(32 * tile) + column * uint32(4)))
                for h in range(2):
                    results[tile, 2 * h] = results[tile, 2 * h] * left
                    results[tile, 2 * h + 1] = results[tile, 2 * h + 1] * right
            # O += P V'; then V' is scaled, and S = e^G S + K^T V'
            last = shared_load_f32(uint32(decays + uint32(4 * (CHUNK - 1))))
            for i in range(tiles):
                for j in range(4):
                    sums[i, j] = sums[i, j] * last
            for strip_of_keys in range(STRIPS):
                tile = 2 * strip_of_keys
                if has_delta:
                    factors[0] = pack(news[tile, 0], news[tile, 1])
                    factors[1] = pack(news[tile, 2], news[tile, 3])
                    factors[2] = pack(news[tile + 1, 0], news[tile + 1, 1])
                    factors[3] = pack(news[tile + 1, 2], news[tile + 1, 3])
                else:
                    for i in range(4):
                        factors[i] = given[strip_of_keys, i]
                four = (factors[0], factors[1], factors[2], factors[3])
                for i in range(STRIPS):
                    if i >= strip_of_keys:
                        fragment = i * (i + 1) // 2 + strip_of_keys
                        place = uint32(stage + own_lane + uint32(triangle_at + fragment * FRAGMENT))
                        put_4(others, shared_load_4xb32(place))
                        add_product(results[2 * i], four, (others[0], others[1]))
                        add_product(results[2 * i + 1], four, (others[2], others[3]))
                place = uint32(decays + uint32(4 * CHUNK + 64 * strip_of_keys) + column * uint32(4))
                for side in range(2):
                    left, right = shared_load_2xf32(uint32(place + uint32(32 * side)))
                    for h in range(2):
                        if has_delta:
                            low, high = news[tile + side, 2 * h], news[tile + side, 2 * h + 1]
                        else:
                            low, high = unpack(given[strip_of_keys, 2 * side + h])
                        factors[2 * side + h] = pack(low * left, high * right)
                four = (factors[0], factors[1], factors[2], factors[3])
                for step in range(steps):
                    place = uint32(stage + own_lane + uint32(matrix + (strip_of_keys * steps + step) * FRAGMENT))
                    put_4(others, shared_load_4xb32(place))
                    add_product(sums[2 * step], four, (others[0], others[1]))
                    add_product(sums[2 * step + 1], four, (others[2], others[3]))
            if following < num_tokens:
                for i in range(STRIPS):
                    put_4(given[i], load_4xb32(columns_source + uint64(i * FRAGMENT)))
            for tile in range(TILES):
                for side in range(2):
                    own_token = uint32(token + column + uint32(8 * tile + side))
                    if own_token >= num_pending and own_token < num_tokens:
                        row = uint64(uint32(uint32(first_token + own_token) - num_pending))
                        at = own_out + row * out_step
                        store_f32(at, results[tile, side])
                        store_f32(at + uint64(32), results[tile, 2 + side])
            token = following

        store_state(sums, own_state + write_page * page_bytes, row_bytes)

    kind = "delta" if has_delta else "mamba"
    name = f"{kind}_chunk_scan_{dtype}_{rows}x{columns}_w{num_warps}_s{state_dtype}"
    constants = {"dtype": dtype, "rows": rows, "columns": columns, "has_delta": has_delta, "num_warps": num_warps}
    lacking = without_room(shared_bytes(form))
    return Specialisation(name, kernel, ARGUMENT_TYPES, threads, constants=constants, spills_on=lacking)
