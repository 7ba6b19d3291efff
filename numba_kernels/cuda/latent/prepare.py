"""Before latent attention: queries are rotated, and perhaps scaled; the tokens' latent rows are normed, rotated and
stored. `head_maps` does so beside the keys' maps; long chunks, whose queries stay as they are, by themselves."""

from __future__ import annotations

import functools
from typing import Any

from numba import cuda, float32, types, uint32, uint64

from numba_kernels.cuda.intrinsics.convert import pack_bf16, pack_f16, unpack_bf16, unpack_f16
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import element_loader, element_storer
from numba_kernels.cuda.intrinsics.element_types import ITEM_BYTES
from numba_kernels.cuda.intrinsics.math import reciprocal_sqrt
from numba_kernels.cuda.intrinsics.memory import load_b32, load_f32, store_b32, store_f32
from numba_kernels.cuda.intrinsics.sync import launch_dependents, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import lane_index, maximum_u32_of_warp, warp_sum
from numba_kernels.cuda.kv_cache import page_row
from numba_kernels.cuda.quantised_pages import larger_bits, row_scaler, run_storer
from numba_kernels.cuda.specialisation import Specialisation
from numba_kernels.latent_rows import GROUP, LatentBytes

THREADS = 128


@functools.cache
def query_rotator(dtype: str, rotary: int, interleaved: bool, is_aligned: bool, stored: str = "") -> Any:
    """A device function ``(source, target, pair, cos, sin, factor)``: one pair of a rotated part, which the target
    has as `stored`, or as the source does. Neighbours of 16 bits are one access if they are aligned."""
    stored = stored or dtype
    load, store, half = element_loader(dtype), element_storer(stored), rotary // 2
    item, stored_item = uint64(ITEM_BYTES[dtype]), uint64(ITEM_BYTES[stored])
    has_pairs = interleaved and is_aligned and stored == dtype != "f32"
    unpack, pack = (unpack_bf16, pack_bf16) if dtype == "bf16" else (unpack_f16, pack_f16)

    @device_function
    def rotate(source, target, pair, cos, sin, factor):
        low = pair
        high = uint32(pair + uint32(half))
        if interleaved:
            low = uint32(uint32(2) * pair)
            high = uint32(low + uint32(1))
        c = load_f32(cos + uint64(pair) * uint64(4))
        s = load_f32(sin + uint64(pair) * uint64(4))
        if has_pairs:
            first, second = unpack(load_b32(source + uint64(low) * item))
            both = pack((first * c - second * s) * factor, (second * c + first * s) * factor)
            store_b32(target + uint64(low) * item, both)
        else:
            first = load(source + uint64(low) * item)
            second = load(source + uint64(high) * item)
            store(target + uint64(low) * stored_item, (first * c - second * s) * factor)
            store(target + uint64(high) * stored_item, (second * c + first * s) * factor)

    return rotate


@functools.cache
def row_writer(dtype: str, width: int, rotary: int, interleaved: bool, is_aligned: bool, pages: str) -> Any:
    """A device function of a warp, ``(source, cos, sin, norm, slot, pages, eps)``: a token's latent row, of which
    `source` has the values first. `pages`: "e4m3" for rows of `numba_kernels.latent_rows`, "" for the dtype's."""
    if pages:
        return _byte_row_writer(dtype, width, rotary, interleaved, pages)
    load, store = element_loader(dtype), element_storer(dtype)
    rotate = query_rotator(dtype, rotary, interleaved, is_aligned)
    item, rest, padded = uint64(ITEM_BYTES[dtype]), width - rotary, page_row(width)
    reciprocal_rest, turns = float32(1.0 / rest), -(-(padded - rotary) // 32)

    @device_function
    def write_row(source, cos, sin, norm, slot, pages, eps):
        if slot >= 0:
            lane = lane_index()
            row = pages + uint64(slot) * uint64(padded) * item
            pair = lane
            while pair < uint32(rotary // 2):
                rotate(source + uint64(rest) * item, row, pair, cos, sin, float32(1))
                pair = uint32(pair + uint32(32))
            numbers = cuda.local.array(turns, float32)
            squares = float32(0)
            for turn in range(turns):
                index = uint32(lane + uint32(32 * turn))
                numbers[turn] = float32(0)
                if index < uint32(rest):
                    numbers[turn] = load(source + uint64(index) * item)
                squares += numbers[turn] * numbers[turn]
            scale = reciprocal_sqrt(warp_sum(squares) * reciprocal_rest + eps)
            for turn in range(turns):
                index = uint32(lane + uint32(32 * turn))
                if index < uint32(padded - rotary):
                    weight = float32(0)
                    if index < uint32(rest):
                        weight = load_f32(norm + uint64(index) * uint64(4))
                    store(row + uint64(uint32(index + uint32(rotary))) * item, numbers[turn] * scale * weight)

    return write_row


def _byte_row_writer(dtype: str, width: int, rotary: int, interleaved: bool, pages: str) -> Any:
    load, store_byte = element_loader(dtype), run_storer(pages, 1)
    rotate = query_rotator(dtype, rotary, interleaved, False, "bf16")
    item, rest, half, scales_of = uint64(ITEM_BYTES[dtype]), width - rotary, rotary // 2, row_scaler(pages)
    layout = LatentBytes(width, rest)
    row_bytes, scales_at, rotated_at, groups = (
        layout.row_bytes, layout.value_bytes, layout.rotated_at, layout.groups
    )  # fmt: skip
    reciprocal_rest, turns = float32(1.0 / rest), GROUP // 32

    @device_function
    def write_row(source, cos, sin, norm, slot, pages, eps):
        if slot >= 0:
            lane = lane_index()
            row = pages + uint64(slot) * uint64(row_bytes)
            pair = lane
            while pair < uint32(half):
                rotate(source + uint64(rest) * item, row + uint64(rotated_at), pair, cos, sin, float32(1))
                pair = uint32(pair + uint32(32))
            numbers = cuda.local.array((groups, turns), float32)
            one = cuda.local.array(1, float32)
            squares = float32(0)
            for group in range(groups):
                for turn in range(turns):
                    index = uint32(lane + uint32(GROUP * group + 32 * turn))
                    numbers[group, turn] = float32(0)
                    if index < uint32(rest):
                        numbers[group, turn] = load(source + uint64(index) * item)
                    squares += numbers[group, turn] * numbers[group, turn]
            scale = reciprocal_sqrt(warp_sum(squares) * reciprocal_rest + eps)
            for group in range(groups):
                largest = uint32(0)
                for turn in range(turns):
                    index = uint32(lane + uint32(GROUP * group + 32 * turn))
                    if index < uint32(rest):
                        weight = load_f32(norm + uint64(index) * uint64(4))
                        numbers[group, turn] = numbers[group, turn] * scale * weight
                        largest = larger_bits(largest, numbers[group, turn])
                of_group, factor = scales_of(maximum_u32_of_warp(largest))
                for turn in range(turns):
                    index = uint32(lane + uint32(GROUP * group + 32 * turn))
                    if index < uint32(rest):
                        one[0] = numbers[group, turn]
                        store_byte(row + uint64(index), one, factor)
                if lane == uint32(0):
                    store_f32(row + uint64(scales_at + 4 * group), of_group)

    return write_row


@functools.cache
def latent_prepare(
    dtype: str, width: int, rotary: int, interleaved: bool, key_dim: int, pages: str = ""
) -> Specialisation:
    """Queries are copied out of wider rows; each head has `key_dim` numbers, then its rotated part. Grid: tokens.
    Arguments: see `planning.plan_prepare`."""
    load, store, item = element_loader(dtype), element_storer(dtype), uint64(ITEM_BYTES[dtype])
    rotate = query_rotator(dtype, rotary, interleaved, False)
    write_row = row_writer(dtype, width, rotary, interleaved, False, pages)
    half, head_dim = rotary // 2, key_dim + rotary

    @cuda.jit
    def prepare(
        q, out, latent, positions, cos, sin, q_scales, norm, slot_mapping, pages, q_pitch, latent_pitch, num_heads, eps
    ):  # fmt: skip
        wait_for_previous_grid()
        launch_dependents()
        token, thread = uint32(cuda.blockIdx.x), uint32(cuda.threadIdx.x)
        table = uint64(uint32(positions[token])) * uint64(4 * half)
        source = q + uint64(token) * uint64(q_pitch) * item
        target = out + uint64(token) * uint64(num_heads) * uint64(head_dim) * item
        factor = float32(1)
        if q_scales != uint64(0):
            factor = load_f32(q_scales + uint64(uint32(positions[token])) * uint64(4))
        index = thread
        while index < uint32(num_heads * uint32(half)):
            head = uint32(index // uint32(half))
            first = uint64(uint32(head * uint32(head_dim) + uint32(key_dim))) * item
            rotate(
                source + first, target + first, uint32(index - head * uint32(half)), cos + table, sin + table, factor
            )
            index = uint32(index + uint32(THREADS))
        index = thread
        while index < uint32(num_heads * uint32(key_dim)):
            head = uint32(index // uint32(key_dim))
            at = uint64(uint32(index + head * uint32(rotary))) * item
            store(target + at, load(source + at) * factor)
            index = uint32(index + uint32(THREADS))
        if thread < uint32(32):
            row = latent + uint64(token) * uint64(latent_pitch) * item
            write_row(row, cos + table, sin + table, norm, slot_mapping[token], pages, eps)

    name = f"latent_prepare_{dtype}_w{width}_r{rotary}{'_interleaved' if interleaved else ''}_k{key_dim}"
    name += f"_{pages}" if pages else ""
    constants = {
        "dtype": dtype, "width": width, "rotary": rotary, "interleaved": interleaved, "key_dim": key_dim,
        "pages": pages,
    }  # fmt: skip
    argument_types = (
        *(types.uint64,) * 3, types.CPointer(types.int32), *(types.uint64,) * 4, types.CPointer(types.int64),
        types.uint64, *(types.uint32,) * 3, types.float32,
    )  # fmt: skip
    return Specialisation(name, prepare, argument_types, THREADS, constants=constants)
