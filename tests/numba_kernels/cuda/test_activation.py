"""Activations on the device, against float64."""

from __future__ import annotations

import numpy as np
import pytest

from numba_kernels.cuda import activation, specialisation
from runtime.device.gpu import Gpu
from tests.numba_kernels.cuda.harness import assert_close, both_archs, empty, get, numpy_dtype, put
from tests.oracles import dense

pytestmark = pytest.mark.exhaustive_cases(r"\bf16\b")

SIZES = [1, 2, 3, 7, 8, 31, 32, 33, 64, 127, 128, 255, 256, 257, 1000, 1021, 1024, 2048, 2049, 4096, 5000, 8191]
# Far out an activation is the exponential of a large number, whose rounding counts as often as it is large.
ROUNDING = {"f32": 4e-6, "f16": 2.0**-11 + 1e-6, "bf16": 2.0**-8 + 1e-6}
SMALLEST = {"f32": 1e-11, "f16": 2.0**-25, "bf16": 3e-38}


def expected(name: str, x: np.ndarray) -> np.ndarray:
    if name == "squared_relu":
        return dense.squared_relu(x)
    return dense.silu(x) if name == "silu" else dense.gelu(x, name.removeprefix("gelu_"))


def run(gpu: Gpu, name: str, x: np.ndarray, dtype: str, *, in_place: bool = False) -> np.ndarray:
    launch, accesses = activation.plan_elementwise(name, 1, x.size, dtype)
    source = put(gpu, x)
    out = source if in_place else empty(gpu, x.shape, dtype)
    gpu.launch(launch, source.address, 0, out.address, accesses, 0.0, 0.0, 0.0, 0.0)
    return get(gpu, out, x.shape, dtype)


@both_archs
@pytest.mark.parametrize("dtype", ["f32", pytest.param("f16", marks=pytest.mark.exhaustive), "bf16"])
@pytest.mark.parametrize("name", activation.ACTIVATIONS)
@pytest.mark.exhaustive_cases("gelu_sigmoid-f32", "gelu_tanh-f32", "silu-f32")
def test_against_float64(gpu: Gpu, name: str, dtype: str) -> None:
    rng = np.random.default_rng(1)
    for size in SIZES:
        x = (rng.standard_normal(size) * 4).astype(numpy_dtype(dtype))
        actual = run(gpu, name, x, dtype, in_place=size % 2 == 0)
        assert_close(actual, expected(name, x), rtol=ROUNDING[dtype], atol=SMALLEST[dtype])


@pytest.mark.parametrize("size", [219, 222, 224])
def test_rows_beside_a_row_do_not_choose_its_kernel(size: int) -> None:
    """Versions of different access widths may round differently."""
    for plan in (
        lambda rows: activation.plan_elementwise("gelu_erf", rows, size, "f32"),
        lambda rows: activation.plan_elementwise("add_scaled", rows, size, "f32"),
        lambda rows: activation.plan_elementwise("sigmoid_gate", rows, size, "f32"),
        lambda rows: activation.plan_elementwise("scale_logits_capped", rows, size, "f32"),
    ):
        (alone, one), (beside, many) = plan(1), plan(24)
        assert alone.specialisation is beside.specialisation
        assert many == 24 * one


@pytest.mark.exhaustive
@both_archs
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(
    ("name", "numbers"), [("clamp", (0.7, 0.0, 0.0, 0.0)), ("xielu", (0.8, 1.3, 0.5, -1e-6)), ("xielu", (2, 1, 0, -1))]
)
def test_functions_with_numbers_of_their_own(gpu: Gpu, name: str, numbers: tuple[float, ...], dtype: str) -> None:
    rng = np.random.default_rng(4)
    for size in SIZES[:14]:
        x = (rng.standard_normal(size) * 3).astype(numpy_dtype(dtype))
        launch, accesses = activation.plan_elementwise(name, 1, size, dtype)
        source, out = put(gpu, x), empty(gpu, x.shape, dtype)
        gpu.launch(launch, source.address, 0, out.address, accesses, *numbers)
        expected = dense.clamp(x, numbers[0]) if name == "clamp" else dense.xielu(x, *numbers)
        assert_close(get(gpu, out, x.shape, dtype), expected, rtol=ROUNDING[dtype], atol=1e-6)


@pytest.mark.parametrize("name", activation.ACTIVATIONS)
def test_far_out(gpu: Gpu, name: str) -> None:
    x = np.array([-80, -30, -13.9, -13, -9, -5, -1e-3, -1e-30, 0, 1e-30, 1e-3, 5, 9, 13.9, 30, 80, 1e18], np.float32)
    # Far to the left the results are tiny: relative accuracy is asked down to 1e-30 only.
    assert_close(run(gpu, name, x, "f32"), expected(name, x), rtol=4e-6, atol=1e-30)
    odd = run(gpu, name, np.array([np.nan, np.inf], np.float32), "f32")
    assert np.isnan(odd[0])
    assert odd[1] == np.inf


def test_more_than_the_grid_at_once(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specialisation, "MAX_BLOCKS", 2)
    x = np.random.default_rng(2).standard_normal(5001).astype(np.float32)
    assert_close(run(gpu, "silu", x, "f32"), expected("silu", x), rtol=1.5e-6)


@both_archs
@pytest.mark.parametrize(
    "name",
    [*activation.GLU_ACTIVATIONS, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in activation.GATES[2:])],
)
@pytest.mark.parametrize("dtype", ["f32", pytest.param("f16", marks=pytest.mark.exhaustive), "bf16"])
@pytest.mark.exhaustive_cases("f32-gelu_tanh")
def test_glu(gpu: Gpu, name: str, dtype: str) -> None:
    rng = np.random.default_rng(3)
    shapes = [(1, size) for size in SIZES[:18]] + [(3, 5), (17, 8), (5, 96), (2, 1000), (70, 16)]
    for num_rows, size in shapes:
        gate_up = (rng.standard_normal((num_rows, 2 * size)) * 3).astype(numpy_dtype(dtype))
        launch, sizes = activation.plan_glu(name, num_rows, size, dtype, (2 * size, 2 * size))
        source, out = put(gpu, gate_up), empty(gpu, (num_rows, size), dtype)
        up = source.address + size * gate_up.itemsize
        gpu.launch(launch, source.address, up, out.address, num_rows, *sizes)
        product = dense.glu(gate_up, name)
        assert_close(get(gpu, out, (num_rows, size), dtype), product, rtol=ROUNDING[dtype], atol=SMALLEST[dtype])
