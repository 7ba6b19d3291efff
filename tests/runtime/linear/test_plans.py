"""Plans of products that weights of one kind share: which are of one kind, and how long the plans live."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from runtime import ops
from runtime.backends import cuda_tensor
from runtime.device.device import Device
from runtime.device.gpu import Gpu
from runtime.linear import weight as weight_module
from runtime.linear.options import LoadOptions
from runtime.linear.weight import GpuWeight, Plans
from runtime.tensor.tensor import Tensor
from tests.runtime.device.emulated import new_gpu

DEVICE = Device("emulated:sm_90a")


def weight(rows: int = 64, *, bias: bool = False, dtype: str = "bfloat16", **options: Any) -> GpuWeight:
    matrix = Tensor.from_numpy(np.ones((rows, 32), np.float32)).to(dtype)
    given = Tensor.from_numpy(np.ones(rows, np.float32)) if bias else None
    made = ops.prepare_linear(matrix, given, LoadOptions(device=DEVICE, **options))
    assert isinstance(made, GpuWeight)
    return made


def test_weights_of_one_kind_share_their_plans_and_no_others_do() -> None:
    first, second = weight(), weight()
    assert first.plans is second.plans
    others = [weight(96), weight(bias=True), weight(dtype="float16"), weight(exact=True), weight(gemm="tensor_core")]
    assert len({id(each.plans) for each in (first, *others)}) == 1 + len(others)
    with new_gpu("sm_90a").installed():  # of the same name, perhaps with fewer multiprocessors
        assert weight().plans is not first.plans


@pytest.mark.exhaustive
def test_plans_go_with_the_last_weight_and_keep_none() -> None:
    gpu = Gpu.of(DEVICE)
    first, second = weight(160), weight(160)
    x = Tensor.zeros((3, 32), "bfloat16", DEVICE)
    ops.linear(x, first)
    ops.linear(x, second)
    assert len(first.plans) == 1
    plans, memory = weakref.ref(first.plans), weakref.ref(second.memory.storage)
    del second
    gc.collect()
    assert memory() is None
    assert plans() is not None
    num_kinds = len(gpu.plans)
    del first
    gc.collect()
    assert plans() is None
    assert len(gpu.plans) == num_kinds - 1


def test_plans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_module, "MOST_PLANS", 3)
    plans = Plans()
    for rows in range(10):
        plans.keep(rows, -rows)
        assert plans[rows] == -rows
        assert len(plans) <= 3
    monkeypatch.setattr(cuda_tensor, "MOST_PLANS", 2)
    asked: list[int] = []
    plan = cuda_tensor.remembered(lambda rows: asked.append(rows) or [rows])
    assert plan(1) is plan(1)
    for rows in (2, 3, 1):
        assert plan(rows) == [rows]
    assert asked == [1, 2, 3, 1]
