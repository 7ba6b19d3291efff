"""Chooses the latent attention kernel of a batch, its grid and its arguments."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from numba_kernels.cuda.attention import parts
from numba_kernels.cuda.intrinsics.element_types import DTYPES
from numba_kernels.cuda.intrinsics.shared_memory import SHARED_BYTES
from numba_kernels.cuda.latent import head_maps, hopper, hopper_steps, plain, prepare, rows, tensor_core
from numba_kernels.cuda.specialisation import Launch, Specialisation

ROW_MULTIPLE = 8
TIERS = ("plain", "tensor_core", "hopper")
_FEW_ROWS = {"": 48, "e4m3": 16}  # of a sequence, up to which tiles of 16 take no longer, by pages
_WAVES = 2  # of blocks, where one cannot hold them
_MOST_WAVES = 4  # of tiles of rows, beyond which sequences stay whole: their records would take gigabytes


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """The launch of one batch's attention, the same for all layers.

    Attributes:
        tier: of `TIERS`.
        workspace_bytes: device memory that it needs; 0 for none.
        num_arrivals: uint32 of device memory that are zeros before the launch, and after it; 0 for none.
        num_heads, table_width, num_seqs: as the kernels take them.
        wanted: blocks that the batch's keys are to be cut into.
    """

    tier: str
    launch: Launch
    num_heads: int
    table_width: int
    num_seqs: int
    workspace_bytes: int = 0
    num_arrivals: int = 0
    wanted: int = 1

    def arguments(
        self, q: int, pages: int, out: int, workspace: int, arrivals: int, query_start: int, seq_lens: int,
        block_tables: int, scale: float,
    ) -> tuple[int | float, ...]:  # fmt: skip
        """Addresses of q [T, H, width], pages, out [T, H, value_dim], workspace and arrivals (0 if not needed),
        query_start (int32 [S + 1]), seq_lens (int32 [S]), block tables (int32 [S, table_width]); the scores' scale."""
        tables, sizes = (query_start, seq_lens, block_tables), (self.num_heads, self.table_width)
        factor = scale * math.log2(math.e)
        if self.tier == "plain":
            return (q, pages, out, *tables, *sizes, factor)
        return (q, pages, out, workspace, arrivals, *tables, *sizes, self.num_seqs, self.wanted, factor)


def why_not(width: int) -> str:
    """Why rows of so many numbers are not supported on a GPU; "" if they are."""
    return "" if width <= plain.MAX_WIDTH else f"{width} numbers a row, limit {plain.MAX_WIDTH}"


def plan_prepare(
    num_tokens: int, width: int, dtype: str, *, rotary: int, interleaved: bool, key_dim: int, pages: str = ""
) -> Launch:
    """The launch for at least one token, and at least one head, whose queries are not absorbed. `pages`: "e4m3" for
    rows of `numba_kernels.latent_rows`, "" for the dtype's.

    Arguments: q, out [T, H, key_dim + rotary], latent [T, width], positions (int32 [T]), cos, sin (float32 [P, rotary /
    2]), q_scales (float32 [P], or 0), norm (float32 [width - rotary]), slot_mapping (int64 [T]; negative if not
    stored), pages; numbers from one token to the next in q and latent, H, eps.
    """
    kernel = prepare.latent_prepare(dtype, width, rotary, interleaved, key_dim, pages)
    return Launch(kernel, (num_tokens, 1, 1), (prepare.THREADS, 1, 1))


def plan_absorb(
    num_tokens: int, num_heads: int, width: int, dtype: str, *, rotary: int, interleaved: bool, key_dim: int,
    is_aligned: bool, pages: str = "",
) -> Launch:  # fmt: skip
    """The launch for at least one token and head: queries as attention takes them, and the tokens' rows.

    Arguments: q [T, H, key_dim + rotary], the keys' maps [H, width - rotary, key_dim], out [T, H, width], latent,
    positions, cos, sin, q_scales, norm, slot_mapping, pages as in `plan_prepare`; numbers from one token to the next
    in q and latent, H, T, eps. `is_aligned`: all rows of q, latent, the maps and out lie on 16-byte bounds.
    """
    head_map = head_maps.HeadMap(dtype, key_dim, width - rotary, key_dim + rotary, width, rotary, is_aligned)
    rows = head_maps.rows_of(head_map, num_tokens)
    kernel = head_maps.absorb(head_map, head_maps.Absorption(width, rotary, interleaved, pages), rows)
    blocks = -(-num_tokens // head_maps.WARPS) + head_map.column_tiles * num_heads * -(-num_tokens // rows)
    return Launch(kernel, (blocks, 1, 1), (head_maps.THREADS, 1, 1), head_map.shared_bytes(rows))


def plan_values(
    num_tokens: int, num_heads: int, latent_dim: int, value_dim: int, dtype: str, *, is_aligned: bool
) -> Launch:
    """The launch for at least one token and head.

    Arguments: results [T, H, latent_dim], the values' maps [H, value_dim, latent_dim], out [T, H, value_dim]; H, T.
    `is_aligned`: all of them lie on 16-byte bounds.
    """
    head_map = head_maps.HeadMap(dtype, latent_dim, value_dim, latent_dim, value_dim, 0, is_aligned)
    rows = head_maps.rows_of(head_map, num_tokens)
    blocks = head_map.column_tiles * num_heads * -(-num_tokens // rows)
    kernel = head_maps.values(head_map, rows)
    return Launch(kernel, (blocks, 1, 1), (head_maps.THREADS, 1, 1), head_map.shared_bytes(rows))


def plan_rows(num_rows: int, width: int, dtype: str, block_size: int, *, pages: str = "", value_dim: int = 0) -> Launch:
    """The launch that copies rows of one sequence out of its pages, in order; those past its end become zeros. `width`
    numbers are whole 16-byte pieces.

    Arguments: pages, out [num_rows, width], seq_lens (int32 [1]), block table (int32); the first row in the sequence,
    num_rows.
    """
    kernel = rows.latent_rows(dtype, width, block_size, pages, value_dim if pages else 0)
    return Launch(kernel, (-(-num_rows // rows.ROWS), 1, 1), (rows.THREADS, 1, 1))


def plan_attention(
    *,
    num_tokens: int,
    num_seqs: int,
    max_query_len: int,
    max_seq_len: int,
    num_heads: int,
    width: int,
    value_dim: int,
    table_width: int,
    dtype: str,
    block_size: int,
    num_sms: int,
    most_shared: int,
    arch: str = "sm_80",
    num_blocks: int | None = None,
    exact: bool = False,
    tier: str | None = None,
    pages: str = "",
) -> LatentPlan:
    """The launch for at least one query and sequence.

    `max_query_len` and `max_seq_len` may be larger than the batch's own (a captured graph's), never smaller.
    `most_shared` is the shared memory that a block may have. With `exact` a row's bits depend on its query and its keys
    alone: no sequence is split, and tiles of keys begin at the same places. `num_blocks` is the cache's, without which
    pages have no tensor map. `tier` forces one of `TIERS`; ValueError if it has no kernel.
    """
    sizes, num_rows = (num_heads, table_width, num_seqs), max_query_len * num_heads
    tiles = tensor_core.choose_tiles(dtype, width, value_dim, most_shared, pages)
    is_for_hopper = arch == hopper.ARCH and num_blocks is not None
    is_for_hopper = is_for_hopper and hopper.has_kernel(dtype, width, value_dim, block_size, pages)
    if tier is None:
        tier = "plain" if tiles is None else "tensor_core"
        if is_for_hopper and num_rows > _FEW_ROWS[pages] and not exact:
            tier = "hopper"
    if tier == "plain":
        plain_kernel = plain.latent_float32(dtype, width, value_dim, block_size, pages)
        grid = max_query_len, -(-num_heads // plain.HEADS), num_seqs
        return LatentPlan(tier, Launch(plain_kernel, grid, (plain.THREADS, 1, 1)), *sizes)
    if tier == "hopper" and is_for_hopper and num_blocks is not None:
        kernel, tile_rows = hopper.latent_hopper(dtype, value_dim, block_size, pages), hopper_steps.NUM_ROWS
        shared_bytes = hopper_steps.LatentPanels(value_dim).shared_bytes
        maps = hopper.map_layouts(dtype, width, num_tokens * num_heads, block_size, num_blocks, pages)
    elif tier == "tensor_core" and tiles is not None:
        kernel, tile_rows = tensor_core.latent_tensor_core(tiles, block_size), tensor_core.NUM_ROWS
        shared_bytes, maps = tiles.shared_bytes, ()
    else:
        raise ValueError(
            f"tier {tier} has no kernel for rows of {width} {dtype} with values of {value_dim} in {most_shared} bytes"
            f" on {arch}"
        )
    num_tiles = min(num_seqs * -(-num_rows // tile_rows), num_seqs + num_tokens * num_heads // tile_rows)
    wanted = 1
    if max_seq_len > parts.MIN_PART_KEYS and not exact and num_tiles <= _MOST_WAVES * num_sms:
        wanted = num_sms - num_tiles if num_sms >= 2 * num_tiles else _WAVES * num_sms
    blocks = num_tiles + wanted
    launch = Launch(kernel, (blocks, 1, 1), (kernel.max_threads, 1, 1), shared_bytes, maps=maps)
    if wanted == 1:
        return LatentPlan(tier, launch, *sizes)
    return LatentPlan(tier, launch, *sizes, parts.workspace_bytes(value_dim, tile_rows, blocks, 1), blocks, wanted)


def specialisations() -> Iterator[Specialisation]:
    """Those of DeepSeek's models and GLM's, with rows of 64 and 512, and of Mistral 4's, of 64 and 256."""
    for dtype in DTYPES:
        for interleaved in (False, True):
            yield prepare.latent_prepare(dtype, 576, 64, interleaved, 128)
        yield rows.latent_rows(dtype, 576, 16)
    for dtype in DTYPES:
        for width, key_dim, value_dim in ((576, 128, 128), (576, 192, 256), (320, 64, 128)):
            for count in (1, 64) if dtype != "f32" else (1,):
                yield plan_absorb(
                    count, 1, width, dtype, rotary=64, interleaved=True, key_dim=key_dim, is_aligned=True
                ).specialisation  # fmt: skip
                yield plan_values(count, 1, width - 64, value_dim, dtype, is_aligned=True).specialisation
    for width, value_dim in ((576, 512), (320, 256)):
        for dtype in DTYPES:
            found = {tensor_core.choose_tiles(dtype, width, value_dim, most) for most in SHARED_BYTES.values()}
            for tiles in sorted(filter(None, found), key=lambda each: each.num_keys):
                yield tensor_core.latent_tensor_core(tiles, 16)
            if dtype == "bf16":
                most = SHARED_BYTES.values()
                in_bytes = {tensor_core.choose_tiles(dtype, width, value_dim, each, "e4m3") for each in most}
                for tiles in sorted(filter(None, in_bytes), key=lambda each: each.num_keys):
                    yield tensor_core.latent_tensor_core(tiles, 16)
            if not any(found) or dtype == "bf16":
                yield plain.latent_float32(dtype, width, value_dim, 16)
            for pages in ("", "e4m3") if dtype == "bf16" else ("",):
                if hopper.has_kernel(dtype, width, value_dim, 16, pages):
                    yield hopper.latent_hopper(dtype, value_dim, 16, pages)
