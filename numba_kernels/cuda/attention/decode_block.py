"""The sizes of `decode_tensor_core`'s blocks, and where their tiles lie in shared memory."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from numba_kernels.cuda.attention.runs import STATE_BYTES
from numba_kernels.cuda.attention.tiles import tile_shape

NUM_KEYS = 16  # of a warp's tile
WIDE_SPILL_ON = ("sm_80", "sm_86", "sm_89")  # tiles of 16 rows of more than 128 columns
CUT_BYTES = 32  # what a block keeps of a tile that others have parts of, too
RUN_AT, SCRATCH_BYTES = 2 * CUT_BYTES, 2 * CUT_BYTES + 32


@dataclass(frozen=True, slots=True)
class DecodeBlock:
    """A block's warps and memory: scratch, each warp's state, queries (if it prepares them, rows for the newest key and
    its value, too), factors of rows and warps, then a stage for each warp: two tiles of keys, two of values. A warp's
    results lie in its stage.

    Attributes:
        columns: of a row that are computed, in `steps` of the tensor core; `groups` of 8 queries.
        pitch, key_pitch: bytes from one row of queries, and of keys or values, to the next.
        tile_bytes: of a warp's tile of keys or values, with their scales.
        result_pitch: bytes from one row of results to the next: 8 columns of 4 rows fall into different banks.
        statistics_at: where a warp's results have the rows' largest scores and totals.
        is_ahead: whether the results take one tile's place, so that the next tiles are asked for before they are read.
        results_at: where a warp's results lie in its stage of `stage_bytes`.
        keeps_queries: whether queries stay in registers; else they are read again for each tile of keys.
    """

    dtype: str
    head_dim: int
    num_rows: int
    pages: str
    warps: int
    columns: int
    pitch: int
    key_pitch: int
    tile_bytes: int
    result_pitch: int
    statistics_at: int
    is_ahead: bool
    results_at: int
    stage_bytes: int
    keeps_queries: bool
    queries_at: int
    factors_at: int
    stages_at: int
    shared_bytes: int

    @property
    def threads(self) -> int:
        """The block's threads."""
        return 32 * self.warps

    @property
    def turn_keys(self) -> int:
        """Keys of all warps' tiles."""
        return NUM_KEYS * self.warps

    @property
    def steps(self) -> int:
        """Steps of 16 columns."""
        return self.columns // 16

    @property
    def groups(self) -> int:
        """Groups of 8 rows."""
        return self.num_rows // 8


@functools.cache
def decode_block(
    dtype: str, head_dim: int, num_rows: int, pages: str = "", *, prepares: bool = False
) -> DecodeBlock:  # fmt: skip
    """The block for tiles of `num_rows` queries, 8 or 16. Two of whole head dims take half of a multiprocessor."""
    warps = 2 if head_dim > 128 else 3 if head_dim > 64 and not pages else 4
    shape, key_pitch = tile_shape(dtype, head_dim), tile_shape(pages or dtype, head_dim).pitch
    columns = shape.columns
    tile_bytes, result_pitch = NUM_KEYS * (key_pitch + (4 if pages else 0)), (columns + 4) * 4
    statistics_at, is_ahead = num_rows * result_pitch, num_rows == 8
    results_at = 3 * tile_bytes if is_ahead else 0
    stage_bytes = max(4 * tile_bytes, results_at + statistics_at + num_rows * 8)
    queries_at = SCRATCH_BYTES + warps * STATE_BYTES
    factors_at = queries_at + (num_rows + 2 * prepares) * shape.pitch
    stages_at = factors_at + num_rows * warps * 4
    keeps_queries = columns * num_rows <= (1024 if pages and num_rows == 16 else 2048)
    return DecodeBlock(
        dtype, head_dim, num_rows, pages, warps, columns, shape.pitch, key_pitch, tile_bytes, result_pitch,
        statistics_at, is_ahead, results_at, stage_bytes, keeps_queries, queries_at, factors_at, stages_at,
        stages_at + warps * stage_bytes,
    )  # fmt: skip
