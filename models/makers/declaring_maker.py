"""The maker that takes notes: names, shapes, types and bytes of all that a model asks for, before anything is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from models.checkpoints.checkpoint import TensorLayout
from models.configuration.rope_config import RopeConfig
from models.makers.declaration import Array, LinearDeclaration, TensorSource
from models.makers.maker import Maker
from models.makers.shares import Share
from models.rope import num_table_rows
from runtime.dtype import DType, float32
from runtime.linear.format import WeightFormat, packed_format
from runtime.linear.options import LoadOptions
from runtime.linear.quantized import QuantizedLayout
from runtime.linear.weight import (
    KeptRows,
    LinearWeight,
    packed_bytes,
)
from runtime.ops import RopeTable
from runtime.tensor.tensor import Tensor


class DeclaringMaker(Maker):
    """Notes what a model consists of; what it makes has shapes and types but no numbers.

    Attributes:
        matrices, transposed: names of the tensors of linear maps that may be quantised, and of those among them that
            are stored inputs first.
        rounded_activations: how products round rows of x, by how the weights are stored; none: x stays floats.

    Types and `size_bytes` are those of a checkpoint that has been fitted to the layout; without one, as if all were
    float32.
    """

    def __init__(self, options: LoadOptions, max_positions: int, source: TensorSource | None = None) -> None:
        super().__init__(options, max_positions, float32 if source is None else source.main_dtype())
        self._source = source
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.matrices: set[str] = set()
        self.transposed: set[str] = set()
        self.rounded_activations: dict[str, str] = {}

    def layout(self, prefix: str, harmless: Any, renames: Mapping[str, str] = MappingProxyType({})) -> TensorLayout:
        """What a checkpoint must store; `prefix`, `harmless` and `renames` as there."""
        return TensorLayout(self._shapes, prefix, harmless, self._copies, self._stacks, renames)

    def rope(self, rope: RopeConfig) -> RopeTable:
        """See `Maker.rope`."""
        table = _nothing((num_table_rows(rope, self.max_positions), rope.rotary_dim // 2), float32)
        return RopeTable(cos=table, sin=table, interleaved=rope.interleaved)

    def _stored(self, name: str, shape: tuple[int, ...]) -> DType:
        self._shapes[name] = shape
        return float32 if self._source is None else self._source.dtype(name)

    def _linear(self, declaration: LinearDeclaration) -> LinearWeight:
        stored = {name: self._stored(name, shape) for name, shape in declaration.stored_shapes}
        if self._is_quantisable:
            self.matrices |= {f"{name}.weight" for name in declaration.names}
        if declaration.is_transposed and self._is_quantisable:
            self.transposed |= {f"{name}.weight" for name in declaration.names}
        kept = []
        for (name, _, _), count in zip(declaration.parts, declaration.outputs, strict=True):
            format = self._formats.kept(f"{name}.weight", declaration.columns, declaration)
            layout = None if self._source is None else self._source.quantized(f"{name}.weight")
            has_order = format is not None and layout is not None and layout.has_order
            self._note_rounding(f"{name}.weight", format or self.options.format, layout)
            kept.append(KeptRows(count, format or self.options.format_of(stored[f"{name}.weight"]), has_order))
        if (packing := self._formats.packing(declaration)) is not None:
            layout = None if self._source is None else self._source.quantized(f"{declaration.names[0]}.weight")
            has_order = layout is not None and layout.has_order
            kept = [KeptRows(sum(declaration.outputs), packed_format(packing), has_order)]
        device = self.options.device
        size_bytes = packed_bytes(
            kept, declaration.inputs, device, has_bias=declaration.adds_bias, activations=self.dtype
        )
        return LinearWeight(declaration.shape, kept[0].format, device, size_bytes)

    def _note_rounding(self, name: str, format: WeightFormat | None, layout: QuantizedLayout | None) -> None:
        stored = None if self._source is None else layout.name if layout else self._source.block_format(name)
        if format is not None and self.options.rounds_x(format) and format.activation is not None:
            how = f"{format.activation.name}, {format.activation_block} of a row by one scale"
            self.rounded_activations[stored or format.name] = how
        elif layout is not None and layout.activation is not None and self.options.rounds_long_steps:
            self.rounded_activations[layout.name] = f"{layout.activation.kind} in steps of many rows, else 16 bits"

    def _derived(
        self, name: str, rows: Share, columns: int, shapes: Sequence[tuple[int, int]],
        make: Callable[[Array], Iterator[Array]],
    ) -> list[LinearWeight]:  # fmt: skip
        stored, device = self._stored(name, (rows.whole, columns)), self.options.device
        self.matrices.add(name)
        format = self.options.format_of(stored)
        sizes = [
            packed_bytes([KeptRows(each, format)], inputs, device, has_bias=False, activations=self.dtype)
            for each, inputs in shapes
        ]
        return [LinearWeight(each, format, device, size) for each, size in zip(shapes, sizes, strict=True)]

    def _vector(self, name: str, size: Share, add: float, stored: tuple[int, ...]) -> Tensor:
        self._stored(name, stored)
        return _nothing((size.count,), float32)

    def _number(self, name: str, shape: tuple[int, ...]) -> float:
        self._stored(name, shape)
        return 1.0

    def _ones(self, size: int) -> Tensor:
        return _nothing((size,), float32)

    def _median(self, name: str, add: float) -> float:
        return 1.0

    def _table(self, name: str, rows: int, columns: Share) -> Tensor:
        return _nothing((rows, columns.count), self._dtype_of(self._stored(name, (rows, columns.whole))))


def _nothing(shape: tuple[int, ...], dtype: DType) -> Tensor:
    """A tensor of this shape over one element of memory."""
    return Tensor.from_numpy(np.broadcast_to(np.zeros((), dtype.numpy), shape))
