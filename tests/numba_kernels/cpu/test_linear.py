"""The packed matrix product against float64, exactly on integers, and row by row the same in any batch."""

from __future__ import annotations

import numpy as np
import pytest

from numba_kernels.cpu import linear as kernels
from numba_kernels.cpu.launch import address_of
from numba_kernels.cpu.panels import empty_panels
from numba_kernels.cpu.target import PANEL_COLUMNS
from runtime import ops
from runtime.errors import InvalidArgumentError
from tests.numba_kernels.cpu.cases import WEIGHT_TYPES, normal, tensor
from tests.oracles import dense

SHAPES = [
    (1, 1, 1), (1, 768, 768), (2, 3, 5), (3, 47, 31), (4, 48, 16), (5, 49, 17), (6, 96, 64), (7, 97, 1), (8, 1, 100),
    (9, 145, 33), (13, 50, 1025), (16, 48, 2049), (17, 200, 3), (31, 61, 59), (33, 7, 1500), (64, 130, 70),
    (127, 96, 12), (128, 257, 40), (129, 33, 257), (300, 101, 19), (0, 10, 10), (3, 10, 0), (1, 2000, 700),
]  # fmt: skip


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
    assert np.abs(out - dense.linear(x, weight, bias, residual)).max(initial=0.0) <= 1e-5 * scale
    plain = ops.linear(tensor(x), ops.prepare_linear(tensor(weight))).numpy()
    assert np.abs(plain - dense.linear(x, weight)).max(initial=0.0) <= 1e-5 * scale


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
    for panels_a_ticket, tile_rows, row_tiles, workers in ((1, 4, 2, 2), (3, 1, 37, 2), (2, 3, 5, 1), (99, 2, 3, 2)):
        rows_a_ticket = tile_rows * row_tiles
        count = -(-panels // panels_a_ticket) * -(-37 // rows_a_ticket)
        tickets = kernels.Tickets(count, panels_a_ticket, rows_a_ticket, tile_rows, workers)
        monkeypatch.setattr(kernels, "tickets_of", lambda *sizes, tickets=tickets: tickets)
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
    expected = dense.linear(x, np.concatenate([p.astype(np.float64) for p in parts]), bias)
    assert dense.relative_error(ops.linear(tensor(x), packed).numpy(), expected) < 1e-5
    assert packed.panels.shape[0] == -(-131 // PANEL_COLUMNS)


def test_large_weights_lie_on_their_own_aligned_pages():
    panels = empty_panels(1500, 1000, np.dtype(np.float32))
    assert panels.shape == (-(-1500 // PANEL_COLUMNS), 1000, PANEL_COLUMNS, 1)
    assert address_of(panels) % 4096 == 0
    assert not panels.any()


def test_nan_stays_in_its_row():
    rng = np.random.default_rng(7)
    x, packed = normal(rng, (10, 20)), ops.prepare_linear(tensor(normal(rng, (60, 20))))
    x[4, 3] = np.nan
    out = ops.linear(tensor(x), packed).numpy()
    assert np.isnan(out[4]).all()
    assert np.isfinite(np.delete(out, 4, 0)).all()


@pytest.mark.parametrize(
    ("weights", "biases", "param", "words"),
    [
        ([], None, "weight", "empty"),
        ([np.zeros((2, 3, 4), np.float32)], None, "weight", r"\(2, 3, 4\)"),
        ([np.zeros((2, 3), np.int8)], None, "weight", "int8"),
        ([np.zeros((2, 3), np.float32), np.zeros((2, 4), np.float32)], None, "weight", "has K 4"),
        ([np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float16)], None, "weight", "has dtype"),
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
