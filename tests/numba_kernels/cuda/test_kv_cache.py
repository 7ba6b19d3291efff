"""The write of K and V into pages, and the copy of pages: bit for bit, and nothing else touched."""

from __future__ import annotations

import numpy as np
import pytest

from numba_kernels.cuda import kv_cache
from runtime.device.gpu import Gpu
from tests.numba_kernels.cuda.harness import assert_equal, get, numpy_dtype, put

DTYPES = ("f32", "f16", "bf16")
# tokens, KV heads, head_dim, block size
WRITES = [
    (1, 1, 64, 16), (2, 3, 64, 16), (17, 2, 64, 16), (97, 4, 64, 16), (200, 1, 64, 16), (31, 8, 64, 16), (5, 5, 64, 16),
    (1, 7, 64, 16), (64, 2, 64, 16), (3, 1, 64, 16), (1, 1, 5, 8), (40, 3, 5, 8), (7, 2, 5, 8), (129, 1, 5, 8),
    (16, 2, 128, 32), (33, 1, 128, 32), (1, 4, 128, 32), (50, 2, 20, 32), (11, 3, 20, 32), (65, 1, 20, 32),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["f32", pytest.param("f16", marks=pytest.mark.exhaustive), "bf16"])
@pytest.mark.exhaustive_cases("f32")
def test_write(gpu: Gpu, dtype: str) -> None:
    rng = np.random.default_rng(1)
    for tokens, kv_heads, head_dim, block_size in WRITES:
        rows = rng.standard_normal((2, tokens, kv_heads, head_dim)).astype(numpy_dtype(dtype))
        num_blocks = -(-2 * tokens // block_size)
        shape = num_blocks, kv_heads, block_size, kv_cache.page_row(head_dim)
        pages = np.full(shape, 99, numpy_dtype(dtype))
        slots = rng.permutation(num_blocks * block_size)[:tokens].astype(np.int64)
        slots[1::4] = -1
        blocks = [put(gpu, array) for array in (rows[0], rows[1], slots, pages, pages)]
        stride = kv_heads * head_dim
        launch = kv_cache.plan_write_kv(tokens, kv_heads, head_dim, block_size, dtype)
        gpu.launch(launch, *(block.address for block in blocks), tokens, kv_heads, stride, stride)
        stored = slots >= 0
        block, inside = slots[stored] // block_size, slots[stored] % block_size
        for kind in range(2):
            expected = pages.copy()
            expected[block, :, inside, :head_dim] = rows[kind][stored]
            expected[block, :, inside, head_dim:] = 0
            assert_equal(get(gpu, blocks[3 + kind], shape, dtype), expected)


def test_write_of_every_half_precision_number(gpu: Gpu) -> None:
    for dtype in ("f16", "bf16"):
        codes = np.arange(65536, dtype=np.uint16)
        numbers = codes.view(numpy_dtype(dtype))
        is_number = ~np.isnan(numbers.astype(np.float32))
        codes[~is_number] = 0
        rows = codes.reshape(256, 4, 64)
        pages = np.zeros((16, 4, 16, 64), np.uint16)
        blocks = [put(gpu, array) for array in (rows, rows, np.arange(256), pages, pages)]
        launch = kv_cache.plan_write_kv(256, 4, 64, 16, dtype)
        gpu.launch(launch, *(block.address for block in blocks), 256, 4, 256, 256)
        written = get(gpu, blocks[3], pages.shape, np.uint16)
        assert_equal(written.swapaxes(1, 2).reshape(rows.shape), rows)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_write_from_rows_of_a_wider_matrix(gpu: Gpu, dtype: str) -> None:
    qkv = np.random.default_rng(2).standard_normal((6, 8, 64)).astype(numpy_dtype(dtype))  # 4 q, 2 k, 2 v heads
    pages = np.zeros((1, 2, 16, 64), numpy_dtype(dtype))
    blocks = [put(gpu, array) for array in (qkv, np.arange(6), pages, pages)]
    item = numpy_dtype(dtype).itemsize
    launch = kv_cache.plan_write_kv(6, 2, 64, 16, dtype)
    k, slots, k_cache, v_cache = (block.address for block in blocks)
    gpu.launch(launch, k + 4 * 64 * item, k + 6 * 64 * item, slots, k_cache, v_cache, 6, 2, 512, 512)
    assert_equal(get(gpu, blocks[2], pages.shape, dtype)[0, :, :6], qkv[:, 4:6].swapaxes(0, 1))
    assert_equal(get(gpu, blocks[3], pages.shape, dtype)[0, :, :6], qkv[:, 6:8].swapaxes(0, 1))


def test_refuses_what_no_kernel_is_for() -> None:
    with pytest.raises(ValueError, match="head_dim is 513, must be 1 to 512"):
        kv_cache.plan_write_kv(1, 1, 513, 16, "f32")
