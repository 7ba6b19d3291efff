"""Products of every stored type over odd shapes against float64: for the tiles in force, whichever they are.

    XSERV_CPU_TILES=avx2 python -m tests.numba_kernels.cpu.tile_checks avx2 [types ...]
"""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np

from numba_kernels.cpu import target
from runtime import ops
from tests.numba_kernels.cpu.cases import normal, tensor
from tests.oracles import dense, int8

SHAPES = [
    (1, 48, 64), (1, 700, 130), (2, 17, 3), (3, 33, 61), (4, 96, 257), (5, 1, 1), (6, 50, 128), (7, 49, 63),
    (8, 100, 65), (9, 5, 1030), (10, 145, 20), (19, 31, 700), (40, 97, 192), (0, 10, 10), (3, 10, 0),
]  # fmt: skip
KINDS = ("float32", "bfloat16", "float16", "int8")


def check(kind: str) -> None:
    """Raises AssertionError where a product is not what the oracle says."""
    dtype = np.dtype(ml_dtypes.bfloat16 if kind in ("bfloat16", "int8") else kind)
    for rows, width, depth in SHAPES:
        rng = np.random.default_rng([rows, width, depth])
        x, weight = normal(rng, (rows, depth)), normal(rng, (width, depth), dtype)
        bias, residual = normal(rng, width), normal(rng, (rows, width))
        # no weight at all, a group without any activation, a huge and a tiny one
        weight[width // 2] = 0
        x[:, : depth // 2] *= 0
        x[rows // 2 :] *= np.float32(1e4)
        x[: rows // 4] *= np.float32(1e-12)
        quantization = "int8" if kind == "int8" else "none"
        packed = ops.prepare_linear(tensor(weight), tensor(bias), quantization=quantization)
        out = ops.linear(tensor(x), packed, residual=tensor(residual)).numpy()
        if kind == "int8":
            expected = int8.linear(x, weight, bias, residual)
        else:
            given = x.astype(ml_dtypes.bfloat16) if kind == "bfloat16" and target.HAS_BF16_DOT else x
            expected = dense.linear(given, weight, bias, residual)
        assert out.shape == expected.shape
        size = np.abs(expected).max(1, keepdims=True, initial=1.0)
        assert (np.abs(out - expected) <= 1e-5 * size).all(), (kind, rows, width, depth)

        ids = np.arange(0, width, 7, dtype=np.int32)
        table = ops.embedding(tensor(ids), packed).numpy()
        if kind == "int8":
            integers, scales = int8.weight(weight)
            np.testing.assert_array_equal(table, (integers.astype(np.float32) * scales[:, None])[ids])
        else:
            np.testing.assert_array_equal(table, weight[ids].astype(np.float32))
    for bad in (np.nan, np.inf, -np.inf):
        x = normal(np.random.default_rng(1), (5, 200))
        x[3, 150] = bad
        packed = ops.prepare_linear(tensor(normal(np.random.default_rng(2), (60, 200))), quantization=quantization)
        out = ops.linear(tensor(x), packed).numpy()
        assert not np.isfinite(out[3]).any(), (kind, bad)
        assert np.isfinite(np.delete(out, 3, 0)).all(), (kind, bad)


if __name__ == "__main__":
    assert sys.argv[1] == target.TILES, target.TILES
    for name in sys.argv[2:] or KINDS:
        check(name)
    print("checked", target.TILES)
