"""Rounds a float model's matrices while they are read, as if the checkpoint stored them so."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import ml_dtypes
import numpy as np

from models.errors import WeightsError
from models.makers.declaration import TensorSource
from runtime.dtype import DType
from runtime.linear.quantise import Rounding, quantise
from runtime.linear.quantized import QuantizedLayout, QuantizedMatrix

Array = np.ndarray[Any, Any]

ROUNDINGS = {
    "int4": Rounding("int4", (1, 32), np.dtype(np.float16)),
    "mxfp4": Rounding("fp4", (1, 32), np.dtype(ml_dtypes.float8_e8m0fnu)),
    "fp8": Rounding("fp8", (1, 0), np.dtype(np.float32)),
}
"""By `LoadOptions.rounding`."""

HEAD = Rounding("int8", (1, 0), np.dtype(np.float32))
"""The rounding of the output head, and of a token table tied to it."""


class RoundedSource:
    """A source of floats as one of quantised matrices; see `TensorSource`."""

    def __init__(
        self, source: TensorSource, rounding: str, matrices: Collection[str], heads: Collection[str],
        shapes: Callable[[str], tuple[int, int]], can_keep: Callable[[QuantizedLayout], bool],
    ) -> None:  # fmt: skip
        """`matrices` and `heads` are names of tensors, with `shapes` from the layout; matrices that the device cannot
        keep stay floats."""
        self._source, self._layouts = source, dict[str, QuantizedLayout]()
        self._roundings: dict[str, Rounding] = {}
        for name in (*matrices, *heads):
            each = HEAD if name in heads else ROUNDINGS[rounding]
            layout = QuantizedLayout(each.kind, shapes(name), each.block, each.scale)
            if each.takes(layout.shape[1]) and can_keep(layout):
                self._layouts[name], self._roundings[name] = layout, each

    def main_dtype(self) -> DType:
        return self._source.main_dtype()

    def dtype(self, name: str) -> DType:
        return self._source.dtype(name)

    def array(self, name: str) -> Array:
        return self._source.array(name)

    def block_format(self, name: str) -> str | None:
        return self._source.block_format(name)

    def blocks(self, name: str) -> Array:
        return self._source.blocks(name)

    def quantized(self, name: str) -> QuantizedLayout | None:
        return self._layouts.get(name)

    def order(self, name: str) -> Array | None:
        return None

    def matrix(self, name: str) -> QuantizedMatrix:
        """The tensor, rounded anew at each call. Raises `WeightsError` for a number that is not finite."""
        array = self._source.array(name)
        if not np.isfinite(array).all():
            raise WeightsError(f"tensor {name!r} has a number that is not finite, which cannot be rounded")
        return quantise(array, self._roundings[name])

    def release(self, name: str) -> None:
        self._source.release(name)
