"""The maker that reads a model's pieces from a checkpoint, or from dummy weights, and places them on the device."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from models.checkpoints.checkpoint import Checkpoint
from models.configuration.rope_config import RopeConfig
from models.errors import ModelLoadError, WeightsError
from models.makers.declaration import Array, HeadPart, LinearDeclaration
from models.makers.kept_formats import KeptFormats, check_cut
from models.makers.maker import Maker
from models.makers.shards import Shard
from models.rope import make_rope_table
from numba_kernels.ggml_blocks import ROW_BLOCKS
from runtime import ops
from runtime.dtype import float16, float32
from runtime.linear.options import LoadOptions
from runtime.linear.packed_matrix import MatrixPart, prepare_packed
from runtime.linear.stored_table import StoredTable, pinned_table
from runtime.linear.weight import (
    BlockRows,
    LinearWeight,
    MatrixSource,
)
from runtime.ops import RopeTable
from runtime.tensor.cast import cast_array
from runtime.tensor.tensor import Tensor

_MAPPED_ELEMENTS = 1 << 24  # of a table that are converted at once
_FLOAT16_INFINITY = 0x7C00  # its bits; NaN's are greater


class LoadingMaker(Maker):
    """Makes the pieces from a source that fits the model's layout, and reports how many bytes it has made.

    Attributes:
        dequantised_bytes: stored bytes of quantised tensors that were dequantised, by kind.
    """

    _source: Checkpoint

    def __init__(
        self,
        options: LoadOptions,
        max_positions: int,
        source: Checkpoint,
        tell: Callable[[int], None] = lambda size_bytes: None,
    ) -> None:
        super().__init__(options, max_positions, source.main_dtype())
        self._source = source
        self._tell = tell
        self.dequantised_bytes = Counter[str]()  # shared with the makers below

    def _count(self, size_bytes: int) -> None:
        super()._count(size_bytes)
        self._tell(self.size_bytes)

    def rope(self, rope: RopeConfig) -> RopeTable:
        return make_rope_table(rope, self.max_positions, self.options.device)

    def _linear(self, declaration: LinearDeclaration) -> LinearWeight:
        weight = self._read(declaration)
        check_cut(declaration, weight.format)
        return weight

    def _read(self, declaration: LinearDeclaration) -> LinearWeight:
        def part(name: str, rows: slice, columns: slice) -> MatrixSource:
            shard, format = declaration.columns, None
            if not declaration.is_transposed:
                format = self._formats.kept(f"{name}.weight", shard, declaration)
            if format is None:
                return matrix(name, rows, columns)
            first, end = shard.first, shard.first + shard.count
            if self._source[f"{name}.weight"].quantized is not None:
                return self._source[f"{name}.weight"].matrix().cut(rows).cut_columns(first, end)
            blocks = BlockRows(self._source[f"{name}.weight"].blocks()[rows], format, shard.whole)
            return blocks.cut_columns(first, end)

        def matrix(name: str, rows: slice, columns: slice) -> Tensor:
            if declaration.is_transposed:
                if (layout := self._source[f"{name}.weight"].quantized) is not None:
                    raise ModelLoadError(
                        f"tensor '{name}.weight' is quantised ({layout.name}), which is not read for this architecture:"
                        " its maps are stored inputs first"
                    )
                return Tensor.from_numpy(self._array(f"{name}.weight", (columns, rows)).T)
            array = self._array(f"{name}.weight", (rows, columns))
            return Tensor.from_numpy(array.reshape(len(array), -1) if declaration.kernel else array)

        biases = []
        if self._formats.packing(declaration) is not None:
            parts = [
                MatrixPart(self._source[f"{name}.weight"].matrix(), rows, columns)
                for name, rows, columns in declaration.parts
            ]
            if not any(part.has_nan for part in parts):
                if declaration.adds_bias:
                    biases = [
                        Tensor.from_numpy(self._rounded(declaration.bias_name(name), (rows,)))
                        for name, rows, _ in declaration.parts
                    ]
                kept = prepare_packed(parts, biases, self.options, declaration.split, declaration.whole_shape)
                self._release(declaration)
                return kept
        weights: list[MatrixSource] = []
        whole_rows = []
        is_part = declaration.is_cut
        for name, rows, columns in declaration.parts:
            weights.append(part(name, rows, columns))
            if is_part and self.options.format_of(self._source.dtype(f"{name}.weight")).has_row_scales:
                whole_rows.append(matrix(name, rows, slice(None)))
            if declaration.adds_bias:
                biases.append(Tensor.from_numpy(self._rounded(declaration.bias_name(name), (rows,))))
        packed = ops.prepare_linear(
            weights, biases or None, self.options, split=declaration.split, whole_rows=whole_rows or None,
            norm=declaration.norm, whole_shape=declaration.whole_shape,
        )  # fmt: skip
        del weights, whole_rows
        self._release(declaration)
        return packed

    def _derived(
        self, name: str, rows: Shard, columns: int, shapes: Sequence[tuple[int, int]],
        make: Callable[[Array], Iterator[Array]], formats: KeptFormats, places: Sequence[HeadPart] = (),
    ) -> list[LinearWeight]:  # fmt: skip
        source, made = self._source[name], []
        kept = [
            formats.kept_part(self._source, name, part, inputs) for (part, _, _), (_, inputs) in zip(places, shapes)
        ] or [None] * len(shapes)
        maps: Iterator[Array | None] = itertools.repeat(None)
        if None in kept:
            maps = make(self._array(name, (slice(rows.first, rows.first + rows.count), slice(0, columns))))
        for number, (format, floats) in enumerate(zip(kept, maps, strict=None in kept)):
            matrix: MatrixSource
            if format is None:
                assert floats is not None
                matrix = Tensor.from_numpy(np.ascontiguousarray(floats))
            else:
                matrix = BlockRows(source.head_blocks(*places[number]), format, shapes[number][1])
            made.append(ops.prepare_linear([matrix], None, self.options))
        self._source[name].release()
        return made

    def _release(self, declaration: LinearDeclaration) -> None:
        for name, _ in declaration.stored_shapes:
            self._source[name].release()

    def _vector(
        self,
        name: str,
        size: Shard,
        add: float,
        stored: tuple[int, ...],
        change: Callable[[Array], Array] | None = None,
    ) -> Tensor:
        part = slice(size.first, size.first + size.count)
        mine = self._rounded(name, (part,)) if len(stored) == 1 else self._rounded(name).reshape(-1)[part]
        return self._keep(mine + np.float32(add) if change is None else change(mine), name)

    def _taps(self, name: str, shares: Sequence[Shard], count: int) -> Tensor:
        rows, parts, first = self._rounded(name).reshape(-1, count or 1), [], 0
        for each in shares:
            parts.append(rows[first + each.first : first + each.first + each.count])
            first += each.whole
        return self._keep(np.concatenate(parts), name)

    def _number(self, name: str, shape: tuple[int, ...]) -> float:
        return float(self._rounded(name).reshape(()))

    def _ones(self, size: int) -> Tensor:
        tensor = Tensor.from_numpy(np.ones(size, np.float32)).to(self.options.device)
        tensor.storage.freeze()
        return tensor

    def _median(self, name: str, add: float) -> float:
        return float(np.median(np.abs(self._rounded(name) + np.float32(add))))

    def _table(self, name: str, rows: int, columns: Shard) -> Tensor:
        places = (slice(None), slice(columns.first, columns.first + columns.count)) if columns.is_part else ()
        array = self._array(name, places)
        is_own = array.flags.owndata or self.options.device.kind != "cpu"  # what goes to a GPU is copied there
        return self._keep(array if is_own else array.copy(), name)

    def _mapped_table(self, name: str, rows: int, columns: int) -> Tensor | StoredTable:
        stored, device, dtype = self._source[name], self.options.device, self.dtype
        self._mapped.append(stored.size_bytes)
        if device.kind == "cpu":
            if stored.block_format in ROW_BLOCKS:
                return StoredTable.of(stored.stored_rows(), stored.block_format, columns)
            array = stored.array() if stored.quantized is None else stored.matrix().dequantise(dtype)
            tensor = Tensor.from_numpy(array if stored.is_lasting else array.copy())
            tensor.storage.freeze()
            return tensor
        tensor, numbers = pinned_table((rows, columns), dtype, device)
        step = max(1, _MAPPED_ELEMENTS // columns)
        for first in range(0, rows, step):
            some = slice(first, min(rows, first + step))
            numbers[some] = cast_array(stored.some_rows(some), dtype)
        stored.release()
        return tensor

    def _keep(self, array: Array, name: str) -> Tensor:
        tensor = Tensor.from_numpy(array).to(self.options.device)
        tensor.storage.freeze()
        self._source[name].release()
        return tensor

    def _rounded(self, name: str, places: tuple[slice, ...] = ()) -> Array:
        return np.array(self._array(name, places), np.float32)

    def _array(self, name: str, places: tuple[slice, ...] = ()) -> Array:
        dtype = self._dtype_of(self._source.dtype(name))
        if self._source[name].block_format is not None:
            self.dequantised_bytes[self._source[name].type_name] += self._source[name].size_bytes
        if self._source[name].quantized is not None:
            rows, columns = (*places, slice(None), slice(None))[:2]
            matrix = self._source[name].matrix()
            self.dequantised_bytes[matrix.layout.name] += matrix.size_bytes
            converted: Array = matrix.dequantise(dtype, rows)[:, columns]
        elif self._source.dtype(name) is dtype:
            return self._source[name].array()[places]
        else:
            converted = cast_array(self._source[name].array()[places], dtype)
        if dtype is float16 and _has_infinity(converted):
            largest = np.abs(cast_array(self._source[name].array()[places], float32)).max()
            raise WeightsError(f"tensor {name!r}: {largest:g} is more than float16 holds, which is 65504")
        return converted


def _has_infinity(array: Array) -> bool:
    """Whether a conversion to float16 overflowed."""
    return array.size > 0 and int((array.view(np.uint16) & 0x7FFF).max()) >= _FLOAT16_INFINITY
