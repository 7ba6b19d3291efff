"""What products do beside multiplying, by every tier: rows that are normalised, squares left for the next norm, gated
units; against float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from numba_kernels.cuda import gemm, norm
from numba_kernels.cuda.gemm import hopper
from numba_kernels.cuda.specialisation import Launch
from runtime.device.gpu import Gpu
from tests.numba_kernels.cuda.gemm_cases import case, plan
from tests.numba_kernels.cuda.harness import assert_close, assert_equal, empty, get, numpy_dtype, put
from tests.oracles import dense

pytestmark = [
    pytest.mark.emulator,
    pytest.mark.exhaustive_cases(
        "hopper/large",
        "hopper/middle",
        r"hopper/small-.*\(70, 512, 72\)",
        "gemv-gelu_tanh",
        r"tensor_core-silu-\(70, 77, 136\)",
    ),
]
EPS = 1e-3
ROUNDOFF = {"f32": 2e-6, "f16": 2.0**-11, "bf16": 2.0**-8}
exhaustive = pytest.mark.exhaustive


def planned(way: str, m: int, n: int, k: int, dtype: str = "bf16", **options) -> Launch:
    """A launch of a tier, "tier/tile" or "hopper/tile/parts", whose blocks have several tiles each."""
    tier, _, tile = way.partition("/")
    options |= {"arch": "sm_90a", "num_multiprocessors": 2, "is_out_aligned": True}
    if tier == "hopper":
        epilogue = gemm.Epilogue(options.get("has_residual", False), True, options.get("activation", ""))
        product = gemm.Product(m, n, k, dtype, epilogue=epilogue)
        tile, _, parts = tile.partition("/")
        return hopper.plan_tile(product, gemm.machine_of("sm_90a", 2), getattr(hopper, tile.upper()), int(parts or 1))
    launch = plan(tier, m, n, k, dtype, tile=tile, **{"has_residual": False, **options})
    assert launch is not None
    return launch


def parts_of(x: np.ndarray, count: int) -> np.ndarray:
    """The rows' squares in so many parts, as some kernel may have added them up."""
    squares = np.square(x.astype(np.float64))
    return np.stack([part.sum(1) for part in np.array_split(squares, count, axis=1)], 1).astype(np.float32)


def run(
    gpu: Gpu, launch: Launch, x: np.ndarray, weight: np.ndarray, n: int, *, bias: np.ndarray | None = None,
    residual: np.ndarray | None = None, parts: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray | None]:  # fmt: skip
    """(y, the squares of its rows if the launch leaves them, which is asked for where there is a residual)."""
    (m, k), held = x.shape, [put(gpu, x), put(gpu, weight)]
    gpu.declare_immutable(held[1])
    columns = gemm.square_columns(launch, n) if residual is not None else 0
    out, left = empty(gpu, (m, n), x.dtype), empty(gpu, (m, n // columns if columns else 1), np.float32)
    added = []
    for term in (bias, residual, parts):
        held.append(put(gpu, np.zeros(0, np.float32) if term is None else term))
        added.append(0 if term is None else held[-1].address)
    waits = gpu.kernel(launch.specialisation).compiled.waits_for_dependency
    launch = dataclasses.replace(launch, is_dependent=waits)
    gpu.launch(
        launch, held[0].address, held[1].address, *added[:2], out.address, m, n, k, 1, added[2],
        0 if parts is None else parts.shape[1], EPS, left.address if columns else 0,
    )  # fmt: skip
    return get(gpu, out, (m, n), x.dtype), get(gpu, left, (m, n // columns), np.float32) if columns else None


@pytest.mark.parametrize(
    ("way", "dtype", "sizes", "num_parts"),
    [
        ("gemv", "bf16", (1, 50, 264), 4), ("gemv", "bf16", (2, 21, 1032), 1032),
        ("skinny", "bf16", (5, 50, 264), 12), ("hopper_few", "bf16", (30, 50, 264), 12),
        ("tensor_core", "bf16", (3, 40, 72), 72),
        ("tensor_core", "bf16", (70, 77, 136), 8), ("hopper/small", "bf16", (70, 136, 136), 68),
        ("hopper/large", "bf16", (300, 264, 72), 8), ("hopper/narrow/2", "bf16", (70, 136, 520), 132),
        ("hopper/small", "bf16", (20, 77, 72), 4), ("register", "f32", (9, 33, 68), 4), ("gemv", "f32", (7, 33, 68), 4),
        *(pytest.param(*each, marks=exhaustive) for each in (
            ("skinny", "f16", (33, 70, 136), 132), ("tiled", "bf16", (9, 33, 65), 4),
            ("naive", "f16", (9, 33, 65), 4), ("gemv", "f16", (2, 21, 65), 4),
            ("tensor_core", "f16", (130, 130, 129), 8), ("tensor_core/128x256x64_s2", "bf16", (130, 264, 136), 8),
            ("hopper/small/4", "f16", (130, 77, 1032), 36),
        )),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.exhaustive_cases("hopper/")
def test_normalised_rows(gpu, way, dtype, sizes, num_parts):
    """rms_norm(x) . weight^T + bias: the norm's weights are the matrix's. Rows far from 1 in size, and one of zeros."""
    m, n, k = sizes
    product = case(sizes, dtype, bias="f32", residual=False)
    x = (product.x.astype(np.float32) * np.geomspace(0.01, 30, m, dtype=np.float32)[:, None]).astype(product.x.dtype)
    x[0] *= 0 if m > 1 else 1
    weight = (product.weight.astype(np.float32) * np.float32(k**-0.5)).astype(product.x.dtype)
    launch = planned(way, m, n, k, dtype)
    found, _ = run(gpu, launch, x, weight, n, bias=product.bias, parts=parts_of(x, num_parts))
    expected = dense.linear(dense.rms_norm(x, np.ones(k), EPS), weight, product.bias)
    assert_close(found, expected, rtol=1.01 * ROUNDOFF[dtype], atol=2e-5)


@pytest.mark.parametrize(
    ("way", "sizes"),
    [
        ("gemv", (1, 64, 264)), ("gemv", (2, 48, 72)), ("hopper_few", (5, 128, 1032)), ("tensor_core", (3, 192, 72)),
        ("tensor_core", (70, 128, 72)), ("hopper/small", (70, 512, 72)), ("hopper/large", (300, 512, 72)),
        ("hopper/narrow/2", (70, 512, 520)),
        *(pytest.param(*each, marks=exhaustive) for each in (
            ("skinny", (5, 128, 136)), ("hopper_few", (40, 1152, 136)),
            ("skinny", (28, 256, 136)), ("skinny", (40, 384, 520)), ("hopper/small/4", (130, 1024, 1032)),
            ("hopper/middle", (300, 512, 72)), ("hopper/thin", (130, 768, 72)), ("hopper/middle", (130, 256, 72)),
            ("tensor_core/128x128x32_s3", (130, 256, 72)),
        )),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.exhaustive_cases("hopper/narrow")
def test_squares_that_are_left(gpu, way, sizes):
    """Of x . weight^T + residual, for each part of the columns in turn; nothing is left out, nothing counted twice."""
    m, n, k = sizes
    product = case(sizes, "bf16", bias=None)
    launch = planned(way, m, n, k, has_residual=True)
    found, squares = run(gpu, launch, product.x, product.weight, n, residual=product.residual)
    product.check(found)
    assert squares is not None
    exact = dense.linear(product.x, product.weight, None, product.residual)
    expected = np.square(exact).reshape(m, squares.shape[1], -1).sum(2)
    assert_close(squares, expected, rtol=1e-5)


def test_what_leaves_no_squares():
    """Columns that do not come in whole fours of parts; kernels that only beginners read."""
    for way, n in (("gemv", 24), ("skinny", 96), ("hopper/small", 640)):
        assert gemm.square_columns(planned(way, 2, n, 64, has_residual=True), n) == 0
    assert gemm.square_columns(planned("tiled", 2, 512, 64, has_residual=True), 512) == 0


@pytest.mark.parametrize(
    ("way", "activation", "sizes"),
    [
        ("gemv", "silu", (1, 50, 264)), ("gemv", "gelu_tanh", (2, 21, 1032)), ("hopper_few", "silu", (20, 250, 264)),
        ("tensor_core", "silu", (3, 40, 72)),
        ("tensor_core", "silu", (70, 77, 136)), ("hopper/small", "silu", (70, 136, 136)),
        ("hopper/large", "silu", (300, 200, 136)), ("hopper/narrow/2", "silu", (70, 136, 520)),
        ("hopper/middle", "silu", (300, 200, 136)),
        *(pytest.param(*each, marks=exhaustive) for each in (
            ("hopper/middle", "gelu_tanh", (129, 96, 72)), ("hopper/thin", "silu", (130, 200, 72)),
            ("hopper/middle", "gelu_tanh", (130, 104, 72)), ("hopper/small", "silu", (300, 200, 72)),
            ("hopper/large", "gelu_tanh", (129, 200, 72)), ("hopper/small/4", "gelu_tanh", (130, 72, 1032)),
            ("tensor_core/128x128x32_s3", "gelu_tanh", (130, 264, 136)), ("tensor_core", "silu", (9, 33, 65)),
            ("skinny", "silu", (5, 50, 264)), ("hopper_few", "silu", (9, 600, 1032)),
            ("hopper_few", "gelu_tanh", (64, 70, 264)),
            ("skinny", "silu", (16, 600, 136)), ("skinny", "gelu_tanh", (33, 36, 136)),
        )),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("is_normalised", [True, pytest.param(False, marks=exhaustive)])
@pytest.mark.exhaustive_cases(r"True-tensor_core-silu-\(3, 40, 72\)", "skinny", "gemv", "hopper/small")
def test_gated_units(gpu, way, activation, sizes, is_normalised):
    """f(gate) up, rounded once; columns that end within a tile, whose gate then begins the other half."""
    m, n, k = sizes
    both = case((m, 2 * n, k), "bf16", bias=None, residual=False)
    x = (both.x.astype(np.float32) * np.float32(0.25)).astype(both.x.dtype)
    launch = planned(way, m, n, k, activation=activation)
    assert activation in launch.specialisation.name
    found, _ = run(gpu, launch, x, both.weight, n, parts=parts_of(x, 4) if is_normalised else None)
    rows = dense.rms_norm(x, np.ones(k), EPS) if is_normalised else x
    expected = dense.glu(dense.linear(rows, both.weight), activation)
    assert_close(found, expected, rtol=1.01 * ROUNDOFF["bf16"], atol=1e-3)


@pytest.mark.parametrize("n", [40, 200])
@pytest.mark.exhaustive
def test_exact_rows_have_the_same_bits_in_any_company(gpu, n):
    """Of a norm with a gated unit behind it, whatever the tile."""
    both = case((70, 2 * n, 136), "bf16", bias=None, residual=False)
    parts = parts_of(both.x, 8)

    def rows(some: slice) -> np.ndarray:
        x = np.ascontiguousarray(both.x[some])
        launch = planned("auto", len(x), n, 136, activation="silu", exact=True)
        return run(gpu, launch, x, both.weight, n, parts=np.ascontiguousarray(parts[some]))[0]

    together = rows(slice(None))
    for some in (slice(0, 1), slice(3, 20)):
        assert_equal(rows(some), together[some])


def test_which_glu_is_two_launches():
    """Float32, and what the tensor cores cannot read in whole chunks is read slowly, but gated."""
    options = {"arch": "sm_90a", "num_multiprocessors": 4}
    for m, n, more in (
        (512, 512, {}), (8, 512, {}), (1, 512, {}), (512, 512, {"arch": "sm_80"}), (512, 512, {"exact": True})
    ):  # fmt: skip
        launch = plan("auto", m, n, 64, "bf16", activation="silu", **options | more)
        assert launch is not None
        assert launch.specialisation.name.endswith("silu")
    assert plan("auto", 512, 516, 64, "bf16", activation="silu", **options) is None
    assert plan("auto", 512, 512, 64, "f32", activation="silu", **options) is None
    assert plan("register", 512, 512, 64, "bf16", activation="silu", **options) is None


@pytest.mark.parametrize(("dtype", "size"), [("bf16", 1032), ("f32", 65), ("f16", 4096)])
def test_deferred_norm(gpu, dtype, size):
    x = np.random.default_rng(size).standard_normal((3, size), np.float32).astype(numpy_dtype(dtype))
    held, squares = put(gpu, x), empty(gpu, (3, norm.SQUARE_PARTS), np.float32)
    gpu.launch(norm.plan_deferred_norm(3, size, dtype), held.address, squares.address, size)
    found = get(gpu, squares, (3, norm.SQUARE_PARTS), np.float32)
    assert_close(found.sum(1), np.square(x.astype(np.float64)).sum(1), rtol=1e-6)
