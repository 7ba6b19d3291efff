"""The interface of all towers: a picture is encoded piece by piece, so that no step of the engine waits for much of it.

A layer is two passes over a picture's rows. The first makes queries, keys and values of each; in the second each tile
of queries sees all keys, and goes through the rest of the layer. Both can stop after any piece. On the cpu a row's bits
depend on no other row, so pieces may have any size; on a GPU they may, so all pieces have one size. A picture's bits
are thus the same however it is divided between steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from models.towers.full_attention import FullAttention
from runtime.device.device import Device
from runtime.dtype import DType, float32
from runtime.tensor.tensor import Tensor

CPU_ROWS = 192
"""Rows of a piece on the cpu if no decode waits for its end."""

MOST_CPU_ROWS = 1024
"""The most rows of any piece there."""

GPU_ROWS = 4096
"""On a GPU, which computes a layer of so many in less than a millisecond."""

Pieces = Generator[int, None, tuple[Tensor, ...]]
"""The encoding of a picture: yields the rows of each finished piece, and returns the tower's result."""


@dataclass(slots=True)
class Pace:
    """How many rows the next piece has; the caller may change that between two pieces."""

    rows: int

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

    def start(self, patches: PatchRows, grid: tuple[int, int]) -> Encoding:
        """Begin with a picture; nothing is computed yet."""
        is_cpu = self.device.kind == "cpu"
        pace = Pace(CPU_ROWS if is_cpu else GPU_ROWS)
        return Encoding(self.pieces(patches, grid, pace), pace, is_paced=is_cpu)

    def __call__(self, patches: PatchRows, grid: tuple[int, int]) -> tuple[Tensor, ...]:
        """All of it at once."""
        return self.start(patches, grid).finish()

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

    def rest(self, x: Tensor, attended: Tensor) -> None:
        """The rest of the layer for rows `[n, width]`, in place, given their attention's result."""
        ...


def through(pace: Pace, layer: AttentionLayer, x: Tensor, attention: FullAttention) -> Iterator[int]:
    """Applies the layer to rows `x [num_patches, width]` in place; yields the rows of each piece."""
    for rows in pace.slices(x.shape[0]):
        attention.add(rows, layer.qkv_of(x[rows]))
        yield rows.stop - rows.start
    for blocks in pace.slices(attention.num_blocks, attention.queries_of_block):
        rows = attention.rows_of(blocks)
        layer.rest(x[rows], attention.attend(blocks))
        yield rows.stop - rows.start
