"""Products of 3 to 64 rows by Hopper's `wgmma` with the weight first: against float64, exactly on integers, the same
bits in any company; what a launch reads, and what it leaves of a multiprocessor."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from numba_kernels.cuda import gemm
from numba_kernels.cuda.gemm.rings import hopper_few
from numba_kernels.cuda.packing import PACKINGS
from numba_kernels.cuda.specialisation import HALF_SHARED_BYTES, Launch
from runtime.bench.kernels.counted import SECTOR_BYTES, counting
from runtime.bench.kernels.operations import QWEN3_8B
from runtime.emulator.driver.architectures import H200
from tests.numba_kernels.cuda.gemm_cases import Case, case, plan
from tests.numba_kernels.cuda.harness import assert_equal, get, numpy_dtype, put

pytestmark = [pytest.mark.emulator, pytest.mark.exhaustive_cases(r"\bf16\b")]
MACHINE = gemm.machine_of("sm_90a", H200.num_sms, H200.max_clusters)
SHAPES = [  # K ends within a step and a stage; parts of K, and none; rows of the weight end within a tile, or are few
    (3, 1, 8), (5, 130, 1032), (16, 257, 520), (9, 32, 128), (17, 36, 2056), (32, 300, 264), (25, 1000, 96),
    (33, 64, 384), (64, 513, 1304), (50, 40, 56),
]  # fmt: skip


def planned(case: Case, num_multiprocessors: int = 132, rows: int = 0) -> Launch:
    """The launch of a case, or of so many of its rows."""
    m, n, k = case.sizes
    product = gemm.Product(rows or m, n, k, case.dtype, out=case.out_dtype)
    return hopper_few.plan(product, gemm.machine_of("sm_90a", num_multiprocessors))


@pytest.mark.parametrize(
    ("dtype", "out_dtype"), [("bf16", "bf16"), pytest.param("f16", "f32", marks=pytest.mark.exhaustive)]
)
def test_equals_float64(gpu, dtype, out_dtype):
    for seed, sizes in enumerate(SHAPES):
        bias = (None, "f32", dtype)[seed % 3]
        product = case(sizes, dtype, out_dtype, bias=bias, residual=seed % 2 == 0, seed=seed)
        product.check(product.run_launch(gpu, planned(product)))


@pytest.mark.parametrize("num_multiprocessors", [2, 8])
def test_integers_are_exact_where_blocks_have_several_tiles(gpu, num_multiprocessors):
    """Rings, barriers and sums go on from one tile to the next. Launched dependently, too: only weights may be read
    before the grid in front has ended."""
    for sizes in ((16, 2100, 520), (32, 2300, 72), (60, 2200, 264)):
        product = case(sizes, "bf16", integers=True)
        launch = planned(product, num_multiprocessors)
        assert launch.grid[0] * hopper_few.BLOCK_ROWS < sizes[1]
        product.check(product.run_launch(gpu, dataclasses.replace(launch, is_dependent=True)))


def test_a_row_has_the_same_bits_in_any_company(gpu):
    product = case((64, 260, 1304), "bf16")
    assert planned(product).cluster[1] > 1
    whole = product.run_launch(gpu, planned(product))
    for rows in (slice(5, 8), slice(40, 56), slice(20, 50)):
        found = product.run_launch(gpu, planned(product, rows=rows.stop - rows.start), rows)
        assert_equal(found, whole[rows])


def test_nan_stays_in_its_row_and_nothing_beyond_is_written(gpu):
    product = case((18, 13, 72), "bf16", bias=None, residual=False)
    product.x[3, 71] = np.nan
    m, n, k = product.sizes
    guarded = put(gpu, np.full((m + 2, n), 7, numpy_dtype("bf16")))
    x, weight = put(gpu, product.x), put(gpu, product.weight)
    gpu.launch(planned(product), x.address, weight.address, 0, 0, guarded.address + 2 * n, m, n, k, 0, *gemm.NO_SQUARES)
    out = get(gpu, guarded, (m + 2, n), "bf16").astype(np.float32)
    assert (out[[0, -1]] == 7).all()
    assert np.isnan(out[4]).all()
    assert np.isfinite(np.delete(out, 4, 0)).all()


@pytest.mark.parametrize("num_seqs", [8, 32])
def test_a_layer_reads_its_weights_once_from_the_cache(num_seqs):
    products = [gemm.Product(num_seqs, n, k, "bf16") for n, k in QWEN3_8B]
    read = sum(hopper_few.cache_reads(each, MACHINE) for each in products)
    assert read <= 1.1 * sum(each.weight_bytes for each in products)
    assert max(hopper_few.cache_reads(each, MACHINE) / each.weight_bytes for each in products) <= 1.125


def test_what_is_read_of_the_cache_is_what_the_emulator_counts(gpu):
    """All sectors but those of the result, to the byte."""
    m, n, _ = sizes = 32, 1024, 1024
    arrays, work = case(sizes, "bf16", bias=None, residual=False), gemm.Product(*sizes, "bf16")
    launch = hopper_few.plan(work, MACHINE)
    assert launch.cluster == (2, 4, 1)
    with counting(gpu) as counted:
        arrays.check(arrays.run_launch(gpu, launch))
    assert counted.sectors * SECTOR_BYTES == hopper_few.cache_reads(work, MACHINE) + 2 * m * n


def test_shapes():
    """Parts of K know the weight alone; all blocks run at once, in clusters that the device has room for."""
    few = gemm.machine_of("sm_90a", 132, ((2, 60), (4, 31), (8, 14)))
    for machine in (MACHINE, few):
        for n, k in (*QWEN3_8B, (151936, 4096), (1024, 1024), (64, 64), (2880, 4096)):
            shapes = [hopper_few.shape(m, n, k, machine) for m in (3, 16, 17, 32, 64)]
            assert len({parts for _, _, parts in shapes}) == 1
            for width, shares, parts in shapes:
                launch = hopper_few.plan(gemm.Product(width, n, k, "bf16"), machine)
                assert launch.cluster == (shares, parts, 1)
                assert launch.grid[0] * launch.grid[1] <= 132 * 1.125
    assert hopper_few.shape(32, 4096, 4096, few) == (32, 1, 4)
    for width in hopper_few.WIDTHS:
        for packed in ("", *PACKINGS) if width <= hopper_few.MAX_PACKED_ROWS else ("",):
            for takes_adapters in (False, True):
                block = hopper_few.Block(width, packed, takes_adapters)
                assert block.shared_bytes <= HALF_SHARED_BYTES["sm_90a"]
                if not takes_adapters:  # 33 KB a multiprocessor are memory's bandwidth times a latency of 1 us
                    assert block.num_stages * block.weight_bytes >= 33 << 10
    assert [hopper_few.Block(width).num_stages for width in hopper_few.WIDTHS] == [6, 5, 3]


@pytest.mark.parametrize(
    "options", [{"m": 65}, {"k": 9}, {"k": 0}, {"dtype": "f32"}, {"is_weight_layout": False}, {"exact": True},
                {"is_aligned": False}, {"arch": "sm_100a"}], ids=str,
)  # fmt: skip
def test_refuses_what_it_cannot_do(options):
    options = {"m": 3, "k": 8, "dtype": "bf16", "arch": "sm_90a", **options}
    with pytest.raises(ValueError, match=r"tier hopper_few (takes at most 64|reads 16-bit|needs sm_90a)"):
        plan("hopper_few", options.pop("m"), 8, options.pop("k"), options.pop("dtype"), **options)
