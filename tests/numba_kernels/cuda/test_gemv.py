"""Products of few rows: against float64, exactly on integers, and with the same bits in any company."""

from __future__ import annotations

import numpy as np
import pytest

from numba_kernels.cuda.gemm import gemv
from tests.numba_kernels.cuda.gemm_cases import case, plan
from tests.numba_kernels.cuda.harness import assert_equal, both_archs

pytestmark = pytest.mark.exhaustive_cases(r"\bf16\b")

SHAPES = [
    (1, 1, 1), (1, 1, 8), (1, 5, 16), (2, 3, 5), (3, 4, 31), (4, 17, 64), (5, 64, 16), (6, 47, 24), (7, 16, 40),
    (8, 65, 72), (1, 33, 256), (2, 100, 1000), (3, 61, 59), (4, 130, 264), (5, 7, 1032), (6, 2, 520), (7, 129, 33),
    (8, 50, 7), (1, 24, 2056), (3, 70, 4096), (1, 300, 136), (4, 1, 8200), (8, 3, 4100),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.exhaustive_cases("f32")
def test_equals_float64(gpu, dtype):
    for seed, sizes in enumerate(SHAPES):
        if sizes[0] > gemv.MAX_ROWS[dtype]:
            continue
        bias = (None, "f32", dtype)[seed % 3]
        product = case(sizes, dtype, bias=bias, residual=seed % 2 == 0, seed=seed)
        product.check(product.run(gpu, "gemv"))


@pytest.mark.parametrize(("dtype", "out_dtype"), [("f32", "f32"), ("f16", "f16"), ("bf16", "f32")])
def test_integers_are_exact(gpu, dtype, out_dtype):
    for sizes in (*SHAPES[::3], (2, 20, 0), (1, 700, 520)):
        if sizes[0] > gemv.MAX_ROWS[dtype]:
            continue
        product = case(sizes, dtype, out_dtype, integers=True)
        product.check(product.run(gpu, "gemv"))


@pytest.mark.parametrize("depth", [40, 99, 4104])
@both_archs
def test_a_row_is_the_same_in_any_company_of_eight(gpu, depth):
    product = case((8, 9, depth), "f32")
    whole = product.run(gpu, "gemv")
    for rows in (slice(0, 1), slice(5, 6), slice(2, 4), slice(1, 4), slice(3, 8)):
        assert_equal(product.run(gpu, "gemv", rows=rows), whole[rows])


@pytest.mark.parametrize("depth", [40, 99, 2056])
def test_a_row_is_the_same_alone_and_beside_another(gpu, depth):
    product = case((2, 9, depth), "bf16", "f32")
    whole = product.run(gpu, "gemv")
    for row in range(2):
        assert_equal(product.run(gpu, "gemv", rows=slice(row, row + 1)), whole[row : row + 1])


@pytest.mark.parametrize("gpu", ["emulated:sm_90a"], indirect=True)
@pytest.mark.parametrize(
    ("dtype", "out_dtype", "num_multiprocessors"),
    [("bf16", "bf16", 132), ("bf16", "bf16", 2), pytest.param("f16", "f32", 3, marks=pytest.mark.exhaustive)],
)
def test_a_ring_gives_the_bits_of_registers(gpu, dtype, out_dtype, num_multiprocessors):
    """From sm_90 on weights come through shared memory, and blocks take several tiles."""
    for seed, sizes in enumerate(
        ((1, 24, 2056), (2, 100, 1000), (1, 1, 8), (2, 129, 3072), (1, 300, 520), (2, 17, 64))
    ):
        product = case(sizes, dtype, out_dtype, bias=(None, "f32", dtype)[seed % 3], residual=seed % 2 == 0, seed=seed)
        ring = plan("gemv", *sizes, dtype, out_dtype, arch="sm_90a", num_multiprocessors=num_multiprocessors)
        registers = plan("gemv", *sizes, dtype, out_dtype)
        assert ring.specialisation.name.startswith("gemv_ring_")
        assert not registers.specialisation.name.startswith("gemv_ring_")
        assert ring.grid[0] <= num_multiprocessors
        out = product.run_launch(gpu, ring)
        product.check(out)
        assert_equal(out, product.run_launch(gpu, registers))


def test_x_shares_a_ring_s_memory():
    """A long row leaves fewer stages; where fewer than two are left, weights come through registers."""
    stages = {
        k: launch.shared_bytes - 2 * k if launch.specialisation.name.startswith("gemv_ring") else 0
        for k in (4096, 12_288, 28_672, 40_000, 49_152)
        for launch in [plan("gemv", 1, 64, k, "bf16", arch="sm_90a")]
    }
    ring = 1 << 14
    assert stages == {4096: 6 * ring, 12_288: 5 * ring, 28_672: 3 * ring, 40_000: 2 * ring, 49_152: 0}


def test_few_columns_and_a_long_sum_are_split_over_warps():
    blocks = {}
    for n, k in ((64, 8192), (1024, 8192), (50_257, 768), (8, 64)):
        launch = plan("gemv", 1, n, k, "bf16")
        warps, teams = launch.block[1], launch.block[2]
        assert warps * teams == gemv.BLOCK_WARPS
        assert launch.grid[0] * teams * 4 >= n
        blocks[n, k] = warps
    assert blocks == {(64, 8192): 8, (1024, 8192): 8, (50_257, 768): 1, (8, 64): 1}


def test_nan_stays_in_its_row(gpu):
    product = case((3, 10, 64), "f32")
    product.x[1, 60] = np.nan
    out = product.run(gpu, "gemv")
    assert np.isnan(out[1]).all()
    assert np.isfinite(out[[0, 2]]).all()


@pytest.mark.parametrize(
    "options", [{"m": 9}, {"m": 3, "dtype": "bf16"}, {"is_weight_layout": False}, {"exact": True}], ids=str
)
def test_refuses_what_it_cannot_do(options):
    options = {"m": 2, "dtype": "f32", **options}
    with pytest.raises(ValueError, match="tier gemv takes at most"):
        plan("gemv", options.pop("m"), 8, 8, options.pop("dtype"), **options)
