"""Prepares q, k and v between their projection and attention, in one pass over the tokens.

Each row of ``qkv [T, (Hq + 2 Hkv) D]`` is split into heads (``[T, (Hq + Hkv) D]`` where values are made of keys), which
are normalised and rotated (`attention.prepared_heads`). q goes out as ``[T, Hq, D]``, k and v go into the pages at the
token's slot. A slot of -1 is not written. f32, f16 or bf16, rounded once. The same operation as the CPU's
``cpu/qkv.py``.

qkv is read and everything else written once: bound by bandwidth, or by the launch at decode, where attention prepares
the usual heads itself. Norms over all heads take a second launch, for their scales. A head's result depends on its
token alone. Positions must have a row in the tables and slots must lie in the pages: the device does not check them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from numba import cuda, float32, types, uint32, uint64

from numba_kernels.cuda.attention.prepared_heads import ARGUMENT_TYPES, HeadForm, head_preparer, page_storer
from numba_kernels.cuda.intrinsics.block import block_sum
from numba_kernels.cuda.intrinsics.element import elements_loader
from numba_kernels.cuda.intrinsics.element_types import DTYPES, ITEM_BYTES, VECTOR_WIDTH
from numba_kernels.cuda.intrinsics.math import divide_u32, minimum_u32, reciprocal_sqrt
from numba_kernels.cuda.intrinsics.memory import store_f32
from numba_kernels.cuda.intrinsics.sync import launch_dependents, wait_for_previous_grid
from numba_kernels.cuda.kv_cache import check_pages
from numba_kernels.cuda.quantised_pages import PAGES
from numba_kernels.cuda.rope import check_rotary
from numba_kernels.cuda.specialisation import Launch, Specialisation

THREADS = 128


@functools.cache
def _qkv_prepare(form: HeadForm, block_size: int, pages: str = "") -> Specialisation:
    """Arguments: see `plan_qkv_prepare`."""
    cut, dtype = form.cut, form.dtype
    width, num_units, lanes, rounds, load, store = (
        cut.width, cut.num_units, cut.lanes, cut.rounds, cut.load, cut.store
    )  # fmt: skip
    prepare, store_page = head_preparer(form), page_storer(form, block_size, pages)
    heads_a_block, head_bytes = THREADS // lanes, uint64(form.head_dim * ITEM_BYTES[dtype])
    are_keys = form.values == "keys"

    @cuda.jit
    def qkv_prepare(
        qkv, positions, cos, sin, q_scales, norm_scales, q_norm, k_norm, slot_mapping, k_cache, v_cache, k_scales,
        v_scales, q, num_tokens, num_q_heads, num_kv_heads, eps,
    ):  # fmt: skip
        wait_for_previous_grid()
        launch_dependents()
        lows = cuda.local.array((rounds, width), float32)
        highs = cuda.local.array((rounds, width), float32)
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
        of_heads = positions, cos, sin, q_scales, norm_scales, q_norm, k_norm, slot_mapping, eps
        prepare((lows, highs), lane, token, head, num_q_heads, is_head, is_value, of_heads)
        is_query = head < num_q_heads
        if is_head and is_query:
            target = q + (uint64(token) * uint64(num_q_heads) + uint64(head)) * head_bytes
            for part in range(rounds):
                unit = uint32(lane + uint32(part * lanes))
                if unit < uint32(num_units):
                    store(target, unit, lows[part], highs[part])
        slot = slot_mapping[token]
        kv_head = uint32(head - num_q_heads)
        if is_value:
            kv_head = uint32(kv_head - num_kv_heads)
        is_stored = is_head and not is_query and slot >= 0
        caches = k_cache, v_cache, k_scales, v_scales
        store_page((lows, highs), lane, is_stored, slot, is_value, kv_head, num_kv_heads, caches)

    name = f"qkv_prepare_{dtype}_d{form.head_dim}_b{block_size}{form.suffix}{f'_{pages}' if pages else ''}_x{width}"
    constants = form.constants | {"block_size": block_size, "pages": pages}
    argument_types = types.uint64, *ARGUMENT_TYPES, *(types.uint64,) * 5, *(types.uint32,) * 3, types.float32
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
    form = HeadForm(dtype, head_dim, rotary, interleaved, norm, has_q_scales, is_vector, is_spread, values)
    kernel, heads_a_block = _qkv_prepare(form, block_size, pages), THREADS // form.cut.lanes
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
        yield _qkv_prepare(HeadForm(dtype, 64), 16)
        for head_dim in (32, 64, 128):
            for norm in ("", "head"):
                yield _qkv_prepare(HeadForm(dtype, head_dim, head_dim, norm=norm), 16)
        yield _qkv_prepare(HeadForm(dtype, 128, 128, norm="row"), 16)
        for width in (1, VECTOR_WIDTH[dtype]):
            yield _row_scales(dtype, width)
    for pages in PAGES:
        yield _qkv_prepare(HeadForm("bf16", 128, 128, norm="head"), 16, pages)
    yield _qkv_prepare(HeadForm("bf16", 256, 256, norm="head", values="normed"), 16)
    yield _qkv_prepare(HeadForm("bf16", 256, 64, norm="head", is_spread=True, values="keys"), 16)
