"""Tables of which rows are read one by one, and which are not among a device's weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

from runtime.device.device import Device
from runtime.device.gpu import Gpu
from runtime.dtype import DType, NDArray
from runtime.tensor.tensor import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StoredTable:
    """Looked up by `ops.embedding` on the cpu.

    Attributes:
        rows: uint8 ``[V, row bytes]``, the mapped file's.
        blocks: ggml's name of their blocks, one of `numba_kernels.ggml_blocks.ROW_BLOCKS`.
        width: elements of a row.
    """

    rows: Tensor
    blocks: str
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        """(V, H)."""
        return self.rows.shape[0], self.width

    @staticmethod
    def of(rows: NDArray, blocks: str, width: int) -> StoredTable:
        """Over a file's bytes."""
        return StoredTable(Tensor.from_numpy(rows), blocks, width)


def pinned_table(shape: tuple[int, int], dtype: DType, device: Device) -> tuple[Tensor, NDArray]:
    """A table in pinned memory of the host that kernels of the GPU read in place, over the bus; and its numbers, to be
    written. A row's id may be known on the device alone."""
    block = Gpu.of(device).pinned.allocate(math.prod(shape) * dtype.itemsize)
    table = Tensor.over_device(device, block.address, dtype, shape, (shape[1], 1), block)
    return table, block.array.view(dtype.numpy).reshape(shape)
