"""Quantised matrices out of a checkpoint, arranged for a GPU without becoming floats (`numba_kernels.cuda.packing`), as
`kept_format` says. Neighbours that become one map, but differ in their packing, are dequantised while they are loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from numba_kernels.cuda.packing import GROUPS, Packing, arrange, packing_of
from runtime.dtype import NDArray
from runtime.linear.kept import kept_format
from runtime.linear.options import LoadOptions, Split
from runtime.linear.quantized import ActivationScheme, QuantizedMatrix
from runtime.linear.weight import DynamicQuantisation, GpuSettings, PackedWeight
from runtime.tensor.tensor import Tensor

_ROUNDED: dict[ActivationScheme | None, DynamicQuantisation] = {
    ActivationScheme("int8"): "rows", ActivationScheme("fp8"): "rows", ActivationScheme("fp8", GROUPS[-1]): "groups",
    ActivationScheme("int8", is_static=True): "static", ActivationScheme("fp8", is_static=True): "static",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """Rows and columns of a rank's shard of a matrix. Columns begin where a group does."""

    matrix: QuantizedMatrix
    rows: slice
    columns: slice

    @property
    def has_nan(self) -> bool:
        """Whether an element is NaN, which unpacking in registers cannot represent."""
        return self.matrix.layout.kind == "fp8" and bool((self.numbers() & 0x7F == 0x7F).any())

    def numbers(self) -> NDArray:
        """The codes ``[rows, columns]``, one in a byte."""
        return self.matrix.numbers(self.rows)[:, self.columns]

    def by_row(self, values: NDArray) -> NDArray:
        """Numbers of the matrix's scale blocks -> float32 ``[rows, groups of the columns]``."""
        block_rows, size = self.matrix.layout.block
        first, stop, _ = self.rows.indices(self.matrix.shape[0])
        rows = np.arange(first, stop) // block_rows if block_rows else np.zeros(stop - first, np.int64)
        if not size:
            return values[rows].astype(np.float32)
        start, end, _ = self.columns.indices(self.matrix.shape[1])
        assert start % size == 0, "a rank's columns begin within a group"
        return values[rows, start // size : -(-end // size)].astype(np.float32)


def prepare_packed(
    parts: Sequence[MatrixPart], biases: Sequence[Tensor] | None, options: LoadOptions, split: Split | None,
    whole_shape: tuple[int, int] | None = None,
) -> PackedWeight:  # fmt: skip
    """Parts that have one packing and one order of their columns, joined over N, with their biases; as `prepare_linear`
    gives it on a GPU."""
    format = kept_format(parts[0].matrix.layout, options)
    assert format is not None
    packing = packing_of(format.packing)
    assert packing is not None
    assert options.dtype is not None
    codes = np.concatenate([part.numbers() for part in parts])
    scales, zeros, by_row = (np.concatenate(each) for each in zip(*(_scales_of(part, packing) for part in parts)))
    block = arrange(
        packing, options.dtype.ptx, codes, scales if packing.group else None, zeros if packing.has_zeros else None,
        by_row,
    )  # fmt: skip
    memory = Tensor.from_numpy(block).to(options.device)
    memory.storage.freeze()
    bias = None
    if biases:
        joined = np.concatenate([each.array.astype(np.float32) for each in biases])
        bias = Tensor.from_numpy(joined).to(options.device)
    shape = codes.shape[0], codes.shape[1]
    schemes = {_ROUNDED.get(part.matrix.layout.activation, "") for part in parts}
    rounded: DynamicQuantisation = schemes.pop() if len(schemes) == 1 else ""
    # One x for all parts: the largest of their scales clamps no value that the checkpoint's scales do not.
    input_scale = max(part.matrix.input_scale or 0.0 for part in parts) if rounded == "static" else 0.0
    order = parts[0].matrix.order
    if order is not None:
        for part in parts:
            assert part.matrix.order is not None, "parts of a map have orders of their own"
            assert np.array_equal(part.matrix.order, order), "parts of a map have orders of their own"
        assert shape[1] == len(order), "columns in another order are not cut"
        rounded, input_scale = "", 0.0
    if options.has_float_activations:
        rounded, input_scale = "", 0.0
    if rounded == "rows" and split == "inputs" and options.num_ranks > 1:
        rounded = ""  # no rank here has a whole row of x
    settings = GpuSettings(
        exact=options.exact,
        whole_shape=whole_shape or options.whole_shape(shape, split),
        num_segments=options.num_segments(split),
        rounds_rows=rounded,
        input_scale=input_scale,
    )
    kept_order = None
    if order is not None:
        kept_order = Tensor.from_numpy(order).to(options.device)
        kept_order.storage.freeze()
    return PackedWeight(shape, format, memory, options.dtype, bias, options.gemm, order=kept_order, **settings)


def _scales_of(part: MatrixPart, packing: Packing) -> tuple[NDArray, NDArray, NDArray]:
    """(groups' scales, groups' zeros, rows' scales) as `arrange` takes them; those that a packing lacks are empty."""
    matrix = part.matrix
    scales = part.by_row(matrix.scales)
    zeros = np.zeros((len(scales), 0), np.float32) if matrix.zeros is None else part.by_row(matrix.zeros)
    by_row = np.ones(len(scales), np.float32)
    if not packing.group:
        return np.zeros((len(scales), 0), np.float32), zeros, matrix.scaled(scales[:, 0])
    depth = len(range(*part.columns.indices(matrix.shape[1])))
    wanted, size = -(-depth // packing.group), matrix.layout.block[1] or depth
    of_group = np.arange(wanted) * packing.group // size
    scales, zeros = scales[:, of_group], zeros[:, of_group] if matrix.zeros is not None else zeros
    return scales, zeros, matrix.scaled(by_row)
