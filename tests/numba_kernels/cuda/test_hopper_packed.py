"""Packed weights that are unpacked into `wgmma`'s stages: against float64 of what they mean."""

from __future__ import annotations

import numpy as np
import pytest

from numba_kernels.cuda import gemm
from numba_kernels.cuda.gemm import hopper, hopper_packed
from numba_kernels.cuda.gemm.hopper_packed import HIGH, LOW
from numba_kernels.cuda.packing import PACKINGS
from tests.numba_kernels.cuda.packed_cases import check_squares
from tests.numba_kernels.cuda.test_skinny_packed import product

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
@pytest.mark.exhaustive
def test_equals_float64(gpu, name, dtype, sizes, tile, parts, is_aligned):
    got, expected, bound = product(
        gpu, name, dtype, sizes, bias=sizes[0] != 130, residual=sizes[0] != 300, is_aligned=is_aligned,
        plan=by(tile, parts), tier="hopper_packed",
    )  # fmt: skip
    assert (np.abs(got - expected) <= bound).all(), (np.abs(got - expected) / bound).max()
    assert np.abs(expected).max() > 50 * np.median(bound)  # so that the bound tells


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "sizes", "tile", "parts"),
    [("u4_g32", (70, 176, 328), LOW, 1), ("u8", (140, 112, 136), HIGH, 1), ("e2m1_g16_e4m3", (33, 144, 520), HIGH, 2)],
)
def test_gated_units(gpu, name, sizes, tile, parts):
    got, expected, bound = product(
        gpu, name, "bf16", sizes, activation="silu", plan=by(tile, parts), tier="hopper_packed"
    )
    assert (np.abs(got - expected) <= bound).all(), (np.abs(got - expected) / bound).max()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("tile", "parts"), [(LOW, 1), (HIGH, 3)])
def test_squares_are_left_for_the_norm_behind(gpu, tile, parts):
    check_squares(gpu, by(tile, parts), 456, 128)


def test_what_is_split():
    """Exact products never; others among as many blocks as have two slots and more each."""
    assert {parts for _, parts in hopper_packed.options(4096, exact=True)} == {1}
    assert {parts for _, parts in hopper_packed.options(4096)} == {1, 2, 3, 4, 6, 8}
    assert {parts for _, parts in hopper_packed.options(1024)} == {1, 2}
    assert all(tile.shared_bytes <= 227 * 1024 for tile in hopper_packed.TILES)


def test_what_is_refused():
    for options in ({"x": "f32"}, {"k": 9}, {"num_segments": 8, "out": "f32"}, {"weight": "bf16"}, {"k": 0}):
        options = {"m": 2, "n": 8, "k": 8, "x": "bf16", "weight": "u8", **options}
        options["epilogue"] = gemm.Epilogue(has_residual=False)
        assert hopper_packed.why_not(gemm.Product(**options), gemm.machine_of(hopper.ARCH))
    gated = gemm.Product(2, 24, 8, "bf16", "u8", epilogue=gemm.Epilogue(False, True, "silu"))
    assert hopper_packed.why_not(gated, gemm.machine_of(hopper.ARCH))
    plain = gemm.Product(2, 24, 8, "bf16", "u8")
    assert not hopper_packed.why_not(plain, gemm.machine_of(hopper.ARCH))
    assert hopper_packed.why_not(plain, gemm.machine_of("sm_100a"))


def test_when_it_is_chosen():
    """From `LEAST_ROWS` to `MOST_ROWS`, by its model, and never for exact products."""
    machine = gemm.machine_of(hopper.ARCH)
    products = {m: gemm.Product(m, 8192, 8192, "bf16", "u4_g128") for m in (32, 33, 64, 512, 513)}
    assert [gemm.choose(each, machine) == "hopper_packed" for each in products.values()] == [
        False, True, True, True, False
    ]  # fmt: skip
    assert hopper_packed.seconds(gemm.Product(64, 8192, 8192, "bf16", "u4_g128", exact=True), machine) == np.inf
