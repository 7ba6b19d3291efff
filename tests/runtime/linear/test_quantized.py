"""Quantised matrices: an element is what its definition says, rows can be cut anywhere, and the cpu keeps numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Ggml

from runtime import ops
from runtime.dtype import bfloat16, float32
from runtime.errors import InvalidArgumentError
from runtime.linear.format import GGML_FORMATS, INT8
from runtime.linear.kept import block_bytes, kept_format
from runtime.linear.options import LoadOptions
from runtime.linear.quantized import NumberKind, QuantizedLayout, QuantizedMatrix, pack_halves, unpack_halves
from runtime.linear.weight import JoinedWeight, KeptRows, packed_bytes, runs_of
from runtime.tensor.tensor import Tensor

Array = np.ndarray[Any, Any]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
ROW: tuple[int, int] = (1, 0)


def random_matrix(
    kind: NumberKind, shape: tuple[int, int], block: tuple[int, int], scale: Any = np.float32, *,
    has_zeros: bool = False, has_order: bool = False, divisor: float | None = None, seed: int = 0,
) -> QuantizedMatrix:  # fmt: skip
    """Any numbers that are finite."""
    rng = np.random.default_rng(seed)
    layout = QuantizedLayout(kind, shape, block, np.dtype(scale), has_zeros, has_order, divisor is not None)
    numbers = rng.integers(0, 256 if kind in ("int8", "fp8") else 16, shape, np.uint8)
    if kind == "fp8":
        numbers[numbers & 0x7F == 0x7F] = 0
    scales = rng.uniform(0.001, 0.01, layout.scale_shape)
    if scale == ml_dtypes.float8_e8m0fnu:
        scales = 2.0 ** rng.integers(-12, -5, layout.scale_shape)
    largest = 256 if kind == "int8" else 16
    return QuantizedMatrix(
        layout,
        numbers if kind in ("int8", "fp8") else pack_halves(numbers),
        scales.astype(scale),
        rng.integers(0, largest, layout.scale_shape, np.uint8) if has_zeros else None,
        rng.permutation(shape[1]).astype(np.int32) if has_order else None,
        divisor or 1.0,
    )


def element(matrix: QuantizedMatrix, row: int, column: int) -> np.float32:
    """By the definition, one at a time."""
    layout, place = matrix.layout, column
    if matrix.order is not None:
        place = list(matrix.order).index(column)
    code = int(matrix.numbers()[row, place])
    rows, elements = layout.block
    group = (row // rows if rows else 0), (place // elements if elements else 0)
    scale = np.float32(matrix.scales[group])
    if layout.has_divisor:
        scale = scale / np.float32(matrix.divisor)
    if layout.kind == "fp8":
        return np.float32(np.uint8(code).view(ml_dtypes.float8_e4m3fn)) * scale
    if layout.kind == "fp4":
        return np.float32(E2M1[code & 7] * (-1 if code & 8 else 1)) * scale
    zero = int(matrix.zeros[group]) if matrix.zeros is not None else (8 if layout.kind == "int4" else 128)
    return np.float32(code - zero) * scale


MATRICES: list[dict[str, Any]] = [
    {"kind": "int4", "shape": (5, 64), "block": (1, 32), "scale": np.float16, "has_zeros": True, "has_order": True},
    {"kind": "int4", "shape": (3, 43), "block": (1, 32)},
    {"kind": "int8", "shape": (4, 40), "block": (1, 16), "has_zeros": True, "scale": ml_dtypes.bfloat16},
    {"kind": "int8", "shape": (4, 40), "block": (0, 0)},
    {"kind": "fp8", "shape": (37, 45), "block": (16, 32)},
    {"kind": "fp8", "shape": (6, 20), "block": ROW, "has_order": True},
    {"kind": "fp4", "shape": (6, 48), "block": (1, 16), "scale": ml_dtypes.float8_e4m3fn, "divisor": 3.7},
    {"kind": "fp4", "shape": (6, 64), "block": (1, 32), "scale": ml_dtypes.float8_e8m0fnu},
]


@pytest.mark.parametrize("case", MATRICES, ids=lambda case: f"{case['kind']}-{case['block']}")
def test_an_element_is_what_the_definition_says(case: dict[str, Any]) -> None:
    matrix = random_matrix(**case)
    rows, columns = matrix.shape
    expected = np.array([[element(matrix, row, column) for column in range(columns)] for row in range(rows)])
    whole = matrix.dequantise(float32)
    np.testing.assert_array_equal(whole.view(np.uint32), expected.view(np.uint32))
    np.testing.assert_array_equal(matrix.dequantise(bfloat16), expected.astype(ml_dtypes.bfloat16))
    for some in (slice(1, 3), slice(rows - 1, None), slice(2, 2), slice(3, rows)):
        np.testing.assert_array_equal(matrix.dequantise(float32, some), whole[some])
        np.testing.assert_array_equal(matrix.cut(some).dequantise(float32), whole[some])
    picked = np.array([rows - 1, 0, 2])
    np.testing.assert_array_equal(matrix.pick(picked).dequantise(float32), whole[picked])


def test_halves() -> None:
    numbers = np.random.default_rng(0).integers(0, 16, (3, 7), np.uint8)
    packed = pack_halves(numbers)
    assert packed.shape == (3, 4)
    assert packed[0, 0] == numbers[0, 0] | numbers[0, 1] << 4
    np.testing.assert_array_equal(unpack_halves(packed)[:, :7], numbers)


KEPT: list[tuple[dict[str, Any], str]] = [
    ({"kind": "int8", "shape": (70, 128), "block": ROW}, "int8"),
    ({"kind": "int8", "shape": (70, 36), "block": ROW, "scale": np.float16}, "int8"),
    ({"kind": "int8", "shape": (70, 128), "block": (0, 0), "scale": ml_dtypes.bfloat16}, "int8"),
    ({"kind": "int4", "shape": (70, 96), "block": (1, 32), "scale": np.float16}, "Q4_0"),
    ({"kind": "int4", "shape": (70, 320), "block": (1, 128), "scale": np.float16}, "Q4_0"),
    ({"kind": "int4", "shape": (70, 128), "block": ROW, "scale": np.float16}, "Q4_0"),
    ({"kind": "int4", "shape": (70, 320), "block": (1, 128), "scale": np.float16, "has_order": True}, "Q4_0"),
    ({"kind": "int8", "shape": (70, 128), "block": (1, 64), "scale": np.float16}, "Q8_0"),
    ({"kind": "fp4", "shape": (70, 128), "block": (1, 32), "scale": ml_dtypes.float8_e8m0fnu}, "MXFP4"),
    (
        {"kind": "fp4", "shape": (70, 192), "block": (1, 16), "scale": ml_dtypes.float8_e4m3fn, "divisor": 20.0},
        "nvfp4",
    ),
    ({"kind": "fp8", "shape": (70, 256), "block": (32, 128), "scale": np.float32}, "fp8"),
    ({"kind": "fp8", "shape": (70, 384), "block": (0, 0), "scale": ml_dtypes.bfloat16}, "fp8"),
    ({"kind": "fp8", "shape": (70, 76), "block": ROW, "scale": np.float32}, "fp8"),
    ({"kind": "fp8", "shape": (70, 384), "block": (1, 256), "scale": ml_dtypes.float8_e8m0fnu}, "fp8"),
    ({"kind": "int4", "shape": (70, 320), "block": (1, 128), "scale": ml_dtypes.bfloat16}, "int4_bfloat"),
    ({"kind": "int8", "shape": (70, 64), "block": ROW, "scale": np.float32, "has_zeros": True}, "int8_float_zeros"),
]
# Each takes its kernel's time to compile.
ALSO_KEPT: list[tuple[dict[str, Any], str]] = [
    (
        {"kind": kind, "shape": (70, 192), "block": (1, 64), "scale": scale, "has_zeros": has_zeros},
        f"{kind}_{name}" + "_zeros" * has_zeros,
    )
    for kind in ("int4", "int8")
    for scale, name in ((np.float16, "half"), (ml_dtypes.bfloat16, "bfloat"), (np.float32, "float"))
    for has_zeros in (False, True)
    if has_zeros or scale is not np.float16
]
OTHERS: list[dict[str, Any]] = [
    {"kind": "int8", "shape": (4, 30), "block": ROW},
    {"kind": "int8", "shape": (4, 48), "block": ROW, "has_zeros": True},
    {"kind": "int4", "shape": (4, 64), "block": (1, 16), "scale": np.float16},
    {"kind": "fp8", "shape": (4, 64), "block": (64, 64)},
]


def identity(depth: int) -> Tensor:
    """Rows whose rounding to int8 is exact."""
    return Tensor.from_numpy(np.eye(depth, dtype=np.float32) * np.float32(127))


@pytest.mark.parametrize(
    ("case", "name"),
    [
        *(pytest.param(case, name, id=f"{name}-{case['block']}") for case, name in KEPT),
        *(pytest.param(case, name, id=name, marks=pytest.mark.exhaustive) for case, name in ALSO_KEPT),
    ],
)
def test_the_cpu_keeps_the_numbers(case: dict[str, Any], name: str) -> None:
    matrix, options = random_matrix(**case), LoadOptions()
    format = kept_format(matrix.layout, options)
    assert format is not None
    assert format.name == name
    weight = ops.prepare_linear([matrix], None, options)
    assert weight.format is format
    kept = KeptRows(70, format, matrix.order is not None)
    assert weight.size_bytes == packed_bytes([kept], matrix.shape[1], options.device, has_bias=False)
    floats = matrix.dequantise(float32)
    if matrix.order is None:
        ids = Tensor.from_numpy(np.arange(70, dtype=np.int32))
        found = ops.embedding(ids, weight).numpy()
        np.testing.assert_allclose(found, floats, rtol=2e-7, atol=1e-6 * np.abs(floats).max())
    if name in GGML_FORMATS:
        blocks = block_bytes(matrix, format)
        in_order = floats if matrix.order is None else floats[:, matrix.order]
        np.testing.assert_array_equal(gguf.dequantize(blocks, Ggml[name]), in_order)
    product = ops.linear(identity(matrix.shape[1]), weight).numpy() / np.float32(127)
    of_zeros = 1e-6 * np.abs(floats).max() if matrix.layout.has_zeros else 0  # a difference of two products
    np.testing.assert_allclose(product.T, floats, rtol=2e-7, atol=of_zeros)


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: f"{case['kind']}-{case['block']}")
def test_what_the_cpu_does_not_keep(case: dict[str, Any]) -> None:
    matrix = random_matrix(**case)
    assert kept_format(matrix.layout, LoadOptions()) is None
    with pytest.raises(InvalidArgumentError, match=r"prepare_linear: weight 0 is .* which cpu cannot keep so, whole,"):
        ops.prepare_linear([matrix])


def test_a_type_that_is_asked_for_makes_floats() -> None:
    layout = random_matrix("int8", (4, 64), ROW).layout
    assert kept_format(layout, LoadOptions()) is INT8
    assert kept_format(layout, LoadOptions(dtype=float32)) is None
    assert kept_format(layout, LoadOptions(format=INT8)) is None


def test_parts_whose_columns_lie_in_orders_of_their_own() -> None:
    def ordered(width: int, seed: int) -> QuantizedMatrix:
        return random_matrix("int4", (width, 64), (1, 32), np.float16, has_order=True, seed=seed)

    first, other, plain = ordered(20, 1), ordered(9, 2), random_matrix("int4", (33, 64), (1, 32), np.float16)
    assert first.order is not None
    parts = [first, replace(ordered(30, 3), order=first.order.copy()), other, plain, plain]
    weight = ops.prepare_linear(parts)
    assert isinstance(weight, JoinedWeight)
    assert [part.shape[0] for part in weight.parts] == [20, 30, 9, 66]
    assert weight.parts[0].order is weight.parts[1].order is not weight.parts[2].order
    kept = [KeptRows(part.shape[0], part.format, part.order is not None) for part in weight.parts]
    assert weight.size_bytes == packed_bytes(kept, 64, weight.device, has_bias=False)
    product = ops.linear(identity(64), weight).numpy().T / np.float32(127)
    floats = np.concatenate([part.dequantise(float32) for part in parts])
    np.testing.assert_allclose(product, floats, rtol=2e-7)


def test_parts_of_several_kinds_are_joined() -> None:
    parts = [
        random_matrix("int4", (20, 64), (1, 32), np.float16, seed=1),
        random_matrix("int4", (9, 64), (1, 64), np.float16, seed=2),
        random_matrix("int8", (33, 64), ROW, seed=3),
    ]
    bias = [Tensor.from_numpy(np.full(part.shape[0], number, np.float32)) for number, part in enumerate(parts)]
    weight = ops.prepare_linear(parts, bias)
    assert isinstance(weight, JoinedWeight)
    assert [part.format for part in weight.parts] == [GGML_FORMATS["Q4_0"], INT8]
    assert len(runs_of([KeptRows(part.shape[0], part.format) for part in weight.parts])) == 2
    product = ops.linear(identity(64), weight).numpy()
    first = 0
    for number, part in enumerate(parts):
        found = (product[:, first : first + part.shape[0]].T - number) / np.float32(127)
        np.testing.assert_allclose(found, part.dequantise(float32), rtol=1e-4, atol=1e-6)
        first += part.shape[0]
