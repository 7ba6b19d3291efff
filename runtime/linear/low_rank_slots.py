"""The memory of one map's low-rank adapters on the cpu, which the map's product reads: a pair ``down``, ``up`` for each
part of the map in each slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from numba_kernels.cpu.gemm.low_rank import SlotLayout
from numba_kernels.cpu.gemm.panels import zeroed_bytes
from numba_kernels.cpu.running.launch import address_of
from runtime.dtype import STORED, DType, NDArray
from runtime.tensor.tensor import Tensor


class SlotShape(NamedTuple):
    """``heights``: outputs of the map's parts, one after another; ``depth`` inputs; the largest ``rank``."""

    heights: tuple[int, ...]
    depth: int
    rank: int
    num_slots: int


class DensePair(NamedTuple):
    """A part's ``down [r, K]`` and ``up [N, r]``, float32, scaled."""

    down: NDArray
    up: NDArray


class CpuSlots:
    """The slots (`numba_kernels.cpu.gemm.low_rank`): each adapter is read as far as its own rank goes.

    Attributes:
        shape: of all slots.
        stored: the numpy class that carries an element's bits.
        table: the kernels' ``slots``.
        parts: the kernels' ``parts``.
        memory: all arrays that the table has addresses of.
    """

    def __init__(self, shape: SlotShape, dtype: DType) -> None:
        self.shape, self._dtype, self.stored = shape, dtype, STORED[dtype]
        self._layout = layout = SlotLayout(self.stored, shape.heights, shape.rank, shape.depth)
        self.parts = layout.parts
        self._down, self._up = (self._zeros(each) for each in (layout.down_shape, layout.up_shape))
        self._bias = np.zeros((shape.num_slots, sum(shape.heights)), np.float32)
        self.memory: tuple[NDArray, ...] = (self._down, self._up, self._bias)
        self.table = np.zeros((shape.num_slots, 3 + len(shape.heights)), np.int64)
        for slot, row in enumerate(self.table):
            row[:2] = address_of(self._down[slot]), address_of(self._up[slot])

    def _zeros(self, shape: tuple[int, ...]) -> NDArray:
        kind, whole = np.dtype(self.stored), (self.shape.num_slots, *shape)
        made: NDArray = zeroed_bytes(int(np.prod(whole)) * kind.itemsize).view(kind).reshape(whole)
        return made

    @property
    def size_bytes(self) -> int:
        """The bytes of all slots."""
        return sum(each.nbytes for each in self.memory)

    def write(self, slot: int, pairs: Sequence[DensePair | None], bias: NDArray | None) -> None:
        """Writes a slot's pairs, one for each part; a part without one costs nothing."""
        memory, row = (self._down[slot], self._up[slot]), self.table[slot]
        row[2:] = 0
        for part, pair in enumerate(pairs):
            if pair is not None:
                self._layout.put(part, self._stored(pair.down), self._stored(pair.up), memory)
                row[3 + part] = len(pair.down)
        if bias is not None:
            self._bias[slot] = bias
            row[2] = address_of(self._bias[slot])

    def _stored(self, rows: NDArray) -> NDArray:
        return Tensor.from_numpy(np.ascontiguousarray(rows)).to(self._dtype).array.view(self.stored)


class LowRank(NamedTuple):
    """Low-rank sums of rows that a product adds: of ``x [T, K]`` with the slots of ``adapters [T]`` int32, -1 for none.
    ``slots`` are of the product's device (`CpuSlots`, `gpu_slots.GpuSlots`), ``computed`` is the batch's."""

    slots: Any
    x: Tensor
    adapters: Tensor
    computed: dict[Any, Any]
