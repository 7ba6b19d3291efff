"""qkv_prepare on the device: against float64 and the CPU, and exact where nothing is computed."""

from __future__ import annotations

import numpy as np
import pytest

from numba_kernels.cuda.kv_cache import page_row
from numba_kernels.cuda.qkv import plan_qkv_prepare
from runtime import ops
from runtime.device.gpu import Gpu
from tests.numba_kernels.cpu.cases import normal, paged_case, tensor
from tests.numba_kernels.cuda.harness import assert_equal, both_archs, empty, get, numpy_dtype, put
from tests.oracles import dense

pytestmark = pytest.mark.exhaustive_cases(r"\bf16\b")

DTYPES = ("f32", "f16", "bf16")
TOLERANCE = {"f32": 1e-6, "f16": 2.0**-11 + 1e-6, "bf16": 2.0**-8 + 1e-6}
NUM_POSITIONS = 500


def tables(rotary: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin [NUM_POSITIONS, rotary / 2] float32."""
    angles = np.outer(np.arange(NUM_POSITIONS), 10000.0 ** -np.linspace(0, 1, max(1, rotary // 2)))[:, : rotary // 2]
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


# tokens, q heads, kv heads, head_dim, block size, rotary (0 = none), interleaved, norm
PREPARATIONS = [
    (1, 1, 1, 2, 8, 2, False, False), (1, 12, 12, 64, 16, 0, False, False), (3, 4, 2, 20, 8, 8, True, True),
    (5, 4, 1, 16, 16, 16, False, True), (7, 6, 3, 20, 8, 8, True, True), (17, 8, 1, 64, 16, 64, False, False),
    (33, 2, 2, 128, 16, 128, False, True), (64, 9, 3, 5, 16, 0, False, False), (2, 3, 3, 20, 8, 8, True, True),
    (40, 8, 8, 64, 16, 64, False, False), (90, 14, 2, 64, 16, 64, False, False), (1, 4, 2, 64, 16, 64, False, False),
    (13, 4, 4, 64, 16, 0, False, False), (19, 16, 2, 64, 16, 64, False, False), (2, 16, 8, 128, 16, 128, False, True),
    (101, 2, 1, 16, 16, 16, False, True), (31, 1, 1, 64, 16, 64, False, False), (9, 5, 5, 64, 16, 0, False, False),
    (64, 3, 1, 16, 16, 16, False, True), (11, 7, 1, 128, 16, 128, False, True),
]  # fmt: skip


def prepare(
    gpu: Gpu, dtype: str, qkv: np.ndarray, layout: tuple[int, int, int], block_size: int, num_blocks: int,
    slots: np.ndarray, positions: np.ndarray, cos: np.ndarray, sin: np.ndarray, *, interleaved: bool = False,
    norms: list[np.ndarray] | None = None, norm: str = "head",
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """(q [T, Hq, D], K pages, V pages), the pages filled with 99 before."""
    q_heads, kv_heads, head_dim = layout
    tokens = len(qkv)
    pages = np.full((num_blocks, kv_heads, block_size, page_row(head_dim)), 99, numpy_dtype(dtype))
    k_cache, v_cache, q = put(gpu, pages), put(gpu, pages), empty(gpu, (tokens, q_heads, head_dim), dtype)
    inputs = [put(gpu, array) for array in (qkv, positions, cos, sin, *(norms or []), slots)]
    qkv_at, positions_at, cos_at, sin_at, *norms_at, slots_at = [block.address for block in inputs]
    rotary = 2 * cos.shape[1]
    launch = plan_qkv_prepare(
        tokens, q_heads, kv_heads, head_dim, block_size, dtype, rotary=rotary, interleaved=interleaved,
        norm=norm if norms else "",
    )  # fmt: skip
    gpu.launch(
        launch, qkv_at, positions_at, cos_at if rotary else 0, sin_at if rotary else 0, 0, 0, *(norms_at or (0, 0)),
        slots_at, k_cache.address, v_cache.address, 0, 0, q.address, tokens, q_heads, kv_heads, 1e-6,
    )  # fmt: skip
    return (
        get(gpu, q, (tokens, q_heads, head_dim), dtype), get(gpu, k_cache, pages.shape, dtype),
        get(gpu, v_cache, pages.shape, dtype),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [*(pytest.param(d, marks=pytest.mark.exhaustive) for d in ("f32", "f16")), "bf16"])
def test_qkv_prepare_equals_float64_and_the_cpu(gpu: Gpu, dtype: str) -> None:
    rng = np.random.default_rng(5)
    for tokens, q_heads, kv_heads, head_dim, block_size, rotary, interleaved, has_norm in PREPARATIONS:
        layout, kind = (q_heads, kv_heads, head_dim), numpy_dtype(dtype)
        case = paged_case(
            rng, [(0, 2 * tokens + 1)], heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size,
            dtype=kind,
        )  # fmt: skip
        cpu_pages = [pages.array for pages in case.cache.layer(0)]
        num_blocks = len(cpu_pages[0])
        qkv = normal(rng, (tokens, (q_heads + 2 * kv_heads) * head_dim), kind)
        slots = rng.permutation(num_blocks * block_size)[:tokens].astype(np.int64)
        slots[1::5] = -1
        positions = rng.integers(0, NUM_POSITIONS, tokens).astype(np.int32)
        cos, sin = tables(rotary)
        norms = [normal(rng, head_dim) for _ in range(2)] if has_norm else None
        q, k_pages, v_pages = prepare(
            gpu, dtype, qkv, layout, block_size, num_blocks, slots, positions, cos, sin, interleaved=interleaved,
            norms=norms,
        )  # fmt: skip

        parts = np.split(qkv.reshape(tokens, -1, head_dim), [q_heads, q_heads + kv_heads], axis=1)
        expected = []
        for index, part in enumerate(parts[:2]):
            heads = dense.rms_norm(part, norms[index], 1e-6) if norms else part.astype(np.float64)
            if rotary:
                heads = dense.rotate(heads, cos[positions][:, None], sin[positions][:, None], interleaved)
            expected.append(heads)
        stored = slots >= 0
        block, inside = slots[stored] // block_size, slots[stored] % block_size
        written = k_pages[block, :, inside, :head_dim]
        assert dense.relative_error(q, expected[0]) < TOLERANCE[dtype]
        assert dense.relative_error(written, expected[1][stored]) < TOLERANCE[dtype]
        assert_equal(v_pages[block, :, inside, :head_dim], parts[2][stored])
        if not rotary and not has_norm:
            assert_equal(q, parts[0])
            assert_equal(written, parts[1][stored])
        for pages in (k_pages, v_pages):
            assert (pages[block, :, inside, head_dim:] == 0).all()
            untouched = np.ones(num_blocks * block_size, bool)
            untouched[slots[stored]] = False
            assert (pages.swapaxes(1, 2)[untouched.reshape(num_blocks, block_size)] == 99).all()

        rotation = ops.RopeTable(tensor(cos), tensor(sin), interleaved) if rotary else None
        of_cpu = ops.qkv_prepare(
            tensor(qkv.astype(np.float32)), tensor(positions), num_q_heads=q_heads, num_kv_heads=kv_heads,
            head_dim=head_dim, rope=rotation, q_norm=tensor(norms[0]) if norms else None,
            k_norm=tensor(norms[1]) if norms else None, norm_eps=1e-6, k_cache=case.cache.layer(0)[0],
            v_cache=case.cache.layer(0)[1], slot_mapping=tensor(slots),
        )  # fmt: skip
        assert dense.relative_error(q, of_cpu.numpy()) < TOLERANCE[dtype]
        assert dense.relative_error(written, cpu_pages[0][block, :, :, inside]) < 2 * TOLERANCE[dtype]
        assert_equal(v_pages[block, :, inside, :head_dim], cpu_pages[1][block, :, inside, :head_dim])


@pytest.mark.exhaustive
@pytest.mark.parametrize("norm", ["centred", "after"])
@pytest.mark.parametrize(("head_dim", "rotary", "interleaved"), [(64, 64, True), (64, 32, False), (7, 4, False)])
def test_layer_norms_and_norms_behind_the_rotation(
    gpu: Gpu, norm: str, head_dim: int, rotary: int, interleaved: bool
) -> None:
    rng, (tokens, q_heads, kv_heads) = np.random.default_rng(7), (9, 6, 2)
    qkv, (cos, sin) = normal(rng, (tokens, (q_heads + 2 * kv_heads) * head_dim), np.float32), tables(rotary)
    slots, positions = np.arange(tokens, dtype=np.int64), rng.integers(0, NUM_POSITIONS, tokens).astype(np.int32)
    weights = [normal(rng, (count if norm == "centred" else 1) * head_dim) for count in (q_heads, kv_heads)]
    q, k_pages, v_pages = prepare(
        gpu, "f32", qkv, (q_heads, kv_heads, head_dim), 16, 1, slots, positions, cos, sin, interleaved=interleaved,
        norms=weights, norm=norm,
    )  # fmt: skip
    parts = np.split(qkv.reshape(tokens, -1, head_dim), [q_heads, q_heads + kv_heads], axis=1)
    for found, part, weight in zip((q, k_pages[0, :, :tokens, :head_dim].swapaxes(0, 1)), parts, weights):
        expected = dense.prepared_heads(part, weight, 1e-6, norm, cos[positions], sin[positions], interleaved)
        assert dense.relative_error(found, expected) < TOLERANCE["f32"]
    assert_equal(v_pages[0, :, :tokens, :head_dim].swapaxes(0, 1), parts[2])


@both_archs
def test_one_head_may_be_normalised_and_the_other_not(gpu: Gpu) -> None:
    rng = np.random.default_rng(6)
    qkv, weight = normal(rng, (5, 6 * 64)), normal(rng, (64,))
    slots, positions = np.arange(5, dtype=np.int64), np.zeros(5, np.int32)
    inputs = [put(gpu, array) for array in (qkv, positions, weight, slots)]
    caches = [empty(gpu, (1, 1, 16, 64), "f32") for _ in range(2)]
    q = empty(gpu, (5, 4, 64), "f32")
    qkv_at, positions_at, weight_at, slots_at = [block.address for block in inputs]
    launch = plan_qkv_prepare(5, 4, 1, 64, 16, "f32", norm="head")
    k_at, v_at = (cache.address for cache in caches)
    gpu.launch(
        launch, qkv_at, positions_at, 0, 0, 0, 0, 0, weight_at, slots_at, k_at, v_at, 0, 0, q.address, 5, 4, 1, 1e-6
    )  # fmt: skip
    heads = qkv.reshape(5, 6, 64)
    assert_equal(get(gpu, q, (5, 4, 64), "f32"), heads[:, :4])
    keys = get(gpu, caches[0], (5, 64), "f32")
    assert dense.relative_error(keys, dense.rms_norm(heads[:, 4], weight, 1e-6)) < TOLERANCE["f32"]
    assert_equal(get(gpu, caches[1], (5, 64), "f32"), heads[:, 5])


def test_refuses_what_no_kernel_is_for() -> None:
    with pytest.raises(ValueError, match="rotary is 7, must be even"):
        plan_qkv_prepare(1, 1, 1, 8, 16, "f32", rotary=7)
    with pytest.raises(ValueError, match="rotary is 10, must be even and at most head_dim = 8"):
        plan_qkv_prepare(1, 1, 1, 8, 16, "f32", rotary=10)
    with pytest.raises(ValueError, match="block_size is 12"):
        plan_qkv_prepare(1, 1, 1, 8, 12, "f32")
    with pytest.raises(ValueError, match="head_dim is 513, must be 1 to 512"):
        plan_qkv_prepare(1, 1, 1, 513, 16, "f32")
    with pytest.raises(ValueError, match="dtype is 'f64'"):
        plan_qkv_prepare(1, 1, 1, 8, 16, "f64")
    with pytest.raises(ValueError, match="alignment is 1 bytes"):
        plan_qkv_prepare(1, 1, 1, 8, 16, "f16", alignment=1)
