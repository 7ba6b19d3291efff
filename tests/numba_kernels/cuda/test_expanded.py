"""Long prompts over expanded latent rows beside float64: keys and values of two sizes, segments, every tier."""

from __future__ import annotations

import numpy as np
import pytest

from numba_kernels.cuda import attention
from runtime.device.gpu import Gpu
from tests.numba_kernels.cuda.harness import assert_close, both_archs, empty, get, numpy_dtype, put
from tests.oracles.attention import attention as plain_attention

SCALE = 0.11
TOLERANCE = {"f32": 2e-6, "bf16": 1e-2, "f16": 2e-3}


def run(
    gpu: Gpu, dtype: str, heads: int, qk_dim: int, v_dim: int, context: int, count: int, segment: int, *,
    before: int = 3, scale: float = SCALE,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """The chunk's results, and what they should be. Tokens before and after it belong to others, and are not written;
    rows past the sequence's end are finite, and of no influence."""
    rng = np.random.default_rng(heads + context + count)
    length = context + count
    num_segments = -(-length // segment)
    rows = rng.standard_normal((num_segments * segment, heads, qk_dim + v_dim), np.float32).astype(numpy_dtype(dtype))
    tokens = before + count + 2
    q = rng.standard_normal((tokens, heads, qk_dim), np.float32).astype(numpy_dtype(dtype))
    plan = attention.plan_expanded(
        dtype, qk_dim, v_dim, num_tokens=tokens, query_len=count, num_heads=heads, num_rows=segment, num_sms=4,
        arch=gpu.arch,
    )  # fmt: skip
    kept = put(gpu, np.full((tokens, heads, v_dim), 7, numpy_dtype(dtype)))
    state = empty(gpu, plan.state_bytes // 4, np.float32)
    start, length_at = put(gpu, np.array([before, before + count], np.int32)), put(gpu, np.array([length], np.int32))
    queries = put(gpu, q)
    for number in range(num_segments):
        block = put(gpu, rows[number * segment : (number + 1) * segment])
        values = block.address + qk_dim * rows.itemsize
        gpu.launch(
            plan.launch,
            *plan.arguments(
                queries.address, block.address, values, kept.address, state.address, start.address, length_at.address,
                scale, first_key=number * segment, most_keys=segment, is_last=number + 1 == num_segments,
            ),
        )  # fmt: skip
        gpu.synchronize()
    found = get(gpu, kept, (tokens, heads, v_dim), dtype).astype(np.float64)
    assert (found[:before] == 7).all()
    assert (found[before + count :] == 7).all()
    own = rows[:length]
    wanted = plain_attention(q[before : before + count], own[..., :qk_dim], own[..., qk_dim:], scale)
    return found[before : before + count], wanted


def check(gpu: Gpu, dtype: str, *sizes: int, **how: float) -> None:
    found, wanted = run(gpu, dtype, *sizes, **how)  # type: ignore[arg-type]
    assert_close(found, wanted, rtol=TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])


@both_archs
@pytest.mark.parametrize(
    ("context", "count", "segment"),
    [(0, 1, 16), (0, 200, 208), (130, 70, 64), (500, 33, 256), (16, 129, 48), (257, 3, 272)],
)
def test_beside_float64(gpu: Gpu, context: int, count: int, segment: int) -> None:
    check(gpu, "bf16", 3, 192, 128, context, count, segment)


@pytest.mark.exhaustive
@both_archs
@pytest.mark.parametrize(("qk_dim", "v_dim"), [(256, 256), (128, 128), (192, 128), (72, 40), (96, 96), (64, 64)])
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_sizes_and_random_lengths(gpu: Gpu, dtype: str, qk_dim: int, v_dim: int) -> None:
    rng = np.random.default_rng(qk_dim)
    for _ in range(4):
        context, count = int(rng.integers(0, 300)), int(rng.integers(1, 200))
        segment, heads = 16 * int(rng.integers(1, 12)), int(rng.integers(1, 5))
        check(gpu, dtype, heads, qk_dim, v_dim, context, count, segment, before=int(rng.integers(0, 9)))
    check(gpu, dtype, 2, qk_dim, v_dim, 40, 70, 48, scale=-SCALE)


@pytest.mark.exhaustive
@both_archs
@pytest.mark.parametrize("heads", [16, 20, 128])
def test_many_heads(gpu: Gpu, heads: int) -> None:
    check(gpu, "bf16", heads, 192, 128, 20, 40, 48)
