"""Chooses the attention kernel of a batch, its grid and its arguments."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from numba_kernels.cuda.attention import (
    decode_tensor_core,
    flash_float32,
    flash_hopper,
    flash_tensor_core,
    flash_wide,
    naive,
    parts,
    segments,
)
from numba_kernels.cuda.attention.decode_block import WIDE_SPILL_ON, decode_block
from numba_kernels.cuda.attention.hopper_tiles import hopper_tiles
from numba_kernels.cuda.attention.prepared_heads import HeadForm, fits_tiles
from numba_kernels.cuda.attention.tiles import NO_WINDOW, WIDE, Variant
from numba_kernels.cuda.attention.wide_tiles import wide_tiles
from numba_kernels.cuda.intrinsics.element_types import DTYPES, ITEM_BYTES
from numba_kernels.cuda.intrinsics.shared_memory import SMALL
from numba_kernels.cuda.kv_cache import check_pages
from numba_kernels.cuda.quantised_pages import PAGES
from numba_kernels.cuda.specialisation import HALF_SHARED_BYTES, Launch, Specialisation

TIERS = ("naive", "flash", "flash_hopper", "decode")
_DECODE_ROWS = 16  # the largest tile of the decode kernels
_MOST_VERIFIED = 8  # queries of a sequence that tries proposals
_SPARSE = 4  # multiprocessors for each block of the flash tier from which on those cannot use all the bandwidth
_DECODE_BLOCKS_PER_SM = 3  # what Hopper's shared memory holds
_SHORT_BYTES = 32 << 20  # of a batch's keys and values: some 8 us on an H200
_CACHED_BYTES = 32 << 20  # of keys and values that the second-level cache keeps while tiles of all of them are computed
_WAVES = 2  # of blocks, where one cannot hold them; four took 3 to 5 % longer (docs/measurements, 2026-11-26, an H200)
_HOPPER_ROWS = 64  # with no more, half of a tile or more would be empty
_MAX_GRID_YZ = 65535


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The launch of one batch's attention, the same for all layers of equal shape.

    Attributes:
        tier: of `TIERS`.
        launch: its arguments are `arguments`.
        workspace_bytes: device memory that it needs, 16-byte aligned; 0 for none. For the naive tier it ends as the
            softmax weights, float32 [num_tokens, num_q_heads, workspace_columns].
        workspace_columns: weights a row (naive), blocks that a KV head's keys are to be cut into (decode), sequences
            whose tiles lie in the order of their keys (flash_hopper), or 1.
        shape: num_tokens, num_q_heads, num_kv_heads, table_width, window, num_seqs, as the kernels take them.
        num_arrivals: uint32 of device memory that are zeros before the launch, and after it; 0 for none.
        prepares: whether the kernel prepares its heads: q is qkv, and `prepared_heads.ARGUMENT_TYPES` and the norms'
            eps follow the `arguments`.
    """

    tier: str
    launch: Launch
    workspace_bytes: int
    workspace_columns: int
    shape: tuple[int, int, int, int, int, int]
    num_arrivals: int = 0
    prepares: bool = False

    def arguments(
        self, q: int, k_cache: int, v_cache: int, out: int, workspace: int, arrivals: int, query_start: int,
        seq_lens: int, block_tables: int, scale: float, sinks: int = 0, k_scales: int = 0, v_scales: int = 0, *,
        bidirectional_until: int = 0,
    ) -> tuple[int | float, ...]:  # fmt: skip
        """All addresses (0 for workspace, arrivals, sinks, scales and bidirectional_until that are not needed) and the
        scale of the scores, in the kernel's order."""
        _, num_q_heads, num_kv_heads, table_width, window, num_seqs = self.shape
        return (
            q, k_cache, v_cache, out, workspace, arrivals, sinks, k_scales, v_scales, query_start, seq_lens,
            block_tables, bidirectional_until, num_q_heads, num_kv_heads, num_q_heads // num_kv_heads, table_width,
            window, num_seqs, self.workspace_columns, scale * math.log2(math.e),
        )  # fmt: skip


def plan(
    *,
    num_tokens: int,
    num_seqs: int,
    max_query_len: int,
    max_seq_len: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    table_width: int,
    dtype: str,
    block_size: int,
    window: int | None = None,
    has_sinks: bool = False,
    softcap: float | None = None,
    num_sms: int = 108,
    exact: bool = False,
    arch: str = "sm_80",
    num_blocks: int | None = None,
    tier: str | None = None,
    pages: str = "",
    has_spans: bool = False,
    heads: HeadForm | None = None,
) -> AttentionPlan:
    """The launch for a batch of at least one token.

    `max_query_len` and `max_seq_len` may be larger than the batch's own (a captured graph's), never smaller. `window`
    counts the keys that a query sees, its own included. With `has_sinks` the launch takes the address of float32
    [num_q_heads]: each head's logit that joins its rows' softmax and has no value. `softcap` bounds scores. `arch` is
    the device's; `num_blocks` is the cache's, without which its pages have no tensor map. `tier` forces one of `TIERS`.
    `pages` is the pages' type if it is not the dtype: one of `quantised_pages.PAGES`, whose launches take scales.
    With `has_spans` the launch takes the address of int32 [num_tokens]: one past the last key that each token sees;
    only the flash tier has that. With `heads` the decode tier prepares them itself where it can (`prepares`), for one
    token a sequence.

    With `exact` a row's bits depend on its query and its keys alone: not on the batch, not on how the sequence was
    cut into chunks, and not on whether its token came as prefill or as decode. All lengths then take the flash tier,
    which never splits a sequence. Without it short chunks take the decode tier, in as many parts as fill the device
    (those of more than a tile's rows only where the flash tier's blocks would be few), and long ones flash_hopper
    where the device has it. Either way equal inputs give equal bits.

    ValueError for sizes that no kernel has, naming the field, its value and its limit.
    """
    check_pages(head_dim, block_size, dtype)
    for name, value in (
        ("num_tokens", num_tokens), ("num_seqs", num_seqs), ("max_query_len", max_query_len),
        ("num_q_heads", num_q_heads), ("num_kv_heads", num_kv_heads), ("num_sms", num_sms),
    ):  # fmt: skip
        if value < 1:
            raise ValueError(f"{name} is {value}, must be at least 1")
    for name, value in (("num_seqs", num_seqs), ("num_q_heads", num_q_heads)):
        if value > _MAX_GRID_YZ:
            raise ValueError(f"{name} is {value}, must be at most {_MAX_GRID_YZ}")
    if num_q_heads % num_kv_heads:
        raise ValueError(f"num_q_heads is {num_q_heads}, must be a multiple of num_kv_heads = {num_kv_heads}")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}, must be at least 1")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap is {softcap}, must be above 0 and finite")
    if not 0 <= max_seq_len < NO_WINDOW:
        raise ValueError(f"max_seq_len is {max_seq_len}, must be 0 to {NO_WINDOW - 1}")
    if tier is not None and tier not in TIERS:
        raise ValueError(f"tier is {tier!r}, must be one of {TIERS}")
    if has_spans and tier not in (None, "flash"):
        raise ValueError(f"tier {tier} has no spans, must be flash")
    if pages not in ("", *PAGES):
        raise ValueError(f"pages is {pages!r}, must be '' or one of {PAGES}")
    share = num_q_heads // num_kv_heads
    rows = max_query_len * share  # of a sequence and KV head
    has_hopper = flash_hopper.has_kernel(dtype, head_dim, head_dim, share, block_size)
    if tier is None:
        is_short = max_query_len == 1 or rows <= _DECODE_ROWS
        if not is_short and max_query_len <= _MOST_VERIFIED:  # tiles read keys again, from the cache, but share them
            tile_rows = _flash_rows(dtype, head_dim, rows, arch)
            is_short = _SPARSE * -(-rows // tile_rows) * num_kv_heads * num_seqs <= num_sms
        is_for_hopper = arch == flash_hopper.ARCH and not pages and has_hopper
        if has_spans:
            tier = "flash"
        elif is_short and not exact:
            tier = "decode"
        elif is_for_hopper and num_blocks is not None and rows > _HOPPER_ROWS and not exact:
            tier = "flash_hopper"
        else:
            tier = "flash"
    most_keys = min(max_seq_len, window + max_query_len) if window else max_seq_len
    key_bytes = 2 * num_kv_heads * head_dim * (1 if pages else ITEM_BYTES[dtype])
    shape = num_tokens, num_q_heads, num_kv_heads, table_width, min(window or NO_WINDOW, NO_WINDOW), num_seqs
    variant = Variant(window is not None, has_sinks, softcap or 0.0, pages, has_spans)
    if tier == "naive":
        kernel = naive.naive(dtype, head_dim, block_size, variant)
        attend = Launch(kernel, (max_query_len, num_q_heads, num_seqs), (naive.THREADS, 1, 1))
        columns = max(1, max_seq_len)
        return AttentionPlan(tier, attend, num_tokens * num_q_heads * columns * 4, columns, shape)
    if tier == "flash_hopper":
        if pages:
            raise ValueError(f"tier flash_hopper brings pages by the TMA as they are: got pages of {pages}")
        if arch != flash_hopper.ARCH or num_blocks is None or not has_hopper:
            raise ValueError(
                f"tier flash_hopper needs {flash_hopper.ARCH}, num_blocks, f16 or bf16, a head_dim that is a multiple "
                f"of 8 (beyond {WIDE} with pages of 16 tokens or more) and at most "
                f"{hopper_tiles(head_dim, head_dim).num_rows} query heads a KV head; got {arch}, {num_blocks}, "
                f"{dtype}, {head_dim} and {share}"
            )
        attend = flash_hopper.plan(
            dtype, block_size, variant, num_tokens=num_tokens, num_seqs=num_seqs, max_query_len=max_query_len,
            num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, num_blocks=num_blocks,
            num_sms=num_sms,
        )  # fmt: skip
        return AttentionPlan(tier, attend, 0, max(1, min(32, _CACHED_BYTES // max(1, most_keys * key_bytes))), shape)
    if tier == "flash":
        tile_rows = _flash_rows(dtype, head_dim, rows, arch)
        if dtype == "f32":
            kernel = flash_float32.flash_float32(head_dim, head_dim, block_size, False, variant)
            shared_bytes = flash_float32.shared_bytes(head_dim, head_dim, False)
        elif head_dim > WIDE:
            wide = wide_tiles(dtype, pages, head_dim, arch, False)
            kernel, shared_bytes = flash_wide.flash_wide(wide, block_size, False, variant), wide.shared_bytes
        else:
            kernel = flash_tensor_core.flash_tensor_core(dtype, head_dim, head_dim, block_size, tile_rows, variant)
            shared_bytes = flash_tensor_core.shared_bytes(dtype, head_dim, head_dim, tile_rows, pages)
        grid = -(-rows // tile_rows), num_kv_heads, num_seqs
        return AttentionPlan(tier, Launch(kernel, grid, (kernel.max_threads, 1, 1), shared_bytes), 0, 1, shape)

    prepared, turn_keys = None, parts.UNIT_KEYS
    if dtype == "f32":
        num_rows = flash_float32.num_rows(head_dim, True)
        kernel = flash_float32.flash_float32(head_dim, head_dim, block_size, True, variant)
        shared_bytes = flash_float32.shared_bytes(head_dim, head_dim, True)
    elif head_dim > WIDE:
        wide = wide_tiles(dtype, pages, head_dim, arch, True)
        num_rows, shared_bytes = wide.num_rows, wide.shared_bytes
        kernel = flash_wide.flash_wide(wide, block_size, True, variant)
    else:
        num_rows = 8 if rows <= 8 else _most_rows(head_dim, pages, arch)
        if heads is not None and max_query_len == 1 and rows <= num_rows and fits_tiles(heads):
            prepared = heads
        kernel = decode_tensor_core.decode_tensor_core(dtype, head_dim, block_size, num_rows, variant, prepared)
        block = decode_block(dtype, head_dim, num_rows, pages, prepares=prepared is not None)
        shared_bytes, turn_keys = block.shared_bytes, block.turn_keys
    tiles = min(num_seqs * -(-rows // num_rows), num_seqs + num_tokens * share // num_rows)  # of a KV head, at most
    # Half is left to the next product, which brings its weights meanwhile. Single blocks of a half stream slower.
    is_short = arch in HALF_SHARED_BYTES and num_seqs * most_keys * key_bytes <= _SHORT_BYTES
    blocks_per_sm = _DECODE_BLOCKS_PER_SM if head_dim <= WIDE and not is_short else 1
    if dtype != "f32" and not pages and head_dim <= 128:
        blocks_per_sm = decode_tensor_core.HALF_BLOCKS
    has_runs, is_whole = dtype != "f32" and head_dim <= WIDE, most_keys <= parts.MIN_PART_KEYS
    if has_runs:
        wanted = blocks = tiles if is_whole else max(1, num_sms * blocks_per_sm // num_kv_heads)
    else:
        wanted = 0 if is_whole else _wanted(tiles, num_kv_heads, num_sms * blocks_per_sm)
        blocks = tiles + wanted
    attend = Launch(kernel, (blocks, num_kv_heads, 1), (kernel.max_threads, 1, 1), shared_bytes)
    # A run is never shorter than the least part: a tile of no more turns is one run's, however few tiles there are.
    most_turns = -(-(most_keys + (parts.UNIT_KEYS - 1 if window else 0)) // turn_keys)
    if is_whole and (not has_runs or most_turns <= parts.MIN_PART_KEYS // turn_keys):
        return AttentionPlan(tier, attend, 0, max(1, wanted), shape, prepares=prepared is not None)
    records = tiles + wanted
    workspace_bytes = parts.workspace_bytes(head_dim, num_rows, records, num_kv_heads)
    return AttentionPlan(
        tier, attend, workspace_bytes, wanted, shape, records * num_kv_heads, prepared is not None
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ExpandedPlan:
    """The launches of one long sequence over expanded rows (`segments`), the same for all layers.

    Attributes:
        state_bytes: device memory for the results between them.
    """

    launch: Launch
    num_heads: int
    state_bytes: int

    def arguments(
        self, q: int, keys: int, values: int, out: int, state: int, query_start: int, seq_lens: int, scale: float, *,
        first_key: int, most_keys: int, is_last: bool,
    ) -> tuple[int | float, ...]:  # fmt: skip
        """Addresses of q [T, H, qk_dim] and out [T, H, v_dim] of all tokens, of the segment's first key and value, of
        the state, and of the sequence's query_start (two) and seq_lens (one); the segment's first key in the sequence,
        and how many it has at most."""
        return (
            q, keys, values, out, state, 0, 0, 0, 0, query_start, seq_lens, 0, 0, self.num_heads, self.num_heads, 1,
            int(is_last), first_key, 1, most_keys, scale * math.log2(math.e),
        )  # fmt: skip


def can_expand(dtype: str, qk_dim: int, v_dim: int) -> bool:
    """Whether there is a kernel for expanded rows of this type, whose keys and values have so many numbers a head."""
    whole = 4 if dtype == "f32" else 8  # 16 bytes
    return qk_dim % whole == 0 and v_dim % whole == 0 and 0 < v_dim <= qk_dim <= WIDE


def plan_expanded(
    dtype: str, qk_dim: int, v_dim: int, *, num_tokens: int, query_len: int, num_heads: int, num_rows: int,
    num_sms: int, arch: str,
) -> ExpandedPlan:  # fmt: skip
    """For a sequence's chunk of at most `query_len` of the batch's tokens, against segments of `num_rows` rows, a
    multiple of 16."""
    if dtype == "f32":
        launch, size = flash_float32.plan_expanded(qk_dim, v_dim, query_len=query_len, num_heads=num_heads)
    elif arch == flash_hopper.ARCH and flash_hopper.has_kernel(dtype, qk_dim, v_dim, 1, segments.BLOCK_SIZE):
        launch, size = flash_hopper.plan_expanded(
            dtype, qk_dim, v_dim, num_tokens=num_tokens, query_len=query_len, num_heads=num_heads, num_rows=num_rows,
            num_sms=num_sms,
        )  # fmt: skip
    else:
        launch, size = flash_tensor_core.plan_expanded(dtype, qk_dim, v_dim, query_len=query_len, num_heads=num_heads)
    return ExpandedPlan(launch, num_heads, size)


def _most_rows(head_dim: int, pages: str, arch: str = "") -> int:
    """The rows of a decode kernel's largest tile, where 16 fit in registers."""
    return 8 if head_dim > 128 and (pages or arch in WIDE_SPILL_ON) else _DECODE_ROWS


def _flash_rows(dtype: str, head_dim: int, rows: int, arch: str) -> int:
    if dtype == "f32":
        return flash_float32.num_rows(head_dim, False)
    if head_dim > WIDE:
        return wide_tiles(dtype, "", head_dim, arch, False).num_rows
    return flash_tensor_core.num_rows(head_dim, rows)


def _wanted(num_tiles: int, num_kv_heads: int, num_blocks: int) -> int:
    """Blocks that a KV head's keys are to be cut into: with those of rounding up, at most one for each tile, they fill
    the device's `num_blocks` once, or several times where the tiles alone nearly fill it."""
    resident = max(1, num_blocks // num_kv_heads)
    return resident - num_tiles if resident >= 2 * num_tiles else _WAVES * resident


def specialisations() -> Iterator[Specialisation]:
    """Every tier for the usual head dims, pages of 16 tokens; with windows, sinks and caps, those of gpt-oss and Gemma
    2; those of vision towers, of Gemma 3 for images whose tokens see each other, and of Gemma 4's wide heads."""
    for dtype in DTYPES:
        for head_dim in (32, 64, 128):
            yield from _kernels(dtype, head_dim, Variant())
    for head_dim in (80, 96, 256):
        yield from _kernels("bf16", head_dim, Variant())
    for has_window in (False, True):
        yield from _kernels("bf16", 64, Variant(has_window, True))
    yield from _kernels("bf16", 256, Variant(has_window=True, softcap=50.0))
    for pages in PAGES:
        for head_dim in (64, 128, 256):
            yield from _kernels("bf16", head_dim, Variant(pages=pages))
        yield from _kernels("f16", 128, Variant(pages=pages))
    for dtype in ("f16", "bf16"):
        for head_dim in (64, 72, 80):
            yield from _flash(dtype, head_dim, Variant(), (64, 128))
    for head_dim in (128, 256):
        for has_window in (False, True):
            yield from _flash("bf16", head_dim, Variant(has_window, has_spans=True), (64, 128))
    qwen3, gpt_oss = HeadForm("bf16", 128, 128, norm="head"), HeadForm("bf16", 64, 64)
    for pages in ("", *PAGES):
        yield decode_tensor_core.decode_tensor_core("bf16", 128, 16, 8, Variant(pages=pages), qwen3)
    for has_window in (False, True):
        yield decode_tensor_core.decode_tensor_core("bf16", 64, 16, 8, Variant(has_window, True), gpt_oss)
    for pages, arch in itertools.product(("", "e4m3"), ("sm_80", SMALL[0])):
        for is_split in (False, True):
            tiles = wide_tiles("bf16", pages, 512, arch, is_split)
            yield flash_wide.flash_wide(tiles, 16, is_split, Variant(pages=pages))
    yield flash_hopper.flash_hopper("bf16", 512, 512, 16, Variant())
    yield from _expanded()


def _expanded() -> Iterator[Specialisation]:
    """Latent rows expanded for long prompts: DeepSeek's heads, GLM-4.7-Flash's and Mistral Small 4's."""
    variant, block_size = Variant(is_expanded=True), segments.BLOCK_SIZE
    for qk_dim, v_dim in ((192, 128), (256, 256), (128, 128)):
        for dtype in ("bf16", "f16") if qk_dim != v_dim else ("bf16",):
            tile_rows = flash_tensor_core.num_rows(max(qk_dim, v_dim), 128)
            yield flash_tensor_core.flash_tensor_core(dtype, qk_dim, v_dim, block_size, tile_rows, variant)
            yield flash_hopper.flash_hopper(dtype, qk_dim, v_dim, block_size, variant)
    yield flash_float32.flash_float32(192, 128, block_size, False, variant)


def _flash(dtype: str, head_dim: int, variant: Variant, num_rows: tuple[int, ...]) -> Iterator[Specialisation]:
    """The flash tier for 16 bits, for so many rows of a sequence and KV head."""
    for tile_rows in sorted({flash_tensor_core.num_rows(head_dim, rows) for rows in num_rows}):
        yield flash_tensor_core.flash_tensor_core(dtype, head_dim, head_dim, 16, tile_rows, variant)


def _kernels(dtype: str, head_dim: int, variant: Variant) -> Iterator[Specialisation]:
    yield naive.naive(dtype, head_dim, 16, variant)
    if dtype == "f32":
        yield flash_float32.flash_float32(head_dim, head_dim, 16, False, variant)
        yield flash_float32.flash_float32(head_dim, head_dim, 16, True, variant)
    else:
        yield from _flash(dtype, head_dim, variant, (64, 128))
        if dtype == "bf16" and head_dim >= 64 and not variant.pages:
            yield flash_hopper.flash_hopper(dtype, head_dim, head_dim, 16, variant)
        for num_rows in sorted({8, _most_rows(head_dim, variant.pages)}):
            yield decode_tensor_core.decode_tensor_core(dtype, head_dim, 16, num_rows, variant)
