"""Rounds a float model's matrices while they are read, as if the checkpoint stored them so."""

from __future__ import annotations

from collections.abc import Callable, Collection

import ml_dtypes
import numpy as np

from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.stored_tensor import Array, StoredTensor
from models.errors import WeightsError
from runtime.linear.quantise import Rounding, quantise
from runtime.linear.quantized import QuantizedLayout, QuantizedMatrix

ROUNDINGS = {
    "int4": Rounding("int4", (1, 32), np.dtype(np.float16)),
    "mxfp4": Rounding("fp4", (1, 32), np.dtype(ml_dtypes.float8_e8m0fnu)),
    "fp8": Rounding("fp8", (1, 0), np.dtype(np.float32)),
}
"""By `LoadOptions.rounding`."""

HEAD = Rounding("int8", (1, 0), np.dtype(np.float32))
"""The rounding of the output head, and of a token table tied to it."""


def rounded_on_load(
    source: Checkpoint, rounding: str, matrices: Collection[str], heads: Collection[str],
    can_keep: Callable[[QuantizedLayout], bool],
) -> Checkpoint:  # fmt: skip
    """The source with these matrices and heads, by name, rounded; those that the device cannot keep stay floats."""
    tensors = dict(source.tensors)
    for name in (*matrices, *heads):
        each, stored = HEAD if name in heads else ROUNDINGS[rounding], source[name]
        layout = QuantizedLayout(each.kind, (stored.shape[0], stored.shape[1]), each.block, each.scale)
        if each.takes(layout.shape[1]) and can_keep(layout):
            tensors[name] = _RoundedTensor(stored, layout, each)
    return Checkpoint(source.place, source.label, tensors)


class _RoundedTensor(StoredTensor):
    """A tensor of floats as a quantised matrix."""

    def __init__(self, stored: StoredTensor, layout: QuantizedLayout, rounding: Rounding) -> None:
        self.file, self.name, self.shape, self.dtype = stored.file, stored.name, stored.shape, stored.dtype
        self.type_name, self.size_bytes, self.quantized = stored.type_name, stored.size_bytes, layout
        self._stored, self._rounding = stored, rounding

    def array(self) -> Array:
        """The floats, as they are stored."""
        return self._stored.array()

    def matrix(self) -> QuantizedMatrix:
        """The tensor, rounded anew at each call. Raises `WeightsError` for a number that is not finite."""
        array = self._stored.array()
        if not np.isfinite(array).all():
            raise WeightsError(f"tensor {self.name!r} has a number that is not finite, which cannot be rounded")
        return quantise(array, self._rounding)

    def release(self) -> None:
        self._stored.release()
