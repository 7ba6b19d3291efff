"""Heads of q, k and v between their projection and attention: norms, rotation, the way into the pages.

`head_preparer` normalises (RMSNorm, https://arxiv.org/abs/1910.07467: each head with a float32 weight of D, as Qwen3
does, or all heads together with one of H D, as OLMo 2 does; or LayerNorm, each head with weights of its own, as Cohere
does) and rotates by the token's position (`rope`), or rotates first and normalises then, as Hunyuan does; values may
have an RMSNorm without weights, as in Gemma 4; q is multiplied by its position's scale. `page_storer` writes a head of
k or v to the token's slot (`kv_cache` has the layout), into pages of a byte a number with its scale
(`quantised_pages`). A head is a group of 1 to 32 lanes, which holds it in registers (`rope.head_cut`); arithmetic and
tables float32. The kernels `qkv` and `attention.decode_tensor_core` give a head the same bits.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from typing import Any

from numba import cuda, float32, types, uint32, uint64

from numba_kernels.cuda.intrinsics.convert import pack_bf16, pack_f16
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import elements_storer, floats_loader
from numba_kernels.cuda.intrinsics.element_types import ITEM_BYTES, VECTOR_WIDTH
from numba_kernels.cuda.intrinsics.math import maximum_u32, reciprocal_sqrt
from numba_kernels.cuda.intrinsics.memory import load_f32, shared_store_4xb32, store_b8, store_f32
from numba_kernels.cuda.intrinsics.warp import shuffle_xor_b32, shuffle_xor_f32
from numba_kernels.cuda.kv_cache import page_row, row_address
from numba_kernels.cuda.quantised_pages import larger_bits, row_scaler, run_storer, scale_address
from numba_kernels.cuda.rope import HeadCut, head_cut

_VARIANTS = {"": "", "head": "_norm", "row": "_rownorm", "centred": "_layernorm", "after": "_normafter"}

ARGUMENT_TYPES = (
    types.CPointer(types.int32),  # positions [T]
    types.uint64,  # cos [P, rotary / 2] float32; 0 without rotation
    types.uint64,  # sin
    types.uint64,  # q_scales [P] float32; 0 without
    types.uint64,  # norm_scales [T, 2] float32, of q and of k; 0 but for norm "row"
    types.uint64,  # q_norm, float32; 0 for a missing one
    types.uint64,  # k_norm
    types.CPointer(types.int64),  # slot_mapping [T]
)
"""Arguments of a kernel that prepares heads, in this order."""


@dataclass(frozen=True, slots=True)
class HeadForm:
    """The constants of a kernel that prepares heads.

    Attributes:
        rotary: dimensions that are rotated; `interleaved`, `is_spread`: see `rope`.
        norm: "", "head", "row", "centred" or "after".
        has_q_scales: whether q is multiplied by its position's scale.
        is_vector: whether addresses and sizes allow 16-byte accesses.
        values: "own", "normed", or made of "keys".
    """

    dtype: str
    head_dim: int
    rotary: int = 0
    interleaved: bool = False
    norm: str = ""
    has_q_scales: bool = False
    is_vector: bool = True
    is_spread: bool = False
    values: str = "own"

    @property
    def cut(self) -> HeadCut:
        """How a head lies over lanes."""
        return head_cut(self.dtype, self.head_dim, self.rotary, self.interleaved, self.is_vector, self.is_spread)

    @property
    def suffix(self) -> str:
        """A suffix for the kernel's name."""
        turned = f"_r{self.rotary}{'_interleaved' * self.interleaved}{'_spread' * self.is_spread}" * (self.rotary > 0)
        values = f"_values_{self.values}" * (self.values != "own")
        return f"{turned}{_VARIANTS[self.norm]}{'_qscales' * self.has_q_scales}{values}"

    @property
    def constants(self) -> dict[str, Any]:
        """For the kernel's reports."""
        return {name: value for name, value in asdict(self).items() if name != "is_vector"} | {"width": self.cut.width}


@functools.cache
def head_preparer(form: HeadForm) -> Any:
    """A device function that all lanes of a head's group call, and all lanes of their warp.

    ``prepare(units, lane, token, head, num_q_heads, is_head, is_value, of_heads)`` on the two local arrays
    [rounds, width] that hold the head's units; `head` counts q heads, then k heads, then v heads; `of_heads` is
    `ARGUMENT_TYPES`' values and eps. Groups without a head compute numbers without use.
    """
    cut, head_dim, rotary = form.cut, form.head_dim, form.rotary
    width, num_units, lanes, rounds = cut.width, cut.num_units, cut.lanes, cut.rounds
    rotate, places = cut.rotate, cut.places
    load_weight = floats_loader(width)
    table_row_bytes = uint64(2 * rotary)
    reciprocal_dim = float32(1.0 / head_dim)
    is_odd = head_dim % 2 == 1
    has_norm, norms_rows, is_centred = form.norm != "", form.norm == "row", form.norm == "centred"
    comes_after, norms_values, has_q_scales = form.norm == "after", form.values != "own", form.has_q_scales

    @device_function
    def sum_of_head(value):
        distance = uint32(lanes // 2)
        while distance > uint32(0):
            value += shuffle_xor_f32(value, distance)
            distance = uint32(distance >> uint32(1))
        return value

    @device_function
    def centre(lows, highs, lane, is_value):
        total = float32(0)
        for part in range(rounds):
            if uint32(lane + uint32(part * lanes)) < uint32(num_units):
                for i in range(width):
                    total += lows[part, i] + highs[part, i]
        mean = sum_of_head(total) * reciprocal_dim
        if is_value:
            mean = float32(0)
        for part in range(rounds):
            unit = uint32(lane + uint32(part * lanes))
            if unit < uint32(num_units):
                second = places(unit)[1]
                for i in range(width):
                    lows[part, i] = lows[part, i] - mean
                if not is_odd or second < uint32(head_dim):
                    for i in range(width):
                        highs[part, i] = highs[part, i] - mean

    @device_function
    def rotate_head(lows, highs, lane, cos, sin):
        for part in range(rounds):
            unit = uint32(lane + uint32(part * lanes))
            if unit < uint32(num_units):
                rotate(unit, lows[part], highs[part], cos, sin)

    @device_function
    def normalise(lows, highs, lane, weight, scale):
        for part in range(rounds):
            unit = uint32(lane + uint32(part * lanes))
            if unit < uint32(num_units):
                first, second = places(unit)
                weights = load_weight(weight + uint64(first) * uint64(4))
                for i in range(width):
                    lows[part, i] = lows[part, i] * scale * weights[i]
                if not is_odd or second < uint32(head_dim):
                    weights = load_weight(weight + uint64(second) * uint64(4))
                    for i in range(width):
                        highs[part, i] = highs[part, i] * scale * weights[i]

    @device_function
    def multiply(lows, highs, factor):
        for part in range(rounds):
            for i in range(width):
                lows[part, i] = lows[part, i] * factor
                highs[part, i] = highs[part, i] * factor

    @device_function
    def prepare(units, lane, token, head, num_q_heads, is_head, is_value, of_heads):
        lows, highs = units
        positions, cos, sin, q_scales, norm_scales, q_norm, k_norm, _, eps = of_heads
        is_rotated = is_head and rotary > 0 and not is_value
        row = uint64(0)
        if is_rotated:
            row = uint64(uint32(positions[token])) * table_row_bytes
        if comes_after and is_rotated:
            rotate_head(lows, highs, lane, cos + row, sin + row)
        if norms_rows:
            if not is_value:
                weight = q_norm + uint64(head) * uint64(4 * head_dim)
                place = uint64(token) * uint64(8)
                if head >= num_q_heads:
                    weight = k_norm + uint64(uint32(head - num_q_heads)) * uint64(4 * head_dim)
                    place += uint64(4)
                scale = load_f32(norm_scales + place)
                normalise(lows, highs, lane, weight, scale)
        elif has_norm:
            if is_centred:
                centre(lows, highs, lane, is_value)
            squares = float32(0)
            for part in range(rounds):
                if uint32(lane + uint32(part * lanes)) < uint32(num_units):
                    for i in range(width):
                        squares += lows[part, i] * lows[part, i]
                    for i in range(width):
                        squares += highs[part, i] * highs[part, i]
            squares = sum_of_head(squares)
            weight = q_norm
            if head >= num_q_heads:
                weight = k_norm
            if is_centred:
                of_its_kind = head
                if head >= num_q_heads:
                    of_its_kind = uint32(head - num_q_heads)
                weight += uint64(of_its_kind) * uint64(4 * head_dim)
            if weight != uint64(0) and not is_value:
                normalise(lows, highs, lane, weight, reciprocal_sqrt(squares * reciprocal_dim + eps))
            if norms_values and is_value:
                multiply(lows, highs, reciprocal_sqrt(squares * reciprocal_dim + eps))
        if not comes_after and is_rotated:
            rotate_head(lows, highs, lane, cos + row, sin + row)
        if has_q_scales and is_head and head < num_q_heads:
            multiply(lows, highs, load_f32(q_scales + uint64(uint32(positions[token])) * uint64(4)))

    return prepare


@functools.cache
def page_storer(form: HeadForm, block_size: int, pages: str) -> Any:
    """A device function that all lanes of a prepared head's group call, and all lanes of their warp.

    ``store(units, lane, is_stored, slot, is_value, kv_head, num_kv_heads, caches)``, where `caches` are the addresses
    of keys, values, and the scales of both; groups that are not stored write nothing.
    """
    cut, head_dim, dtype = form.cut, form.head_dim, form.dtype
    width, num_units, lanes, rounds, places, store = (
        cut.width, cut.num_units, cut.lanes, cut.rounds, cut.places, cut.store
    )  # fmt: skip
    store_one, item_bytes = elements_storer(dtype, 1), uint64(ITEM_BYTES[dtype])
    address, address_of_scale = row_address(head_dim, block_size, pages or dtype), scale_address(block_size)
    has_scales, is_odd = pages != "", head_dim % 2 == 1
    scales_of, store_run = row_scaler(pages or "s8"), run_storer(pages or "s8", width)
    padding = page_row(head_dim, pages or dtype) - head_dim

    @device_function
    def store_head(units, lane, is_stored, slot, is_value, kv_head, num_kv_heads, caches):
        (lows, highs), (k_cache, v_cache, k_scales, v_scales) = units, caches
        zero = cuda.local.array(1, float32)
        largest = uint32(0)  # of the bits of a head's numbers without their signs
        if has_scales:
            for part in range(rounds):
                if uint32(lane + uint32(part * lanes)) < uint32(num_units):
                    for i in range(width):
                        largest = larger_bits(larger_bits(largest, lows[part, i]), highs[part, i])
            distance = uint32(lanes // 2)
            while distance > uint32(0):
                largest = maximum_u32(largest, shuffle_xor_b32(largest, distance))
                distance = uint32(distance >> uint32(1))
        if is_stored:
            cache = k_cache
            scales = k_scales
            if is_value:
                cache = v_cache
                scales = v_scales
            block = uint32(uint64(slot) // uint64(block_size))
            place = uint32(uint32(slot) % uint32(block_size))
            target = address(cache, block, place, kv_head, num_kv_heads)
            column = lane
            if has_scales:
                scale, factor = scales_of(largest)
                for part in range(rounds):
                    unit = uint32(lane + uint32(part * lanes))
                    if unit < uint32(num_units):
                        first, second = places(unit)
                        store_run(target + uint64(first), lows[part], factor)
                        if not is_odd or second < uint32(head_dim):
                            store_run(target + uint64(second), highs[part], factor)
                if lane == uint32(0):
                    store_f32(address_of_scale(scales, block, place, kv_head, num_kv_heads), scale)
                while column < uint32(padding):
                    store_b8(target + uint64(uint32(column + uint32(head_dim))), uint32(0))
                    column = uint32(column + uint32(lanes))
            else:
                for part in range(rounds):
                    unit = uint32(lane + uint32(part * lanes))
                    if unit < uint32(num_units):
                        store(target, unit, lows[part], highs[part])
                if padding > 0:
                    zero[0] = float32(0)
                    while column < uint32(padding):
                        store_one(target + uint64(uint32(column + uint32(head_dim))) * item_bytes, zero)
                        column = uint32(column + uint32(lanes))

    return store_head


def fits_tiles(form: HeadForm) -> bool:
    """Whether `decode_preparer` has these heads: those whose norms need no other launch, in runs of 16 bytes."""
    return (
        form.dtype != "f32" and form.head_dim in (64, 128) and form.norm in ("", "head") and form.values == "own"
        and form.cut.width == VECTOR_WIDTH[form.dtype]
    )  # fmt: skip


@functools.cache
def decode_preparer(form: HeadForm, block_size: int, pages: str, num_rows: int, pitch: int, threads: int) -> Any:
    """A device function that a block's threads call for one token of a sequence and one KV head.

    ``prepare(tile, qkv, token, kv_head, counts, is_newest, of_heads, caches)``, where `counts` is (num_q_heads,
    num_kv_heads, share, …), `of_heads` as in `head_preparer`, and `caches` as in `page_storer`: the KV head's query
    heads go as rows to the shared address `tile`, with zeros up to `num_rows`; if the block `is_newest`, the token's
    key and value go into the pages, and to the next two rows. A barrier must follow. `fits_tiles` has `form`.
    """
    cut, head_bytes = form.cut, uint64(form.head_dim * ITEM_BYTES[form.dtype])
    lanes, rounds, width, num_units, load, places = (
        cut.lanes, cut.rounds, cut.width, cut.num_units, cut.load, cut.places
    )  # fmt: skip
    prepare, store = head_preparer(form), page_storer(form, block_size, pages)
    pack = pack_bf16 if form.dtype == "bf16" else pack_f16
    heads_a_turn = threads // lanes

    @device_function
    def store_run(address, values):
        low = pack(values[0], values[1]), pack(values[2], values[3])
        high = pack(values[4], values[5]), pack(values[6], values[7])
        shared_store_4xb32(address, (low[0], low[1], high[0], high[1]))

    @device_function
    def prepare_heads(tile, qkv, token, kv_head, counts, is_newest, of_heads, caches):
        (num_q_heads, num_kv_heads, share, _), thread = counts, uint32(cuda.threadIdx.x)
        lows = cuda.local.array((rounds, width), float32)
        highs = cuda.local.array((rounds, width), float32)
        lane = uint32(thread & uint32(lanes - 1))
        place = uint32(thread // uint32(lanes))
        end = uint32(num_rows)
        slot = of_heads[7][token]
        if is_newest:
            end = uint32(num_rows + 2)
        first = uint32(0)  # the same in all threads: lanes without a head take part in the shuffles
        while first < end:
            is_row = place < uint32(num_rows)
            is_head = place < share or (not is_row and place < end)
            is_value = place == uint32(num_rows + 1)
            head = uint32(kv_head * share + place)
            if not is_row:
                head = uint32(num_q_heads + kv_head)
            if is_value:
                head = uint32(head + num_kv_heads)
            for part in range(rounds):
                for i in range(width):
                    lows[part, i] = float32(0)
                    highs[part, i] = float32(0)
            if is_head:
                row = uint64(token) * uint64(uint32(num_q_heads + uint32(2) * num_kv_heads)) + uint64(head)
                for part in range(rounds):
                    unit = uint32(lane + uint32(part * lanes))
                    if unit < uint32(num_units):
                        load(qkv + row * head_bytes, unit, lows[part], highs[part])
            prepare((lows, highs), lane, token, head, num_q_heads, is_head, is_value, of_heads)
            if place < end:
                target = uint32(tile + place * uint32(pitch))
                for part in range(rounds):
                    unit = uint32(lane + uint32(part * lanes))
                    if unit < uint32(num_units):
                        at, behind = places(unit)
                        store_run(uint32(target + at * uint32(2)), lows[part])
                        store_run(uint32(target + behind * uint32(2)), highs[part])
            if is_newest:
                is_stored = is_head and not is_row and slot >= 0
                store((lows, highs), lane, is_stored, slot, is_value, kv_head, num_kv_heads, caches)
            place = uint32(place + uint32(heads_a_turn))
            first = uint32(first + uint32(heads_a_turn))

    return prepare_heads
