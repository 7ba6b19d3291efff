"""RMSNorm and LayerNorm against float64."""

from __future__ import annotations

import numpy as np
import pytest

from runtime import ops
from tests.numba_kernels.cpu.cases import WEIGHT_TYPES, normal, tensor
from tests.oracles import dense

SHAPES = [(1, 1), (1, 2), (1, 31), (2, 64), (3, 97), (5, 768), (7, 13), (17, 1600), (64, 48), (100, 1000), (0, 8)]


@pytest.mark.parametrize("dtype", WEIGHT_TYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_equal_float64(rows, width, dtype):
    rng = np.random.default_rng([rows, width])
    x, weight, bias = normal(rng, (rows, width)), normal(rng, width, dtype), normal(rng, width, dtype)
    out = ops.rms_norm(tensor(x), tensor(weight), 1e-6).numpy()
    assert dense.relative_error(out, dense.rms_norm(x, weight, 1e-6)) < 1e-5
    added = ops.rms_norm(tensor(x), tensor(weight), 1e-6, residual=tensor(x)).numpy()
    assert dense.relative_error(added, dense.rms_norm(x, weight, 1e-6) + x) < 1e-5
    out = ops.layer_norm(tensor(x), tensor(weight), tensor(bias), 1e-5).numpy()
    assert dense.relative_error(out, dense.layer_norm(x, weight, bias, 1e-5)) < 1e-5
    out = ops.layer_norm(tensor(x), tensor(weight), None, 1e-5).numpy()
    assert dense.relative_error(out, dense.layer_norm(x, weight, None, 1e-5)) < 1e-5


def test_layer_norm_of_a_large_mean_does_not_cancel():
    rng = np.random.default_rng(0)
    x = (normal(rng, (4, 500)) + 1000).astype(np.float32)
    one = np.ones(500, np.float32)
    out = ops.layer_norm(tensor(x), tensor(one), None, 1e-5).numpy()
    assert dense.relative_error(out, dense.layer_norm(x, one, None, 1e-5)) < 1e-4  # x itself has steps of 6e-5


def test_known_values():
    x = np.array([[3.0, 4.0]], np.float32)
    one = np.ones(2, np.float32)
    np.testing.assert_allclose(ops.rms_norm(tensor(x), tensor(one), 0.0).numpy(), x / np.sqrt(12.5), rtol=1e-6)
    np.testing.assert_allclose(ops.layer_norm(tensor(x), tensor(one), None, 0.0).numpy(), [[-1, 1]], rtol=1e-6)
    assert not ops.rms_norm(tensor(np.zeros((2, 5), np.float32)), tensor(np.ones(5, np.float32)), 1e-6).numpy().any()


def test_a_row_is_the_same_alone_and_nan_stays_in_its_row():
    rng = np.random.default_rng(1)
    x, weight = normal(rng, (200, 300)), normal(rng, 300)
    x[7, 5] = np.nan
    for norm in (
        lambda rows: ops.rms_norm(tensor(rows), tensor(weight), 1e-6).numpy(),
        lambda rows: ops.layer_norm(tensor(rows), tensor(weight), tensor(weight), 1e-6).numpy(),
    ):
        whole = norm(x)
        np.testing.assert_array_equal(norm(x[3:4].copy()), whole[3:4])
        assert np.isnan(whole[7]).all()
        assert np.isfinite(np.delete(whole, 7, 0)).all()
