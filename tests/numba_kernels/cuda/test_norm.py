"""RMSNorm and LayerNorm on the device, against float64."""

from __future__ import annotations

import numpy as np
import pytest

from numba_kernels.cuda import norm
from runtime.device.gpu import Gpu
from tests.numba_kernels.cuda.harness import assert_close, both_archs, empty, get, numpy_dtype, put
from tests.oracles import dense as oracle

pytestmark = pytest.mark.exhaustive_cases(r"\bf16\b")

# Rows of one element, odd, prime, more than a block's threads, wide enough for several vectors a thread.
SHAPES = [
    (1, 1), (2, 3), (3, 31), (1, 32), (5, 33), (4, 64), (2, 97), (7, 127), (3, 128), (1, 255), (6, 256), (2, 257),
    (3, 384), (1, 509), (2, 512), (1, 768), (2, 1000), (1, 1031), (2, 1536), (1, 2048), (3, 2050), (1, 4096), (1, 8200),
    (1, 20_488),
]  # fmt: skip
ROUNDING = {"f32": 2e-6, "f16": 2.0**-11 + 1e-6, "bf16": 2.0**-8 + 1e-6}
NAMES = ("rms_norm", "layer_norm")


def run(
    gpu: Gpu, name: str, x: np.ndarray, weight: np.ndarray, bias: np.ndarray, dtype: str, eps: float,
    residual: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    num_rows, size = x.shape
    blocks = [put(gpu, array) for array in (x, weight, bias)]
    residual_block, out = None if residual is None else put(gpu, residual), empty(gpu, x.shape, dtype)
    x_at, weight_at, bias_at = (block.address for block in blocks)
    if name == "rms_norm":
        launch = norm.plan_rms_norm(num_rows, size, dtype, has_residual=residual is not None)
        inputs = x_at, 0 if residual_block is None else residual_block.address, weight_at
    else:
        launch, inputs = norm.plan_layer_norm(num_rows, size, dtype), (x_at, weight_at, bias_at)
    factor = (1.0,) if name == "rms_norm" else ()
    gpu.launch(launch, *inputs, out.address, size, 1.0 / size, eps, *factor)
    return get(gpu, out, x.shape, dtype)


def expected(name: str, x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float) -> np.ndarray:
    return oracle.rms_norm(x, weight, eps) if name == "rms_norm" else oracle.layer_norm(x, weight, bias, eps)


@both_archs
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.exhaustive_cases("layer_norm-f32")
def test_against_float64(gpu: Gpu, name: str, dtype: str) -> None:
    rng = np.random.default_rng(1)
    for shape in SHAPES:
        x = (rng.standard_normal(shape) * 3 + 0.5).astype(numpy_dtype(dtype))
        weight, bias = rng.standard_normal((2, shape[1])).astype(np.float32)
        actual = run(gpu, name, x, weight, bias, dtype, 1e-5)
        assert_close(actual, expected(name, x, weight, bias, 1e-5), rtol=ROUNDING[dtype], atol=4e-6)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.exhaustive
def test_a_residual_is_added_to_the_norm_before_it_is_rounded(gpu: Gpu, dtype: str) -> None:
    rng = np.random.default_rng(2)
    for shape in SHAPES:
        x, residual = rng.standard_normal((2, *shape)).astype(numpy_dtype(dtype))
        weight = rng.standard_normal(shape[1]).astype(np.float32)
        actual = run(gpu, "rms_norm", x, weight, weight, dtype, 1e-6, residual)
        total = oracle.rms_norm(x, weight, 1e-6) + residual.astype(np.float64)
        assert_close(actual, total, rtol=ROUNDING[dtype], atol=4e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_large_mean_does_not_cancel(gpu: Gpu, name: str) -> None:
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((2, 1536)) + 3000).astype(np.float32)
    ones, zeros = np.ones(1536, np.float32), np.zeros(1536, np.float32)
    actual = run(gpu, name, x, ones, zeros, "f32", 1e-5)
    # a unit in the last place of a mean of 3,000 is 2.4e-4
    assert_close(actual, expected(name, x, ones, zeros, 1e-5), rtol=1e-5, atol=5e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_does_not_depend_on_the_others(gpu: Gpu, name: str) -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((5, 196)).astype(np.float32)
    weight, bias = rng.standard_normal((2, 196)).astype(np.float32)
    together = run(gpu, name, x, weight, bias, "f32", 1e-5)
    for row in range(5):
        alone = run(gpu, name, x[row : row + 1], weight, bias, "f32", 1e-5)
        assert np.array_equal(alone[0], together[row])


@pytest.mark.parametrize("name", NAMES)
def test_zeros_and_nan(gpu: Gpu, name: str) -> None:
    x = np.zeros((3, 64), np.float32)
    x[1, 17] = np.nan
    weight, bias = np.ones(64, np.float32), np.full(64, 2, np.float32)
    actual = run(gpu, name, x, weight, bias, "f32", 1e-5)
    assert np.isnan(actual[1]).all()
    assert (actual[[0, 2]] == (0 if name == "rms_norm" else 2)).all()


def test_plans_are_wide_only_where_they_may_be() -> None:
    assert norm.plan_rms_norm(4, 4096, "bf16").specialisation.constants["width"] == 8
    assert norm.plan_rms_norm(4, 4096, "bf16", alignment=8).specialisation.constants["width"] == 1
    assert norm.plan_rms_norm(4, 4100, "bf16").specialisation.constants["width"] == 1
    assert norm.plan_layer_norm(4, 4100, "f32").specialisation.constants["width"] == 4
    for size in (1, 31, 4096, 100_000):
        for name, plan in (("rms_norm", norm.plan_rms_norm), ("layer_norm", norm.plan_layer_norm)):
            launch = plan(7, size, "f32")
            assert launch.grid == (7, 1, 1)
            assert launch.block[0] in range(32, norm.MAX_THREADS[name] + 1, 32)


def test_threads_hold_a_row_in_registers() -> None:
    """Each has a vector up to 256 threads; then two of an RMSNorm, where a row has so many."""
    for size, threads in ((1024, 128), (2048, 256), (4096, 256), (5120, 320), (16_384, 1024), (32_768, 1024)):
        assert norm.plan_rms_norm(1, size, "bf16").block == (threads, 1, 1)
    assert norm.plan_layer_norm(1, 1600, "f32").block == (416, 1, 1)
