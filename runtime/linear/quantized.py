"""A quantised matrix as checkpoints of every kind mean it: small numbers, scales by block, perhaps zeros and an order.

There is one layout for each kind of number, whatever file it came from (`models.quantized` reads them):

| kind | numbers | codes, uint8 |
|---|---|---|
| `int4` | integers 0 to 15 | `[N, ceil(K / 2)]`: element 2j in the low half of byte j, 2j + 1 in the high half |
| `int8` | integers 0 to 255 | `[N, K]` |
| `fp8` | e4m3 (without infinities) | `[N, K]` |
| `fp4` | e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6; the highest bit is the sign | `[N, ceil(K / 2)]`, halves as `int4` |

An element is ``(number - zero) * scale`` for integers and ``number * (scale / divisor)``, or
``number * (scale * factor)``, for floats, in float32 and rounded after each operation: as each format's own library has
it, before that rounds to 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import ml_dtypes
import numpy as np

from runtime.dtype import DType, NDArray
from runtime.tensor.cast import cast_array

NumberKind = Literal["int4", "int8", "fp8", "fp4"]

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_ELEMENTS_AT_ONCE = 1 << 18


@dataclass(frozen=True, slots=True)
class ActivationScheme:
    """The checkpoint's rounding of the rows of x that the matrix is multiplied with.

    Attributes:
        kind: the type of the rounded numbers: "fp8", "int8" or "fp4".
        group: how many elements of a row share a scale; 0 means all.
        is_static: one scale for all rows, which the checkpoint has; else each row, or group, has its own, the largest
            magnitude over the largest number.
    """

    kind: NumberKind
    group: int = 0
    is_static: bool = False


@dataclass(frozen=True, slots=True)
class QuantizedLayout:
    """The layout of a quantised matrix, from headers and the config.

    Attributes:
        kind: of its numbers.
        shape: (N, K).
        block: rows of N by elements of K that share a scale; 0 means all.
        scale: numpy's type of the scales: float32, float16, bfloat16, e4m3 or e8m0.
        has_zeros: whether integers have zeros of their own, one for each scale; else it is the middle, 8 or 128.
        has_order: whether columns are stored in another order.
        has_divisor: whether scales are divided by one number for the whole matrix.
        has_factor: whether they are multiplied with one.
        activation: the checkpoint's rounding of x, or None. Weight-only products may leave it out.
    """

    kind: NumberKind
    shape: tuple[int, int]
    block: tuple[int, int]
    scale: np.dtype[Any]
    has_zeros: bool = False
    has_order: bool = False
    has_divisor: bool = False
    has_factor: bool = False
    activation: ActivationScheme | None = None

    @property
    def scale_shape(self) -> tuple[int, int]:
        """Shape of the scales, and of the zeros."""
        (width, depth), (rows, elements) = self.shape, self.block
        return (-(-width // rows) if rows else 1), (-(-depth // elements) if elements else 1)

    @property
    def code_shape(self) -> tuple[int, int]:
        """Shape of the codes, in bytes."""
        width, depth = self.shape
        return width, depth if self.kind in ("int8", "fp8") else -(-depth // 2)

    def picked(self, count: int) -> QuantizedLayout:
        """That of so many rows that are picked out: they have scales of their own, or the one of all."""
        return replace(self, shape=(count, self.shape[1]), block=(min(self.block[0], 1), self.block[1]))

    @property
    def name(self) -> str:
        """A name for messages, such as "int4 in groups of 128, with zeros"."""
        rows, elements = self.block
        if not rows:
            place = "a scale for all"
        elif not elements:
            place = "a scale a row" if rows == 1 else f"a scale for {rows} rows"
        else:
            place = f"groups of {elements}" if rows == 1 else f"blocks of {rows} x {elements}"
        extras = [name for name, has in (("zeros", self.has_zeros), ("an order", self.has_order)) if has]
        return f"{self.kind}, {place}" + (f", with {' and '.join(extras)}" if extras else "")


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedMatrix:
    """A quantised matrix ``[N, K]``. Arrays may be views of mapped files.

    Attributes:
        layout: its shape, kind and scales.
        codes: uint8, `layout.code_shape`.
        scales: of `layout.scale`, `layout.scale_shape`; finite.
        zeros: uint8, `layout.scale_shape`, or None for 8 or 128.
        order: int32 ``[K]``: column j of codes and scales is the matrix's column ``order[j]``, so that
            ``x . W^T = x[:, order] . stored^T``; or None if columns are in order.
        divisor: scales are divided by it.
        factor: scales are multiplied by it.
        input_scale: of a static activation scheme: x is rounded to its multiples ("fp4": divides scales of x).
    """

    layout: QuantizedLayout
    codes: NDArray
    scales: NDArray
    zeros: NDArray | None = None
    order: NDArray | None = None
    divisor: float = 1.0
    factor: float = 1.0
    input_scale: float | None = None

    def __post_init__(self) -> None:
        layout = self.layout
        _check("codes", self.codes, layout.code_shape, np.dtype(np.uint8))
        _check("scales", self.scales, layout.scale_shape, layout.scale)
        assert (self.zeros is not None) == layout.has_zeros, layout
        assert (self.order is not None) == layout.has_order, layout
        if self.zeros is not None:
            _check("zeros", self.zeros, layout.scale_shape, np.dtype(np.uint8))
        if self.order is not None:
            _check("order", self.order, layout.shape[1:], np.dtype(np.int32))

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.layout.shape

    @property
    def size_bytes(self) -> int:
        """Bytes of codes, scales, zeros and order."""
        arrays = (self.codes, self.scales, self.zeros, self.order)
        return sum(array.nbytes for array in arrays if array is not None)

    def cut(self, rows: slice) -> QuantizedMatrix:
        """Some rows of the matrix, as views where they have scales of their own."""
        width, _ = self.shape
        first, stop, step = rows.indices(width)
        if (first, stop, step) == (0, width, 1):
            return self
        return self._some(slice(first, stop, step), len(range(first, stop, step)))

    def pick(self, rows: NDArray) -> QuantizedMatrix:
        """The rows of these numbers, copied."""
        return self._some(rows, len(rows))

    def _some(self, rows: slice | NDArray, count: int) -> QuantizedMatrix:
        places = self._scale_rows(rows)
        zeros = None if self.zeros is None else self.zeros[places]
        return replace(
            self, layout=self.layout.picked(count), codes=self.codes[rows], scales=self.scales[places], zeros=zeros
        )

    def cut_columns(self, first: int, end: int) -> QuantizedMatrix:
        """Columns ``first`` up to ``end``, as views; they begin between groups, and the matrix has no order."""
        width, depth = self.shape
        if (first, end) == (0, depth):
            return self
        elements = self.layout.block[1]
        assert self.order is None, "columns are stored in another order"
        assert first % (elements or 1) == 0, "a part begins within a group"
        a_byte = 1 if self.layout.kind in ("int8", "fp8") else 2
        assert first % a_byte == 0, "a part begins within a byte"
        groups = slice(first // elements, -(-end // elements)) if elements else slice(None)
        zeros = None if self.zeros is None else self.zeros[:, groups]
        return replace(
            self, layout=replace(self.layout, shape=(width, end - first)), zeros=zeros,
            codes=self.codes[:, first // a_byte : -(-end // a_byte)], scales=self.scales[:, groups],
        )  # fmt: skip

    def dequantise(self, dtype: DType, rows: slice = slice(None)) -> NDArray:
        """Rows of the matrix, ``[rows, K]``, columns in the matrix's own order."""
        width, depth = self.shape
        first, stop, _ = rows.indices(width)
        out = np.empty((max(0, stop - first), depth), dtype.numpy)
        step = max(1, _ELEMENTS_AT_ONCE // max(1, depth))
        for start in range(first, stop, step):
            some = slice(start, min(start + step, stop))
            with np.errstate(all="ignore"):  # products may be too large or too small for a float
                values = cast_array(self._values(some), dtype)
            place = out[some.start - first : some.stop - first]
            if self.order is None:
                place[:] = values
            else:
                place[:, self.order] = values
        return out

    def numbers(self, rows: slice = slice(None)) -> NDArray:
        """The codes of rows one in a byte, ``[rows, K]`` uint8, columns as they are stored."""
        codes = self.codes[rows]
        if self.layout.kind in ("int8", "fp8"):
            return codes
        halves: NDArray = unpack_halves(codes)[:, : self.shape[1]]
        return halves

    def scaled(self, scales: NDArray) -> NDArray:
        """Scales in float32, by the number for the whole matrix."""
        with np.errstate(over="ignore"):
            if self.layout.has_divisor:
                scales = scales / np.float32(self.divisor)
            return scales * np.float32(self.factor) if self.layout.has_factor else scales

    def _values(self, rows: slice) -> NDArray:
        """Rows as float32, columns as they are stored."""
        layout, numbers = self.layout, self.numbers(rows)
        scales = self.scaled(self.scales[self._scale_rows(rows)].astype(np.float32))
        zeros = None
        if layout.kind == "fp8":
            values: NDArray = _E4M3[numbers]
        elif layout.kind == "fp4":
            values = _E2M1[numbers]
        else:
            values = numbers.astype(np.float32)
            if self.zeros is not None:
                zeros = self.zeros[self._scale_rows(rows)].astype(np.float32)
            else:
                values -= np.float32(8 if layout.kind == "int4" else 128)
        for part, scale, zero in self._groups(values, scales, zeros):
            if zero is not None:
                part -= zero
            part *= scale
        return values

    def _scale_rows(self, rows: slice | NDArray) -> Any:
        """The rows of the scales that belong to rows of the matrix."""
        block_rows = self.layout.block[0]
        if not block_rows:
            return slice(0, 1)
        if not isinstance(rows, slice):
            return rows // block_rows
        return rows if block_rows == 1 else np.arange(rows.start, rows.stop, rows.step) // block_rows

    def _groups(
        self, values: NDArray, scales: NDArray, zeros: NDArray | None
    ) -> Iterator[tuple[NDArray, NDArray, NDArray | None]]:
        """Views of the values, with the scales that broadcast over them: whole groups, then the rest of a row."""
        depth = values.shape[1]
        size = self.layout.block[1] or depth
        whole = depth // size
        cut = whole * size
        parts = [(values[:, :cut].reshape(len(values), whole, size), slice(0, whole))]
        if cut < depth:
            parts.append((values[:, None, cut:], slice(whole, whole + 1)))
        for part, groups in parts:
            assert np.shares_memory(part, values) or not part.size
            yield part, scales[:, groups, None], None if zeros is None else zeros[:, groups, None]


def _check(name: str, array: NDArray, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    assert array.shape == shape, (name, array.shape, shape)
    assert array.dtype == dtype, (name, array.dtype, dtype)


def unpack_halves(packed: NDArray) -> NDArray:
    """Bytes ``[..., n]`` to the halves that they hold, the low one first: ``[..., 2n]`` uint8."""
    halves = np.empty((*packed.shape, 2), np.uint8)
    np.bitwise_and(packed, 15, out=halves[..., 0])
    np.right_shift(packed, 4, out=halves[..., 1])
    return halves.reshape(*packed.shape[:-1], -1)


def pack_halves(numbers: NDArray) -> NDArray:
    """Numbers ``[..., n]`` from 0 to 15, two in a byte, the first in the low half: ``[..., ceil(n / 2)]`` uint8."""
    if numbers.shape[-1] % 2:
        numbers = np.concatenate([numbers, np.zeros((*numbers.shape[:-1], 1), np.uint8)], axis=-1)
    packed: NDArray = numbers[..., 0::2] | numbers[..., 1::2] << np.uint8(4)
    return packed
