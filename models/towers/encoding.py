"""The interface of all towers: a picture is encoded piece by piece, so that no step of the engine waits for much of it.

A layer is two passes over a picture's rows. The first makes queries, keys and values of each; in the second each tile
of queries sees all keys, and goes through the rest of the layer. Both can stop after any piece. On the cpu a row's bits
depend on no other row, so pieces may have any size; on a GPU they may, so all pieces have one size. A picture's bits
are thus the same however it is divided between steps.

Patches attend to all of the picture, or of their window, in both directions, by the paged causal kernels: a query that
stands last in its sequence sees all keys, so that nothing is masked. A block of patches becomes one token of as many
query heads, which share a KV head. So a picture's keys are read once per block, and no further kernel is needed.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from runtime import ops
from runtime.batch import AdaptedRows, Batch
from runtime.device.device import Device
from runtime.dtype import DType, float32
from runtime.kv.cache import KVCache, KVCacheSpec
from runtime.ops import RopeTable
from runtime.tensor.tensor import Tensor

CPU_ROWS = 192
"""Rows of a piece on the cpu if no decode waits for its end."""

MOST_CPU_ROWS = 1024
"""The most rows of any piece there."""

GPU_ROWS = 4096
"""On a GPU, which computes a layer of so many in less than a millisecond."""

_PLAIN = AdaptedRows(None)

T = TypeVar("T")

Pieces = Generator[int, None, tuple[Tensor, ...]]
"""The encoding of a picture: yields the rows of each finished piece, and returns the tower's result."""


class Keeper(Protocol):
    """Keeps arrays of a picture's size for the next picture, and may replay the work on them."""

    def keep(self, make: Callable[[], T]) -> T: ...

    def owns(self, *values: object) -> bool: ...

    def run(self, work: Callable[[], None]) -> None: ...


@dataclass(slots=True)
class Pace:
    """How many rows the next piece has, which the caller may change between two pieces, and the picture's adapter.

    Attributes:
        adapter: the slot of the picture's adapter, -1 for none.
        keeper: of arrays of this size; None if each picture has its own.
    """

    rows: int
    adapter: int = -1
    keeper: Keeper | None = None
    _rows_by_count: dict[int, AdaptedRows] = field(default_factory=dict)

    def of(self, x: Tensor) -> AdaptedRows:
        """The adapters of the rows ``x``."""
        if self.adapter < 0:
            return _PLAIN
        count = x.shape[0]
        found = self._rows_by_count.get(count)
        if found is None:
            (adapters,) = ops.place([np.full(count, self.adapter, np.int32)], x.device)
            found = self._rows_by_count[count] = AdaptedRows(adapters)
        return found

    def keep(self, make: Callable[[], T]) -> T:
        """The result of `make` for an earlier picture of this size, or now. Towers call it in one order."""
        return make() if self.keeper is None else self.keeper.keep(make)

    def slices(self, num_rows: int, unit: int = 1) -> Iterator[slice]:
        """Pieces of rows that each stand for `unit` patches."""
        begin = 0
        while begin < num_rows:
            end = min(begin + max(1, self.rows // unit), num_rows)
            yield slice(begin, end)
            begin = end


class PatchRows(Protocol):
    """A picture's patches, normalised: `rows` of them are `[n, patch_size]` float32. Arrays are such."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any, /) -> NDArray[np.float32]: ...


class Encoding:
    """A picture on its way through a tower, which can stop between any two pieces.

    Attributes:
        num_rows: computed so far; each counts twice in each layer.
    """

    def __init__(self, pieces: Pieces, pace: Pace, *, is_paced: bool) -> None:
        """`is_paced`: pieces may have any number of rows."""
        self._pieces, self._pace, self._is_paced, self._rows = pieces, pace, is_paced, pace.rows
        self.num_rows = 0

    def advance(self, num_rows: int) -> tuple[Tensor, ...] | None:
        """Compute pieces until they have so many rows together, on the cpu one piece of so many; at least one. Returns
        the tower's result after the last."""
        if self._is_paced:
            self._pace.rows = max(1, min(num_rows, MOST_CPU_ROWS))
        until = self.num_rows + num_rows
        try:
            while self.num_rows < until:
                self.num_rows += next(self._pieces)
        except StopIteration as end:
            made: tuple[Tensor, ...] = end.value
            return made
        return None

    def finish(self) -> tuple[Tensor, ...]:
        """Compute all that is left."""
        made = None
        while made is None:
            made = self.advance(self._rows)
        return made


class PictureTower(ABC):
    """Makes a picture's embeddings; a tower implements `pieces`."""

    dtype: DType
    device: Device

    @abstractmethod
    def pieces(self, patches: PatchRows, grid: tuple[int, int], pace: Pace) -> Pieces:
        """Encodes a picture of `grid` patches, those of a token together, piece by piece."""

    def start(
        self, patches: PatchRows, grid: tuple[int, int], adapter: int = -1, keeper: Keeper | None = None
    ) -> Encoding:
        """Begin with a picture, whose adapter lies in this slot; nothing is computed yet. The result may lie in kept
        arrays."""
        is_cpu = self.device.kind == "cpu"
        pace = Pace(CPU_ROWS if is_cpu else GPU_ROWS, adapter, keeper)
        return Encoding(self.pieces(patches, grid, pace), pace, is_paced=is_cpu)

    def __call__(self, patches: PatchRows, grid: tuple[int, int], adapter: int = -1) -> tuple[Tensor, ...]:
        """All of it at once."""
        return self.start(patches, grid, adapter).finish()

    def pixels(self, patches: PatchRows, rows: Any) -> Tensor:
        """Some of a picture's patches on the device, in the type that the tower computes in."""
        made = Tensor.from_numpy(np.ascontiguousarray(patches[rows], np.float32)).to(self.device)
        return made if self.device.kind == "cpu" else made.to(self.dtype)

    def buffer(self, *shape: int) -> Tensor:
        """Zeros in that type."""
        return Tensor.zeros(shape, float32 if self.device.kind == "cpu" else self.dtype, self.device)


CPU_QUERIES = 64
"""Patches that share a read of the keys: the rows of a group of the cpu's kernel, and a window of Qwen2.5-VL's."""

GPU_QUERIES = (64, 128)
"""On a GPU: the rows of its tiles, of which windows take the smaller one."""

_PAGE_TOKENS = 16


class FullAttention:
    """Attention over one picture, whose keys and values lie in pages of its own, one layer at a time.

    `lengths` are those of its consecutive windows: a patch sees those of its own. `rope` has a row for each patch; None
    disables rotation. First all of a layer's rows are added, some at a time; then tiles of queries attend.

    Attributes:
        num_blocks: of queries; a tile is some of them.
        queries_of_block: patches of a block, or fewer.
    """

    def __init__(
        self, lengths: Sequence[int], num_heads: int, head_dim: int, rope: RopeTable | None, dtype: DType,
        device: Device, *, scale: float | None = None, norm_eps: float = 0.0,
    ) -> None:  # fmt: skip
        """`scale` of scores, by default `head_dim**-0.5`; `norm_eps` of heads' norms."""
        self._num_heads, self._head_dim, self._rope = num_heads, head_dim, rope
        self._scale, self._norm_eps = head_dim**-0.5 if scale is None else scale, norm_eps
        spec = KVCacheSpec.uniform(
            num_layers=1, num_kv_heads=num_heads, head_dim=head_dim, block_size=_PAGE_TOKENS, dtype=dtype, device=device
        )
        counts = np.array(lengths, np.int64)
        num_patches, self._longest = int(counts.sum()), max(lengths)
        self.queries_of_block = queries = _queries(device, self._longest)
        num_pages, num_blocks = -(-counts // _PAGE_TOKENS), -(-counts // queries)  # of each window
        first_pages, first_blocks = np.cumsum(num_pages) - num_pages, np.cumsum(num_blocks) - num_blocks
        total = int(num_blocks.sum())
        self._pages = KVCache(spec, int(num_pages.sum()))
        inside = np.concatenate([np.arange(count) for count in lengths])
        self._blocks = np.repeat(first_blocks, counts) + inside // queries  # of each patch
        self.num_blocks = total
        table = np.minimum(np.arange(num_pages.max()), num_pages[:, None] - 1) + first_pages[:, None]
        arrays = (
            np.arange(num_patches, dtype=np.int32),
            np.repeat(first_pages, counts) * _PAGE_TOKENS + inside,
            np.arange(total + 1, dtype=np.int32),
            np.repeat(counts, num_blocks).astype(np.int32),
            np.ascontiguousarray(np.repeat(table, num_blocks, axis=0).astype(np.int32)),
            np.zeros(0, np.int32),
        )
        self._positions, self._slots, self._starts, self._seq_lens, self._tables, self._nothing = ops.place(
            arrays, device
        )
        self._spread: tuple[Tensor, NDArray[np.int64]] | None = None
        if (counts[:-1] % queries).any():  # partial blocks between others
            places = self._blocks * queries + inside % queries
            sources = np.zeros(total * queries, np.int32)
            sources[places] = np.arange(num_patches, dtype=np.int32)
            (spread,) = ops.place((sources,), device)
            self._spread = spread, places
        # A layer's queries, spread out over their blocks unless only the last block is partial.
        num_rows = total * queries if self._spread is None else num_patches
        self._queries = Tensor.zeros((num_rows, num_heads * head_dim), dtype, device)
        self._batches: dict[tuple[int, int], tuple[Batch, Tensor | None]] = {}

    def add(self, rows: slice, qkv: Tensor, norms: tuple[Tensor, Tensor] | None = None) -> None:
        """Adds some rows' `[n, 3 * num_heads * head_dim]`. With the weights of queries' and keys' `norms` each head of
        them is normalised, and those of values without weights."""
        heads, head_dim = self._num_heads, self._head_dim
        k_cache, v_cache = self._pages.layer(0)
        q = ops.qkv_prepare(
            qkv, self._positions[rows], num_q_heads=heads, num_kv_heads=heads, head_dim=head_dim, rope=self._rope,
            q_norm=norms and norms[0], k_norm=norms and norms[1], norm_eps=self._norm_eps,
            values="normed" if norms else "own", k_cache=k_cache, v_cache=v_cache, slot_mapping=self._slots[rows],
        )  # fmt: skip
        self._queries[rows] = q.view(q.shape[0], heads * head_dim)

    def rows_of(self, blocks: slice) -> slice:
        """The patches of a tile, which are consecutive."""
        first, end = np.searchsorted(self._blocks, (blocks.start, blocks.stop))
        return slice(int(first), int(end))

    def attend(self, blocks: slice) -> Tensor:
        """The attention of a tile's patches, `[n, num_heads * head_dim]`; all rows of the layer have been added."""
        heads, head_dim, count = self._num_heads, self._head_dim, blocks.stop - blocks.start
        queries = self.queries_of_block
        batch, back = self._batch(blocks)
        places = slice(blocks.start * queries, blocks.stop * queries)
        if self._spread is None:
            padded = self._queries[places]
        else:
            padded = ops.gather_rows(self._queries, self._spread[0][places])
        by_head = padded.view(count, queries, heads, head_dim).transpose(1, 2).contiguous()
        k_cache, v_cache = self._pages.layer(0)
        attended = ops.attention(
            by_head.view(count, heads * queries, head_dim), k_cache, v_cache, batch, 0, scale=self._scale
        )
        by_patch = attended.view(count, heads, queries, head_dim).transpose(1, 2).contiguous()
        rows = by_patch.view(count * queries, heads * head_dim)
        if back is not None:
            return ops.gather_rows(rows, back)
        patches = self.rows_of(blocks)
        return rows[: patches.stop - patches.start]

    def _batch(self, blocks: slice) -> tuple[Batch, Tensor | None]:
        """A tile as a batch of decodes, and the places of its patches among its queries, if they are spread out."""
        found = self._batches.get((blocks.start, blocks.stop))
        if found is None:
            count = blocks.stop - blocks.start
            starts = self._starts[: count + 1]
            batch = Batch(
                token_ids=starts[:count], positions=starts[:count], query_start=starts,
                seq_lens=self._seq_lens[blocks], slot_mappings=(self._slots,), block_tables=(self._tables[blocks],),
                logits_indices=self._nothing, max_query_len=1, max_seq_len=self._longest, exact=True,
            )  # fmt: skip
            back = None
            if self._spread is not None:
                places = self._spread[1][self.rows_of(blocks)] - blocks.start * self.queries_of_block
                (back,) = ops.place([places.astype(np.int32)], self._starts.device)
            found = self._batches[blocks.start, blocks.stop] = batch, back
        return found


def _queries(device: Device, longest: int) -> int:
    """Patches of a block, for a longest window of so many."""
    if device.kind == "cpu":
        return CPU_QUERIES
    return GPU_QUERIES[longest > GPU_QUERIES[0]]


class AttentionLayer(Protocol):
    """A layer of a tower. `head_norms`: see `FullAttention.add`."""

    @property
    def head_norms(self) -> tuple[Tensor, Tensor] | None: ...

    def qkv_of(self, x: Tensor, adapted: AdaptedRows) -> Tensor:
        """Rows `[n, width]` -> queries, keys and values side by side, `[n, 3 * width]`."""

    def rest(self, x: Tensor, attended: Tensor, adapted: AdaptedRows) -> None:
        """The rest of the layer for rows `[n, width]`, in place, given their attention's result."""


def through(pace: Pace, layer: AttentionLayer, x: Tensor, attention: FullAttention) -> Iterator[int]:
    """Applies the layer to rows `x [num_patches, width]` in place; yields the rows of each piece."""

    def add(rows: slice) -> None:
        piece = x[rows]
        attention.add(rows, layer.qkv_of(piece, pace.of(piece)), layer.head_norms)

    def finish(blocks: slice, rows: slice) -> None:
        piece = x[rows]
        layer.rest(piece, attention.attend(blocks), pace.of(piece))

    keeper = pace.keeper
    run = keeper.run if keeper is not None and keeper.owns(x, attention) else _now
    for rows in pace.slices(x.shape[0]):
        run(functools.partial(add, rows))
        yield rows.stop - rows.start
    for blocks in pace.slices(attention.num_blocks, attention.queries_of_block):
        rows = attention.rows_of(blocks)
        run(functools.partial(finish, blocks, rows))
        yield rows.stop - rows.start


def _now(work: Callable[[], None]) -> None:
    work()
