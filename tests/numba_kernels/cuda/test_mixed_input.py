"""Tiles of many rows times a packed weight: against float64 of what the weight means."""

from __future__ import annotations

import numpy as np
import pytest

from numba_kernels.cuda import gemm
from numba_kernels.cuda.gemm import mixed_input
from numba_kernels.cuda.packing import PACKINGS
from numba_kernels.cuda.specialisation import Launch
from tests.numba_kernels.cuda.packed_cases import check_squares
from tests.numba_kernels.cuda.test_skinny_packed import product

pytestmark = pytest.mark.exhaustive_cases(r"\bf16\b", "e2m1_g16_e4m3", "u4_g32")

DEFAULT = [
    ("u4_g128_zeros", "bf16", (130, 150, 264), "emulated:sm_80"),
    ("e4m3_g128", "f16", (70, 40, 200), "emulated:sm_90a"),
    ("e2m1_g16_e4m3", "bf16", (20, 33, 136), "emulated:sm_89"),
]  # fmt: skip
SWEEP = [
    (name, dtype, shape, arch)
    for name in (*PACKINGS, "u4_g64", "u8_g32_zeros", "u8_g128", "u4_g32_zeros")
    for dtype, arch in (("bf16", "emulated:sm_90a"), ("f16", "emulated:sm_80"), ("bf16", "emulated:sm_89"))
    for shape in ((1, 17, 8), (65, 260, 1160), (300, 47, 520))
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype", "sizes", "gpu"),
    [*DEFAULT, *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in SWEEP)], indirect=["gpu"],
)  # fmt: skip
def test_equals_float64(gpu, name, dtype, sizes):
    got, expected, bound = product(
        gpu, name, dtype, sizes, bias=sizes[1] != 40, residual=sizes[1] != 33, tier="mixed_input"
    )
    assert (np.abs(got - expected) <= bound).all(), (np.abs(got - expected) / bound).max()
    assert np.abs(expected).max() > 50 * np.median(bound)  # so that the bound tells


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("u4_g32", (33, 80, 328)), pytest.param("u8", (140, 112, 136), marks=pytest.mark.exhaustive)],
)
def test_gated_units(gpu, name, sizes):
    got, expected, bound = product(gpu, name, "bf16", sizes, activation="silu", tier="mixed_input")
    assert (np.abs(got - expected) <= bound).all(), (np.abs(got - expected) / bound).max()


@pytest.mark.exhaustive
def test_squares_are_left_for_the_norm_behind(gpu):
    def plan(asked: gemm.Product, machine: gemm.Machine) -> Launch:
        launch = gemm.plan(asked, machine, "mixed_input")
        assert launch is not None
        return launch

    check_squares(gpu, plan, 136, mixed_input.WARP_N)


def test_it_is_chosen_for_many_rows_and_never_for_exact_ones():
    def chosen(m: int, *, exact: bool = False) -> str:
        asked = gemm.Product(m, 4096, 4096, "bf16", "u4_g128", epilogue=gemm.Epilogue(is_aligned=True), exact=exact)
        return gemm.choose(asked.deciding if exact else asked, gemm.machine_of("sm_80", 108))

    assert [chosen(m) for m in (1, 64, 512, 4096)] == ["quantised_gemv", "skinny", "mixed_input", "mixed_input"]
    assert chosen(4096, exact=True) == "skinny"


def test_what_is_refused():
    for options in ({"x": "f32"}, {"k": 9}, {"num_segments": 8, "out": "f32"}, {"weight": "bf16"}):
        options = {"m": 2, "n": 8, "k": 8, "x": "bf16", "weight": "u8", **options}
        options["epilogue"] = gemm.Epilogue(has_residual=False)
        assert mixed_input.why_not(gemm.Product(**options), gemm.machine_of("sm_90a"))
