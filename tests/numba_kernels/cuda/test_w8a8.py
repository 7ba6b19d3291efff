"""Products of rows rounded to bytes: the rounding against numpy, the sums against exact integers or float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from numba_kernels.cuda import dynamic_quantisation, gemm
from numba_kernels.cuda.gemm import w8a8
from numba_kernels.cuda.packing import Packing, arrange
from tests.numba_kernels.cuda.harness import assert_equal, empty, get, numpy_dtype, put
from tests.numba_kernels.cuda.packed_cases import packed_matrix, rounded_e4m3
from tools.kernel_costs.static import ARCHS

SHAPES = [
    (70, 150, 264, "bf16", "", "emulated:sm_90a"), (130, 48, 128, "bf16", "silu", "emulated:sm_80"),
    *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in (
        (1, 17, 8, "f16", "", "emulated:sm_80"), (70, 150, 264, "bf16", "", "emulated:sm_120a"),
        (300, 260, 1160, "bf16", "", "emulated:sm_89"),
        (64, 128, 72, "f16", "silu", "emulated:sm_90a"), (129, 129, 520, "f16", "", "emulated:sm_89"),
    )),
]  # fmt: skip


def rounded(gpu, x: np.ndarray, dtype: str):
    """(memory, address of the scales, codes [m, K], scales [m]) of x on the device."""
    (m, k), (first, size) = x.shape, dynamic_quantisation.sections(*x.shape)
    memory, source = empty(gpu, (size,), "u8"), put(gpu, x)
    gpu.launch(dynamic_quantisation.plan(m, k, dtype), source.address, memory.address, memory.address + first, m, k)
    held = get(gpu, memory, (size,), "u8")
    tiles, slots = -(-m // 8), -(-k // 64)
    lanes = held[:first].view(np.int8).reshape(tiles, slots, 8, 4, 2, 8)[..., [0, 2, 1, 3, 4, 6, 5, 7]]
    codes = lanes.transpose(0, 2, 1, 4, 3, 5).reshape(tiles * 8, slots * 64)
    return memory, memory.address + first, codes, held[first:].view(np.float32)


def test_rows_are_rounded_by_their_largest_magnitude(gpu):
    rng = np.random.default_rng(2)
    x = (rng.standard_normal((19, 328)) * 10.0 ** rng.uniform(-3, 3, (19, 1))).astype(ml_dtypes.bfloat16)
    x[3] = 0
    x[5, 7], x[6, 9] = np.inf, np.nan
    _, _, codes, scales = rounded(gpu, x, "bf16")
    wide = x.astype(np.float64)
    finite = np.ones(19, bool)
    finite[[5, 6]] = False
    wide = wide[finite]
    expected = np.abs(wide).max(axis=1) / 127
    assert (np.abs(scales[:19][finite] - expected) <= 1e-6 * expected).all()
    assert not np.isfinite(scales[[5, 6]]).any()
    assert (scales[19:] == 0).all()
    assert (codes[19:] == 0).all()
    assert (codes[:, 328:] == 0).all()
    codes = codes[:19, :328][finite].astype(np.int64)
    assert (np.abs(codes * expected[:, None] - wide) <= expected[:, None] * 0.50001).all()
    assert np.abs(codes).max(axis=1).tolist() == [127 * (row != 3) for row in finite.nonzero()[0]]


@pytest.mark.parametrize(("m", "n", "k", "dtype", "activation", "gpu"), SHAPES, indirect=["gpu"])
@pytest.mark.exhaustive_cases("130-48-128")
def test_sums_of_integers_are_exact(gpu, m, n, k, dtype, activation):
    rng = np.random.default_rng([m, n, k])
    rows = n * (2 if activation else 1)
    weight = rng.integers(0, 256, (rows, k)).astype(np.uint8)
    row_scales = rng.uniform(0.001, 0.02, rows).astype(np.float32)
    block = arrange(Packing("u8"), dtype, weight, None, None, row_scales)
    x = rng.standard_normal((m, k)).astype(numpy_dtype(dtype))
    memory, scales_at, codes, scales = rounded(gpu, x, dtype)
    asked = gemm.Product(
        m, n, k, dtype, "u8", "f32" if not activation else dtype,
        gemm.Epilogue(has_residual=False, is_aligned=True, activation=activation),
    )  # fmt: skip
    assert not w8a8.why_not(asked, gemm.machine_of(gpu.arch))
    held, out = put(gpu, block), empty(gpu, (m, n), asked.out)
    gpu.launch(w8a8.plan(asked), memory.address, held.address, 0, 0, out.address, m, n, k, 0, scales_at, 0, 0.0, 0)
    sums = codes[:m, :k].astype(np.int64) @ (weight.astype(np.int64) - 128).T
    values = sums.astype(np.float32) * row_scales * scales[:m, None]
    got = get(gpu, out, (m, n), asked.out)
    if not activation:
        assert_equal(got, values)
        return
    gate, up = values[:, :n].astype(np.float64), values[:, n:].astype(np.float64)
    expected = gate / (1 + np.exp(-gate)) * up
    assert (np.abs(got.astype(np.float64) - expected) <= 2.0**-8 * np.abs(expected) + 1e-6).all()


def test_what_is_refused():
    plain = {"m": 70, "n": 8, "k": 8, "x": "bf16", "weight": "u8", "epilogue": gemm.Epilogue(has_residual=False)}
    machine = gemm.machine_of("sm_80")
    assert not w8a8.why_not(gemm.Product(**plain), machine)
    for name in ("e4m3", "e4m3_g128"):
        product = gemm.Product(**plain | {"weight": name})
        able = [arch for arch in ARCHS if not w8a8.why_not(product, gemm.machine_of(arch))]
        assert able == ["sm_89", "sm_120a"]
    for other in ({"x": "f32"}, {"k": 9}, {"k": 1 << 18}, {"exact": True}, {"weight": "u8_g128"}):
        assert w8a8.why_not(gemm.Product(**plain | other), machine), other


@pytest.mark.parametrize(
    ("name", "m", "n", "k", "activation", "gpu"),
    [
        ("e4m3_g128", 140, 150, 456, "", "emulated:sm_120a"),
        *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in (
            ("e4m3", 70, 150, 264, "", "emulated:sm_89"),
            ("e4m3", 130, 48, 1160, "silu", "emulated:sm_89"), ("e4m3", 130, 150, 264, "", "emulated:sm_120a"),
            ("e4m3_g128", 131, 48, 1096, "silu", "emulated:sm_89"), ("e4m3_g128", 70, 272, 128, "", "emulated:sm_89"),
        )),
    ],
    indirect=["gpu"],
)  # fmt: skip
@pytest.mark.exhaustive
def test_products_of_e4m3(gpu, name, m, n, k, activation):
    """Rows, or 128 of K of them, are rounded as ml_dtypes rounds them; sums are those of their products, in float32."""
    if gpu.arch == "sm_90a":  # a real GPU in the place of the emulated ones
        pytest.skip("Hopper multiplies e4m3 by wgmma alone")
    rng = np.random.default_rng([m, n, k])
    matrix = packed_matrix(name, n * (2 if activation else 1), k, "bf16")
    group = 128 if name != "e4m3" else k
    x = rng.standard_normal((m, k)) * 10.0 ** rng.uniform(-2, 2, (m, -(-k // group))).repeat(group, axis=1)[:, :k]
    x = x.astype(ml_dtypes.bfloat16)
    memory, scales_at, given, scales = rounded_e4m3(gpu, x, is_grouped=group < k)
    starts = np.arange(0, k, group)
    largest = np.maximum.reduceat(np.abs(x.astype(np.float32)), starts, axis=1).repeat(group, axis=1)[:, :k]
    expected = (x.astype(np.float32) * (np.float32(448) / largest)).astype(ml_dtypes.float8_e4m3fn)
    steps = np.abs(given.view(np.uint8).astype(int) - expected.view(np.uint8).astype(int))
    assert (steps <= 1).all()
    assert steps.mean() < 1e-2  # ties, by the reciprocal's last bit
    asked = gemm.Product(
        m, n, k, "bf16", name, "" if activation else "f32",
        gemm.Epilogue(has_residual=False, is_aligned=True, activation=activation),
    )  # fmt: skip
    assert not w8a8.why_not(asked, gemm.machine_of(gpu.arch))
    held, out = put(gpu, matrix.block), empty(gpu, (m, n), asked.out)
    gpu.launch(w8a8.plan(asked), memory.address, held.address, 0, 0, out.address, m, n, k, 0, scales_at, 0, 0.0, 0)
    used = given.astype(np.float64) * scales.astype(np.float64).repeat(group, axis=1)[:, :k]
    exact = used @ matrix.values.T
    bound = 2 * (k + 4) * 2.0**-24 * (np.abs(used) @ np.abs(matrix.values).T)
    got = get(gpu, out, (m, n), asked.out).astype(np.float64)
    if activation:
        with np.errstate(over="ignore"):
            exact = exact[:, :n] / (1 + np.exp(-exact[:, :n])) * exact[:, n:]
        bound = 2.0**-7 * np.abs(exact) + 1e-3
    assert (np.abs(got - exact) <= bound).all()
