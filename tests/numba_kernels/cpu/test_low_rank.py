"""Low-rank sums that ride on products, against float64, and row by row the same in any batch.

`test_tiles` runs this file under each kind of tile.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from models.quantized.on_load import ROUNDINGS
from numba_kernels.blocks import BLOCKS
from runtime import ops
from runtime.backends import cpu_threads
from runtime.dtype import DType
from runtime.errors import InvalidArgumentError
from runtime.linear.low_rank_slots import CpuSlots, DensePair, LowRank, SlotShape
from runtime.linear.options import LoadOptions
from runtime.linear.quantise import quantise
from tests.numba_kernels.cpu.cases import WEIGHT_TYPES, normal, tensor
from tests.oracles import dense
from tests.oracles.tiles import ROUNDS_TO_BF16, as_multiplied
from tests.runtime.linear.test_split_k import Rank

SIZES = [
    # rows, outputs of the parts, inputs, largest rank, ranks of the slots in all parts
    (1, (48,), 64, 16, (16, 16)),
    (1, (2000, 700), 130, 8, (8, 3)),
    (2, (1,), 1, 1, (1, 0)),
    (7, (33, 17, 80), 31, 5, (5, 1, 2)),
    (33, (96, 48), 257, 40, (40, 7, 16)),
    (130, (50, 51), 65, 9, (9, 9, 9, 4)),
    (1100, (31, 40), 33, 3, (3, 2)),
]
BF16 = WEIGHT_TYPES[2]


def _product(rows, heights, depth, rank, ranks, dtype):
    """(a weight with residual's and x's arrays, the slots, the adapters, what float64 gives)."""
    rng = np.random.default_rng([rows, depth, rank])
    width = sum(heights)
    x, weight, bias = normal(rng, (rows, depth)), normal(rng, (width, depth), dtype), normal(rng, width)
    residual = normal(rng, (rows, width))
    slots = CpuSlots(SlotShape(heights, depth, rank, len(ranks)), DType.parse(dtype))
    ids = rng.integers(-1, len(ranks), rows).astype(np.int32)
    given = as_multiplied(x, dtype)
    expected = dense.linear(given, weight, bias, residual)
    is_rounded = ROUNDS_TO_BF16 and dtype == BF16
    for slot, own in enumerate(ranks):
        stale = DensePair(normal(rng, (rank, depth)), normal(rng, (heights[0], rank)))
        slots.write(slot, [stale] + [None] * (len(heights) - 1), normal(rng, width))
        pairs, first, of_slot = [], 0, np.flatnonzero(ids == slot)
        extra = normal(rng, width) if slot % 2 else None
        for number, height in enumerate(heights):
            has_own = own and (number or slot != 1)
            down, up = normal(rng, (own, depth), dtype), normal(rng, (height, own), dtype)
            pairs.append(DensePair(down.astype(np.float32), up.astype(np.float32)) if has_own else None)
            if has_own:
                source = given if is_rounded else x
                between = source[of_slot].astype(np.float64) @ down.astype(np.float64).T
                if is_rounded:
                    between = between.astype(np.float32).astype(BF16).astype(np.float64)
                expected[of_slot, first : first + height] += between @ up.astype(np.float64).T
            first += height
        slots.write(slot, pairs, extra)
        if extra is not None:
            expected[of_slot] += extra
    return ops.prepare_linear(tensor(weight), tensor(bias)), x, residual, slots, ids, expected


def _error(out, expected, dtype, depth, rank):
    """Relative to the sums' own size; a number between that is rounded to the other bfloat16 moves a sum more."""
    largest, usual = (4e-3, 1e-4) if dtype == BF16 and ROUNDS_TO_BF16 else (2e-6, 1.5e-7)
    size = np.sqrt(depth * (1 + rank))
    assert np.abs(out - expected).max(initial=0.0) <= largest * size
    assert np.abs(out - expected).mean() <= usual * size


@pytest.mark.parametrize("dtype", WEIGHT_TYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_equals_float64(size, dtype):
    rows, _, depth, rank, _ = size
    weight, x, residual, slots, ids, expected = _product(*size, dtype)
    adapters, given = tensor(ids), tensor(x)
    out = ops.linear(given, weight, residual=tensor(residual), low_rank=LowRank(slots, given, adapters, {})).numpy()
    _error(out, expected, dtype, depth, rank)
    in_place = tensor(residual.copy())
    ops.linear(given, weight, residual=in_place, out=in_place, low_rank=LowRank(slots, given, adapters, {}))
    np.testing.assert_array_equal(in_place.numpy(), out)
    for row in range(0, rows, 1 + rows // 7):
        some = slice(row, row + 1 + row % 3)
        alone = tensor(x[some])
        low_rank = LowRank(slots, alone, tensor(ids[some]), {})
        found = ops.linear(alone, weight, residual=tensor(residual[some]), low_rank=low_rank).numpy()
        np.testing.assert_array_equal(found, out[some])


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_rides_on_quantised_products_on_any_threads(quantization):
    rng = np.random.default_rng(1)
    heights, depth, rank = (300, 100), 256, 16
    matrix = normal(rng, (400, depth), BF16)
    if quantization == "int8":
        weight = ops.prepare_linear(tensor(matrix), None, LoadOptions.parse(quantization=quantization))
    else:
        weight = ops.prepare_linear([quantise(matrix.astype(np.float32), ROUNDINGS[quantization])])
        assert weight.stored in BLOCKS
    slots = CpuSlots(SlotShape(heights, depth, rank, 3), DType.parse("bfloat16"))
    for slot in range(3):
        pairs = [DensePair(normal(rng, (rank, depth)), normal(rng, (height, rank))) for height in heights]
        slots.write(slot, pairs, None)
    x, ids = tensor(normal(rng, (150, depth))), tensor(rng.integers(-1, 3, 150).astype(np.int32))
    plain = ops.linear(x, weight).numpy()
    found = []
    try:
        for workers in {1, cpu_threads.MAX_WORKERS}:
            cpu_threads.set_num_workers(workers)
            found.append(ops.linear(x, weight, low_rank=LowRank(slots, x, ids, {})).numpy())
    finally:
        cpu_threads.set_num_workers(cpu_threads.MAX_WORKERS)
    for each in found:
        np.testing.assert_array_equal(each, found[0])
    added = ops.low_rank(x, SimpleNamespace(adapters=ids, computed={}), slots).numpy()
    np.testing.assert_array_equal(added[ids.numpy() < 0], 0)
    np.testing.assert_array_equal(plain + added, found[0])


@pytest.mark.parametrize("dtype", WEIGHT_TYPES[::2], ids=str)
def test_exact_sums_of_ranks_are_those_of_one(dtype):
    rng = np.random.default_rng(2)
    width, depth, rows = 70, 128, 9
    x, residual = normal(rng, (rows, depth)), tensor(normal(rng, (rows, width)))
    matrix, ids = normal(rng, (width, depth), dtype), tensor(rng.integers(-1, 2, rows).astype(np.int32))
    slots = CpuSlots(SlotShape((width,), depth, 4, 2), DType.parse(dtype))
    for slot in range(2):
        slots.write(slot, [DensePair(normal(rng, (4, depth)), normal(rng, (width, 4)))], None)
    low_rank = LowRank(slots, tensor(x), ids, {})
    whole = ops.prepare_linear(tensor(matrix), None, LoadOptions(exact=True), split="inputs")
    expected = ops.linear(tensor(x), whole, residual=residual, low_rank=low_rank).numpy()
    partials = []
    for rank in range(2):
        columns = slice(rank * depth // 2, (rank + 1) * depth // 2)
        options = LoadOptions(exact=True, communicator=Rank(rank, 2))
        part = ops.prepare_linear(tensor(matrix[:, columns]), None, options, split="inputs")
        partials.append(ops.linear_partial(tensor(np.ascontiguousarray(x[:, columns])), part).numpy())
    added = ops.add_partials(tensor(np.stack(partials)), part, residual=residual, low_rank=low_rank).numpy()
    np.testing.assert_array_equal(added, expected)


def test_wrong_slots_are_refused():
    slots = CpuSlots(SlotShape((8,), 4, 2, 1), DType.parse("float32"))
    x, ids = tensor(np.zeros((3, 4), np.float32)), tensor(np.zeros(3, np.int32))
    weight = ops.prepare_linear(tensor(np.zeros((9, 4), np.float32)))
    with pytest.raises(InvalidArgumentError, match=r"low_rank\.slots must be a CpuSlots of 9 outputs"):
        ops.linear(x, weight, low_rank=LowRank(slots, x, ids, {}))
    weight = ops.prepare_linear(tensor(np.zeros((8, 4), np.float32)))
    with pytest.raises(InvalidArgumentError, match=r"low_rank\.adapters"):
        ops.linear(x, weight, low_rank=LowRank(slots, x, tensor(np.zeros(2, np.int32)), {}))
