"""K in segments: each segment's sums are a product of their own, and the tree adds them as numpy does."""

from __future__ import annotations

import numpy as np
import pytest

from numba_kernels.cuda import gemm
from numba_kernels.cuda.gemm import split_k, tensor_core
from tests.numba_kernels.cuda.gemm_cases import case, plan
from tests.numba_kernels.cuda.harness import assert_equal, both_archs, empty, get, numpy_dtype, put


def borders(k: int, count: int) -> list[int]:
    steps = -(-k // 16)
    return [min(k, steps * number // count * 16) for number in range(count + 1)]


@pytest.mark.parametrize(
    ("tier", "dtype"),
    [("auto", "f32"), ("auto", "bf16"),
     *(pytest.param(tier, dtype, marks=pytest.mark.exhaustive)
       for tier in ("naive", "tiled", "register") for dtype in ("f32", "bf16"))],
)  # fmt: skip
@both_archs
@pytest.mark.exhaustive
def test_each_segment_is_a_product_of_its_own(gpu, tier, dtype):
    for (m, n, k), count in (((5, 70, 384), 8), ((40, 33, 96), 4), ((17, 40, 201), 8), ((9, 8, 7), 2)):
        whole = case((m, n, k), dtype, "f32", bias=None, residual=False)
        launch = plan(tier, m, n, k, dtype, "f32", exact=True, has_residual=False, num_segments=count)
        held = [put(gpu, whole.x), put(gpu, whole.weight)]
        out = empty(gpu, (count, m, n), "f32")
        gpu.launch(launch, *(block.address for block in held), 0, 0, out.address, m, n, k, 0, *gemm.NO_SQUARES)
        sums = get(gpu, out, (count, m, n), "f32")
        for found, first, end in zip(sums, places := borders(k, count), places[1:], strict=False):
            part = case((m, n, end - first), dtype, "f32", bias=None, residual=False)
            part.x, part.weight = whole.x[:, first:end], whole.weight[:, first:end]
            assert_equal(found, part.run(gpu, tier, exact=True))


@pytest.mark.parametrize("tile", [pytest.param(str(tile), marks=[pytest.mark.exhaustive] * (tile is not
                                  tensor_core.MEDIUM)) for tile in tensor_core.TILES])  # fmt: skip
@pytest.mark.exhaustive
def test_all_tiles_give_the_same_segments(gpu, tile):
    m, n, k = 70, 140, 208
    product = case((m, n, k), "bf16", "f32", bias=None, residual=False)
    held = [put(gpu, product.x), put(gpu, product.weight)]
    found = []
    for name in (str(tensor_core.SMALL), tile):
        launch = plan("tensor_core", m, n, k, "bf16", "f32", tile=name, has_residual=False, num_segments=8)
        out = empty(gpu, (8, m, n), "f32")
        gpu.launch(launch, *(block.address for block in held), 0, 0, out.address, m, n, k, 0, *gemm.NO_SQUARES)
        found.append(get(gpu, out, (8, m, n), "f32"))
    assert_equal(found[1], found[0])


@pytest.mark.exhaustive_cases("bf16-2", "bf16-8")  # they differ from those of float32 in the type alone, as does bf16-4
@pytest.mark.parametrize("count", split_k.NUM_SUMS)
@pytest.mark.parametrize("out_dtype", ["f32", "bf16"])
def test_the_tree(gpu, count, out_dtype):
    """Quads and single elements, with bias and residual and without; the residual may be the result."""
    rng = np.random.default_rng(count)
    for m, n, has_bias, has_residual in ((3, 700, 1, 1), (5, 61, 1, 0), (2, 512, 0, 1), (1, 1, 0, 0)):
        sums = rng.standard_normal((count, m, n), dtype=np.float32)
        bias = rng.standard_normal(n, dtype=np.float32)
        residual = rng.standard_normal((m, n), dtype=np.float32).astype(numpy_dtype(out_dtype))
        expected = list(sums)
        while len(expected) > 1:
            expected = [left + right for left, right in zip(expected[::2], expected[1::2], strict=True)]
        total = expected[0] + bias if has_bias else expected[0]
        total = total + residual.astype(np.float32) if has_residual else total
        held = [put(gpu, sums), put(gpu, bias), put(gpu, residual)]
        addresses = [held[0].address, held[1].address if has_bias else 0, held[2].address if has_residual else 0]
        launch = split_k.plan_add(count, m, n, out_dtype)
        gpu.launch(launch, *addresses, held[2].address, m, n, 0)
        assert_equal(get(gpu, held[2], (m, n), out_dtype), total.astype(numpy_dtype(out_dtype)))


def test_rows_at_a_time_fill_the_workspace_and_not_more():
    assert split_k.most_rows(8, 4096) * 8 * 4096 * 4 == split_k.WORKSPACE_BYTES
    assert split_k.most_rows(8, 100_000) == split_k.LEAST_ROWS
    assert split_k.most_rows(8, 1) > 100_000


def test_skinny_fill_a_gpu():
    launch = plan("auto", 1, 4096, 4096, "bf16", "f32", exact=True, has_residual=False, num_segments=8)
    assert launch.grid == (64, 8, 1)
    assert plan("hopper", 512, 4096, 4096, "bf16", "f32", exact=True, has_residual=False, num_segments=8, arch="sm_90a"
                ).specialisation.name.startswith("gemm_tensor_core_")  # fmt: skip


@pytest.mark.parametrize("changes", [{"num_segments": 3}, {"out": "bf16"}, {"is_weight_layout": False},
                                     {"epilogue": gemm.Epilogue()}])  # fmt: skip
def test_products_that_cannot_be_cut(changes):
    fields = {"out": "f32", "num_segments": 8, "epilogue": gemm.Epilogue(has_residual=False), **changes}
    with pytest.raises(ValueError, match="K cannot be cut into segments"):
        gemm.Product(1, 16, 128, "bf16", **fields)
