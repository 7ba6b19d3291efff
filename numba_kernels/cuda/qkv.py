"""Prepares q, k and v between their projection and attention, in one pass over the tokens.

Each row of ``qkv [T, (Hq + 2 Hkv) D]`` is split into heads (``[T, (Hq + Hkv) D]`` where values are made of keys). q
and k are normalised (RMSNorm, https://arxiv.org/abs/1910.07467: each head with a float32 weight of D, as Qwen3 does, or
all heads together with one of H D, as OLMo 2 does; or LayerNorm, each head with weights of its own, as Cohere does) and
rotated by the token's position (`rope`), or rotated first and normalised then, as Hunyuan does; values may have an
RMSNorm without weights, as in Gemma 4; q is multiplied by its position's scale. q goes out as ``[T, Hq, D]``, k and v
go into the pages at the token's slot (`kv_cache` has the layout). A slot of -1 is not written. f32, f16 or bf16,
rounded once; arithmetic and tables float32. Into pages of a byte a number each head's row goes with its scale
(`quantised_pages`). The same operation as the CPU's ``cpu/qkv.py``.

A head is a group of 1 to 32 lanes, which holds it in registers, so that qkv is read and everything else written once:
bound by bandwidth, or by the launch at decode. Norms over all heads take a second launch, for their scales. A head's
result depends on its token alone. Positions must have a row in the tables and slots must lie in the pages: the device
does not check them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from numba import cuda, float32, types, uint32, uint64

from numba_kernels.cuda.intrinsics.block import block_sum
from numba_kernels.cuda.intrinsics.device import device_function
from numba_kernels.cuda.intrinsics.element import elements_loader, elements_storer, floats_loader
from numba_kernels.cuda.intrinsics.element_types import DTYPES, ITEM_BYTES, VECTOR_WIDTH
from numba_kernels.cuda.intrinsics.math import divide_u32, maximum_u32, minimum_u32, reciprocal_sqrt
from numba_kernels.cuda.intrinsics.memory import load_f32, store_b8, store_f32
from numba_kernels.cuda.intrinsics.sync import launch_dependents, wait_for_previous_grid
from numba_kernels.cuda.intrinsics.warp import shuffle_xor_b32, shuffle_xor_f32
from numba_kernels.cuda.kv_cache import check_pages, page_row, row_address
from numba_kernels.cuda.quantised_pages import PAGES, larger_bits, row_scaler, run_storer, scale_address
from numba_kernels.cuda.rope import check_rotary, head_cut
from numba_kernels.cuda.specialisation import Launch, Specialisation

THREADS = 128
_VARIANTS = {"": "", "head": "_norm", "row": "_rownorm", "centred": "_layernorm", "after": "_normafter"}


@functools.cache
def _qkv_prepare(
    dtype: str, head_dim: int, block_size: int, rotary: int, interleaved: bool, norm: str, has_q_scales: bool,
    is_vector: bool, pages: str, is_spread: bool, values: str,
) -> Specialisation:  # fmt: skip
    """Arguments: see `plan_qkv_prepare`."""
    cut = head_cut(dtype, head_dim, rotary, interleaved, is_vector, is_spread)
    width, num_units, lanes, rounds = cut.width, cut.num_units, cut.lanes, cut.rounds
    load, rotate, store, places = cut.load, cut.rotate, cut.store, cut.places
    load_weight, store_one = floats_loader(width), elements_storer(dtype, 1)
    address, address_of_scale = row_address(head_dim, block_size, pages or dtype), scale_address(block_size)
    has_scales = pages != ""
    scales_of, store_run = row_scaler(pages or "s8"), run_storer(pages or "s8", width)
    heads_a_block = THREADS // lanes
    head_bytes, item_bytes, table_row_bytes = (
        uint64(head_dim * ITEM_BYTES[dtype]), uint64(ITEM_BYTES[dtype]), uint64(2 * rotary)
    )  # fmt: skip
    padding = page_row(head_dim, pages or dtype) - head_dim
    reciprocal_dim = float32(1.0 / head_dim)
    is_odd = head_dim % 2 == 1
    norms_values, are_keys = values != "own", values == "keys"
    has_norm, norms_rows, is_centred, comes_after = norm != "", norm == "row", norm == "centred", norm == "after"

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

    @cuda.jit
    def qkv_prepare(
        qkv, positions, cos, sin, q_scales, norm_scales, q_norm, k_norm, slot_mapping, k_cache, v_cache, k_scales,
        v_scales, q, num_tokens, num_q_heads, num_kv_heads, eps,
    ):  # fmt: skip
        wait_for_previous_grid()
        launch_dependents()
        lows = cuda.local.array((rounds, width), float32)
        highs = cuda.local.array((rounds, width), float32)
        zero = cuda.local.array(1, float32)
        thread = uint32(cuda.threadIdx.x)
        lane = uint32(thread & uint32(lanes - 1))
        num_heads = uint32(num_q_heads + uint32(2) * num_kv_heads)
        index = uint32(uint32(cuda.blockIdx.x) * uint32(heads_a_block) + thread // uint32(lanes))
        last = uint32(num_tokens * num_heads - uint32(1))
        is_head = index <= last
        index = minimum_u32(index, last)  # lanes without a head take part in the shuffles
        token = divide_u32(index, num_heads)
        head = uint32(index - token * num_heads)
        is_value = head >= uint32(num_q_heads + num_kv_heads)
        source = qkv + uint64(index) * head_bytes
        if are_keys:
            place = uint32(index - token * num_kv_heads)
            if is_value:
                place = uint32(place - num_kv_heads)
            source = qkv + uint64(place) * head_bytes
        for part in range(rounds):
            unit = uint32(lane + uint32(part * lanes))
            if unit < uint32(num_units):
                load(source, unit, lows[part], highs[part])

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
                scale = reciprocal_sqrt(squares * reciprocal_dim + eps)
                for part in range(rounds):
                    for i in range(width):
                        lows[part, i] = lows[part, i] * scale
                        highs[part, i] = highs[part, i] * scale

        if not comes_after and is_rotated:
            rotate_head(lows, highs, lane, cos + row, sin + row)
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
        if is_head:
            is_query = head < num_q_heads
            if has_q_scales and is_query:
                factor = load_f32(q_scales + uint64(uint32(positions[token])) * uint64(4))
                for part in range(rounds):
                    for i in range(width):
                        lows[part, i] = lows[part, i] * factor
                        highs[part, i] = highs[part, i] * factor
            target = q + (uint64(token) * uint64(num_q_heads) + uint64(head)) * head_bytes
            is_stored = is_query
            if not is_query:
                slot = slot_mapping[token]
                is_stored = slot >= 0
                cache = k_cache
                scales = k_scales
                kv_head = uint32(head - num_q_heads)
                if is_value:
                    cache = v_cache
                    scales = v_scales
                    kv_head = uint32(kv_head - num_kv_heads)
                block = uint32(uint64(slot) // uint64(block_size))
                target = address(cache, block, uint32(uint32(slot) % uint32(block_size)), kv_head, num_kv_heads)
            if is_stored and has_scales and not is_query:
                scale, factor = scales_of(largest)
                for part in range(rounds):
                    unit = uint32(lane + uint32(part * lanes))
                    if unit < uint32(num_units):
                        first, second = places(unit)
                        store_run(target + uint64(first), lows[part], factor)
                        if not is_odd or second < uint32(head_dim):
                            store_run(target + uint64(second), highs[part], factor)
                if lane == uint32(0):
                    place = uint32(uint32(slot) % uint32(block_size))
                    store_f32(address_of_scale(scales, block, place, kv_head, num_kv_heads), scale)
                column = lane
                while column < uint32(padding):
                    store_b8(target + uint64(uint32(column + uint32(head_dim))), uint32(0))
                    column = uint32(column + uint32(lanes))
            elif is_stored:
                for part in range(rounds):
                    unit = uint32(lane + uint32(part * lanes))
                    if unit < uint32(num_units):
                        store(target, unit, lows[part], highs[part])
                if padding > 0 and not is_query:
                    zero[0] = float32(0)
                    column = lane
                    while column < uint32(padding):
                        store_one(target + uint64(uint32(column + uint32(head_dim))) * item_bytes, zero)
                        column = uint32(column + uint32(lanes))

    rope = f"_r{rotary}{'_interleaved' if interleaved else ''}{'_spread' if is_spread else ''}" if rotary else ""
    variant = f"{_VARIANTS[norm]}{'_qscales' if has_q_scales else ''}"
    variant += f"{'' if values == 'own' else f'_values_{values}'}{f'_{pages}' if pages else ''}"
    name = f"qkv_prepare_{dtype}_d{head_dim}_b{block_size}{rope}{variant}_x{width}"
    constants = {
        "dtype": dtype, "head_dim": head_dim, "block_size": block_size, "rotary": rotary, "interleaved": interleaved,
        "norm": norm, "has_q_scales": has_q_scales, "width": width, "pages": pages,
        "is_spread": is_spread, "values": values,
    }  # fmt: skip
    argument_types = (
        types.uint64, types.CPointer(types.int32), *(types.uint64,) * 6, types.CPointer(types.int64),
        *(types.uint64,) * 5, *(types.uint32,) * 3, types.float32,
    )  # fmt: skip
    return Specialisation(name, qkv_prepare, argument_types, THREADS, constants=constants)


def plan_qkv_prepare(
    num_tokens: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: str,
    *,
    rotary: int = 0,
    interleaved: bool = False,
    norm: str = "",
    has_q_scales: bool = False,
    alignment: int = 16,
    pages: str = "",
    is_spread: bool = False,
    values: str = "own",
) -> Launch:
    """qkv [num_tokens, (num_q_heads + 2 num_kv_heads) head_dim], C-contiguous (once num_kv_heads if `values` are
    "keys"); num_tokens and num_q_heads at least 1. Values are normalised unless they are their "own"; then `norm` is
    "head".

    Arguments: qkv, positions (int32 [T]), cos, sin (float32 [P, rotary / 2]; 0 where rotary is 0), q_scales (float32
    [P]; 0 without), norm_scales (float32 [T, 2], of q and of k; 0 but for norm "row"), q_norm, k_norm, slot_mapping
    (int64 [T]), k_cache, v_cache, k_scales, v_scales (0 for pages of the dtype), q addresses; num_tokens, num_q_heads,
    num_kv_heads, eps. `pages` is their type, if one of `quantised_pages.PAGES`. The weights of norm "head" and "after"
    are float32 [head_dim], 0 for a missing one; of "centred" and "row", float32 [num_q_heads head_dim] and
    [num_kv_heads head_dim], of "row" with the scales that `plan_row_scales` leaves. `alignment` in bytes divides the
    addresses of qkv, q and the norms' weights. ValueError for unsupported sizes.
    """
    check_pages(head_dim, block_size, dtype)
    check_rotary(dtype, head_dim, rotary, alignment)
    is_vector = alignment % 16 == 0
    if values != "own" and norm != "head":
        raise ValueError(f"values are {values!r} with norm {norm!r}, must be 'own' unless that is 'head'")
    kernel = _qkv_prepare(
        dtype, head_dim, block_size, rotary, interleaved, norm, has_q_scales, is_vector, pages, is_spread, values
    )
    heads_a_block = THREADS // head_cut(dtype, head_dim, rotary, interleaved, is_vector, is_spread).lanes
    num_heads = num_tokens * (num_q_heads + 2 * num_kv_heads)
    return Launch(kernel, (-(-num_heads // heads_a_block), 1, 1), (THREADS, 1, 1))


@functools.cache
def _row_scales(dtype: str, width: int) -> Specialisation:
    """Arguments: see `plan_row_scales`."""
    load, item_bytes = elements_loader(dtype, width), uint64(ITEM_BYTES[dtype])

    @cuda.jit
    def row_scales(qkv, scales, q_size, k_size, row_size, reciprocal_q, reciprocal_k, eps):
        wait_for_previous_grid()
        launch_dependents()
        partials = cuda.shared.array(32, float32)
        row = uint64(cuda.blockIdx.x) * uint64(row_size)
        size = q_size
        reciprocal = reciprocal_q
        is_key = uint32(cuda.blockIdx.y)
        if is_key != uint32(0):
            row += uint64(q_size)
            size = k_size
            reciprocal = reciprocal_k
        squares = float32(0)
        index = uint32(cuda.threadIdx.x) * uint32(width)
        while index < size:
            loaded = load(qkv + (row + uint64(index)) * item_bytes)
            for lane in range(width):
                squares += loaded[lane] * loaded[lane]
            index += uint32(cuda.blockDim.x) * uint32(width)
        squares = block_sum(squares, partials)
        if uint32(cuda.threadIdx.x) == uint32(0):
            place = uint64(cuda.blockIdx.x) * uint64(8) + uint64(is_key) * uint64(4)
            store_f32(scales + place, reciprocal_sqrt(squares * reciprocal + eps))

    argument_types = (types.uint64,) * 2 + (types.uint32,) * 3 + (types.float32,) * 3
    name, constants = f"qk_row_scales_{dtype}_x{width}", {"dtype": dtype, "width": width}
    return Specialisation(name, row_scales, argument_types, THREADS, constants=constants)


def plan_row_scales(num_tokens: int, q_size: int, k_size: int, dtype: str, *, alignment: int = 16) -> Launch:
    """RMSNorm's factors of each row of qkv, over all q heads and over all k heads.

    Arguments: qkv, scales (float32 [num_tokens, 2]) addresses; q_size, k_size, elements of a row; 1 / q_size,
    1 / k_size, eps. `alignment` in bytes divides the address of qkv.
    """
    width = VECTOR_WIDTH[dtype]
    if alignment % 16 or q_size % width or k_size % width:
        width = 1
    return Launch(_row_scales(dtype, width), (num_tokens, 2, 1), (THREADS, 1, 1))


def specialisations() -> Iterator[Specialisation]:
    """GPT-2 (no rotation), Llama, Qwen3 (with head norms), OLMo 2 (with row norms), Gemma 4, pages of 16 tokens."""
    for dtype in DTYPES:
        yield _qkv_prepare(dtype, 64, 16, 0, False, "", False, True, "", False, "own")
        for head_dim in (32, 64, 128):
            for norm in ("", "head"):
                yield _qkv_prepare(dtype, head_dim, 16, head_dim, False, norm, False, True, "", False, "own")
        yield _qkv_prepare(dtype, 128, 16, 128, False, "row", False, True, "", False, "own")
        for width in (1, VECTOR_WIDTH[dtype]):
            yield _row_scales(dtype, width)
    for pages in PAGES:
        yield _qkv_prepare("bf16", 128, 16, 128, False, "head", False, True, pages, False, "own")
    yield _qkv_prepare("bf16", 256, 16, 256, False, "head", False, True, "", False, "normed")
    yield _qkv_prepare("bf16", 256, 16, 64, False, "head", False, True, "", True, "keys")
