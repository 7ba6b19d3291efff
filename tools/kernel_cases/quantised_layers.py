"""Quantised linear maps at sizes of serving that are cheap to make: their rows are those of a small matrix, quantised
and packed like a checkpoint's, in a random order of tiles.

So every column of a product can be compared with numpy's: only the small matrix's differ.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from numba_kernels.cuda.packing import Packing, packing_of
from runtime import ops
from runtime.bench.kernels.case import Array
from runtime.device.gpu import Gpu
from runtime.dtype import float32
from runtime.linear.kept import kept_format
from runtime.linear.options import LoadOptions
from runtime.linear.packed_matrix import MatrixPart, prepare_packed
from runtime.linear.quantized import ActivationScheme, NumberKind, QuantizedLayout, QuantizedMatrix
from runtime.linear.weight import GpuWeight, PackedWeight
from runtime.tensor.tensor import Tensor

TILE = 16  # rows that lie together in a packed block
MOST_ROWS = 512
"""Most rows of the small matrix."""

_E4M3, _E8M0 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e8m0fnu)
_HALF, _FLOAT = np.dtype(np.float16), np.dtype(np.float32)
_STD = 0.03
"""The standard deviation of an element, about."""


@dataclass(frozen=True, slots=True)
class Format:
    """How a matrix is stored: `QuantizedLayout`'s fields without the shape."""

    kind: NumberKind
    block: tuple[int, int]
    scale: np.dtype[Any]
    has_zeros: bool = False
    has_factor: bool = False
    activation: ActivationScheme | None = None

    def layout(self, rows: int, depth: int) -> QuantizedLayout:
        return QuantizedLayout(
            self.kind, (rows, depth), self.block, self.scale, self.has_zeros, has_factor=self.has_factor,
            activation=self.activation,
        )  # fmt: skip

    @property
    def packing(self) -> Packing:
        """A GPU's packing of such matrices."""
        options = LoadOptions.parse(device="emulated:sm_90a", dtype="bfloat16")
        format = kept_format(self.layout(TILE, MOST_ROWS), options)
        found = None if format is None else packing_of(format.packing)
        assert found is not None
        return found


FORMATS = {
    "int4 g128": Format("int4", (1, 128), _HALF),
    "mxfp4": Format("fp4", (1, 32), _E8M0),
    "fp8 blocks": Format("fp8", (128, 128), _FLOAT, activation=ActivationScheme("fp8", 128)),
    "fp8": Format("fp8", (1, 0), _FLOAT, activation=ActivationScheme("fp8")),
    "int8": Format("int8", (1, 0), _FLOAT),
    "w8a8": Format("int8", (1, 0), _FLOAT, activation=ActivationScheme("int8")),
    "int4 g128 zeros": Format("int4", (1, 128), _HALF, has_zeros=True),
    "int4 g32": Format("int4", (1, 32), _HALF),
    "nvfp4": Format("fp4", (1, 16), _E4M3, has_factor=True),
    "fp8 static": Format("fp8", (0, 0), _FLOAT, activation=ActivationScheme("fp8", is_static=True)),
}
"""The formats of checkpoints, by this report's names; "int4 g32" and "mxfp4" are `--quantization`'s, too."""

_SIZES = {"int4": 4.6, "int8": 74.0, "fp8": 120.0, "fp4": 2.9}
"""Standard deviations of numbers whose codes are random."""


def random_matrix(format: Format, rows: int, depth: int, seed: int) -> QuantizedMatrix:
    """A matrix of any finite numbers, with random scales."""
    rng, layout = np.random.default_rng(seed), format.layout(rows, depth)
    codes = np.frombuffer(rng.bytes(int(np.prod(layout.code_shape))), np.uint8).reshape(layout.code_shape).copy()
    if format.kind == "fp8":
        codes[codes & 0x7F == 0x7F] = 0
    scales: Array = rng.uniform(0.5, 1.5, layout.scale_shape) * _STD / _SIZES[format.kind]
    factor = 1.0
    if format.scale == _E8M0:
        scales = 2.0 ** rng.integers(-8, -5, layout.scale_shape)
    elif format.has_factor:
        factor = 2.0**-7 * 1.1
        scales /= factor
    zeros = None
    if format.has_zeros:
        zeros = rng.integers(0, 16 if format.kind == "int4" else 256, layout.scale_shape, np.uint8)
    is_static = format.activation is not None and format.activation.is_static
    return QuantizedMatrix(
        layout, codes, scales.astype(format.scale), zeros, factor=factor, input_scale=2.0**-8 if is_static else None
    )


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear map on the device.

    Attributes:
        matrix: float32, the distinct rows.
        rows: for each of its outputs, the index of its distinct row.
        bias: float32, of each output; or 0.
    """

    weight: GpuWeight
    matrix: Array
    rows: Array
    bias: Array | float = 0.0

    def expected(self, x: Array) -> Array:
        """Products with rows of x, float32."""
        found: Array = (x.astype(np.float32) @ self.matrix.T)[:, self.rows] + self.bias
        return found


@functools.lru_cache(maxsize=2)  # cases of one layer follow each other
def packed_layer(gpu: Gpu, name: str, width: int, depth: int, seed: int = 0, *, has_bias: bool = False) -> Layer:
    """``[width, depth]`` in one of `FORMATS`, prepared like a checkpoint's matrix."""
    options = LoadOptions.parse(device=str(gpu.device), dtype="bfloat16")
    height = min(width, MOST_ROWS)
    small, bias = random_matrix(FORMATS[name], height, depth, seed), _bias(width, seed) if has_bias else None
    matrix, added = small.dequantise(float32), 0.0 if bias is None else bias
    terms = None if bias is None else [Tensor.from_numpy(bias[:height])]
    weight = prepare_packed([MatrixPart(small, slice(None), slice(None))], terms, options, None)
    if width == height:
        return Layer(weight, matrix, np.arange(width), added)
    tiles = np.random.default_rng(seed).integers(0, height // TILE, -(-width // TILE))
    rows = (tiles[:, None] * TILE + np.arange(TILE)).reshape(-1)[:width]
    on_gpu = None if bias is None else Tensor.from_numpy(bias).to(weight.device)
    return Layer(_repeated(weight, tiles, (width, depth), on_gpu), matrix, rows, added)


def _bias(width: int, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(width, np.float32)


def _repeated(small: PackedWeight, tiles: Array, shape: tuple[int, int], bias: Tensor | None) -> PackedWeight:
    """A weight that repeats the tiles of a small one. Sections of a packed block are by tile."""
    block, dtype = small.memory.to("cpu").array, small.activations.ptx
    borders = (0, *small.packing.sections(*small.shape, dtype))
    sections = [block[first:end].reshape(small.shape[0] // TILE, -1) for first, end in itertools.pairwise(borders)]
    parts = [section[tiles].reshape(-1) for section in sections]
    memory = Tensor.from_numpy(np.concatenate(parts)).to(small.device)
    memory.storage.freeze()
    return PackedWeight(
        shape, small.format, memory, small.activations, bias, small.tier, rounds_rows=small.rounds_rows,
        input_scale=small.input_scale,
    )  # fmt: skip


@functools.lru_cache(maxsize=2)
def float_layer(gpu: Gpu, width: int, depth: int, seed: int = 0, *, has_bias: bool = False) -> Layer:
    """The same in bfloat16."""
    options = LoadOptions.parse(device=str(gpu.device), dtype="bfloat16")
    rng, height = np.random.default_rng(seed), min(width, MOST_ROWS)
    small = (rng.standard_normal((height, depth), np.float32) * np.float32(_STD)).astype(ml_dtypes.bfloat16)
    tiles = rng.integers(0, -(-height // TILE), -(-width // TILE))
    rows = np.minimum((tiles[:, None] * TILE + np.arange(TILE)).reshape(-1)[:width], height - 1)
    bias = _bias(width, seed) if has_bias else None
    terms = None if bias is None else Tensor.from_numpy(bias)
    weight = ops.prepare_linear(Tensor.from_numpy(small[rows]), terms, options)
    assert isinstance(weight, GpuWeight)
    return Layer(weight, small.astype(np.float32), rows, 0.0 if bias is None else bias)


def dynamic_quantisation(x: Array, weight: GpuWeight) -> Array:
    """Rows of x rounded as the checkpoint prescribes, float32."""
    assert isinstance(weight, PackedWeight)
    is_fp8 = weight.packing.element == "e4m3"
    largest = np.float32(448 if is_fp8 else 127)
    wide = x.astype(np.float32)
    if weight.rounds_rows == "static":
        scale: Any = np.float32(weight.input_scale)
    elif weight.rounds_rows == "groups":
        group = weight.packing.group
        padded = np.zeros((len(x), -(-x.shape[1] // group), group), np.float32)
        padded.reshape(len(x), -1)[:, : x.shape[1]] = wide
        scale = np.abs(padded).max(2).repeat(group, 1)[:, : x.shape[1]] / largest
    else:
        scale = np.abs(wide).max(1, keepdims=True) / largest
    numbers = np.clip(wide / scale, -largest, largest)
    codes = numbers.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) if is_fp8 else np.rint(numbers)
    found: Array = codes * scale
    return found


def planned_of(weight: GpuWeight) -> Any:
    """How the last product with it was planned (`cuda_plans.Planned`)."""
    return list(weight.plans.values())[-1]


def launched_names(weight: GpuWeight) -> list[str]:
    """The kernels of the last product with it, in order."""
    planned = planned_of(weight)
    launches = (planned.rounding, planned.dequantization, planned.launch)
    return [launch.specialisation.name for launch in launches if launch is not None]
