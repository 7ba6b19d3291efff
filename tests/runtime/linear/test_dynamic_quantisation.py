"""Weights of a byte whose checkpoint has many rows of x rounded, too: by 128 of K, or by a static scale."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from runtime import ops
from runtime.backends import cuda_plans
from runtime.device.device import Device
from runtime.device.gpu import Gpu
from runtime.dtype import bfloat16, float32
from runtime.linear.norm import RmsNorm
from runtime.linear.options import LoadOptions
from runtime.linear.packed_matrix import MatrixPart, prepare_packed
from runtime.linear.quantized import ActivationScheme, NumberKind
from runtime.tensor.tensor import Tensor
from tests.numba_kernels.cuda.test_hopper_bytes import CUT
from tests.runtime.linear.test_quantized import random_matrix

pytestmark = pytest.mark.emulator
DEPTH, ROWS = 328, 70


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[cuda_plans.Planned]:
    """Products whose rows were rounded: all that could be."""
    found: list[cuda_plans.Planned] = []
    plan_rounded = cuda_plans.plan_rounded
    monkeypatch.setattr(cuda_plans, "_is_faster_rounded", lambda weight, product, plain, machine, **more: (
        cuda_plans.can_round(weight, product, machine)
    ))  # fmt: skip
    monkeypatch.setattr(
        cuda_plans, "plan_rounded", lambda *given, **more: found.append(plan_rounded(*given, **more)) or found[-1]
    )  # fmt: skip
    return found


@pytest.mark.parametrize(
    ("kind", "arch"),
    [("fp8", "sm_120a"), *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in (
        ("fp8", "sm_89"), ("fp8", "sm_90a"), ("int8", "sm_80"), ("int8", "sm_120a"),
    ))],
)  # fmt: skip
@pytest.mark.exhaustive
def test_static_scales(kind: NumberKind, arch: str, launched: list[cuda_plans.Planned]) -> None:
    """x is rounded to multiples of the largest of two maps' scales, and clamped; a row with a NaN is nothing else."""
    device, scale = Device.parse(f"emulated:{arch}"), np.float32(2.0**-9 if kind == "fp8" else 0.011)
    parts = []
    for seed in (1, 2):
        matrix = random_matrix(kind, (48, DEPTH), (0, 0), seed=seed)
        layout = replace(matrix.layout, activation=ActivationScheme(kind, is_static=True))
        parts.append(replace(matrix, layout=layout, scales=matrix.scales / 10, input_scale=float(scale) / (3 - seed)))
    weight = prepare_packed(
        [MatrixPart(part, slice(None), slice(None)) for part in parts], None,
        LoadOptions(device=device, dtype=bfloat16), None,
    )  # fmt: skip
    x = np.random.default_rng(4).standard_normal((ROWS, DEPTH)).astype(ml_dtypes.bfloat16)
    x[5, 7] = np.nan
    got = ops.linear(Tensor.from_numpy(x).to(device), weight).to("cpu").array.astype(np.float64)
    wide = x.astype(np.float32) * (1 / scale)
    if kind == "fp8":
        codes = np.clip(wide, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    else:
        codes = np.clip(np.rint(wide), -128, 127).astype(np.float64)
    assert (np.abs(wide) > np.nanmax(codes)).mean() > 0.1  # are clamped
    rounded, matrix = codes * scale, np.concatenate([each.dequantise(float32) for each in parts]).astype(np.float64)
    expected, sizes = rounded @ matrix.T, np.abs(rounded) @ np.abs(matrix).T
    assert np.isnan(got[5]).all()
    finite = np.arange(ROWS) != 5
    added = 2.0**-16 if Gpu.of(device).driver.is_emulated or kind != "fp8" else CUT
    assert (np.abs(got - expected)[finite] <= (2.0**-8 * np.abs(expected) + added * sizes)[finite]).all()
    assert [each.rounding.specialisation.name for each in launched if each.rounding is not None] == [
        f"dynamic_quantisation_{'e4m3' if kind == 'fp8' else 's8'}_static_bf16"
    ]


@pytest.mark.exhaustive
def test_products_of_blocks(launched: list[cuda_plans.Planned]) -> None:
    """Two maps as one, whose blocks of 128 rows do not end where a tile does; with a residual, and gated."""
    device = Device.parse("emulated:sm_90a")
    parts = []
    for seed in (1, 2):
        matrix = random_matrix("fp8", (144, DEPTH), (128, 128), seed=seed)
        layout = replace(matrix.layout, activation=ActivationScheme("fp8", 128))
        parts.append(replace(matrix, layout=layout, scales=matrix.scales / 100))
    whole = [MatrixPart(part, slice(None), slice(None)) for part in parts]
    weight = prepare_packed(whole, None, LoadOptions(device=device, dtype=bfloat16), None)
    rng = np.random.default_rng(4)
    x = rng.standard_normal((ROWS, DEPTH)) * 10.0 ** rng.uniform(-1, 1, (ROWS, 3)).repeat(128, axis=1)[:, :DEPTH]
    x = x.astype(ml_dtypes.bfloat16)
    residual = rng.standard_normal((ROWS, 288)).astype(ml_dtypes.bfloat16)
    on_gpu = Tensor.from_numpy(x).to(device)
    got = ops.linear(on_gpu, weight, residual=Tensor.from_numpy(residual).to(device)).to("cpu").array
    gated = ops.linear_glu(on_gpu, weight, "silu").to("cpu").array
    norm = RmsNorm(Tensor.from_numpy(rng.standard_normal(DEPTH).astype(np.float32)).to(device), 1e-5, median=1.0)
    normed = ops.rms_norm(on_gpu, norm.weight, norm.eps)
    for at_once, apart in (
        (ops.linear(on_gpu, weight, norm=norm), ops.linear(normed, weight)),
        (ops.linear_glu(on_gpu, weight, "silu", norm=norm), ops.linear_glu(normed, weight, "silu")),
    ):
        np.testing.assert_array_equal(at_once.to("cpu").array, apart.to("cpu").array)

    wide = np.zeros((ROWS, 3, 128), np.float32)
    wide.reshape(ROWS, -1)[:, :DEPTH] = x
    largest = np.abs(wide).max(axis=2, keepdims=True)
    codes = (wide * (np.float32(448) * (1 / largest))).astype(ml_dtypes.float8_e4m3fn)
    rounded = codes.astype(np.float64) * largest / 448
    rounded = rounded.reshape(ROWS, -1)[:, :DEPTH]
    matrix = np.concatenate([each.dequantise(float32) for each in parts]).astype(np.float64)
    sums = rounded @ matrix.T
    expected = sums + residual.astype(np.float64)
    # The weight's scales are of 16 bits; what lies between two codes of x may fall to the other side.
    worst = np.abs(got.astype(np.float64) - expected) / (np.abs(rounded) @ np.abs(matrix).T + np.abs(expected))
    assert (worst > 2.0**-8).mean() < 1e-2, (worst > 2.0**-8).mean()
    assert worst.max() <= 2.0**-5
    unrounded = x.astype(np.float64) @ matrix.T + residual.astype(np.float64)
    error, rounding = np.abs(got.astype(np.float64) - expected).mean(), np.abs(unrounded - expected).mean()
    assert error < rounding / 2  # x was rounded so, and not otherwise
    gate, up = sums[:, :144], sums[:, 144:]
    expected = gate / (1 + np.exp(-gate)) * up
    assert np.abs(gated.astype(np.float64) - expected).max() <= 2e-2 * np.abs(expected).max()
    plain, gated_too = "gemm_hopper_bytes_e4m3_g128_bf16_bf16", "gemm_hopper_bytes_e4m3_g128_bf16_bf16_silu"
    roundings = [each.rounding.specialisation.name for each in launched if each.rounding is not None]
    assert [each.launch.specialisation.name for each in launched] == [plain, gated_too, plain, plain, gated_too]
    apart, at_once = "dynamic_quantisation_e4m3_g128_bf16", "rounded_norm_e4m3_groups_bf16"
    assert roundings == [apart, apart, at_once, apart, at_once]
