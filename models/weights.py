"""Stored tensors into the pieces that layers are made of: packed linear maps, vectors, tables.

Converts one tensor at a time and lets go of it before the next, so that loading needs little more than one
copy of the weights.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from models.errors import WeightsError
from runtime import ops
from runtime.device.device import CPU, Device
from runtime.dtype import DType, float16, float32, promote
from runtime.ops import LinearWeight
from runtime.tensor.cast import cast_array
from runtime.tensor.tensor import Tensor

_FLOAT16_INFINITY = 0x7C00  # its bits; NaN's are greater


class TensorSource(Protocol):
    """Where tensors come from: a `Checkpoint` or a `DummyCheckpoint`."""

    def main_dtype(self) -> DType: ...

    def dtype(self, name: str) -> DType: ...

    def array(self, name: str) -> np.ndarray[Any, Any]: ...

    def release(self, name: str) -> None: ...


class Weights:
    """Makes the pieces of a model and counts their bytes.

    `dtype` is the type that weights are converted to, or None to keep each as it is stored. On a GPU, where
    the activations have the weights' type, all matrices are of one: None means the checkpoint's main type.
    `quantization` is what the matrices of linear maps are made into after that; vectors, and tables that are
    nothing else, stay as they are.
    """

    def __init__(
        self,
        source: TensorSource,
        dtype: DType | None,
        device: Device = CPU,
        gemm: str = "auto",
        *,
        exact: bool = False,
        quantization: str = "none",
    ) -> None:
        self.quantization = quantization
        self._source = source
        self._gemm = gemm
        self._exact = exact
        self._device = device
        if dtype is None and device.kind != "cpu":
            dtype = source.main_dtype()
        self._dtype = dtype
        self.dtype = dtype or source.main_dtype()
        self.size_bytes = 0

    def linear(self, *names: str, is_transposed: bool = False, has_bias: bool = False) -> LinearWeight:
        """The map `name.weight [N, K]` (`is_transposed`: stored as `[K, N]`) and, with `has_bias`,
        `name.bias [N]`.

        Several names become one map, their outputs one after another.
        """
        stored = [self._source.dtype(f"{name}.weight") for name in names]
        dtype = self._dtype or stored[0]
        for other in stored[1:]:
            dtype = self._dtype or promote(dtype, other)
        arrays = [self._array(f"{name}.weight", dtype) for name in names]
        weights = [Tensor.from_numpy(array.T if is_transposed else array) for array in arrays]
        biases = [Tensor.from_numpy(self._rounded(f"{name}.bias")) if has_bias else None for name in names]
        packed = ops.prepare_linear(
            weights,
            biases,
            device=self._device,
            gemm=self._gemm,
            exact=self._exact,
            quantization=self.quantization,
        )
        del arrays, weights
        for name in names:
            self._source.release(f"{name}.weight")
            if has_bias:
                self._source.release(f"{name}.bias")
        self.size_bytes += packed.size_bytes
        return packed

    def vector(self, name: str) -> Tensor:
        """`name [N]` as float32, after rounding to the weights' type; norms and biases are computed in
        float32."""
        return self._keep(self._rounded(name), name)

    def table(self, name: str) -> Tensor:
        """`name [rows, N]` in memory of its own, in the weights' type."""
        array = self._array(name, self._dtype or self._source.dtype(name))
        is_own = array.flags.owndata or self._device.kind != "cpu"  # what goes to a GPU is copied there
        return self._keep(array if is_own else array.copy(), name)

    def _keep(self, array: np.ndarray[Any, Any], name: str) -> Tensor:
        tensor = Tensor.from_numpy(array).to(self._device)
        tensor.storage.freeze()
        self._source.release(name)
        self.size_bytes += array.nbytes
        return tensor

    def _rounded(self, name: str) -> np.ndarray[Any, Any]:
        dtype = self._dtype or self._source.dtype(name)
        return np.array(self._array(name, dtype), np.float32)

    def _array(self, name: str, dtype: DType) -> np.ndarray[Any, Any]:
        array = self._source.array(name)
        if self._source.dtype(name) is dtype:
            return array
        converted = cast_array(array, dtype)
        if (
            dtype is float16
            and array.size
            and (converted.view(np.uint16) & 0x7FFF).max() >= _FLOAT16_INFINITY
        ):
            largest = np.abs(cast_array(array, float32)).max()
            raise WeightsError(f"tensor {name!r}: {largest:g} is more than float16 holds, which is 65504")
        return converted
