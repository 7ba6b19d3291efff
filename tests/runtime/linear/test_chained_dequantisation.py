"""A packed weight that is written out as floats first: its product may not start early, as it then reads weights before
it waits for the kernel in front, which writes them."""

from __future__ import annotations

import numpy as np
import pytest

from runtime import ops
from runtime.device.device import Device
from runtime.device.gpu import Gpu
from runtime.dtype import DType, bfloat16, float32
from runtime.linear.options import LoadOptions
from runtime.linear.packed_matrix import MatrixPart, prepare_packed
from runtime.tensor.tensor import Tensor
from tests.runtime.linear.test_quantized import random_matrix

pytestmark = pytest.mark.emulator


@pytest.mark.parametrize(("dtype", "rows", "kernel"), [
    (float32, 1, "gemv"), pytest.param(bfloat16, 300, "gemm_hopper", marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_the_product_waits_for_its_weight(dtype: DType, rows: int, kernel: str) -> None:
    device = Device.parse("emulated:sm_90a")
    whole = MatrixPart(random_matrix("fp8", (256, 512), (128, 128)), slice(None), slice(None))
    weight = prepare_packed([whole], None, LoadOptions(device=device, dtype=dtype), None)
    x = np.random.default_rng(1).standard_normal((rows, 512)).astype(dtype.numpy)
    on_gpu = Tensor.from_numpy(x).to(device)
    apart = ops.linear(on_gpu, weight).to("cpu").array
    (planned,) = weight.plans.values()
    assert planned.dequantization is not None
    assert planned.launch.specialisation.name.startswith(kernel)
    assert planned.launch.starts_late
    with Gpu.of(device).chained():
        chained = ops.linear(on_gpu, weight)
    np.testing.assert_array_equal(chained.to("cpu").array, apart)
