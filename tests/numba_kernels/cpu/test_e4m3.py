"""Products with matrices of FP8 (e4m3) that the cpu keeps as they are stored, against float64.

`test_tiles` runs this file under each kind of tile.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from runtime import ops
from runtime.dtype import float32
from runtime.linear.options import LoadOptions
from runtime.linear.quantized import QuantizedLayout, QuantizedMatrix
from tests.numba_kernels.cpu.cases import normal, tensor
from tests.oracles import dense
from tests.oracles.tiles import as_multiplied_by_fp8

SHAPES = [(1, 50, 128), (2, 17, 512), (3, 48, 256), (4, 5, 1000), (5, 100, 768), (6, 16, 36), (7, 200, 129)]
SHAPES += [(8, 49, 384), (9, 33, 640), (13, 70, 768), (33, 49, 511), (130, 33, 512), (0, 10, 256), (1, 1, 1)]


def matrix_of(codes: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> QuantizedMatrix:
    shape = codes.shape[0], codes.shape[1]
    return QuantizedMatrix(QuantizedLayout("fp8", shape, block, scales.dtype), codes, scales)


def random_matrix(rng: np.random.Generator, width: int, depth: int, block: tuple[int, int]) -> QuantizedMatrix:
    codes = rng.integers(0, 256, (width, depth), np.uint8)
    codes[codes & 0x7F == 0x7F] = 1  # no NaN, but a subnormal number
    shape = (-(-width // block[0]) if block[0] else 1), (-(-depth // block[1]) if block[1] else 1)
    return matrix_of(codes, rng.uniform(0.001, 0.01, shape).astype(np.float32), block)


@pytest.mark.parametrize("block", [(1, 0), (128, 128), (0, 0)])
def test_products_rows_and_tables(block: tuple[int, int]) -> None:
    """A row has the same bits alone; a row of a table is that of the dequantised matrix."""
    for rows, width, depth in SHAPES:
        rng = np.random.default_rng([rows, width, depth])
        matrix = random_matrix(rng, width, depth, block)
        floats = matrix.dequantise(float32)
        x, bias, residual = normal(rng, (rows, depth)), normal(rng, width), normal(rng, (rows, width))
        packed = ops.prepare_linear([matrix], [tensor(bias)])
        assert (packed.shape, packed.format.name) == ((width, depth), "fp8")
        out = ops.linear(tensor(x), packed, residual=tensor(residual)).numpy()
        expected = dense.linear(as_multiplied_by_fp8(x), floats, bias, residual)
        size = np.abs(expected).max(initial=1.0)
        assert np.abs(out - expected).max(initial=0) <= 2e-6 * size, (rows, width, depth)
        for row in range(rows):
            one = slice(row, row + 1)
            alone = ops.linear(tensor(x[one]), packed, residual=tensor(residual[one])).numpy()
            np.testing.assert_array_equal(alone, out[one])
        ids = np.arange(0, width, 7, dtype=np.int32)
        np.testing.assert_array_equal(ops.embedding(tensor(ids), packed).numpy(), floats[ids])


def test_every_number() -> None:
    """All 254 of them, at every place of a word, times a power of two."""
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    rolled = np.stack([np.roll(codes, place) for place in range(4)])
    matrix = matrix_of(rolled, np.full((1, 1), 0.25, np.float32), (0, 0))
    packed = ops.prepare_linear([matrix])
    out = ops.linear(tensor(np.eye(len(codes), dtype=np.float32)), packed).numpy()
    np.testing.assert_array_equal(out.T, rolled.view(ml_dtypes.float8_e4m3fn).astype(np.float32) / 4)


def test_nan_makes_its_row_nan() -> None:
    rng = np.random.default_rng(3)
    matrix = random_matrix(rng, 20, 384, (128, 128))
    matrix.codes[7, 200] = 0xFF
    x = normal(rng, (9, 384))
    out = ops.linear(tensor(x), ops.prepare_linear([matrix])).numpy()
    assert np.isnan(out[:, 7]).all()
    rest = np.arange(20) != 7
    expected = dense.linear(as_multiplied_by_fp8(x), matrix.dequantise(float32)[rest])
    assert np.abs(out[:, rest] - expected).max() <= 2e-6 * np.abs(expected).max()


def test_exact_mode_cuts_k_into_segments() -> None:
    rng = np.random.default_rng(6)
    matrix = random_matrix(rng, 40, 2500, (1, 0))
    packed = ops.prepare_linear([matrix], options=LoadOptions(exact=True), split="inputs")
    assert packed.num_segments == 8
    x = normal(rng, (9, 2500))
    out = ops.linear(tensor(x), packed).numpy()
    expected = dense.linear(as_multiplied_by_fp8(x), matrix.dequantise(float32))
    assert np.abs(out - expected).max() <= 2e-6 * np.abs(expected).max()
    np.testing.assert_array_equal(ops.linear(tensor(x[4:5]), packed).numpy(), out[4:5])
