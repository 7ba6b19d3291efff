"""Before latent attention: queries are rotated, and perhaps scaled, in place; the tokens' latent rows are normed,
rotated and stored."""

from __future__ import annotations

import functools

from numba import cuda, float32, types, uint32, uint64

from numba_kernels.cuda.intrinsics.block import block_sum
from numba_kernels.cuda.intrinsics.element import element_loader, elements_storer
from numba_kernels.cuda.intrinsics.element_types import ITEM_BYTES
from numba_kernels.cuda.intrinsics.math import reciprocal_sqrt
from numba_kernels.cuda.intrinsics.memory import load_f32
from numba_kernels.cuda.intrinsics.sync import launch_dependents, wait_for_previous_grid
from numba_kernels.cuda.kv_cache import page_row
from numba_kernels.cuda.specialisation import Specialisation

THREADS = 128


@functools.cache
def latent_prepare(
    dtype: str, width: int, rotary: int, interleaved: bool, q_width: int, q_first: int
) -> Specialisation:
    """Queries have so many numbers a head, and the rotated ones from `q_first` on. Arguments: see
    `planning.plan_prepare`."""
    load, store = element_loader(dtype), elements_storer(dtype, 1)
    item, half, rest, q_rest = uint64(ITEM_BYTES[dtype]), rotary // 2, width - rotary, q_width - rotary
    padded = page_row(width)
    reciprocal_rest = float32(1.0 / rest)

    @cuda.jit
    def prepare(q, latent, positions, cos, sin, q_scales, norm, slot_mapping, pages, num_heads, eps):
        partials = cuda.shared.array(32, float32)
        value = cuda.local.array(1, float32)
        wait_for_previous_grid()
        launch_dependents()
        token, thread = uint32(cuda.blockIdx.x), uint32(cuda.threadIdx.x)
        table = uint64(uint32(positions[token])) * uint64(4 * half)
        slot = slot_mapping[token]
        source = latent + uint64(token) * uint64(width) * item
        row = pages + uint64(slot) * uint64(padded) * item
        factor = float32(1)
        if q_scales != uint64(0):
            factor = load_f32(q_scales + uint64(uint32(positions[token])) * uint64(4))
        index = thread
        while index < uint32(uint32(num_heads + uint32(1)) * uint32(half)):  # the last head is the token's own row
            head = uint32(index // uint32(half))
            pair = uint32(index - head * uint32(half))
            low = pair
            high = uint32(pair + uint32(half))
            if interleaved:
                low = uint32(uint32(2) * pair)
                high = uint32(low + uint32(1))
            place = q + (uint64(token) * uint64(num_heads) + uint64(head)) * uint64(q_width) * item
            place = place + uint64(q_first) * item
            target = place
            is_written = True
            size = factor
            if head == num_heads:
                place = source + uint64(rest) * item
                target = row
                is_written = slot >= 0
                size = float32(1)
            if is_written:
                first = load(place + uint64(low) * item)
                second = load(place + uint64(high) * item)
                c = load_f32(cos + table + uint64(pair) * uint64(4))
                s = load_f32(sin + table + uint64(pair) * uint64(4))
                value[0] = (first * c - second * s) * size
                store(target + uint64(low) * item, value)
                value[0] = (second * c + first * s) * size
                store(target + uint64(high) * item, value)
            index = uint32(index + uint32(THREADS))
        if q_scales != uint64(0):
            index = thread
            while index < uint32(num_heads * uint32(q_rest)):
                head = uint32(index // uint32(q_rest))
                column = uint32(index - head * uint32(q_rest))
                if column >= uint32(q_first):
                    column = uint32(column + uint32(rotary))
                first_column = (uint64(token) * uint64(num_heads) + uint64(head)) * uint64(q_width)
                place = q + (first_column + uint64(column)) * item
                value[0] = load(place) * factor
                store(place, value)
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
    if (q_width, q_first) != (width, 0):
        name += f"_q{q_width}_{q_first}"
    constants = {
        "dtype": dtype, "width": width, "rotary": rotary, "interleaved": interleaved, "q_width": q_width,
        "q_first": q_first,
    }  # fmt: skip
    argument_types = (
        types.uint64, types.uint64, types.CPointer(types.int32), *(types.uint64,) * 4, types.CPointer(types.int64),
        types.uint64, types.uint32, types.float32,
    )  # fmt: skip
    return Specialisation(name, prepare, argument_types, THREADS, constants=constants)
