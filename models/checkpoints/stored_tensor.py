"""The interface to one tensor of a model's files, in any format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from runtime.dtype import DType
from runtime.linear.quantized import QuantizedLayout, QuantizedMatrix

Array = np.ndarray[Any, Any]


class StoredTensor(ABC):
    """One tensor of a file; by default of floats, element by element.

    Attributes:
        file: the file's name.
        name: its name in the file.
        shape: of the elements.
        dtype: of the elements as `array` gives them; None if it cannot.
        type_name: the type's name in the file.
        size_bytes: in the file.
        block_format: the name of the blocks that `blocks` gives, ggml's or ours; None if there are none.
        quantized: how `matrix`'s result is quantised; None if it is not.
        is_lasting: whether views of `array` may be kept: their memory is not written.
        head_formats: the names of the blocks that `head_blocks` gives, by part, "keys" and "values"; None or absent for
            a part without blocks.
    """

    file: str
    name: str
    shape: tuple[int, ...]
    dtype: DType | None
    type_name: str
    size_bytes: int
    block_format: str | None = None
    quantized: QuantizedLayout | None = None
    is_lasting: bool = True
    head_formats: Mapping[str, str | None] = MappingProxyType({})

    def widen(self, shape: tuple[int, ...]) -> None:  # noqa: B027 - most formats write every size
        """Takes this shape, if the tensor's lacks only sizes of 1, which the file's writer left out."""

    @abstractmethod
    def array(self) -> Array:
        """The elements, as a view of the mapped file where they are stored so."""

    def some_rows(self, rows: slice) -> Array:
        """`array()[rows]`, which reads no others."""
        return self.array()[rows]

    def stored_rows(self) -> Array:
        """`blocks` without a look at them, which would read the whole tensor."""
        raise AssertionError(f"{self.name} is not stored in blocks")

    def blocks(self) -> Array:
        """The bytes of the rows, `[rows, row bytes]`, of a matrix in a `block_format`."""
        raise AssertionError(f"{self.name} is not stored in blocks")

    def head_blocks(self, part: str, head: int, rows: slice) -> Array:
        """The bytes of the rows of a head's keys or values, `[rows, row bytes]`, if they are in blocks: keys
        `[latent, keys]`, values `[values, latent]`. They are these rows of the whole map."""
        raise AssertionError(f"{self.name} is not stored by head")

    def order(self) -> Array | None:
        """The order of a `quantized` matrix's columns, as `QuantizedMatrix` has it; the matrix itself is not read."""
        return None

    def matrix(self) -> QuantizedMatrix:
        """A matrix that is `quantized`."""
        raise AssertionError(f"{self.name} is not quantised")

    def check(self) -> None:  # noqa: B027 - most have nothing to check
        """Raises `WeightsError` for numbers that cannot be, such as a scale of NaN. Floats may have any value."""

    def release(self) -> None:  # noqa: B027 - some have no pages
        """Let go of the file's memory pages; reading it again reads the file again."""
