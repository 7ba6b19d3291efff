"""The parallel part of the chunk form: everything of a chunk of 64 tokens that needs no state. For all chunks at once.

    Q, K, V = SiLU(conv(x)), for the delta rule normalised;  G_i = g_0 + ... + g_i;  D_ij = e^(G_i - G_j), i >= j
    delta rule:  A = tril(beta K K^T * D, -1);  T = (I + A)^-1;  U = T (beta V);  -W = -T (beta e^G K)
                 P = Q K^T * D;  decays e^G and e^(G_last - G)
    Mamba-2:     U = V;  P = (Q K^T * D) dt + d I;  decays e^G and e^(G_last - G) dt;  K is B, Q is C, V is x

See https://arxiv.org/abs/2412.06464 and https://arxiv.org/abs/2405.21060. No exponent is positive, so every factor is
at most 1 (times dt).

A block has one chunk, one key head, and some of its value heads, one after another: Q, K and their products are made
once. Tiles above the diagonal of the products of 64 x 64 are left out. A sequence's last chunk also writes the page's
convolution inputs and length. `chunk_layout` has the workspace, `chunk_inputs` the tiles.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import cuda, float32, types, uint32, uint64

from numba_kernels.cuda.intrinsics.convert import pack_bf16, pack_f16
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.math import exp2, minimum_u32
from numba_kernels.cuda.intrinsics.memory import (
    load_f32,
    shared_address,
    shared_load_2xf32,
    shared_load_4xb32,
    shared_load_f32,
    shared_store_4xb32,
    store_4xb32,
    store_b32,
    store_f32,
)
from numba_kernels.cuda.intrinsics.mma import load_matrix_x4_transposed, product_adder, put_4
from numba_kernels.cuda.intrinsics.sync import launch_dependents, sync_block, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import lane_index
from numba_kernels.cuda.recurrent.chunk_inputs import (
    GATES_BYTES,
    THREADS,
    gate_maker,
    slider,
    tail_keeper,
    tile_pitch,
)
from numba_kernels.cuda.recurrent.chunk_layout import (
    CHUNK,
    FRAGMENT,
    STRIPS,
    TRIANGLE,
    ChunkForm,
    first_slot,
    sequence_of,
)
from numba_kernels.cuda.recurrent.chunk_products import TILES, decayer, key_products, own_fragment
from numba_kernels.cuda.recurrent.triangular_inverse import PITCH, SIZE_BYTES, TEMPORARY_BYTES, invert
from numba_kernels.cuda.specialisation import Specialisation

MOST_HEADS = 8
"""Value heads of a block."""

ARGUMENT_TYPES = (
    types.uint64,  # x [T, stride]
    types.uint64,  # workspace
    types.uint64,  # conv [channels, taps] float32
    types.uint64,  # its bias [channels] float32, or 0
    types.uint64,  # a [value heads] float32
    types.uint64,  # dt_bias [value heads] float32
    types.uint64,  # d [value heads] float32; 0 for the delta rule
    types.uint64,  # query_start [S + 1] int32
    types.uint64,  # seq_lens [S] int32
    types.uint64,  # block_tables [S, table_width] int32
    types.uint64,  # the pages' length [pages] int32
    types.uint64,  # their inputs [pages, taps - 1 + pending, channels]
    types.uint64,  # their gates [pages, pending, gates]; 0 without pending tokens
    types.uint32,  # table_width
    types.uint32,  # elements of x's rows
    types.uint32,  # x's column of channel 0
    types.uint32,  # x's column of the first gate: b, then a; or dt
    types.uint32,  # channels of the convolution
    types.uint32,  # pending: rows of a page for pending tokens
    types.uint32,  # most_steps
    types.uint32,  # slots of the workspace
    types.uint32,  # key heads
    types.uint32,  # value heads
    types.uint32,  # value heads of a block, at most MOST_HEADS
    types.uint32,  # the first channels of q,
    types.uint32,  # k,
    types.uint32,  # and v
    types.uint32,  # value head i of key head h: this times h ...
    types.uint32,  # ... plus this times i
    types.float32,  # dt at least
    types.float32,  # and at most
)


def _scratch_bytes(form: ChunkForm) -> int:
    """Q's tile, and what later takes its place: a temporary of the inversion, and T's fragments."""
    return max(CHUNK * tile_pitch(form.rows), (TEMPORARY_BYTES + TRIANGLE * FRAGMENT) * form.has_delta)


def shared_bytes(form: ChunkForm) -> int:
    """Dynamic shared memory: tiles of Q, K and V, A, gates."""
    tiles = _scratch_bytes(form) + CHUNK * (tile_pitch(form.rows) + tile_pitch(form.columns))
    return tiles + SIZE_BYTES * form.has_delta + MOST_HEADS * GATES_BYTES


@functools.cache
def _transformer(form: ChunkForm) -> Any:
    """A device function ``(matrix, gates, k_tile, place, fragments, warp, lane, target)``: a warp's 16 rows of T
    diag(beta), as fragments in shared memory, and of -W, as fragments at `target`."""
    steps, pitch = form.rows // 16, tile_pitch(form.rows)
    add_product, pack = product_adder(form.dtype), pack_bf16 if form.dtype == "bf16" else pack_f16

    @device_function
    def transform(matrix, gates, k_tile, place, fragments, warp, lane, target):
        t = cuda.local.array((STRIPS, 4), uint32)
        words = cuda.local.array(4, uint32)
        sums = cuda.local.array((2, 4), float32)
        row = uint32(uint32(warp * uint32(16)) + uint32(lane >> uint32(2)))
        column = uint32(uint32(lane & uint32(3)) * uint32(2))
        for strip in range(STRIPS):
            for i in range(4):
                t[strip, i] = uint32(0)
            if uint32(strip) <= warp:
                for side in range(2):
                    j = uint32(column + uint32(16 * strip + 8 * side))
                    totals = shared_load_2xf32(uint32(gates + j * uint32(4)))
                    betas = shared_load_2xf32(uint32(gates + uint32(4 * CHUNK) + j * uint32(4)))
                    left_decay, right_decay = -exp2(totals[0]), -exp2(totals[1])
                    for h in range(2):
                        i = uint32(row + uint32(8 * h))
                        both = shared_load_2xf32(uint32(matrix + uint32(i * uint32(PITCH) + j) * uint32(4)))
                        left, right = both[0] * betas[0], both[1] * betas[1]
                        words[2 * h + side] = pack(left, right)
                        t[strip, 2 * side + h] = pack(left * left_decay, right * right_decay)
                fragment = uint32(fragments + own_fragment(warp, uint32(strip)) * uint32(FRAGMENT))
                shared_store_4xb32(
                    uint32(fragment + lane * uint32(16)), (words[0], words[1], words[2], words[3])
                )  # fmt: skip
        target = target + uint64(uint32(warp * uint32(steps * FRAGMENT)))
        for step in range(steps):
            for side in range(2):
                for i in range(4):
                    sums[side, i] = float32(0)
            for strip in range(STRIPS):
                if uint32(strip) <= warp:
                    four = (t[strip, 0], t[strip, 1], t[strip, 2], t[strip, 3])
                    k_place = uint32(k_tile + place + uint32(strip * 16 * pitch + step * 32))
                    put_4(words, load_matrix_x4_transposed(k_place))
                    add_product(sums[0], four, (words[0], words[1]))
                    add_product(sums[1], four, (words[2], words[3]))
            a, b = pack(sums[0, 0], sums[0, 1]), pack(sums[1, 0], sums[1, 1])
            c, d = pack(sums[0, 2], sums[0, 3]), pack(sums[1, 2], sums[1, 3])
            store_4xb32(target + uint64(step * FRAGMENT), (a, b, c, d))

    return transform


@functools.cache
def _value_maker(form: ChunkForm) -> Any:
    """A device function ``(place, fragments, lane, target)``: U of 16 columns, whose tile of V begins at `place`, as
    fragments."""
    pitch, has_delta = tile_pitch(form.columns), form.has_delta
    add_product, pack = product_adder(form.dtype), pack_bf16 if form.dtype == "bf16" else pack_f16

    @device_function
    def make(place, fragments, lane, target):
        v = cuda.local.array(4, uint32)
        t = cuda.local.array(4, uint32)
        sums = cuda.local.array((TILES, 4), float32)
        for i in range(TILES):
            for j in range(4):
                sums[i, j] = float32(0)
        for strip in range(STRIPS):
            put_4(v, load_matrix_x4_transposed(uint32(place + uint32(strip * 16 * pitch))))
            four = (v[0], v[2], v[1], v[3])
            if not has_delta:
                store_4xb32(target + uint64(strip * FRAGMENT), four)
            for later in range(STRIPS):
                if has_delta and later >= strip:
                    fragment = (later * (later + 1) // 2 + strip) * FRAGMENT
                    put_4(t, shared_load_4xb32(uint32(fragments + uint32(fragment) + lane * uint32(16))))
                    add_product(sums[2 * later], four, (t[0], t[1]))
                    add_product(sums[2 * later + 1], four, (t[2], t[3]))
        if has_delta:
            for i in range(STRIPS):
                a, b = pack(sums[2 * i, 0], sums[2 * i, 1]), pack(sums[2 * i, 2], sums[2 * i, 3])
                c, d = pack(sums[2 * i + 1, 0], sums[2 * i + 1, 1]), pack(sums[2 * i + 1, 2], sums[2 * i + 1, 3])
                store_4xb32(target + uint64(i * FRAGMENT), (a, b, c, d))

    return make


@functools.cache
def chunk_factors(form: ChunkForm, taps: int, has_bias: bool) -> Specialisation:
    """The kernel. Grid: (chunks of the longest sequence, key heads times parts of their value heads, sequences)."""
    dtype, rows, columns, has_delta = form.dtype, form.rows, form.columns, form.has_delta
    pitch, value_pitch, key_part, value_part = tile_pitch(rows), tile_pitch(columns), form.key_part, form.value_part
    pieces, value_pieces, value_strips = rows // 8, columns // 8, columns // 16
    k_offset = _scratch_bytes(form)
    v_offset = k_offset + CHUNK * pitch
    matrix_offset = v_offset + CHUNK * value_pitch
    gates_offset = matrix_offset + SIZE_BYTES * has_delta
    p_place, decays_place, u_place = form.matrix * has_delta, form.decays, form.copied
    value_tokens = 8  # of a thread's slide over V
    q_length = float32(rows**-0.5 if has_delta else 1)
    keep_tail, make_gates = tail_keeper(taps), gate_maker(dtype, has_delta)
    slide, slide_normed = slider(dtype, taps, has_bias, 0), slider(dtype, taps, has_bias, pieces * has_delta)
    multiply_keys, decay, transform, make_values = (
        key_products(form), decayer(form), _transformer(form), _value_maker(form)
    )  # fmt: skip

    @cuda.jit
    def kernel(
        x, workspace, conv, bias, a, dt_bias, d, query_start, seq_lens, block_tables, lengths, inputs, gates,
        table_width, stride, first_column, gates_column, channels, pending, most_steps, num_slots, key_heads,
        value_heads, heads_of_block, q_channel, k_channel, v_channel, head_step, share_step, least, most,
    ):  # fmt: skip
        wait_for_previous_grid()
        launch_dependents()
        seq, first = uint32(cuda.blockIdx.z), uint32(uint32(cuda.blockIdx.x) * uint32(CHUNK))
        tokens = sequence_of(seq, query_start, seq_lens, block_tables, table_width, lengths, pending, most_steps)
        first_token, num_pending, num_tokens, position, _, write_page = tokens
        if first >= num_tokens:
            return
        rows_of_inputs = (x, inputs, uint32(pending + uint32(taps - 1)), channels, stride, first_column)
        gate_fields = (gates, pending, gates_column, value_heads, stride)
        is_last = uint32(first + uint32(CHUNK)) >= num_tokens
        slot = uint64(uint32(first_slot(first_token, seq, pending) + uint32(cuda.blockIdx.x)))
        part = uint32(uint32(cuda.blockIdx.y) // key_heads)
        key_head = uint32(uint32(cuda.blockIdx.y) - part * key_heads)
        first_head = uint32(part * heads_of_block)
        end = minimum_u32(uint32(first_head + heads_of_block), uint32(value_heads // key_heads))
        thread, lane = uint32(cuda.threadIdx.x), lane_index()
        warp = uint32(thread >> uint32(5))
        own_lane = uint64(uint32(lane * uint32(16)))
        keys_target = workspace + (slot * uint64(key_heads) + uint64(key_head)) * uint64(key_part) + own_lane
        values_target = workspace + uint64(num_slots) * uint64(key_heads) * uint64(key_part)
        values_target = values_target + slot * uint64(value_heads) * uint64(value_part)
        storage = cuda.shared.array(0, float32)
        q_tile = shared_address(storage)
        k_tile, v_tile = uint32(q_tile + uint32(k_offset)), uint32(q_tile + uint32(v_offset))
        matrix, fragments = uint32(q_tile + uint32(matrix_offset)), uint32(q_tile + uint32(TEMPORARY_BYTES))
        block_gates = uint32(q_tile + uint32(gates_offset))
        place = uint32(uint32(lane & uint32(15)) * uint32(pitch) + uint32(lane >> uint32(4)) * uint32(16))
        v_place = uint32(uint32(lane & uint32(15)) * uint32(value_pitch) + uint32(lane >> uint32(4)) * uint32(16))

        # The gates of the block's value heads, a warp each; then Q and K, `pieces` tokens of 8 channels a thread.
        index = uint32(first_head + warp)
        while index < end:
            own_gates = uint32(block_gates + uint32(index - first_head) * uint32(GATES_BYTES))
            head = uint32(key_head * head_step + index * share_step)
            make_gates(own_gates, first, head, x, tokens, gate_fields, (a, dt_bias), (least, most))
            index = uint32(index + uint32(4))
        own_q, own_k = uint32(q_channel + key_head * uint32(rows)), uint32(k_channel + key_head * uint32(rows))
        rest = uint32(thread // uint32(pieces))
        piece = uint32(thread - rest * uint32(pieces))
        token = uint32(uint32(rest >> uint32(1)) * uint32(pieces))
        tile, channel, length = q_tile, own_q, q_length
        if uint32(rest & uint32(1)) == uint32(1):
            tile, channel, length = k_tile, own_k, float32(1)
        target = uint32(tile + piece * uint32(16) + token * uint32(pitch))
        slide_normed(
            target, uint32(pitch), (uint32(first + token), uint32(pieces)), uint32(channel + piece * uint32(8)), length,
            (conv, bias), tokens, rows_of_inputs,
        )  # fmt: skip
        if is_last and part == uint32(0):
            keep_tail(own_q, uint32(pieces), thread, tokens, rows_of_inputs)
            keep_tail(own_k, uint32(pieces), thread, tokens, rows_of_inputs)
            if key_head == uint32(0) and thread == uint32(0):
                covered = uint32(uint32(position + num_tokens) - num_pending)
                store_b32(lengths + write_page * uint64(4), covered)
        sync_block()
        products = cuda.local.array((TILES, 4), float32)
        squares = cuda.local.array((TILES, 4), float32)
        multiply_keys(products, squares, q_tile, k_tile, warp, place, part == uint32(0), keys_target)

        index = first_head
        while index < end:
            head = uint32(key_head * head_step + index * share_step)
            target = values_target + uint64(head) * uint64(value_part)
            own_gates = uint32(block_gates + uint32(index - first_head) * uint32(GATES_BYTES))
            own_v = uint32(v_channel + head * uint32(columns))
            sync_block()  # all have read V, Q and T's fragments
            task = thread
            while task < uint32(value_pieces * CHUNK // value_tokens):
                group = uint32(task // uint32(value_pieces))
                piece = uint32(task - group * uint32(value_pieces))
                token = uint32(group * uint32(value_tokens))
                slide(
                    uint32(v_tile + piece * uint32(16) + token * uint32(value_pitch)), uint32(value_pitch),
                    (uint32(first + token), uint32(value_tokens)), uint32(own_v + piece * uint32(8)), float32(1),
                    (conv, bias), tokens, rows_of_inputs,
                )  # fmt: skip
                task = uint32(task + uint32(THREADS))
            if is_last:
                keep_tail(own_v, uint32(value_pieces), thread, tokens, rows_of_inputs)
            if thread < uint32(CHUNK):
                at = uint32(own_gates + thread * uint32(4))
                decays = target + uint64(decays_place) + uint64(uint32(thread * uint32(4)))
                store_f32(decays, exp2(shared_load_f32(at)))
                store_f32(decays + uint64(4 * CHUNK), shared_load_f32(uint32(at + uint32(8 * CHUNK))))
            diagonal = float32(0)
            if not has_delta:
                diagonal = load_f32(d + uint64(head) * uint64(4))
            decay(products, squares, matrix, own_gates, warp, lane, diagonal, target + uint64(p_place) + own_lane)
            if has_delta:
                invert(matrix, q_tile, thread)
                transform(matrix, own_gates, k_tile, place, fragments, warp, lane, target + own_lane)
            sync_block()  # V, and T's fragments
            strip = warp
            while strip < uint32(value_strips):
                u_target = target + uint64(u_place) + uint64(uint32(strip * uint32(STRIPS * FRAGMENT))) + own_lane
                make_values(uint32(v_tile + v_place + strip * uint32(32)), fragments, lane, u_target)
                strip = uint32(strip + uint32(4))
            index = uint32(index + uint32(1))

    kind = "delta" if has_delta else "mamba"
    name = f"{kind}_chunk_factors_{dtype}_{rows}x{columns}_k{taps}{'_bias' if has_bias else ''}"
    constants = {"dtype": dtype, "rows": rows, "columns": columns, "taps": taps, "has_delta": has_delta}
    return Specialisation(name, kernel, ARGUMENT_TYPES, THREADS, constants=constants)
