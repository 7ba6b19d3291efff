"""Seeded packed matrices and what they are worth in float64, and rows rounded to bytes, for the tests of kernels that
read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from numba_kernels.cuda import dynamic_quantisation, gemm
from numba_kernels.cuda.packing import Packing, arrange, packing_of
from numba_kernels.cuda.specialisation import Launch
from runtime.device.gpu import Gpu
from tests.numba_kernels.cuda.harness import empty, get, numpy_dtype, put

FLOATS = {"e4m3": ml_dtypes.float8_e4m3fn, "e2m1": ml_dtypes.float4_e2m1fn}


@dataclass
class PackedMatrix:
    """A matrix [N, K]: `block` is its bytes, `values` float64 what they mean, with scales as the dtype keeps them."""

    packing: Packing
    block: np.ndarray
    values: np.ndarray


def packed_matrix(name: str, rows: int, depth: int, dtype: str, seed: int = 0) -> PackedMatrix:
    """Random codes (all of them occur in a large matrix), scales and zero points. `values` takes the group scales as
    numbers that `dtype` holds, as they are given here."""
    packing = packing_of(name)
    assert packing is not None
    rng = np.random.default_rng([seed, rows, depth])
    bits = 4 if packing.element in ("u4", "e2m1") else 8
    codes = rng.integers(0, 1 << bits, (rows, depth)).astype(np.uint8)
    groups = -(-depth // packing.group) if packing.group else 1
    if packing.element in FLOATS:
        codes[codes & 0x7F == 0x7F] = 0x7E  # e4m3's NaN
        values = codes.view(FLOATS[packing.element]).astype(np.float64)
    else:
        values = codes.astype(np.float64)
    zeros = None
    if packing.element in ("u4", "u8"):
        middle = 1 << (bits - 1)
        if packing.has_zeros:
            zeros = rng.integers(0, 1 << bits, (rows, groups)).astype(np.uint8)
        of_element = np.full((rows, groups), middle) if zeros is None else zeros
        values -= np.repeat(of_element.astype(np.float64), packing.group or depth, axis=1)[:, :depth]
    scales = None
    if packing.group:
        if packing.scale == "value":
            scales = rng.uniform(0.001, 0.3, (rows, groups)).astype(numpy_dtype(dtype)).astype(np.float32)
        elif packing.scale == "exponent":
            scales = np.ldexp(np.float32(1), rng.integers(-9, 3, (rows, groups))).astype(np.float32)
        else:
            scales = np.abs(rng.standard_normal((rows, groups))).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        values *= np.repeat(scales.astype(np.float64), packing.group, axis=1)[:, :depth]
    row_scales = rng.uniform(0.001, 0.02, rows).astype(np.float32)
    values *= row_scales.astype(np.float64)[:, None]
    block = arrange(packing, dtype, codes, scales, zeros, row_scales)
    assert block.nbytes == packing.size_bytes(rows, depth, dtype)
    return PackedMatrix(packing, block, values)


def rounded_e4m3(gpu, x: np.ndarray, *, is_grouped: bool):
    """(memory, address of the scales, codes [m, K], scales [m, K / 128 or 1]) of x on the device."""
    (m, k), (first, size) = x.shape, dynamic_quantisation.sections(*x.shape, is_grouped=is_grouped)
    memory, source = empty(gpu, (size,), "u8"), put(gpu, x)
    launch = dynamic_quantisation.plan(m, k, "bf16", "e4m3", is_grouped=is_grouped)
    gpu.launch(launch, source.address, memory.address, memory.address + first, m, k)
    held = get(gpu, memory, (size,), "u8")
    tiles, slots = -(-m // 8), -(-k // 64)
    lanes = held[:first].reshape(tiles, slots, 8, 4, 2, 8)[..., [0, 2, 1, 3, 4, 6, 5, 7]]
    codes = lanes.transpose(0, 2, 1, 4, 3, 5).reshape(tiles * 8, slots * 64)[:m, :k]
    scales = held[first:].view(np.float32).reshape(-1, tiles * 8).T[:m]
    return memory, memory.address + first, codes.view(ml_dtypes.float8_e4m3fn), scales


def check_squares(
    gpu: Gpu, plan: Callable[[gemm.Product, gemm.Machine], Launch], k: int, columns: int, m: int = 20
) -> None:
    """What a product with a residual leaves for the norm behind it: sums of squares of what it has written, so many
    columns each."""
    n = 4 * columns
    rng = np.random.default_rng(5)
    matrix = packed_matrix("u8", n, k, "bf16")
    x, residual = (rng.standard_normal(shape).astype(numpy_dtype("bf16")) for shape in ((m, k), (m, n)))
    asked = gemm.Product(m, n, k, "bf16", "u8", epilogue=gemm.Epilogue(is_aligned=True))
    launch = plan(asked, gemm.machine_of(gpu.arch))
    assert gemm.square_columns(launch, n) == columns
    held = [put(gpu, each) for each in (x, matrix.block, residual)]
    out, squares = empty(gpu, (m, n), "bf16"), empty(gpu, (m, 4), "f32")
    gpu.launch(
        launch, held[0].address, held[1].address, 0, held[2].address, out.address, m, n, k, 0, 0, 0, 0.0,
        squares.address,
    )  # fmt: skip
    y = get(gpu, out, (m, n), "bf16").astype(np.float64)
    expected = (y**2).reshape(m, 4, columns).sum(axis=2)
    assert np.abs(get(gpu, squares, (m, 4), "f32") / expected - 1).max() < 2e-2  # of what was rounded afterwards
