"""The matrices of experts on a GPU. The GPU is emulated."""

from __future__ import annotations

import numpy as np

from runtime import ops
from runtime.device.gpu import Gpu
from runtime.device.graph import Graph, GraphPool
from runtime.dtype import bfloat16
from runtime.linear.experts import ExpertsWeight
from runtime.linear.options import LoadOptions
from runtime.tensor.tensor import Tensor

DEVICE = "emulated:sm_90a"


def test_some_experts_of_a_recorded_pass_are_in_no_memory_of_others() -> None:
    """Adapters of many experts are multiplied some at a time, whose addresses the first such pass sends."""
    gpu, pool = Gpu.of(DEVICE), GraphPool(Gpu.of(DEVICE))
    options = LoadOptions(device=gpu.device, dtype=bfloat16)
    matrix = Tensor.from_numpy(np.ones((64, 64), bfloat16.numpy))
    weight = ExpertsWeight([ops.prepare_linear(matrix, None, options) for _ in range(4)])
    x = Tensor.ones((64, 64), "float32", DEVICE)
    before = Graph.capture(gpu, lambda: (x + x) * (x * x), pool=pool)
    Graph.capture(gpu, lambda: [weight.some(first, first + 2) for first in (0, 2)], pool=pool)
    before.replay()
    gpu.synchronize()
    parts = [weight.some(first, first + 2) for first in (0, 2)]
    for name, axis in (("table", 1), ("maps", 0)):
        whole, *found = (getattr(each, name).to("cpu").array for each in (weight, *parts))
        assert np.array_equal(np.concatenate(found, axis=axis), whole)
