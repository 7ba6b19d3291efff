"""Low-rank adapters on a GPU in one launch, against float64; a row's bits are those that it has alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest

from runtime import ops
from runtime.batch import Batch
from runtime.device.device import Device
from runtime.dtype import DType
from runtime.linear.gpu_slots import GpuSlots
from runtime.linear.low_rank_slots import DensePair, SlotShape
from runtime.linear.norm import RmsNorm
from runtime.linear.options import LoadOptions
from runtime.tensor.tensor import Tensor

CASES = [
    # type, rows, outputs of the parts, inputs, largest rank, ranks of the slots, whether x is normalised
    ("bfloat16", 5, (1500, 40, 24), 64, 16, (16, 3, 0), True),
    ("float32", 3, (70,), 33, 5, (5, 1), False),
    pytest.param("bfloat16", 70, (30, 2050), 40, 24, (24, 8, 9), False, marks=pytest.mark.exhaustive),
    pytest.param("float32", 2, (2100,), 4100, 9, (9,), True, marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("dtype", "rows", "heights", "depth", "rank", "ranks", "is_normed"), CASES)
def test_equals_float64(
    dtype: str, rows: int, heights: tuple[int, ...], depth: int, rank: int, ranks: tuple[int, ...], is_normed: bool
) -> None:
    device, kind = Device.parse("emulated:sm_90a"), np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
    rng, width = np.random.default_rng([rows, depth, rank]), sum(heights)

    def drawn(*shape: int) -> np.ndarray[Any, Any]:
        return rng.standard_normal(shape).astype(np.float32).astype(kind)

    def placed(array: np.ndarray[Any, Any]) -> Tensor:
        return Tensor.from_numpy(np.ascontiguousarray(array)).to(device)

    slots = GpuSlots(
        SlotShape(heights, depth, rank, len(ranks)), LoadOptions(device=device, dtype=DType.parse(dtype), exact=True)
    )
    x, residual = drawn(rows, depth), drawn(rows, width)
    ids = rng.integers(-1, len(ranks), rows).astype(np.int32)
    ids[0] = 0
    weights = rng.uniform(0.5, 1.5, depth).astype(np.float32)
    given, expected = x.astype(np.float64), residual.astype(np.float64)
    if is_normed:
        given = given / np.sqrt((given**2).mean(1, keepdims=True) + 1e-6) * weights
    for slot, own in enumerate(ranks):
        stale = [
            DensePair(np.ones((rank, depth), np.float32), np.ones((height, rank), np.float32)) for height in heights
        ]
        slots.write(slot, stale, np.ones(width, np.float32))
        pairs: list[DensePair | None] = []
        bias, first, of_slot = (drawn(width).astype(np.float32) if slot else None), 0, ids == slot
        for height in heights:
            down, up = (each.astype(np.float32) for each in (drawn(own, depth), drawn(height, own)))
            pairs.append(DensePair(down, up) if own else None)
            expected[of_slot, first : first + height] += given[of_slot] @ down.T.astype(np.float64) @ up.T
            first += height
        slots.write(slot, pairs, bias)
        if bias is not None:
            expected[of_slot] += bias
    norm = RmsNorm(placed(weights), 1e-6, 1.0) if is_normed else None

    def found(some: slice) -> np.ndarray[Any, Any]:
        batch = cast(Batch, SimpleNamespace(adapters=placed(ids[some]), computed={}))
        return ops.low_rank(placed(x[some]), batch, slots, residual=placed(residual[some]), norm=norm).to("cpu").numpy()

    out = found(slice(None))
    assert (
        np.abs(out.astype(np.float64) - expected).max()
        <= (4e-3 if dtype == "bfloat16" else 1e-6) * np.abs(expected).max()
    )
    for row in (0, rows - 1):
        np.testing.assert_array_equal(found(slice(row, row + 1))[0], out[row])
