"""Softmax and log-softmax on the device, against float64."""

from __future__ import annotations

import numpy as np
import pytest

from numba_kernels.cuda.arithmetic import softmax
from runtime.device.gpu import Gpu
from tests.numba_kernels.cuda.harness import assert_close, both_archs, empty, get, numpy_dtype, put
from tests.oracles import dense as oracle

SHAPES = [
    (1, 1), (3, 2), (2, 3), (5, 8), (1, 31), (2, 32), (4, 33), (3, 64), (1, 97), (2, 127), (7, 128), (1, 255), (2, 256),
    (1, 257), (3, 500), (2, 512), (1, 1000), (2, 1021), (1, 1024), (1, 2047), (2, 4096), (1, 5003), (1, 9000),
]  # fmt: skip
ROUNDING = {"f32": 4e-6, "f16": 2.0**-11 + 4e-6, "bf16": 2.0**-8 + 4e-6}


def run(gpu: Gpu, x: np.ndarray, dtype: str, is_log: bool) -> np.ndarray:
    launch = softmax.plan_softmax(*x.shape, dtype, is_log=is_log)
    source, out = put(gpu, x), empty(gpu, x.shape, dtype)
    gpu.launch(launch, source.address, out.address, x.shape[1])
    return get(gpu, out, x.shape, dtype)


@both_archs
@pytest.mark.parametrize("dtype", ["f32", pytest.param("f16", marks=pytest.mark.exhaustive), "bf16"])
@pytest.mark.parametrize("is_log", [False, True])
@pytest.mark.exhaustive_cases("False-bf16", "f32")
def test_against_float64(gpu: Gpu, dtype: str, is_log: bool) -> None:
    rng = np.random.default_rng(1)
    for shape in SHAPES:
        x = (rng.standard_normal(shape) * 5).astype(numpy_dtype(dtype))
        expected = oracle.log_softmax(x) if is_log else oracle.softmax(x)
        assert_close(run(gpu, x, dtype, is_log), expected, rtol=ROUNDING[dtype], atol=4e-6 if is_log else 6e-8)


def test_masked_rows(gpu: Gpu) -> None:
    x = np.full((3, 70), -np.inf, np.float32)
    x[1, 69] = -1e30
    x[2, :35] = 2.0
    actual = run(gpu, x, "f32", is_log=False)
    assert_close(actual, oracle.softmax(x), rtol=1e-6)
    assert (actual[0] == 0).all()
    assert actual[1, 69] == 1


@pytest.mark.parametrize("odd", [np.nan, np.inf])
@pytest.mark.parametrize("is_log", [False, True])
def test_nan_spreads_over_its_row_alone(gpu: Gpu, odd: float, is_log: bool) -> None:
    x = np.zeros((3, 1030), np.float32)
    x[1, 1029] = odd
    actual = run(gpu, x, "f32", is_log)
    assert np.isnan(actual[1]).any()
    assert np.isfinite(actual[[0, 2]]).all()


def test_a_row_does_not_depend_on_the_others(gpu: Gpu) -> None:
    x = np.random.default_rng(4).standard_normal((4, 130)).astype(np.float32)
    together = run(gpu, x, "f32", is_log=False)
    for row in range(4):
        assert np.array_equal(run(gpu, x[row : row + 1], "f32", is_log=False)[0], together[row])
