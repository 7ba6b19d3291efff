"""Head norm, rotation and the write into pages, against float64 and bit for bit where nothing is computed."""

from __future__ import annotations

import numpy as np
import pytest

from runtime import ops
from runtime.errors import InvalidArgumentError
from tests.numba_kernels.cpu.cases import WEIGHT_TYPES, normal, paged_case, tensor
from tests.oracles import dense

CASES = [  # tokens, q heads, kv heads, head_dim, block size, rotary (0 = none), interleaved, norm
    (1, 1, 1, 2, 8, 2, False, ""), (1, 12, 12, 64, 16, 0, False, ""), (3, 4, 2, 8, 8, 8, True, ""),
    (5, 4, 1, 16, 16, 16, False, "head"), (7, 6, 3, 10, 24, 10, False, "head"), (17, 8, 1, 32, 32, 32, False, ""),
    (33, 2, 2, 128, 16, 128, False, "head"), (64, 9, 3, 5, 16, 0, False, ""), (2, 3, 3, 20, 8, 8, True, "head"),
    (40, 8, 8, 64, 16, 64, True, ""), (0, 2, 1, 16, 16, 16, False, "head"), (90, 14, 2, 64, 16, 64, False, ""),
    (9, 6, 2, 12, 16, 12, True, "centred"), (11, 3, 1, 7, 8, 4, False, "centred"),
    (13, 4, 2, 20, 16, 20, False, "after"), (5, 2, 2, 9, 8, 6, True, "after"),
]  # fmt: skip


def _run(case, qkv, slots, positions, rope, norms, layout, norm_kind="before"):
    q_heads, kv_heads, head_dim = layout
    k_cache, v_cache = case.cache.layer(0)
    return ops.qkv_prepare(
        tensor(qkv), tensor(positions), num_q_heads=q_heads, num_kv_heads=kv_heads, head_dim=head_dim, rope=rope,
        q_norm=norms[0], k_norm=norms[1], norm_eps=1e-6, norm_kind=norm_kind, k_cache=k_cache, v_cache=v_cache,
        slot_mapping=tensor(slots),
    )  # fmt: skip


@pytest.mark.parametrize("norm", ["", "head", "after"])
@pytest.mark.parametrize("rotary", [0, 6])
def test_neighbours_are_written_as_one_by_one(rotary: int, norm: str) -> None:
    """Runs of neighbouring slots, broken by ends of blocks, unwritten tokens and jumps."""
    tokens, heads, head_dim, block_size = 61, 3, 21, 24
    rng = np.random.default_rng(4)
    qkv, positions = normal(rng, (tokens, 3 * heads * head_dim)), np.arange(tokens, dtype=np.int32)
    slots = 29 + np.arange(tokens)
    slots[7] = slots[40] = -1
    slots[50:] += 2
    angles = rng.uniform(-3, 3, (tokens, rotary // 2))
    rope = ops.RopeTable(tensor(np.cos(angles, dtype=np.float32)), tensor(np.sin(angles, dtype=np.float32)), False)
    norms = [tensor(normal(rng, head_dim)) for _ in range(2)] if norm else [None, None]
    made = []
    for together in (True, False):
        case = paged_case(rng, [(0, 120)], heads=heads, kv_heads=heads, head_dim=head_dim, block_size=block_size)
        pages = [each.array for each in case.cache.layer(0)]
        for each in pages:
            each[...] = 7
        found = []
        for part in [slice(0, tokens)] if together else [slice(i, i + 1) for i in range(tokens)]:
            found.append(
                _run(
                    case, qkv[part], slots[part], positions[part], rope if rotary else None, norms,
                    (heads, heads, head_dim), norm if norm == "after" else "before",
                ).numpy()
            )  # fmt: skip
        made.append([np.concatenate(found), *pages])
    for together, alone in zip(*made, strict=True):
        np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize("dtype", WEIGHT_TYPES, ids=str)
@pytest.mark.parametrize("layout", CASES)
def test_equals_float64(layout, dtype):
    tokens, q_heads, kv_heads, head_dim, block_size, rotary, interleaved, norm = layout
    rng = np.random.default_rng(tokens)
    case = paged_case(
        rng, [(0, 2 * tokens + 1)], heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size,
        dtype=dtype,
    )  # fmt: skip
    k_pages, v_pages = (pages.array for pages in case.cache.layer(0))
    num_blocks = k_pages.shape[0]
    k_pages[...] = v_pages[...] = 99
    qkv = normal(rng, (tokens, (q_heads + 2 * kv_heads) * head_dim))
    slots = rng.permutation(num_blocks * block_size)[:tokens].astype(np.int64)
    slots[::5] = -1
    positions = rng.integers(0, 500, tokens).astype(np.int32)
    angles = np.outer(np.arange(500), 10000.0 ** -np.linspace(0, 1, max(1, rotary // 2)))[:, : rotary // 2]
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    rope = ops.RopeTable(tensor(cos), tensor(sin), interleaved) if rotary else None
    counts = (q_heads, kv_heads) if norm == "centred" else (1, 1)
    weights = [normal(rng, count * head_dim, dtype) for count in counts]
    norms = [tensor(w) for w in weights] if norm else [None, None]
    kind = norm if norm in ("centred", "after") else "before"
    q = _run(case, qkv, slots, positions, rope, norms, (q_heads, kv_heads, head_dim), kind).numpy()

    split = [q_heads, q_heads + kv_heads]
    parts = np.split(qkv.reshape(tokens, q_heads + 2 * kv_heads, head_dim), split, axis=1)
    angles = cos[positions], sin[positions], interleaved
    expected = [dense.prepared_heads(part, weight, 1e-6, norm, *angles) for part, weight in zip(parts, weights)]
    assert dense.relative_error(q, expected[0]) < 1e-5
    stored = slots >= 0
    block, inside = slots[stored] // block_size, slots[stored] % block_size
    tolerance = {4: 1e-5, 2: 2.0**-10 if dtype == np.float16 else 2.0**-7}[dtype.itemsize]
    written = k_pages[block, :, :, inside].astype(np.float32)
    assert dense.relative_error(written, expected[1][stored]) < tolerance
    np.testing.assert_array_equal(v_pages[block, :, inside, :head_dim], parts[2][stored].astype(dtype))
    if not rotary and not norm:
        np.testing.assert_array_equal(q, parts[0])
        np.testing.assert_array_equal(k_pages[block, :, :, inside], parts[1][stored].astype(dtype))
    untouched = np.ones(num_blocks * block_size, bool)
    untouched[slots[stored]] = False
    untouched = untouched.reshape(num_blocks, block_size)
    assert (k_pages.transpose(0, 3, 1, 2)[untouched] == 99).all()
    assert (v_pages.transpose(0, 2, 1, 3)[untouched] == 99).all()


@pytest.mark.parametrize("dtype", WEIGHT_TYPES[1:], ids=str)
def test_narrow_pages_round_to_nearest_even(dtype):
    values = np.concatenate([
        np.array([0.0, -0.0, 1e-45, 6e-8, 65504, 65520, 3e38, np.inf, -np.inf, np.nan], np.float32),
        (np.arange(256, dtype=np.uint32) * 0x1000 + 0x3F800000).view(np.float32),
        (np.arange(256, dtype=np.uint32) * 0x8000 + 0x3F800000).view(np.float32),
    ])  # fmt: skip
    values = np.concatenate([values, np.zeros(-len(values) % 16, np.float32)])
    layout = {"heads": 1, "kv_heads": 1, "head_dim": len(values), "block_size": 8}
    case = paged_case(np.random.default_rng(0), [(0, 8)], dtype=dtype, **layout)
    qkv = np.tile(values, 3)[None]
    _run(case, qkv, np.zeros(1, np.int64), np.zeros(1, np.int32), None, (None, None), (1, 1, len(values)))
    stored = case.cache.layer(0)[1].array[0, 0, 0]
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(stored.astype(np.float32), values.astype(dtype).astype(np.float32))


def test_refuses_positions_and_slots_out_of_range():
    case = paged_case(np.random.default_rng(0), [(0, 8)], heads=1, kv_heads=1, head_dim=4, block_size=8)
    table = tensor(np.ones((10, 2), np.float32))
    rope = ops.RopeTable(table, table, False)
    qkv = np.ones((2, 12), np.float32)
    arguments = {"rope": rope, "norms": (None, None), "layout": (1, 1, 4)}
    slots, positions = np.zeros(2, np.int64), np.zeros(2, np.int32)
    for bad in (-1, 10):
        with pytest.raises(InvalidArgumentError, match=r"qkv_prepare: positions .* limit 9"):
            _run(case, qkv, slots, np.array([0, bad], np.int32), **arguments)
    size = case.cache.num_blocks * 8
    with pytest.raises(InvalidArgumentError, match=f"qkv_prepare: slot_mapping holds {size}, limit {size - 1}"):
        _run(case, qkv, np.array([0, size], np.int64), positions, **arguments)
