"""Packed weights that are unpacked into `wgmma`'s stages: against float64 of what they mean."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from numba_kernels.cuda import gemm
from numba_kernels.cuda.gemm import hopper, hopper_packed
from numba_kernels.cuda.gemm.hopper_packed import HIGH, LOW
from numba_kernels.cuda.packing import PACKINGS
from runtime.device.gpu import Gpu
from tests.numba_kernels.cuda.harness import empty, get, numpy_dtype, put
from tests.numba_kernels.cuda.packed_cases import packed_matrix
from tests.numba_kernels.cuda.test_few_rows_packed import product

pytestmark = pytest.mark.emulator

DEFAULT = [("u4_g128", "bf16", (70, 160, 264), LOW, 1, True)]
ODD = ("u4_g64", "u8_g32_zeros", "u8_g128", "u4_g32_zeros")
SWEEP = [
    (name, dtype, sizes, tile, parts, is_aligned)
    for name, dtype in [*((name, "bf16") for name in (*PACKINGS, *ODD)), ("u4_g128_zeros", "f16"), ("e4m3", "f16")]
    for sizes, tile, parts, is_aligned in (
        ((130, 264, 72), HIGH, 1, True), ((300, 47, 520), HIGH, 1, False), ((65, 520, 1160), LOW, 4, True),
        ((17, 33, 648), LOW, 2, False), ((140, 260, 1096), HIGH, 3, True), ((1, 24, 8), LOW, 1, True),
    )
]  # fmt: skip


def by(tile, parts, num_multiprocessors=2):
    """Blocks have several tiles where there are so few multiprocessors."""

    def plan(asked, machine):
        machine = gemm.machine_of(machine.arch, num_multiprocessors)
        return hopper.plan_tile(asked, machine, tile, parts)

    return plan


@pytest.mark.parametrize(
    ("name", "dtype", "sizes", "tile", "parts", "is_aligned"),
    [*DEFAULT, *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in SWEEP)],
)  # fmt: skip
def test_equals_float64(gpu, name, dtype, sizes, tile, parts, is_aligned):
    got, expected, bound = product(
        gpu, name, dtype, sizes, bias=sizes[0] != 130, residual=sizes[0] != 300, is_aligned=is_aligned,
        plan=by(tile, parts), tier="hopper_packed",
    )  # fmt: skip
    assert (np.abs(got - expected) <= bound).all(), (np.abs(got - expected) / bound).max()
    assert np.abs(expected).max() > 50 * np.median(bound)  # so that the bound tells


@pytest.mark.exhaustive
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("name", "sizes", "tile", "parts"),
    [("u4_g32", (70, 176, 328), LOW, 1), ("u8", (140, 112, 136), HIGH, 1), ("e2m1_g16_e4m3", (33, 144, 520), HIGH, 2)],
)
def test_gated_units(gpu, name, sizes, tile, parts, activation):
    if activation == "gelu_tanh":
        launch = by(tile, parts)(
            gemm.Product(*sizes, "bf16", name, epilogue=gemm.Epilogue(False, True, activation)),
            gemm.machine_of(hopper.ARCH),
        )
        assert activation in launch.specialisation.name
        return
    got, expected, bound = product(
        gpu, name, "bf16", sizes, activation=activation, plan=by(tile, parts), tier="hopper_packed"
    )
    assert (np.abs(got - expected) <= bound).all(), (np.abs(got - expected) / bound).max()
