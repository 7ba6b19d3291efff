"""What all towers share: a picture goes through piece by piece, so that no step of the engine waits for much of it.

A layer is two passes over a picture's rows. The first makes queries, keys and values of each; in the second each tile
of queries sees all keys, and goes through the rest of the layer. Both stop behind any piece. Pieces depend on nothing
but the picture's shape, so that its bits are the same however they are shared out between steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from models.towers.full_attention import FullAttention
from numba_kernels.cpu.running.pool import NUM_THREADS
from runtime.device.device import Device
from runtime.dtype import DType, float32
from runtime.tensor.tensor import Tensor

CPU_ROWS = 32 * max(2, NUM_THREADS)
"""Rows of a piece on the cpu: enough for its threads and for the tiles of products, and over after milliseconds."""

GPU_ROWS = 4096
"""On a GPU, which computes a layer of so many in less than a millisecond."""

Pieces = Generator[int, None, tuple[Tensor, ...]]
"""A picture's work: yields the rows of each piece behind it, and returns what the tower makes of the picture."""


class PatchRows(Protocol):
    """A picture's patches, normalised: `rows` of them are `[n, patch_size]` float32. Arrays are such."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any, /) -> NDArray[np.float32]: ...


class Encoding:
    """A picture on its way through a tower, which can stop between any two pieces.

    Attributes:
        num_rows: that have been computed; each counts twice in each layer.
    """

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self.num_rows = 0

    def advance(self, num_rows: int) -> tuple[Tensor, ...] | None:
        """Compute pieces until they have so many rows together; at least one. Behind the last: what the tower makes."""
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
            made = self.advance(1 << 62)
        return made


class PictureTower(ABC):
    """Makes a picture's embeddings. A tower says how in `pieces`."""

    dtype: DType
    device: Device

    @abstractmethod
    def pieces(self, patches: PatchRows, grid: tuple[int, int]) -> Pieces:
        """Of a picture of `grid` patches, those of a token together."""

    def start(self, patches: PatchRows, grid: tuple[int, int]) -> Encoding:
        """Begin with a picture; nothing is computed yet."""
        return Encoding(self.pieces(patches, grid))

    def __call__(self, patches: PatchRows, grid: tuple[int, int]) -> tuple[Tensor, ...]:
        """All of it at once."""
        return self.start(patches, grid).finish()

    @property
    def piece_rows(self) -> int:
        return CPU_ROWS if self.device.kind == "cpu" else GPU_ROWS

    def slices(self, num_rows: int, unit: int = 1) -> Iterator[slice]:
        """Pieces of rows that each stand for `unit` patches."""
        size = max(1, self.piece_rows // unit)
        return (slice(begin, min(begin + size, num_rows)) for begin in range(0, num_rows, size))

    def pixels(self, patches: PatchRows, rows: Any) -> Tensor:
        """Some of a picture's patches on the device, in the type that the tower computes in."""
        made = Tensor.from_numpy(np.ascontiguousarray(patches[rows], np.float32)).to(self.device)
        return made if self.device.kind == "cpu" else made.to(self.dtype)

    def buffer(self, *shape: int) -> Tensor:
        """Zeros in that type."""
        return Tensor.zeros(shape, float32 if self.device.kind == "cpu" else self.dtype, self.device)


class AttentionLayer(Protocol):
    """A layer of a tower."""

    def qkv_of(self, x: Tensor) -> Tensor:
        """Rows `[n, width]` -> queries, keys and values side by side, `[n, 3 * width]`."""
        ...

    def rest(self, x: Tensor, attended: Tensor) -> Tensor:
        """What the layer makes of rows `[n, width]`, given what they have attended to."""
        ...


def through(tower: PictureTower, layer: AttentionLayer, x: Tensor, attention: FullAttention) -> Iterator[int]:
    """Rows `x [num_patches, width]` become in place what the layer makes of them; the rows of each piece."""
    for rows in tower.slices(x.shape[0]):
        attention.add(rows, layer.qkv_of(x[rows]))
        yield rows.stop - rows.start
    for blocks in attention.tiles(tower.piece_rows):
        rows = attention.rows_of(blocks)
        x[rows] = layer.rest(x[rows], attention.attend(blocks))
        yield rows.stop - rows.start
