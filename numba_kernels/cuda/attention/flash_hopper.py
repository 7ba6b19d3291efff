"""Flash attention on Hopper's tensor cores (sm_90a), f16 and bf16: `wgmma` fed by the TMA, softmax beside products.

The mathematics of `flash_tensor_core`, arranged as in FlashAttention-3 (https://arxiv.org/abs/2407.08608). A block has
128 rows of queries, of wide heads 64, and three groups of four warps. The first brings tiles by TMA, its warp 0 queries
and keys, its warp 1 values, as far ahead as the rings have room (`hopper_tiles`), and leaves its registers to the other
two, which compute 64 rows each, or half of the columns of the same 64 (`hopper_walk`). A block goes on to other tiles
of queries and heads: their queries, keys and values come while results of the one before are still on their way out.

Scores stay unscaled: exp2(scale s - scale max) is one fused multiply-add and one exponential. Where the scale is
negative the queries change their sign once. Sums of a row come in another order than in `flash_tensor_core`, and
tiles begin at the first page that is seen: a row's last bits may depend on its chunk and its batch.
"""

from __future__ import annotations

import functools
from dataclasses import asdict

from numba import cuda, uint32

from numba_kernels.cuda.attention import segments
from numba_kernels.cuda.attention.hopper_roles import Barriers, Given, take_tile, tile_bringer, tile_computer
from numba_kernels.cuda.attention.hopper_softmax import GROUP_THREADS
from numba_kernels.cuda.attention.hopper_tiles import (
    ALIGNMENT,
    PANEL_COLUMNS,
    expanded_layout,
    hopper_tiles,
    page_layout,
    query_layout,
    row_zeroer,
)
from numba_kernels.cuda.attention.tiles import (
    ARGUMENT_TYPES,
    Variant,
)
from numba_kernels.cuda.intrinsics import mbarrier, tma
from numba_kernels.cuda.intrinsics.math import divide_u32
from numba_kernels.cuda.intrinsics.memory import shared_address
from numba_kernels.cuda.intrinsics.sync import (
    launch_dependents,
    set_registers,
    sync_block,
    wait_for_previous_grid,
)
from numba_kernels.cuda.intrinsics.warp import lane_index
from numba_kernels.cuda.kv_cache import MAX_HEAD_DIM, check_pages
from numba_kernels.cuda.specialisation import TENSOR_MAP, Launch, Specialisation

ARCH = "sm_90a"
THREADS = 3 * GROUP_THREADS
_CONSUMER_WARPS = 8
_MOST_SHARED = 232_448  # bytes of a block

_give_registers = set_registers(56, is_more=False)
_take_registers = set_registers(224, is_more=True)


def has_kernel(dtype: str, qk_dim: int, v_dim: int, share: int, block_size: int) -> bool:
    """Whether the TMA can walk over heads of this type and size, `share` of them fit into a tile, a warp's lanes
    request all of a tile's pages, and results fit in a tile of their own or in the queries' place."""
    tiles = hopper_tiles(qk_dim, v_dim)
    return (
        dtype != "f32" and all(dim % 8 == 0 and 8 <= dim <= MAX_HEAD_DIM for dim in (qk_dim, v_dim))
        and share <= tiles.num_rows and tiles.num_keys // block_size * max(tiles.qk_panels, tiles.v_panels) <= 32
        and (tiles.has_own_out or tiles.v_panels <= tiles.qk_panels)
        and (qk_dim == v_dim or not tiles.shares_rows) and tiles.shared_bytes <= _MOST_SHARED
    )  # fmt: skip


def plan(
    dtype: str,
    block_size: int,
    variant: Variant,
    *,
    num_tokens: int,
    num_seqs: int,
    max_query_len: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_blocks: int,
    num_sms: int,
) -> Launch:
    """The launch for a batch, as `planning.plan`; `num_blocks` is the cache's."""
    share, tiles = num_q_heads // num_kv_heads, hopper_tiles(head_dim, head_dim)
    pages = page_layout(dtype, head_dim, block_size, num_kv_heads, num_blocks)
    maps = (0, query_layout(dtype, tiles, num_q_heads, share, num_tokens)), (1, pages), (2, pages)
    tile_tokens = tiles.num_rows // share
    most_tiles = min(num_seqs * -(-max_query_len // tile_tokens), num_seqs + num_tokens // tile_tokens)
    grid = min(num_sms, num_kv_heads * most_tiles), 1, 1
    kernel = flash_hopper(dtype, head_dim, head_dim, block_size, variant)
    return Launch(kernel, grid, (THREADS, 1, 1), tiles.shared_bytes, maps=maps)


def plan_expanded(
    dtype: str, qk_dim: int, v_dim: int, *, num_tokens: int, query_len: int, num_heads: int, num_rows: int, num_sms: int
) -> tuple[Launch, int]:
    """The launch for one sequence's segment of `num_rows` expanded rows (`segments`), and bytes of its results."""
    tiles = hopper_tiles(qk_dim, v_dim)
    keys, values = (
        expanded_layout(dtype, columns, qk_dim + v_dim, segments.BLOCK_SIZE, num_heads, num_rows)
        for columns in (qk_dim, v_dim)
    )
    maps = (0, query_layout(dtype, tiles, num_heads, 1, num_tokens)), (1, keys), (2, values)
    kernel = flash_hopper(dtype, qk_dim, v_dim, segments.BLOCK_SIZE, Variant(is_expanded=True))
    items = -(-query_len // tiles.num_rows) * num_heads
    launch = Launch(kernel, (min(num_sms, items), 1, 1), (THREADS, 1, 1), tiles.shared_bytes, maps=maps)
    return launch, segments.state_bytes(items, tiles.own_panels * PANEL_COLUMNS // 2, 2, 2 * GROUP_THREADS)


@functools.cache
def flash_hopper(dtype: str, qk_dim: int, v_dim: int, block_size: int, variant: Variant) -> Specialisation:
    """The kernel for pages of `block_size` tokens. Grid: as many blocks as the device has multiprocessors, or fewer."""
    for head_dim in (qk_dim, v_dim):
        check_pages(head_dim, block_size, dtype)
    tiles = hopper_tiles(qk_dim, v_dim)
    keys, stages, tile_rows, is_even = tiles.num_keys, tiles.stages, tiles.num_rows, qk_dim == v_dim
    barriers_at, ring_bytes, zero_rows = tiles.barriers_at, 8 * stages, row_zeroer(tiles, THREADS)
    bring_tiles = tile_bringer(tiles, block_size, variant)
    compute_tiles = tile_computer(dtype, tiles, block_size, variant)

    @cuda.jit
    def kernel(
        q, k_cache, v_cache, out, workspace, arrivals, sinks, k_scales, v_scales, query_start, seq_lens, block_tables,
        bidirectional_until, num_q_heads, num_kv_heads, share, table_width, window, num_seqs, workspace_columns, scale,
    ):  # fmt: skip
        storage = cuda.shared.array(0, uint32)
        shared = uint32((shared_address(storage) + uint32(ALIGNMENT - 1)) & uint32(0xFFFFFFFF - ALIGNMENT + 1))
        queries_full = uint32(shared + uint32(barriers_at))
        keys_full = uint32(queries_full + uint32(24))
        keys_empty, values_full = uint32(keys_full + uint32(ring_bytes)), uint32(keys_full + uint32(2 * ring_bytes))
        values_empty = uint32(keys_full + uint32(3 * ring_bytes))
        queries_empty, landed = uint32(queries_full + uint32(8)), uint32(queries_full + uint32(16))
        thread = uint32(cuda.threadIdx.x)
        lane = lane_index()
        if thread == uint32(0):
            tma.prefetch_map(q)
            tma.prefetch_map(k_cache)
            tma.prefetch_map(v_cache)
            mbarrier.init(queries_full, uint32(1))
            mbarrier.init(queries_empty, uint32(_CONSUMER_WARPS))
            mbarrier.init(landed, uint32(1))
            for stage in range(stages):
                mbarrier.init(uint32(keys_full + uint32(8 * stage)), uint32(1))
                mbarrier.init(uint32(keys_empty + uint32(8 * stage)), uint32(_CONSUMER_WARPS))
                mbarrier.init(uint32(values_full + uint32(8 * stage)), uint32(1))
                mbarrier.init(uint32(values_empty + uint32(8 * stage)), uint32(_CONSUMER_WARPS))
            mbarrier.fence_init()
        tile_tokens = divide_u32(uint32(tile_rows), share)
        zero_rows(shared, uint32(tile_tokens * share), thread)
        tma.fence_shared()
        sync_block()
        wait_for_previous_grid()

        given = Given(
            q, k_cache, v_cache, out, workspace, sinks, query_start, seq_lens, block_tables, num_q_heads, num_kv_heads,
            share, table_width, window, num_seqs, workspace_columns, scale, tile_tokens,
        )  # fmt: skip
        barriers = Barriers(queries_full, queries_empty, landed, keys_full, keys_empty, values_full, values_empty)
        tile = take_tile(given, uint32(0), lane)
        if thread < uint32(GROUP_THREADS):
            _give_registers()
            bring_tiles(given, shared, barriers, tile, uint32(thread >> uint32(5)), lane)
            launch_dependents()
        else:
            _take_registers()
            compute_tiles(given, shared, barriers, tile, lane)

    sizes = f"d{qk_dim}" if is_even else f"d{qk_dim}_v{v_dim}"
    name = f"attention_flash_hopper_{dtype}_{sizes}_b{block_size}{variant.suffix}"
    constants = {
        "dtype": dtype, "head_dim": qk_dim, "v_dim": v_dim, "block_size": block_size, "num_rows": tile_rows,
        "num_keys": keys,
    } | asdict(variant)  # fmt: skip
    arguments = (TENSOR_MAP, TENSOR_MAP, TENSOR_MAP, *ARGUMENT_TYPES[3:])
    return Specialisation(
        name, kernel, arguments, THREADS, min_blocks=1, constants=constants, min_capability=90,
        needs_arch_features=True,
    )  # fmt: skip
