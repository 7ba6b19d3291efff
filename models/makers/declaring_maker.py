"""The maker that records names, shapes, types and bytes of all pieces of a model, before anything is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from models.checkpoints.checkpoint import Checkpoint, TensorLayout
from models.configuration.rope_config import RopeConfig
from models.makers.declaration import Array, HeadPart, LinearDeclaration
from models.makers.kept_formats import KeptFormats, check_cut
from models.makers.maker import Maker
from models.makers.shards import Shard, whole_shard
from models.rope import num_table_rows
from runtime.dtype import DType, float32
from runtime.linear.experts import ExpertsWeight
from runtime.linear.format import WeightFormat, packed_format
from runtime.linear.options import LoadOptions
from runtime.linear.quantized import QuantizedLayout
from runtime.linear.shared_table import SharedTable
from runtime.linear.weight import (
    KeptRows,
    LinearWeight,
    packed_bytes,
)
from runtime.ops import RopeTable
from runtime.tensor.tensor import Tensor


class DeclaringMaker(Maker):
    """Records the pieces of a model; those that it makes have shapes and types but no numbers.

    Names and shapes are there when the model's constructor has run: a checkpoint is fitted to them (`layout`). The kept
    formats depend on the stored ones: `settle` takes them from the fitted checkpoint and sets the declared weights and
    `size_bytes`. Before that, all count as stored in `main_dtype`, and matrices have no bytes.

    Attributes:
        matrices, transposed: names of the tensors of linear maps that may be quantised, and of those among them that
            are stored inputs first.
        rounded_activations: how products round rows of x, by how the weights are stored; empty if x stays floats.
    """

    def __init__(self, options: LoadOptions, max_positions: int, main_dtype: DType = float32) -> None:
        super().__init__(options, max_positions, main_dtype)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._experts: list[ExpertsWeight] = []
        self._unsettled_tables: list[str] = []
        self._unsettled: list[tuple[int, Callable[[Checkpoint], int]]] = []  # a place among sizes, and its bytes
        self.matrices: set[str] = set()
        self.transposed: set[str] = set()
        self.rounded_activations: dict[str, str] = {}

    def layout(self, prefix: str, harmless: Any, renames: Mapping[str, str] = MappingProxyType({})) -> TensorLayout:
        """The layout that a checkpoint must have; `prefix`, `harmless` and `renames` as there."""
        return TensorLayout(self._shapes, prefix, harmless, self._copies, self._stacks, renames)

    def settle(self, source: Checkpoint) -> None:
        """Decides the kept format of every declared tensor, by a source that fits the layout. Raises `ModelLoadError`
        if ranks cannot share a matrix, `InvalidArgumentError` if a layer's experts differ."""
        for place, settled_bytes in self._unsettled:
            self._sizes[place] = settled_bytes(source)
        self._mapped[:] = [source[name].size_bytes for name in self._unsettled_tables]
        for experts in self._experts:
            experts.check_alike()

    def rope(self, rope: RopeConfig) -> RopeTable:
        table = _nothing((num_table_rows(rope, self.max_positions), rope.rotary_dim // 2), float32)
        return RopeTable(cos=table, sin=table, interleaved=rope.interleaved, is_spread=rope.kind == "proportional")

    def experts(self, names: str | Sequence[str], **sizes: Any) -> ExpertsWeight:
        made = super().experts(names, **sizes)
        self._experts.append(made)
        return made

    def _settles(self, settled_bytes: Callable[[Checkpoint], int], after: int = 0) -> None:
        """Defers the bytes of the next piece, or the one `after` others, until the source is known."""
        self._unsettled.append((len(self._sizes) + after, settled_bytes))

    def _linear(self, declaration: LinearDeclaration) -> LinearWeight:
        self._shapes.update(declaration.stored_shapes)
        if self._is_quantisable:
            named = {f"{name}.weight" for name in declaration.names if name not in declaration.floats}
            self.matrices |= named
            if declaration.is_transposed:
                self.transposed |= named
        device, formats = self.options.device, self._formats
        weight = LinearWeight(declaration.shape, self.options.format_of(self.dtype), device, 0)

        def settled_bytes(source: Checkpoint) -> int:
            kept = self._kept_rows(declaration, replace(formats, source=source), source)
            weight.format = kept[0].format
            check_cut(declaration, weight.format)
            weight.size_bytes = packed_bytes(
                kept, declaration.inputs, device, has_bias=declaration.adds_bias, activations=self.dtype
            )
            return weight.size_bytes

        self._settles(settled_bytes)
        return weight

    def _kept_rows(self, declaration: LinearDeclaration, formats: KeptFormats, source: Checkpoint) -> list[KeptRows]:
        if (packing := formats.packing(declaration)) is not None:
            for name in declaration.names:
                self._note_rounding(source, f"{name}.weight", self.options.format)
            layout = source[f"{declaration.names[0]}.weight"].quantized
            has_order = layout is not None and layout.has_order
            return [KeptRows(sum(declaration.outputs), packed_format(packing), has_order)]
        kept = []
        for (part, _, _), count in zip(declaration.parts, declaration.outputs, strict=True):
            name = f"{part}.weight"
            format = formats.kept(name, declaration.columns, declaration)
            layout = source[name].quantized
            has_order = format is not None and layout is not None and layout.has_order
            self._note_rounding(source, name, format or self.options.format)
            kept.append(KeptRows(count, format or self.options.format_of(source.dtype(name)), has_order))
        return kept

    def _note_rounding(self, source: Checkpoint, name: str, format: WeightFormat | None) -> None:
        layout: QuantizedLayout | None = source[name].quantized
        stored = layout.name if layout else source[name].type_name if source[name].block_format else None
        if format is not None and self.options.rounds_x(format):
            self._note_blocks(stored or format.name, format)
        elif layout is not None and layout.activation is not None and self.options.rounds_long_steps:
            self.rounded_activations[layout.name] = f"{layout.activation.kind} in steps of many rows, else 16 bits"

    def _note_blocks(self, stored: str, format: WeightFormat) -> None:
        assert format.activation is not None
        how = f"{format.activation.name}, {format.activation_block} of a row by one scale"
        self.rounded_activations[stored] = how

    def _word_table(self, name: str, rows: int, columns: int) -> Tensor | LinearWeight | SharedTable:
        table = super()._word_table(name, rows, columns)
        place, floats_bytes = self._unsettled.pop()
        full_name, formats, device = f"{self._prefix}{name}.weight", self._formats, self.options.device

        def settled_bytes(source: Checkpoint) -> int:
            format = replace(formats, source=source).kept(full_name, whole_shard(columns))
            if format is None:
                return floats_bytes(source)
            self._note_rounding(source, full_name, format)
            return packed_bytes([KeptRows(rows, format)], columns, device, has_bias=False, activations=self.dtype)

        self._unsettled.append((place, settled_bytes))
        return table

    def _derived(
        self, name: str, rows: Shard, columns: int, shapes: Sequence[tuple[int, int]],
        make: Callable[[Array], Iterator[Array]], formats: KeptFormats, places: Sequence[HeadPart] = (),
    ) -> list[LinearWeight]:  # fmt: skip
        self._shapes[name] = (rows.whole, columns)
        self.matrices.add(name)
        parts = [part for part, _, _ in places] or [""] * len(shapes)
        return [
            self._derived_map(name, shape, after, formats, part)
            for after, (shape, part) in enumerate(zip(shapes, parts))
        ]

    def _derived_map(
        self, name: str, shape: tuple[int, int], after: int, formats: KeptFormats, part: str
    ) -> LinearWeight:
        weight = LinearWeight(shape, self.options.format_of(self.dtype), self.options.device, 0)

        def settled_bytes(source: Checkpoint) -> int:
            format = formats.kept_part(source, name, part, shape[1])
            if format is not None:
                self._note_blocks(source[name].head_formats[part] or "", format)
            weight.format = format or self.options.format_of(source.dtype(name))
            weight.size_bytes = packed_bytes(
                [KeptRows(shape[0], weight.format)], shape[1], weight.device, has_bias=False, activations=self.dtype
            )
            return weight.size_bytes

        self._settles(settled_bytes, after)
        return weight

    def _vector(
        self,
        name: str,
        size: Shard,
        add: float,
        stored: tuple[int, ...],
        change: Callable[[Array], Array] | None = None,
    ) -> Tensor:
        self._shapes[name] = stored
        return _nothing((size.count,), float32)

    def _taps(self, name: str, shares: Sequence[Shard], count: int) -> Tensor:
        self._shapes[name] = (sum(each.whole for each in shares), *((1, count) if count else ()))
        return _nothing((sum(each.count for each in shares), count or 1), float32)

    def _number(self, name: str, shape: tuple[int, ...]) -> float:
        self._shapes[name] = shape
        return 1.0

    def _ones(self, size: int) -> Tensor:
        return _nothing((size,), float32)

    def _median(self, name: str, add: float) -> float:
        return 1.0

    def _table(self, name: str, rows: int, columns: Shard) -> Tensor:
        self._shapes[name] = (rows, columns.whole)
        self._settles(lambda source: rows * columns.count * self._dtype_of(source.dtype(name)).itemsize)
        return _nothing((rows, columns.count), self._dtype_of(self.dtype))

    def _mapped_table(self, name: str, rows: int, columns: int) -> Tensor:
        self._shapes[name] = (rows, columns)
        self._unsettled_tables.append(name)
        return _nothing((rows, columns), self._dtype_of(self.dtype))


def _nothing(shape: tuple[int, ...], dtype: DType) -> Tensor:
    """A tensor of this shape over one element of memory."""
    return Tensor.from_numpy(np.broadcast_to(np.zeros((), dtype.numpy), shape))
