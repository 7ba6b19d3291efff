"""The tiers of the matrix product against float64, on integers exactly, and against each other bit by bit."""

from __future__ import annotations

import re

import numpy as np
import pytest

from numba_kernels.cuda import gemm
from numba_kernels.cuda.gemm import tensor_core
from runtime.device.kernel_cache import KernelCache
from tests.numba_kernels.cuda.gemm_cases import case, plan
from tests.numba_kernels.cuda.harness import assert_equal, both_archs, empty, get, put

pytestmark = pytest.mark.exhaustive_cases(r"\bf16\b")

TIERS = ("naive", "tiled", "register", "tensor_core")
DTYPES = ("f32", "f16", "bf16")

SHAPES = [
    (1, 1, 1), (1, 1, 8), (2, 3, 5), (3, 17, 31), (5, 4, 64), (7, 64, 16), (13, 47, 24), (16, 16, 16), (16, 65, 72),
    (17, 33, 1), (19, 100, 40), (31, 61, 59), (32, 64, 128), (33, 7, 200), (47, 130, 8), (64, 64, 64), (65, 129, 33),
    (100, 50, 7), (128, 24, 96), (131, 70, 80), (1, 200, 300), (150, 1, 48),
]  # fmt: skip
EMPTY = [(0, 5, 8), (2, 0, 8), (0, 0, 0)]


def _tier_dtypes():
    return [(tier, dtype) for tier in TIERS for dtype in DTYPES if (tier, dtype) != ("tensor_core", "f32")]


@pytest.mark.parametrize(("tier", "dtype"), _tier_dtypes())
@pytest.mark.exhaustive_cases("naive-bf16", "register-bf16", "tiled-bf16")
def test_equals_float64(gpu, tier, dtype):
    for seed, sizes in enumerate(SHAPES):
        bias = (None, "f32", dtype)[seed % 3]
        product = case(sizes, dtype, bias=bias, residual=seed % 2 == 0, seed=seed)
        product.check(product.run(gpu, tier))


@pytest.mark.parametrize(("tier", "dtype"), _tier_dtypes())
@pytest.mark.exhaustive_cases("register-bf16")
def test_integers_are_exact(gpu, tier, dtype):
    for sizes in (*SHAPES[::3], (70, 90, 264)):
        product = case(sizes, dtype, integers=True)
        product.check(product.run(gpu, tier))


@pytest.mark.parametrize(
    ("tier", "dtype"),
    [("naive", "f16"), ("tiled", "f32"), *(pytest.param(*each, marks=pytest.mark.exhaustive)
     for each in (("register", "f32"), ("tensor_core", "f16"), ("tensor_core", "bf16"), ("register", "bf16")))],
)  # fmt: skip
def test_plain_b(gpu, tier, dtype):
    for seed, (m, n, k) in enumerate(SHAPES):
        product = case((m, n, k), dtype, is_weight_layout=False, integers=seed % 4 == 0, seed=seed)
        product.check(product.run(gpu, tier))
    # Rows of B on 16-byte bounds, whatever K is, as x's rows are too.
    for sizes in ((40, 72, 104), (9, 136, 64), (70, 8, 8)):
        product = case(sizes, dtype, is_weight_layout=False)
        product.check(product.run(gpu, tier))


@pytest.mark.parametrize(
    ("tier", "dtype"),
    [("naive", "f16"), ("tiled", "bf16"), *(pytest.param(*each, marks=pytest.mark.exhaustive)
     for each in (("register", "f16"), ("tensor_core", "f16"), ("tensor_core", "bf16")))],  # models have it
)  # fmt: skip
def test_float32_output_of_narrow_factors(gpu, tier, dtype):
    for sizes in ((3, 77, 40), (40, 50, 64), (21, 36, 11)):
        product = case(sizes, dtype, "f32", bias=dtype)
        product.check(product.run(gpu, tier))


@pytest.mark.parametrize("dtype", ["f32", pytest.param("bf16", marks=pytest.mark.exhaustive)])
@both_archs
@pytest.mark.exhaustive
def test_large_register_tiles(gpu, dtype):
    """A device of one multiprocessor is filled by the first large tile."""
    for sizes in ((129, 140, 72), (64, 300, 40), (1100, 130, 8)):
        product = case(sizes, dtype, integers=sizes[0] == 129)
        product.check(product.run(gpu, "register", num_multiprocessors=1))


@pytest.mark.parametrize(
    ("dtype", "out_dtype", "tiles"),
    [
        ("bf16", "bf16", tensor_core.TILES[:-1]),
        *(
            pytest.param(*each, tensor_core.TILES, marks=pytest.mark.exhaustive)
            for each in (("f16", "f32"), ("bf16", "bf16"))
        ),
    ],
    ids=["bf16-small", "f16", "bf16"],
)
@both_archs
@pytest.mark.exhaustive
def test_all_tiles(gpu, dtype, out_dtype, tiles):
    """More row tiles than one group has, too; and all tiles give the same bits."""
    for sizes in ((129, 140, 72), (64, 300, 200), (1100, 130, 8)):
        product = case(sizes, dtype, out_dtype, integers=sizes[0] == 64)
        first, *others = (product.run(gpu, "tensor_core", tile=str(tile)) for tile in tiles)
        product.check(first)
        for other in others:
            assert_equal(other, first)


def test_tiles_fit_the_architectures_with_the_least_shared_memory():
    assert all(tile.shared_bytes <= 99 << 10 for tile in tensor_core.TILES)


@pytest.mark.parametrize(
    ("m", "n", "expected"),
    [(8192, 8192, "LARGE"), (2048, 4096, "MEDIUM"), (256, 4096, "MEDIUM"), (100, 512, "SMALL"), (16, 512, "SKINNY")],
)
def test_the_tile_fills_the_device(m, n, expected):
    assert tensor_core.choose_tile(m, n, True, True, 108) is getattr(tensor_core, expected)
    assert tensor_core.choose_tile(m, n, True, False, 108) is tensor_core.SMALL
    assert tensor_core.choose_tile(m, n, True, True, 108, arch="sm_89") is not tensor_core.LARGE, "it spills there"


@pytest.mark.parametrize("tier", TIERS)
def test_no_depth_leaves_bias_and_residual(gpu, tier):
    for dtype in ("f32", "bf16"):
        product = case((5, 9, 0), dtype)
        product.check(product.run(gpu, tier))


@pytest.mark.parametrize("tier", ["auto", *gemm.TIERS])
@pytest.mark.parametrize(("m", "n", "k"), EMPTY)
def test_nothing_to_do_is_no_launch(tier, m, n, k):
    assert plan(tier, m, n, k, "bf16") is None


@pytest.mark.parametrize("dtype", ["f32", pytest.param("bf16", marks=pytest.mark.exhaustive)])
def test_scalar_tiers_agree_bit_by_bit(gpu, dtype):
    for sizes in ((20, 70, 97), (33, 20, 128)):
        product = case(sizes, dtype, "f32")
        naive, tiled, register = (product.run(gpu, tier) for tier in ("naive", "tiled", "register"))
        assert_equal(tiled, naive)
        assert_equal(register, naive)


@pytest.mark.parametrize(("tier", "dtype"), [("auto", "f32"), ("auto", "bf16"), ("naive", "f16"), ("tiled", "f16")])
@pytest.mark.exhaustive_cases("auto-f32")
def test_exact_rows_are_the_same_alone_and_in_any_batch(gpu, tier, dtype):
    product = case((130, 72, 136), dtype)
    whole = product.run(gpu, tier, exact=True, num_multiprocessors=1)
    for rows in (slice(0, 1), slice(7, 9), slice(3, 20), slice(60, 125)):
        assert_equal(product.run(gpu, tier, exact=True, rows=rows), whole[rows])


@pytest.mark.parametrize("tier", TIERS)
def test_residual_may_be_the_output(gpu, tier):
    product = case((21, 44, 40), "bf16", bias=None)
    m, n, k = product.sizes
    x, weight, target = put(gpu, product.x), put(gpu, product.weight), put(gpu, product.residual)
    launch = plan(tier, m, n, k, "bf16")
    gpu.launch(launch, x.address, weight.address, 0, target.address, target.address, m, n, k, 0, *gemm.NO_SQUARES)
    product.check(get(gpu, target, (m, n), "bf16"))


@pytest.mark.parametrize("tier", TIERS)
def test_writes_nothing_beyond_its_output(gpu, tier):
    """Rows of guards on both sides; the output begins on no 16-byte bound."""
    product = case((18, 13, 24), "bf16", bias=None, residual=False)
    m, n, k = product.sizes
    guarded = put(gpu, np.full((m + 2, n), 7, product.x.dtype))
    x, weight = put(gpu, product.x), put(gpu, product.weight)
    launch = plan(tier, m, n, k, "bf16")
    gpu.launch(launch, x.address, weight.address, 0, 0, guarded.address + 2 * n, m, n, k, 0, *gemm.NO_SQUARES)
    out = get(gpu, guarded, (m + 2, n), "bf16")
    assert (out[[0, -1]] == 7).all()
    product.check(out[1:-1])


@pytest.mark.parametrize(("tier", "dtype"), _tier_dtypes())
def test_factors_on_no_16_byte_bounds(gpu, tier, dtype):
    product = case((20, 24, 40), dtype, bias=None, residual=False)
    m, n, k = product.sizes
    x, weight = (
        put(gpu, np.concatenate([np.zeros(1, array.dtype), array.ravel()])) for array in (product.x, product.weight)
    )
    out, item = empty(gpu, (m, n), dtype), product.x.itemsize
    launch = plan(tier, m, n, k, dtype, is_aligned=False)
    gpu.launch(launch, x.address + item, weight.address + item, 0, 0, out.address, m, n, k, 0, *gemm.NO_SQUARES)
    product.check(get(gpu, out, (m, n), dtype))


@pytest.mark.parametrize(("tier", "dtype"), [("register", "f32"), ("tensor_core", "bf16")])
def test_nan_stays_in_its_row(gpu, tier, dtype):
    product = case((20, 30, 24), dtype)
    product.x[4, 3] = np.nan
    out = product.run(gpu, tier).astype(np.float32)
    assert np.isnan(out[4]).all()
    assert np.isfinite(np.delete(out, 4, 0)).all()


@pytest.mark.parametrize("tier", [*TIERS, "gemv", "skinny"])
def test_no_double_precision_and_no_local_memory(tier):
    launch = plan(tier, 2, 64, 64, "f32" if tier == "register" else "bf16")
    text = KernelCache().get(launch.specialisation, "sm_90a", is_ptx=True).image.decode()
    assert not re.search(r"\.f64|\.local|\bcall", text)
    if tier == "tensor_core":
        assert {"mma.sync", "ldmatrix", "cp.async.cg"} == {
            name for name in ("mma.sync", "ldmatrix", "cp.async.cg") if name in text
        }
