"""The Hopper tier against float64, on integers exactly, at ragged sizes, with every tile and way out."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from numba_kernels.cuda import gemm
from numba_kernels.cuda.gemm import hopper
from runtime.device.kernel_cache import KernelCache
from runtime.errors import InvalidArgumentError
from tests.numba_kernels.cuda.gemm_cases import Case, case, plan
from tests.numba_kernels.cuda.harness import assert_equal, get, put

pytestmark = [pytest.mark.emulator, pytest.mark.exhaustive_cases(r"\bf16\b")]
TILES = pytest.mark.parametrize(
    "tile",
    [
        each if each in (hopper.SMALL, hopper.LARGE) else pytest.param(each, marks=pytest.mark.exhaustive)
        for each in hopper.TILES
    ],
    ids=str,
)


def planned(case: Case, tile=None, parts=1, *, rows=None, num_multiprocessors=132, is_out_aligned=True):
    """A launch for a case, with the residual that it has."""
    m, n, k = case.sizes
    epilogue = gemm.Epilogue(has_residual=case.residual is not None, is_aligned=is_out_aligned)
    product = gemm.Product(m if rows is None else rows, n, k, case.dtype, out=case.out_dtype, epilogue=epilogue)
    machine = gemm.machine_of(hopper.ARCH, num_multiprocessors)
    return hopper.plan(product, machine) if tile is None else hopper.plan_tile(product, machine, tile, parts)


@pytest.mark.parametrize(
    ("tile", "sizes", "dtype", "bias", "residual"),
    [(hopper.SMALL, (63, 136, 72), "f16", "f16", True), (hopper.SMALL, (65, 128, 1032), "bf16", "bf16", False),
     (hopper.LARGE, (129, 264, 200), "bf16", "f32", True), (hopper.LARGE, (300, 520, 136), "bf16", "bf16", False),
     *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in (
         (hopper.SMALL, (1, 8, 64), "bf16", None, False), (hopper.LARGE, (1, 520, 1032), "bf16", None, False),
         (hopper.LARGE, (63, 8, 72), "f16", "f32", False), (hopper.MIDDLE, (300, 392, 200), "bf16", "f32", True),
         (hopper.MIDDLE, (129, 520, 1032), "bf16", "bf16", False), (hopper.MIDDLE, (63, 8, 72), "f16", None, True),
         (hopper.MIDDLE, (130, 200, 72), "bf16", "f32", False), (hopper.MIDDLE, (63, 392, 136), "bf16", None, True),
         (hopper.THIN, (130, 392, 520), "bf16", "bf16", True), (hopper.THIN, (63, 200, 72), "f16", "f32", False),
     ))],
)  # fmt: skip
@pytest.mark.exhaustive_cases("tile1", "tile3")
def test_equals_float64(gpu, tile, sizes, dtype, bias, residual):
    product = case(sizes, dtype, bias=bias, residual=residual)
    launch = planned(product, tile)
    assert ("tiles_residual" if residual else "tiles") in launch.specialisation.name
    product.check(product.run_launch(gpu, launch))


@TILES
@pytest.mark.parametrize(("sizes", "residual"), [((300, 264, 328), True), ((130, 520, 64), False)])
@pytest.mark.exhaustive
def test_integers_are_exact_on_few_multiprocessors(gpu, tile, sizes, residual):
    """Each block has several tiles: barriers and stages go on from one to the next. Launched dependently, too: only
    weights may be read before the grid in front has ended."""
    product = case(sizes, "bf16", integers=True, residual=residual)
    launch = planned(product, tile, num_multiprocessors=2)
    product.check(product.run_launch(gpu, dataclasses.replace(launch, is_dependent=residual)))


@pytest.mark.parametrize(
    ("tile", "sizes", "dtypes"),
    [(hopper.SMALL, (70, 77, 72), ("bf16", "bf16")), (hopper.LARGE, (65, 301, 72), ("bf16", "f32")),
     pytest.param(hopper.SMALL, (129, 260, 64), ("bf16", "f32"), marks=pytest.mark.exhaustive),
     pytest.param(hopper.MIDDLE, (300, 261, 72), ("bf16", "f32"), marks=pytest.mark.exhaustive),
     pytest.param(hopper.MIDDLE, (70, 200, 136), ("f16", "f16"), marks=pytest.mark.exhaustive),
     pytest.param(hopper.THIN, (129, 391, 72), ("bf16", "bf16"), marks=pytest.mark.exhaustive),
     pytest.param(hopper.LARGE, (129, 260, 64), ("f16", "f16"), marks=pytest.mark.exhaustive)],
)  # fmt: skip
@pytest.mark.exhaustive
def test_rows_on_any_bounds(gpu, tile, sizes, dtypes):
    """An output whose rows the TMA cannot store, or in float32."""
    product = case(sizes, *dtypes, bias=dtypes[0])
    launch = planned(product, tile, is_out_aligned=False)
    assert launch.specialisation.name.endswith("rows")
    product.check(product.run_launch(gpu, launch))


@pytest.mark.parametrize(("tile", "is_by_tma"), [(hopper.SMALL, False), (hopper.LARGE, True)])
@pytest.mark.exhaustive_cases("tile0")
def test_residual_may_be_the_output_and_nothing_beyond_is_written(gpu, tile, is_by_tma):
    product = case((67, 144, 72), "bf16", bias=None)
    m, n, k = product.sizes
    x, weight = put(gpu, product.x), put(gpu, product.weight)
    guarded = put(gpu, np.concatenate([np.ones((8, n)), product.residual, np.ones((70, n))]).astype(product.x.dtype))
    out = guarded.address + 8 * n * 2
    launch = planned(product, tile, is_out_aligned=is_by_tma)
    gpu.launch(launch, x.address, weight.address, 0, out, out, m, n, k, 0, *gemm.NO_SQUARES)
    found = get(gpu, guarded, (m + 78, n), "bf16")
    assert (np.delete(found, slice(8, m + 8), 0) == 1).all()
    product.check(found[8 : m + 8])


@TILES
@pytest.mark.exhaustive
def test_rows_have_the_same_bits_in_any_company_and_by_any_tile(gpu, tile):
    product = case((140, 136, 200), "bf16")
    whole = product.run_launch(gpu, planned(product, hopper.LARGE))
    for rows in (slice(0, 1), slice(60, 130)):
        launch = planned(product, tile, rows=rows.stop - rows.start, num_multiprocessors=3)
        assert_equal(product.run_launch(gpu, launch, rows), whole[rows])


def test_nan_stays_in_its_row(gpu):
    product = case((66, 40, 72), "bf16")
    product.x[65, 71] = np.nan
    out = product.run_launch(gpu, planned(product, hopper.LARGE)).astype(np.float32)
    assert np.isnan(out[65]).all()
    assert np.isfinite(np.delete(out, 65, 0)).all()


@pytest.mark.parametrize(
    ("tile", "parts", "sizes", "dtypes", "bias"),
    [(hopper.SMALL, 2, (130, 264, 136), ("bf16", "bf16"), "f32"),
     (hopper.NARROW, 8, (70, 128, 1032), ("bf16", "bf16"), None),
     pytest.param(hopper.NARROW, 3, (60, 77, 520), ("f16", "f32"), "f16", marks=pytest.mark.exhaustive),
     pytest.param(hopper.SMALL, 4, (9, 40, 1032), ("bf16", "f32"), None, marks=pytest.mark.exhaustive)],
)  # fmt: skip
@pytest.mark.exhaustive
def test_a_sum_split_among_a_cluster(gpu, tile, parts, sizes, dtypes, bias):
    product = case(sizes, *dtypes, bias=bias, residual=bias is not None)
    launch = planned(product, tile, parts)
    assert launch.cluster == (parts, 1, 1)
    found = product.run_launch(gpu, launch)
    product.check(found)
    assert_equal(product.run_launch(gpu, dataclasses.replace(launch, is_dependent=True)), found)


def test_what_is_split():
    """Few tiles and depth enough, unless rows must have the same bits in any company."""
    machine = gemm.machine_of(hopper.ARCH)
    assert hopper.choose(64, 4096, 4096, machine, exact=False) == (hopper.NARROW, 4)
    assert hopper.choose(128, 4096, 4096, machine, exact=False) == (hopper.SMALL, 4)
    assert hopper.choose(128, 4096, 4096, machine, exact=True) == (hopper.THIN, 1)
    assert hopper.choose(128, 4096, 256, machine, exact=False) == (hopper.SMALL, 1)
    assert hopper.choose(4096, 4096, 4096, machine, exact=False) == (hopper.LARGE, 1)


def test_tiles_of_192_columns_save_a_round():
    """24,576 columns are 128 tiles for 132 multiprocessors, where others leave a last round of half."""
    machine = gemm.machine_of(hopper.ARCH)
    for m, n, tile in (
        (64, 24576, hopper.THIN), (128, 24576, hopper.MIDDLE), (192, 24576, hopper.THIN), (256, 24576, hopper.MIDDLE),
        (192, 6144, hopper.THIN), (512, 6144, hopper.MIDDLE), (512, 24576, hopper.LARGE),
    ):  # fmt: skip
        assert hopper.choose(m, n, 4096, machine, exact=False) == (tile, 1)
    for tile in hopper.TILES:
        assert tile.shared_bytes <= 227 * 1024


def test_as_many_clusters_run_as_the_driver_says():
    """16 clusters of 8 fill 128 multiprocessors; a device whose groups hold only 14 takes a second round for two."""
    few = gemm.machine_of(hopper.ARCH, 132, ((2, 60), (4, 32), (8, 14)))
    assert hopper.choose(64, 2048, 16384, gemm.machine_of(hopper.ARCH), exact=False) == (hopper.NARROW, 8)
    assert hopper.choose(64, 2048, 16384, few, exact=False) == (hopper.NARROW, 4)
    product = gemm.Product(4096, 4096, 4096, "bf16", epilogue=gemm.Epilogue(has_residual=False, is_aligned=True))
    assert hopper.plan_tile(product, few, hopper.LARGE).grid == (120, 1, 1)


def test_auto_takes_it_for_many_rows(gpu):
    product = case((129, 72, 136), "bf16", "f32")
    options = {"arch": "sm_90a", "num_multiprocessors": 4}
    for rows, exact, tier in ((129, False, "hopper"), (30, False, "hopper_few"), (129, True, "tensor_core")):
        launch = plan("auto", rows, 72, 136, "bf16", "f32", exact=exact, **options)
        assert launch.specialisation.name.startswith(f"gemm_{tier}")
    assert plan("auto", 129, 72, 136, "bf16").specialisation.name.startswith("gemm_tensor_core")
    product.check(product.run(gpu, "auto", **options))


@pytest.mark.parametrize(
    ("k", "dtype", "options", "family"),
    [(65, "bf16", {}, "tensor_core"), (0, "bf16", {}, "tensor_core"), (64, "f32", {}, "register"),
     (64, "bf16", {"is_aligned": False}, "tensor_core"), (64, "f16", {"is_weight_layout": False}, "tensor_core"),
     (64, "f16", {}, "hopper")],
)  # fmt: skip
def test_what_the_tma_cannot_read_goes_to_another_tier(k, dtype, options, family):
    launch = plan("hopper", 64, 64, k, dtype, arch="sm_90a", **options)
    assert launch.specialisation.name.startswith(f"gemm_{family}_{dtype}")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100a", "sm_120a"])
def test_no_other_architecture_has_it(arch):
    with pytest.raises(ValueError, match=f"tier hopper needs sm_90a, the device is {arch}"):
        plan("hopper", 64, 64, 64, "bf16", arch=arch)


def test_instructions():
    kernel = hopper.kernel("bf16", "bf16", hopper.LARGE, "tiles")
    text = KernelCache().get(kernel, "sm_90a", is_ptx=True).image.decode()
    assert not re.search(r"\.f64|\.local|\bcall", text)
    for name in (
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16", ".multicast::cluster", "setmaxnreg", "stmatrix",
        "cp.async.bulk.tensor.2d.global", "griddepcontrol.wait",
    ):  # fmt: skip
        assert name in text


@pytest.mark.parametrize("arguments", [(b"",), ()])
def test_a_map_is_made_of_an_address(gpu, arguments):
    launch = planned(case((8, 8, 64), "bf16"), hopper.SMALL)
    with pytest.raises(InvalidArgumentError, match=r"gemm_hopper.*: argument 0 is .*, must be a tensor's address"):
        gpu.launch(launch, *arguments)
