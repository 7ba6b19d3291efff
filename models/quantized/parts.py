"""The stored tensors of one module, and the quantised matrix that some of them make."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from models.checkpoints.stored_tensor import StoredTensor
from models.configuration.json_fields import Fields
from models.errors import WeightsError
from runtime.dtype import DType
from runtime.linear.quantized import QuantizedLayout, QuantizedMatrix, pack_halves, unpack_halves

_LONGEST_PATTERN = 4096
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"


def compiled(fields: Fields, name: str, pattern: str) -> re.Pattern[str]:
    """A regular expression out of a config; raises `ConfigError` for one that is none."""
    try:
        if len(pattern) > _LONGEST_PATTERN:
            raise re.error(f"longer than {_LONGEST_PATTERN} characters")
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise fields.error(name, f"has {pattern!r:.80}, which is no regular expression: {error}") from None


class UnconvertedModules:
    """The list `modules_to_not_convert`, by transformers' rule: a pattern names a module and all below it, or ends a
    name."""

    def __init__(self, fields: Fields, name: str, patterns: Iterable[str]) -> None:
        self._patterns = [(pattern, compiled(fields, name, f"(?:{pattern}){_BOUNDARY}")) for pattern in patterns]

    def __contains__(self, module: str) -> bool:
        return any(regex.match(module) or module.endswith(pattern) for pattern, regex in self._patterns)


Array = np.ndarray[Any, Any]

FLOATS = ("F32", "F16", "BF16")


class ModuleTensors:
    """The tensors under a module's name, such as `model.layers.0.mlp.up_proj`; a reader takes those that it uses."""

    def __init__(self, name: str, tensors: Mapping[str, StoredTensor]) -> None:
        self.name = name
        self.taken: set[str] = set()  # the last parts of names
        self._tensors = tensors

    def has(self, part: str) -> bool:
        """Whether `NAME.part` is stored."""
        return part in self._tensors

    def type_of(self, part: str) -> str:
        """The file's name of the type of `NAME.part`; "" if it is not stored."""
        return self._tensors[part].type_name if part in self._tensors else ""

    def take(self, part: str, types: tuple[str, ...], shape: tuple[int | None, ...] | None = None) -> StoredTensor:
        """`NAME.part`, which must have one of these types and this shape; None allows any size. Raises
        `WeightsError`."""
        if part not in self._tensors:
            there = min(self._tensors.values(), key=lambda stored: stored.name)
            raise WeightsError(f"{there.file}: tensor '{self.name}.{part}' is missing, which {there.name!r} needs")
        stored = self._tensors[part]
        if stored.type_name not in types:
            raise refusal(stored, f"is {stored.type_name}, must be {' or '.join(types)}")
        if 0 in stored.shape:
            raise refusal(stored, f"is {list(stored.shape)}, must not be empty")
        if shape is not None and (
            len(shape) != len(stored.shape)
            or any(size not in (None, found) for size, found in zip(shape, stored.shape, strict=True))
        ):
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise refusal(stored, f"is {list(stored.shape)}, must be [{wanted}]")
        self.taken.add(part)
        return stored

    def take_scalar(self, part: str, types: tuple[str, ...] = FLOATS) -> Part:
        """`NAME.part`, which must hold one number. Raises `WeightsError`."""
        stored = self.take(part, types)
        if stored.shape not in ((), (1,)):
            raise refusal(stored, f"is {list(stored.shape)}, must be one number")
        return Part(stored)


def refusal(stored: StoredTensor, message: str) -> WeightsError:
    """An error that names the file and the tensor."""
    return WeightsError(f"{stored.file}: tensor {stored.name!r} {message}")


def unchanged(array: Array) -> Array:
    """The conversion of parts that are kept as stored."""
    return array


@dataclass(frozen=True, slots=True)
class Part:
    """One array of a matrix: its stored tensor, and the conversion to the layout."""

    stored: StoredTensor
    convert: Callable[[Array], Array] = unchanged

    def array(self) -> Array:
        """The array, read from the file."""
        return self.convert(self.stored.array())


@dataclass(frozen=True, slots=True)
class MatrixParts:
    """A quantised matrix that is not read yet.

    Attributes:
        layout: by headers and config.
        codes, scales, zeros, divisor, factor, input_scale: the sources of its arrays.
        order: gives the group of each column, int ``[K]``, in the matrix's order; codes come so, too.
        checks: raise `WeightsError` if further tensors are wrong.
        stack_shape: of a matrix in which those of all experts stand one under another: the shape of the tensor that
            holds them in floats (`models.checkpoints.stacked`).
    """

    layout: QuantizedLayout
    codes: Part
    scales: Part
    zeros: Part | None = None
    order: Part | None = None
    divisor: Part | None = None
    factor: Part | None = None
    input_scale: Part | None = None
    checks: tuple[Callable[[], None], ...] = field(default=())
    stack_shape: tuple[int, int, int] | None = None


class QuantizedTensor(StoredTensor):
    """A matrix as the model asks for it; see `models.checkpoints.stored_tensor.StoredTensor`.

    Attributes:
        dtype: the default type of its dequantised form.
        quantized: how it is stored.
    """

    def __init__(self, name: str, parts: MatrixParts, tensors: list[StoredTensor], dtype: DType) -> None:
        self.name, self.file = name, parts.codes.stored.file
        self.shape: tuple[int, ...] = parts.stack_shape or parts.layout.shape
        self.dtype: DType | None = dtype
        self.type_name = parts.layout.name
        self.size_bytes = sum(stored.size_bytes for stored in tensors)
        self.quantized: QuantizedLayout | None = parts.layout
        self._dtype, self._parts, self._tensors = dtype, parts, tensors

    def order(self) -> Array | None:
        """The permutation of the matrix's columns, int32 ``[K]``, or None if they are in order."""
        if self._parts.order is None:
            return None
        return np.argsort(self._parts.order.array(), kind="stable").astype(np.int32)

    def matrix(self) -> QuantizedMatrix:
        """The matrix, its arrays views of the mapped file where they are stored so."""
        parts = self._parts
        codes, order = parts.codes.array(), self.order()
        if order is not None:
            codes = _in_order(codes, order, parts.layout)
        return QuantizedMatrix(
            parts.layout,
            codes,
            parts.scales.array(),
            None if parts.zeros is None else parts.zeros.array(),
            order,
            1.0 if parts.divisor is None else _scalar(parts.divisor),
            1.0 if parts.factor is None else _scalar(parts.factor),
            None if parts.input_scale is None else _scalar(parts.input_scale),
        )

    def check(self) -> None:
        """Raises `WeightsError` for an impossible number: reads all but the matrix itself."""
        parts = self._parts
        for part in (parts.scales, parts.divisor, parts.factor, parts.input_scale):
            if part is not None:
                values = part.array().astype(np.float32)
                if not np.isfinite(values).all():
                    place = np.argwhere(~np.isfinite(values.reshape(np.atleast_1d(values).shape)))[0].tolist()
                    found = values.reshape(np.atleast_1d(values).shape)[tuple(place)]
                    raise refusal(part.stored, f"has the scale {found} at {place}; scales must be finite")
        for part in (parts.divisor, parts.factor, parts.input_scale):
            if part is not None and _scalar(part) <= 0:
                raise refusal(part.stored, f"is {_scalar(part):g}; a scale of all must be greater than 0")
        for part, is_divided in ((parts.divisor, True), (parts.factor, False)):
            if part is not None:
                number, largest = np.float32(_scalar(part)), np.abs(parts.scales.array().astype(np.float32)).max()
                with np.errstate(over="ignore"):
                    whole = largest / number if is_divided else largest * number
                if not np.isfinite(whole):
                    raise refusal(part.stored, f"is {number:g}, by which the scale {largest:g} is more than a float32")
        if parts.order is not None:
            check_groups(parts.order, parts.layout.block[1])
        for check in parts.checks:
            check()

    def array(self) -> Array:
        """The matrix in floats."""
        return self.matrix().dequantise(self._dtype)

    def release(self) -> None:
        for stored in self._tensors:
            stored.release()


def check_groups(part: Part, size: int) -> None:
    """Refuses groups of columns that are not each of `size` columns, but for the last."""
    groups = part.array()
    wanted = np.arange(groups.size) // size
    if np.array_equal(np.sort(groups), wanted):
        return
    outside = (groups < 0) | (groups > wanted[-1])
    if outside.any():
        place = int(np.argmax(outside))
        raise refusal(part.stored, f"has group {groups[place]} at {place}, must be from 0 to {wanted[-1]}")
    counts = np.bincount(groups, minlength=int(wanted[-1]) + 1)
    wrong = int(np.argmax(counts != np.bincount(wanted)))
    raise refusal(part.stored, f"gives group {wrong} {counts[wrong]} columns, must be {np.bincount(wanted)[wrong]}")


def _scalar(part: Part) -> float:
    return float(part.array().astype(np.float32).reshape(()))


def _in_order(codes: Array, order: Array, layout: QuantizedLayout) -> Array:
    if layout.kind in ("int8", "fp8"):
        return np.take(codes, order, axis=1)
    return pack_halves(np.take(unpack_halves(codes), order, axis=1))
