"""The packed matrix product against float64, exactly on integers, and row by row the same in any batch.

`test_tiles` runs this file under each kind of tile.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from numba_kernels.cpu.gemm import linear as kernels
from numba_kernels.cpu.gemm.panels import empty_panels
from numba_kernels.cpu.layout import PANEL_COLUMNS
from numba_kernels.cpu.running.launch import address_of
from runtime import ops
from runtime.errors import InvalidArgumentError
from runtime.linear.options import LoadOptions
from tests.numba_kernels.cpu.cases import WEIGHT_TYPES, normal, tensor
from tests.oracles import dense, int8
from tests.oracles.tiles import as_multiplied, product

SHAPES = [
    (1, 1, 1), (1, 768, 768), (2, 3, 5), (3, 47, 31), (4, 48, 16), (5, 49, 17), (6, 96, 64), (7, 97, 1), (8, 1, 100),
    (9, 145, 33), (13, 50, 1025), (16, 48, 2049), (17, 200, 3), (31, 61, 59), (33, 7, 1500), (64, 130, 70),
    (127, 96, 12), (128, 257, 40), (129, 33, 257), (300, 101, 19), (0, 10, 10), (3, 10, 0), (1, 2000, 700),
    (1, 70, 1), (1, 5, 2), (1, 49, 3), (2, 2, 1),
]  # fmt: skip

MORE_SHAPES = [
    (1, 48, 64), (1, 700, 130), (2, 17, 3), (3, 33, 61), (4, 96, 257), (5, 1, 1), (6, 50, 128), (7, 49, 63),
    (8, 100, 65), (9, 5, 1030), (10, 145, 20), (19, 31, 700), (40, 97, 192), (0, 10, 10), (3, 10, 0),
]  # fmt: skip
KINDS = ("float32", "bfloat16", "float16", "int8")


def stored(kind):
    """The type of a weight before it is prepared, and its quantization."""
    return np.dtype("bfloat16" if kind == "int8" else kind), "int8" if kind == "int8" else "none"


@pytest.mark.parametrize("dtype", WEIGHT_TYPES, ids=str)
@pytest.mark.parametrize(("rows", "width", "depth"), SHAPES)
def test_equals_float64(rows, width, depth, dtype):
    rng = np.random.default_rng([rows, width, depth])
    x, weight, bias = normal(rng, (rows, depth)), normal(rng, (width, depth), dtype), normal(rng, width)
    residual = normal(rng, (rows, width))
    packed = ops.prepare_linear(tensor(weight), tensor(bias))
    assert packed.shape == (width, depth)
    out = ops.linear(tensor(x), packed, residual=tensor(residual)).numpy()
    scale = max(1.0, np.sqrt(depth))  # of a sum of products of unit normals
    given = as_multiplied(x, dtype)
    assert np.abs(out - dense.linear(given, weight, bias, residual)).max(initial=0.0) <= 1e-5 * scale
    plain = ops.linear(tensor(x), ops.prepare_linear(tensor(weight))).numpy()
    assert np.abs(plain - dense.linear(given, weight)).max(initial=0.0) <= 1e-5 * scale


@pytest.mark.parametrize("kind", KINDS)
def test_gated_products_are_those_of_two_launches(kind):
    """Halves that end at a panel's end, before it and after it; several work items of rows and of panels."""
    rng = np.random.default_rng(1)
    dtype, quantization = stored(kind)
    for rows, half, depth in ((9, 5, 33), (13, 48, 130), (40, 70, 64), (130, 100, 300), (270, 144, 96), (20, 240, 700)):
        x, weight = normal(rng, (rows, depth)), normal(rng, (2 * half, depth), dtype)
        bias = normal(rng, 2 * half)
        packed = ops.prepare_linear(tensor(weight), tensor(bias), LoadOptions.parse(quantization=quantization))
        for activation in ("silu", "gelu_tanh", "clamped_silu"):
            found = ops.linear_glu(tensor(x), packed, activation).numpy()
            expected = ops.glu(ops.linear(tensor(x), packed), activation).numpy()
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_any_size(kind):
    """No weight at all in a column, groups without any activation, huge and tiny rows; a row of a table is exact."""
    dtype, quantization = stored(kind)
    for rows, width, depth in MORE_SHAPES:
        rng = np.random.default_rng([rows, width, depth])
        x, weight = normal(rng, (rows, depth)), normal(rng, (width, depth), dtype)
        bias, residual = normal(rng, width), normal(rng, (rows, width))
        weight[width // 2] = 0
        x[:, : depth // 2] *= 0
        x[rows // 2 :] *= np.float32(1e4)
        x[: rows // 4] *= np.float32(1e-12)
        packed = ops.prepare_linear(tensor(weight), tensor(bias), LoadOptions.parse(quantization=quantization))
        out = ops.linear(tensor(x), packed, residual=tensor(residual)).numpy()
        if kind == "int8":
            expected = int8.linear(x, weight, bias, residual)
        else:
            expected = dense.linear(as_multiplied(x, dtype), weight, bias, residual)
        assert out.shape == expected.shape
        size = np.abs(expected).max(1, keepdims=True, initial=1.0)
        assert (np.abs(out - expected) <= 1e-5 * size).all(), (rows, width, depth)

        ids = np.arange(0, width, 7, dtype=np.int32)
        table = ops.embedding(tensor(ids), packed).numpy()
        if kind == "int8":
            integers, scales = int8.weight(weight)
            np.testing.assert_array_equal(table, (integers.astype(np.float32) * scales[:, None])[ids])
        else:
            np.testing.assert_array_equal(table, weight[ids].astype(np.float32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "width", "depth"), [(1, 50, 300), (9, 145, 33), (35, 97, 129)])
def test_sums_are_those_of_the_definition_to_the_bit(rows, width, depth, kind):
    """In every layout, compiled for any processor: where the arithmetic is the same, so are the results."""
    dtype, quantization = stored(kind)
    rng = np.random.default_rng([rows, width, depth])
    x, weight, bias = normal(rng, (rows, depth)), normal(rng, (width, depth), dtype), normal(rng, width)
    residual = normal(rng, (rows, width))
    packed = ops.prepare_linear(tensor(weight), tensor(bias), LoadOptions.parse(quantization=quantization))
    out = ops.linear(tensor(x), packed, residual=tensor(residual)).numpy()
    np.testing.assert_array_equal(out, product(x, weight, bias, residual, kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row(kind, bad):
    dtype, quantization = stored(kind)
    x = normal(np.random.default_rng(1), (5, 200))
    x[3, 150] = bad
    weight = normal(np.random.default_rng(2), (60, 200), dtype)
    packed = ops.prepare_linear(tensor(weight), options=LoadOptions.parse(quantization=quantization))
    out = ops.linear(tensor(x), packed).numpy()
    assert not np.isfinite(out[3]).any()
    assert np.isfinite(np.delete(out, 3, 0)).all()


@pytest.mark.parametrize("dtype", WEIGHT_TYPES, ids=str)
@pytest.mark.parametrize(("rows", "width", "depth"), [(1, 100, 300), (8, 48, 2100), (21, 331, 97), (150, 64, 1030)])
def test_integers_are_exact(rows, width, depth, dtype):
    rng = np.random.default_rng(1)
    x = rng.integers(-8, 9, (rows, depth)).astype(np.float32)
    weight = rng.integers(-8, 9, (width, depth)).astype(dtype)
    bias = rng.integers(-99, 100, width).astype(np.float32)
    out = ops.linear(tensor(x), ops.prepare_linear(tensor(weight), tensor(bias))).numpy()
    np.testing.assert_array_equal(out, dense.linear(x, weight, bias))


@pytest.mark.parametrize("depth", [40, 2500])
def test_a_row_is_the_same_alone_and_in_any_batch(depth):
    rng = np.random.default_rng(2)
    x, packed = normal(rng, (300, depth)), ops.prepare_linear(tensor(normal(rng, (500, depth))))
    whole = ops.linear(tensor(x), packed).numpy()
    for rows in (slice(0, 1), slice(7, 9), slice(3, 6), slice(3, 10), slice(290, 300), slice(5, 140)):
        np.testing.assert_array_equal(ops.linear(tensor(x[rows].copy()), packed).numpy(), whole[rows])


def test_any_split_of_the_work_gives_the_same_bits(monkeypatch):
    rng = np.random.default_rng(3)
    x, packed = normal(rng, (37, 60)), ops.prepare_linear(tensor(normal(rng, (500, 60))))
    expected = ops.linear(tensor(x), packed).numpy()
    panels = packed.panels.shape[0]
    shares = ((1, 10, 5, 2), (3, 37, 1, 2), (2, 13, 3, 1), (99, 19, 7, 2))
    for panels_a_work_item, num_tiles, row_work_items, workers in shares:
        count = -(-panels // panels_a_work_item) * row_work_items
        work_items = kernels.WorkItems(count, panels_a_work_item, row_work_items, num_tiles, workers)
        monkeypatch.setattr(kernels, "work_items_of", lambda *sizes, work_items=work_items: work_items)
        np.testing.assert_array_equal(ops.linear(tensor(x), packed).numpy(), expected)


def test_writes_nothing_beyond_its_output():
    rng = np.random.default_rng(4)
    guarded = np.full(3 * 50 + 200, 7.0, np.float32)
    out = guarded[100:250].reshape(3, 50)
    x, packed = normal(rng, (3, 20)), ops.prepare_linear(tensor(normal(rng, (50, 20))))
    ops.linear(tensor(x), packed, out=tensor(out))
    assert (guarded[:100] == 7).all()
    assert (guarded[250:] == 7).all()
    assert not (out == 7).any()


def test_residual_may_be_the_output():
    rng = np.random.default_rng(5)
    x, weight, residual = normal(rng, (9, 2100)), normal(rng, (70, 2100)), normal(rng, (9, 70))
    expected = dense.linear(x, weight, None, residual)
    target = tensor(residual)
    assert ops.linear(tensor(x), ops.prepare_linear(tensor(weight)), residual=target, out=target) is target
    assert dense.relative_error(target.numpy(), expected) < 1e-5


@pytest.mark.parametrize("dtype", WEIGHT_TYPES, ids=str)
def test_joined_weights_of_any_strides(dtype):
    rng = np.random.default_rng(6)
    parts = [normal(rng, (30, 10), dtype).T, normal(rng, (21, 60), dtype)[::3, ::2], normal(rng, (100, 30), dtype)]
    parts[1] = normal(rng, (21, 60), dtype)[:, ::2]
    biases = [None, normal(rng, 21), normal(rng, 100)]
    packed = ops.prepare_linear([tensor(p) for p in parts], [None if b is None else tensor(b) for b in biases])
    x = normal(rng, (4, 30))
    bias = np.concatenate([np.zeros(10), biases[1], biases[2]])
    expected = dense.linear(as_multiplied(x, dtype), np.concatenate([p.astype(np.float64) for p in parts]), bias)
    assert dense.relative_error(ops.linear(tensor(x), packed).numpy(), expected) < 1e-5
    assert packed.panels.shape[0] == -(-131 // PANEL_COLUMNS)


def test_parts_of_several_types_keep_them():
    """Each part's columns have the bits of the part alone, next to the others' and in place."""
    rng = np.random.default_rng(8)
    dtypes = [np.dtype(name) for name in ("bfloat16", "bfloat16", "float32", "float16")]
    parts = [normal(rng, (width, 70), dtype) for width, dtype in zip((10, 41, 5, 60), dtypes, strict=True)]
    biases = [normal(rng, len(part)) for part in parts]
    joined = ops.prepare_linear([tensor(part) for part in parts], [tensor(bias) for bias in biases])
    assert [(part.format.name, part.shape[0]) for part in joined.parts] == [
        ("bfloat16", 51), ("float32", 5), ("float16", 60)
    ]  # fmt: skip
    assert joined.size_bytes == sum(part.size_bytes for part in joined.parts)
    for rows in (1, 7, 1030):
        x, residual = normal(rng, (rows, 70)), normal(rng, (rows, 116))
        alone = [ops.linear(tensor(x), ops.prepare_linear(tensor(w), tensor(b))) for w, b in zip(parts, biases)]
        together = np.concatenate([one.numpy() for one in alone], 1)
        np.testing.assert_array_equal(ops.linear(tensor(x), joined).numpy(), together)
        target = tensor(residual.copy())
        ops.linear(tensor(x), joined, residual=target, out=target)
        np.testing.assert_array_equal(target.numpy(), together + residual)


def test_small_panels_share_huge_pages_but_no_byte() -> None:
    """As many as do not fit one piece of memory; lines of their own, zeros, and kept by whoever holds one."""
    made = [empty_panels(96, 2048 + extra, np.dtype(np.float32)) for extra in range(30)]
    assert all(1 << 19 < each.nbytes < 2 << 20 for each in made)
    spans = sorted((each.ctypes.data, each.nbytes) for each in made)
    assert all(start % 64 == 0 for start, _ in spans)
    assert all(start + size <= after for (start, size), (after, _) in itertools.pairwise(spans))
    for number, each in enumerate(made, 1):
        assert not each.any()
        each[:] = number
    kept = made[3::7]
    del made
    empty_panels(96, 2048, np.dtype(np.float32))[:] = -1
    for number, each in zip(range(4, 31, 7), kept, strict=True):
        assert (each == number).all()


def test_large_weights_lie_on_their_own_aligned_pages():
    panels = empty_panels(1500, 1000, np.dtype(np.float32))
    assert panels.shape == (-(-1500 // PANEL_COLUMNS), 1000, PANEL_COLUMNS, 1)
    assert address_of(panels) % 4096 == 0
    assert not panels.any()


@pytest.mark.parametrize(
    ("weights", "biases", "param", "words"),
    [
        ([], None, "weight", "empty"),
        ([np.zeros((2, 3, 4), np.float32)], None, "weight", r"\(2, 3, 4\)"),
        ([np.zeros((2, 3), np.int8)], None, "weight", "int8"),
        ([np.zeros((2, 3), np.float32), np.zeros((2, 4), np.float32)], None, "weight", "has K 4"),
        ([np.zeros((2, 3), np.float32)], [np.zeros(3, np.float32)], "bias", r"\(3,\), must be \[2\]"),
        ([np.zeros((2, 3), np.float32)], [np.zeros(2, np.int32)], "bias", "int32"),
        ([np.zeros((2, 3), np.float32)], [None, None], "bias", "one entry for each of 1"),
    ],
)
def test_prepare_refuses(weights, biases, param, words):
    given = None if biases is None else [None if b is None else tensor(b) for b in biases]
    with pytest.raises(InvalidArgumentError, match=f"prepare_linear: .*{words}") as caught:
        ops.prepare_linear([tensor(w) for w in weights], given)
    assert caught.value.param == param


def test_one_bias_cannot_serve_two_weights():
    part, bias = tensor(np.zeros((2, 3), np.float32)), tensor(np.zeros(2, np.float32))
    with pytest.raises(InvalidArgumentError, match="bias must hold one entry for each of 2"):
        ops.prepare_linear([part, part], bias)
