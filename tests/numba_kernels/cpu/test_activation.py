"""Activations against float64, with their relative accuracy in the tails."""

from __future__ import annotations

import numpy as np
import pytest

from runtime import ops
from tests.numba_kernels.cpu.cases import normal, tensor
from tests.oracles import dense

SHAPES = [(1,), (15,), (16,), (17,), (1, 1), (3, 31), (7, 128), (64, 1000), (2, 3, 5), (0,), (4, 0)]
FUNCTIONS = {
    "silu": (ops.silu, dense.silu),
    **{
        f"gelu {kind}": (
            lambda x, kind=kind, **out: ops.gelu(x, kind, **out),
            lambda x, kind=kind: dense.gelu(x, kind),
        )
        for kind in ("erf", "tanh", "sigmoid")
    },
}
SHAPED = [  # with numbers of their own
    (ops.clamp, dense.clamp, (0.7,)), (ops.xielu, dense.xielu, (0.8, 1.3, 0.5, -1e-6)),
    (ops.xielu, dense.xielu, (0.2, 0.6, -0.4, -0.3)), (ops.squared_relu, dense.squared_relu, ()),
]  # fmt: skip


@pytest.mark.parametrize(("function", "oracle", "numbers"), SHAPED)
@pytest.mark.parametrize("shape", [(1, 1), (3, 31), (7, 128), (0, 4), (4, 0)])
def test_functions_with_numbers_of_their_own(function, oracle, numbers, shape):
    x = normal(np.random.default_rng(1), shape) * 2
    out = function(tensor(x), *numbers)
    assert dense.relative_error(out.numpy(), oracle(x, *numbers)) < 1e-6
    target = tensor(x.copy())
    assert function(target, *numbers, out=target) is target
    np.testing.assert_array_equal(target.numpy(), out.numpy())
    assert np.isnan(function(tensor(np.full((1, 3), np.nan, np.float32)), *numbers).numpy()).all()


def test_xielu_near_zero_and_far_out():
    x = np.concatenate([-np.geomspace(1e-8, 80, 3000), np.geomspace(1e-8, 1e4, 3000)]).astype(np.float32)[None]
    expected = dense.xielu(x, 0.8, 1.3, 0.0, -1e-9)  # without the linear part, which would hide the curve
    out = ops.xielu(tensor(x), 0.8, 1.3, 0.0, -1e-9).numpy()
    np.testing.assert_allclose(out, expected, rtol=2e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_float64_and_works_in_place(name, shape):
    function, oracle = FUNCTIONS[name]
    x = normal(np.random.default_rng(len(shape)), shape) * 3
    out = function(tensor(x))
    assert dense.relative_error(out.numpy(), oracle(x)) < 1e-6
    target = tensor(x.copy())
    assert function(target, out=target) is target
    np.testing.assert_array_equal(target.numpy(), out.numpy())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_value_is_close_in_relative_terms(name):
    function, oracle = FUNCTIONS[name]
    x = np.concatenate([np.linspace(-9, 12, 20001), np.geomspace(1e-30, 1, 500), -np.geomspace(1e-30, 1, 500)])
    x = x.astype(np.float32)
    expected = oracle(x)
    far = np.abs(expected) > 1e-36
    assert far.sum() > 20000
    out = function(tensor(x)).numpy()
    tolerance = 2e-7 * (10 + np.abs(np.log(np.abs(expected[far]))))  # e^-80 takes over 80 times its argument's error
    assert (np.abs(out[far] - expected[far]) <= tolerance * np.abs(expected[far])).all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_extremes(name):
    function, _ = FUNCTIONS[name]
    x = np.array([0.0, -0.0, 1e4, -1e4, 3e38, np.nan, np.inf], np.float32)
    out = function(tensor(x)).numpy()
    np.testing.assert_array_equal(out[:3], [0, 0, 1e4])
    assert abs(out[3]) < 1e-30
    assert out[4] > 2e38
    assert np.isnan(out[5])


def test_rough_gelu():
    x = np.concatenate([np.linspace(-40, 40, 80001), np.geomspace(1e-30, 1, 500), -np.geomspace(1e-30, 1, 500)])
    x = x.astype(np.float32)
    error = np.abs(ops.gelu(tensor(x), "erf", rough=True).numpy() - dense.gelu(x, "erf"))
    assert (error <= 3e-5 * np.maximum(1, x / 4)).all()
    assert (error <= 6e-5 * np.abs(x)).all()
    extremes = np.array([0.0, -0.0, 1e4, -1e4, np.inf, -np.inf, np.nan], np.float32)
    out = ops.gelu(tensor(extremes), "erf", rough=True).numpy()
    np.testing.assert_allclose(out, [0, 0, 1e4, 0, np.inf, 0, np.nan], rtol=1e-5, atol=3e-5)


def test_known_values():
    one = tensor(np.array([1.0, -1.0], np.float32))
    np.testing.assert_allclose(ops.gelu(one, "erf").numpy(), [0.8413447460685429, -0.15865525393145705], rtol=1e-6)
    np.testing.assert_allclose(ops.gelu(one, "tanh").numpy(), [0.8411919906082768, -0.15880800939172324], rtol=1e-6)
    np.testing.assert_allclose(ops.silu(one).numpy(), [0.7310585786300049, -0.2689414213699951], rtol=1e-6)


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (1, 17), (3, 16), (5, 100), (33, 1001), (200, 300), (0, 4)])
@pytest.mark.parametrize("activation", ops.GATES)
def test_glu(rows, width, activation):
    gate_up = normal(np.random.default_rng(rows), (rows, 2 * width)) * 5  # beyond what is clamped
    out = ops.glu(tensor(gate_up), activation)
    assert out.shape == (rows, width)
    assert dense.relative_error(out.numpy(), dense.glu(gate_up, activation)) < 1e-6


def test_clamped_glu():
    gate, up = [7.0, 9.0, np.inf, -50.0, 1.0, 1.0, 1.0, np.nan], [1.0, 2.0, 3.0, 4.0, 8.0, -9.0, np.nan, 1.0]
    gate_up = np.array([gate + up])
    out = ops.glu(tensor(gate_up.astype(np.float32)), "clamped_silu").numpy()[0]
    full, one = 7 / (1 + np.exp(-1.702 * 7)), 1 / (1 + np.exp(-1.702))
    np.testing.assert_allclose(out[:6], [2 * full, 3 * full, 4 * full, 0, 8 * one, -6 * one], rtol=1e-6, atol=1e-30)
    assert np.isnan(out[6:]).all()
