"""Products of up to 64 rows by tensor cores: against float64, exactly on integers, the same bits in any company."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from numba_kernels.cuda import gemm
from numba_kernels.cuda.gemm import skinny_shape
from runtime.device.kernel_cache import KernelCache
from tests.numba_kernels.cuda.gemm_cases import case, plan
from tests.numba_kernels.cuda.harness import assert_equal, empty, get, numpy_dtype, put

pytestmark = pytest.mark.exhaustive_cases(r"\bf16\b")

SHAPES = [  # K ends within a step, a group, a stream; few columns, and more than a block's
    (1, 1, 8), (2, 3, 16), (1, 40, 264), (8, 65, 72), (5, 130, 1032), (7, 33, 520),
    (9, 32, 128), (16, 100, 136), (12, 257, 1160), (17, 36, 256), (32, 60, 2056), (25, 300, 96),
    (33, 64, 384), (64, 96, 1024), (50, 47, 1304), (64, 260, 56),
]  # fmt: skip


@pytest.mark.parametrize(
    ("gpu", "dtype", "out_dtype", "but"),
    [
        ("emulated:sm_90a", "bf16", "bf16", range(17, 65)),  # `hopper_few` takes these there
        *(
            pytest.param(*each, (), marks=pytest.mark.exhaustive)
            for each in (("emulated:sm_80", "f16", "f32"), ("emulated:sm_90a", "bf16", "bf16"))
        ),
    ],
    indirect=["gpu"],
)
def test_equals_float64(gpu, dtype, out_dtype, but):
    for seed, sizes in enumerate(sizes for sizes in SHAPES if sizes[0] not in but):
        bias = (None, "f32", dtype)[seed % 3]
        product = case(sizes, dtype, out_dtype, bias=bias, residual=seed % 2 == 0, seed=seed)
        product.check(product.run(gpu, "skinny"))


@pytest.mark.parametrize("most_rows", [16, pytest.param(64, marks=pytest.mark.exhaustive)])
def test_integers_are_exact(gpu, most_rows):
    for sizes in (*(sizes for sizes in SHAPES[1::3] if sizes[0] <= most_rows), (most_rows - 1, 20, 0)):
        product = case(sizes, "bf16", integers=True)
        product.check(product.run(gpu, "skinny"))


@pytest.mark.parametrize(
    "sizes", [pytest.param((64, 40, 1096), marks=pytest.mark.exhaustive), (64, 2056, 136)], ids=str
)
@pytest.mark.exhaustive
def test_a_row_is_the_same_in_any_company_of_64(gpu, sizes):
    product = case(sizes, "bf16")
    whole = product.run(gpu, "skinny")
    for rows in (slice(0, 1), slice(5, 13), slice(40, 56), slice(20, 52)):
        assert_equal(product.run(gpu, "skinny", rows=rows), whole[rows])


def test_the_split_knows_the_weight_alone():
    weights = (64, 4096), (6144, 4096), (4096, 12288), (24576, 4096), (64, 512), (8, 64)
    splits = {weight: skinny_shape.split(*weight) for weight in weights}
    assert list(splits.values()) == [8, 8, 8, 4, 4, 1]
    for (n, k), streams in splits.items():
        for m in (1, 8, 9, 64):
            launch = plan("skinny", m, n, k, "bf16")
            assert launch.block == (32, streams, skinny_shape.BLOCK_WARPS // streams)
            assert launch.grid[0] * launch.block[2] * skinny_shape.COLUMNS >= n
            assert launch.shared_bytes <= 99 << 10  # of a block on sm_86


def test_nan_stays_in_its_row(gpu):
    product = case((11, 40, 200), "bf16")
    product.x[3, 199] = np.nan
    out = product.run(gpu, "skinny").astype(np.float32)
    assert np.isnan(out[3]).all()
    assert np.isfinite(np.delete(out, 3, 0)).all()


def test_an_infinite_weight_stays_infinite_where_k_ends_within_a_group(gpu):
    product = case((4, 6, 72), "bf16", bias=None, residual=False)
    product.x[:] = 1
    product.weight[2, 5], product.weight[4, 71] = np.inf, -np.inf
    out = product.run(gpu, "skinny").astype(np.float32)
    assert (out[:, 2] == np.inf).all()
    assert (out[:, 4] == -np.inf).all()
    assert np.isfinite(out[:, [0, 1, 3, 5]]).all()


@pytest.mark.parametrize(
    ("tier", "k"), [("skinny", 640), ("gemv", 640), ("gemv", 251), ("tensor_core", 640), ("tensor_core", 251)]
)
@pytest.mark.exhaustive_cases("gemv-640", "tensor_core")
def test_may_be_launched_before_the_kernel_in_front_ends(gpu, tier, k):
    """A depth of 251 leaves rows that are not aligned: they are read in front of the wait, too."""
    product = case((2, 70, k), "bf16", bias=None, residual=False)
    m, n, k = product.sizes
    x, weight, out = put(gpu, product.x), put(gpu, product.weight), empty(gpu, (m, n), "bf16")
    gpu.declare_immutable(weight)
    launch = dataclasses.replace(plan(tier, m, n, k, "bf16"), is_dependent=True)
    gpu.launch(launch, x.address, weight.address, 0, 0, out.address, m, n, k, 0, *gemm.NO_SQUARES)
    product.check(get(gpu, out, (m, n), "bf16"))


def test_blocks_that_fit_twice_on_a_multiprocessor_start_late(gpu):
    with gpu.chained():
        rows = [gpu._in_chain(plan("skinny", m, 64, 640, "bf16")).is_dependent for m in (17, 16, 17)]
    assert rows == [False, False, True]  # in front of the first there is nothing


@pytest.mark.parametrize("rows", [14, *(pytest.param(rows, marks=pytest.mark.exhaustive) for rows in (18, 50))])
def test_writes_nothing_beyond_its_output(gpu, rows):
    product = case((rows, 13, 24), "bf16", bias=None, residual=False)
    m, n, k = product.sizes
    guarded = put(gpu, np.full((m + 2, n), 7, numpy_dtype("bf16")))
    x, weight = put(gpu, product.x), put(gpu, product.weight)
    gpu.launch(
        plan("skinny", m, n, k, "bf16"), x.address, weight.address, 0, 0, guarded.address + 2 * n, m, n, k, 0,
        *gemm.NO_SQUARES,
    )  # fmt: skip
    out = get(gpu, guarded, (m + 2, n), "bf16")
    assert (out[[0, -1]] == 7).all()
    product.check(out[1:-1])


def test_what_is_read_early_is_no_nc_load():
    """ptxas moves those behind griddepcontrol.wait (seen in the machine code of sm_90a): they would come late."""
    for launch in (plan("gemv", 1, 64, 640, "bf16"), plan("skinny", 2, 64, 640, "bf16")):
        text = KernelCache().get(launch.specialisation, "sm_90a", is_ptx=True).image.decode()
        early = text.partition("griddepcontrol.wait")[0]
        assert "ld.global.L1::no_allocate" in early
        assert "ld.global.nc" not in early


@pytest.mark.parametrize(
    "options", [{"m": 65}, {"k": 9}, {"dtype": "f32"}, {"is_weight_layout": False}, {"exact": True},
                {"is_aligned": False}], ids=str,
)  # fmt: skip
def test_refuses_what_it_cannot_do(options):
    options = {"m": 2, "k": 8, "dtype": "bf16", **options}
    with pytest.raises(ValueError, match="tier skinny takes at most 64 rows"):
        plan("skinny", options.pop("m"), 8, options.pop("k"), options.pop("dtype"), **options)
