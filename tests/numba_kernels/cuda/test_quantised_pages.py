"""KV pages of int8 and fp8 on a GPU: written to the bytes that numpy and the cpu write, read within the dtype's
rounding of float64 over what the pages hold."""

from __future__ import annotations

import numpy as np
import pytest

from numba_kernels.cuda import attention
from numba_kernels.cuda.kv_cache import page_row
from numba_kernels.cuda.qkv import plan_qkv_prepare
from runtime.device.gpu import Gpu
from runtime.kv.cache import KVCache, KVCacheSpec
from tests.numba_kernels.cpu.test_quantised_pages import KINDS, write
from tests.numba_kernels.cuda.harness import empty, get, numpy_dtype, put
from tests.numba_kernels.cuda.paged import PAGES, paged_batch, quantised, quantised_batch
from tests.numba_kernels.cuda.test_attention import TOLERANCE, sinks_of
from tests.oracles.dense import relative_error

CPU_KIND = {"s8": "int8", "e4m3": "fp8"}
BOTH = ("s8", "e4m3")
slow = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("dtype", "head_dim"), [("f32", 64), ("bf16", 5), pytest.param("bf16", 128, marks=slow),
    pytest.param("f16", 40, marks=slow), pytest.param("f32", 129, marks=slow)]
)  # fmt: skip
@pytest.mark.parametrize("pages", BOTH)
@pytest.mark.exhaustive_cases("f32")
def test_rows_are_written_as_numpy_and_the_cpu_do(gpu: Gpu, pages: str, dtype: str, head_dim: int) -> None:
    rng = np.random.default_rng(head_dim)
    tokens, heads, block_size = 50, 2, 16
    keys, values = (
        (rng.standard_normal((tokens, heads, head_dim)) * np.exp(rng.standard_normal((tokens, heads, 1)) * 3))
        .astype(numpy_dtype(dtype)).astype(np.float32) for _ in range(2)
    )  # fmt: skip
    keys[:, :, : head_dim // 2] *= np.float32(2.0**-12)  # subnormal in e4m3
    keys = keys.astype(numpy_dtype(dtype)).astype(np.float32)
    values[3], values[4, 0, 1], values[5, 1, 0] = 0, np.nan, -np.inf
    slots = rng.permutation(80)[:tokens].astype(np.int64)
    slots[7] = -1
    qkv = np.concatenate([np.zeros_like(keys), keys, values], axis=1).astype(numpy_dtype(dtype))
    shape = 5, heads, block_size, page_row(head_dim, pages)
    planes = [put(gpu, np.full(shape, 99, np.uint8)) for _ in range(2)]
    scales = [put(gpu, np.full(shape[:3], 99, np.float32)) for _ in range(2)]
    inputs = [put(gpu, array) for array in (qkv, np.zeros(tokens, np.int32), slots)]
    qkv_at, positions_at, slots_at = (block.address for block in inputs)
    q = empty(gpu, (tokens, heads, head_dim), dtype)
    launch = plan_qkv_prepare(tokens, heads, heads, head_dim, block_size, dtype, pages=pages)
    caches = [block.address for block in (*planes, *scales)]
    gpu.launch(launch, qkv_at, positions_at, 0, 0, 0, 0, 0, 0, slots_at, *caches, q.address, tokens, heads, heads, 0.0)

    cpu = KVCache(KVCacheSpec.uniform(1, heads, head_dim, block_size, KINDS[CPU_KIND[pages]][0]), 5)
    written = slots >= 0
    write(cpu, keys[written], values[written], slots[written])
    block, inside = slots // block_size, slots % block_size
    for kind, rows in enumerate((keys, values)):
        stored = get(gpu, planes[kind], shape, np.uint8)
        found, found_scales = stored[block, :, inside], get(gpu, scales[kind], shape[:3], np.float32)[block, :, inside]
        assert not found[written, :, head_dim:].any()
        cpu_pages = cpu.layer(0)[kind].array
        theirs = (
            cpu_pages[block, :, :, inside] if kind == 0 else cpu_pages[block, :, inside, :head_dim]
        ).view(np.uint8)  # fmt: skip
        np.testing.assert_array_equal(found[written, :, :head_dim], theirs[written])
        np.testing.assert_array_equal(found_scales[written], cpu.layer(0)[2 + kind].array[block, :, inside][written])
        finite = written & np.isfinite(rows).all(axis=(1, 2))
        numbers, expected = quantised(rows[finite], pages)
        np.testing.assert_array_equal(
            found[finite, :, :head_dim].view(PAGES[pages]).astype(np.float32), numbers.astype(np.float32)
        )
        np.testing.assert_array_equal(found_scales[finite], expected)
    assert (get(gpu, planes[0], shape, np.uint8) == 99).sum() >= 30 * heads * head_dim  # the others' rows stay


CASES = {  # (context, queries) of each sequence, q heads, kv heads, head_dim, block size, window, sinks, cap
    "decode": [
        ([(500, 1), (3, 1), (257, 1)], 8, 2, 64, 16, None, False, 0),
        ([(300, 1), (20, 1)], 4, 2, 128, 16, 17, True, 0),
        ([(100, 7), (5, 1)], 4, 2, 80, 8, None, False, 5.0),
        ([(192, 1), (191, 1)], 24, 1, 256, 32, 64, False, 0),
        ([(130, 2)], 2, 1, 20, 16, None, False, 0),
    ],
    "flash": [
        ([(100, 7), (0, 33), (5, 1), (31, 2)], 8, 2, 64, 16, None, False, 0),
        ([(0, 100), (150, 1)], 4, 2, 128, 8, 7, True, 0),
        ([(60, 70)], 4, 1, 80, 16, None, False, 5.0),
        ([(130, 20)], 2, 1, 256, 32, 100, False, 0),
        ([(0, 40)], 2, 1, 20, 16, None, False, 0),
    ],
    "naive": [([(100, 7), (0, 33)], 4, 2, 40, 16, 50, True, 5.0)],
}  # fmt: skip
PARAMETERS = [
    pytest.param(tier, dtype, pages, index, marks=() if is_usual else slow)
    for tier, cases in CASES.items() for dtype in ("bf16", "f16", "f32") for pages in BOTH
    for index in range(len(cases))
    for is_usual in [(tier, dtype, pages, index) in {
        ("decode", "bf16", "e4m3", 0), ("flash", "f32", "e4m3", 0), ("naive", "f32", "s8", 0),
    }]
]  # fmt: skip


@pytest.mark.parametrize(("tier", "dtype", "pages", "index"), PARAMETERS)
@pytest.mark.exhaustive_cases("f32")
def test_attention_equals_float64_of_what_the_pages_hold(
    gpu: Gpu, tier: str, dtype: str, pages: str, index: int
) -> None:
    chunks, heads, kv_heads, head_dim, block_size, window, has_sinks, cap = CASES[tier][index]
    plain = paged_batch(
        np.random.default_rng(index), chunks, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype,
        block_size=block_size,
    )  # fmt: skip
    for rows in (*plain.keys, *plain.values):  # each row's scale is another
        rows *= np.exp2(np.arange(len(rows)) % 5 - 3)[:, None, None].astype(rows.dtype)
    batch = quantised_batch(plain, pages)
    if window is not None:
        batch.give_up(window)
    sinks, softcap, scale = sinks_of(heads) if has_sinks else None, cap or None, head_dim**-0.5
    expected = batch.expected(scale, window, sinks, softcap)
    for num_sms in (1, 132) if tier == "decode" else (132,):
        out, _ = batch.run(gpu, scale, window, sinks, tier=tier, num_sms=num_sms, softcap=softcap)
        assert relative_error(out, expected) < TOLERANCE[dtype]


def test_pages_of_bytes_take_the_plain_flash_tier_on_hopper() -> None:
    sizes = {
        "num_tokens": 512, "num_seqs": 1, "max_query_len": 512, "max_seq_len": 512, "num_q_heads": 8, "num_kv_heads": 2,
        "head_dim": 128, "table_width": 32, "dtype": "bf16", "block_size": 16, "num_blocks": 32, "arch": "sm_90a",
    }  # fmt: skip
    assert attention.plan(**sizes).tier == "flash_hopper"
    plan = attention.plan(**sizes, pages="e4m3")
    assert plan.tier == "flash"
    with pytest.raises(ValueError, match="flash_hopper brings pages by the TMA"):
        attention.plan(**sizes, pages="e4m3", tier="flash_hopper")
    with pytest.raises(ValueError, match="pages is 'e5m2'"):
        attention.plan(**sizes, pages="e5m2")
