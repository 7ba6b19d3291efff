"""Weights in blocks of 128 x 128 of e4m3 on Hopper: many rows of x are rounded by 128 of K, as the checkpoint says."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from runtime import ops
from runtime.backends import cuda_packed
from runtime.device.device import Device
from runtime.dtype import bfloat16, float32
from runtime.linear.options import LoadOptions
from runtime.linear.packed_matrix import MatrixPart, prepare_packed
from runtime.linear.quantized import ActivationScheme
from runtime.tensor.tensor import Tensor
from tests.runtime.linear.test_quantized import random_matrix

pytestmark = pytest.mark.emulator
DEPTH, ROWS = 328, 70


def test_products_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two maps as one, whose blocks of 128 rows do not end where a tile does; with a residual, and gated."""
    device, launched = Device.parse("emulated:sm_90a"), []
    plan_rounded = cuda_packed._plan_rounded
    monkeypatch.setattr(cuda_packed, "_is_faster_rounded", lambda weight, product, plain, machine: (
        cuda_packed.can_round(weight, product, machine)
    ))  # fmt: skip
    monkeypatch.setattr(
        cuda_packed, "_plan_rounded", lambda *given: launched.append(plan_rounded(*given)) or launched[-1]
    )  # fmt: skip
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
    assert [each.launch.specialisation.name for each in launched] == [
        "gemm_hopper_bytes_e4m3_g128_bf16_bf16", "gemm_hopper_bytes_e4m3_g128_bf16_bf16_silu",
    ]  # fmt: skip
