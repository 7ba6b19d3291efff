"""Maps on a GPU whose columns are stored in another order, as GPTQ's `desc_act` leaves them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from runtime import ops
from runtime.device.device import Device
from runtime.dtype import DType, bfloat16, float32
from runtime.linear.options import LoadOptions
from runtime.linear.packed_matrix import MatrixPart, prepare_packed
from runtime.linear.quantized import NumberKind, QuantizedMatrix
from runtime.tensor.tensor import Tensor
from tests.runtime.linear.test_quantized import random_matrix

pytestmark = pytest.mark.emulator
ROWS = (1, 3, 70)  # each number has kernels of its own


def parts_of(kind: NumberKind, depth: int, has_zeros: bool) -> list[QuantizedMatrix]:
    """Two matrices of one order."""
    parts = [
        random_matrix(kind, (48, depth), (1, 32), np.float16, has_zeros=has_zeros, has_order=True, seed=seed)
        for seed in (1, 2)
    ]
    parts[1].order[:] = parts[0].order  # type: ignore[index]
    return parts


@pytest.mark.parametrize(
    ("kind", "depth", "has_zeros", "dtype", "arch", "row_counts"),
    [
        ("int4", 264, True, bfloat16, "sm_90a", ROWS[1:2]),
        *(pytest.param(*each, ROWS, marks=pytest.mark.exhaustive) for each in (
            ("int4", 264, True, bfloat16, "sm_90a"),
            ("int8", 264, True, bfloat16, "sm_80"), ("int4", 328, False, bfloat16, "sm_90a"),
            ("int4", 129, True, float32, "sm_80"), ("fp8", 130, False, float32, "sm_120a"),
        )),
    ],
)  # fmt: skip
@pytest.mark.exhaustive
def test_products(
    kind: NumberKind, depth: int, has_zeros: bool, dtype: DType, arch: str, row_counts: tuple[int, ...]
) -> None:
    """As of the same matrix in floats, for one row and many, and gated."""
    parts, device = parts_of(kind, depth, has_zeros), Device.parse(f"emulated:{arch}")
    weight = prepare_packed(
        [MatrixPart(part, slice(None), slice(None)) for part in parts], None, LoadOptions(device=device, dtype=dtype),
        None,
    )  # fmt: skip
    assert weight.order is not None
    assert weight.size_bytes == weight.memory.size_bytes + 4 * depth
    matrix = np.concatenate([part.dequantise(float32) for part in parts]).astype(np.float64)
    rng = np.random.default_rng(depth)
    for rows in row_counts:
        x = (rng.standard_normal((rows, depth)) * 10.0 ** rng.uniform(-1, 1, depth)).astype(dtype.numpy)
        on_gpu = Tensor.from_numpy(x).to(device)
        used = x.astype(np.float64)
        expected, size = used @ matrix.T, np.abs(used) @ np.abs(matrix).T
        got = ops.linear(on_gpu, weight).to("cpu").array.astype(np.float64)
        unit = 2.0**-7 if dtype is bfloat16 else 2.0**-20
        assert (np.abs(got - expected) <= unit * (size / 2 + np.abs(expected))).all()
        gate, up = expected[:, :48], expected[:, 48:]
        gated = ops.linear_glu(on_gpu, weight, "silu").to("cpu").array.astype(np.float64)
        expected = gate / (1 + np.exp(-gate)) * up
        assert np.abs(gated - expected).max() <= (3e-2 if dtype is bfloat16 else 1e-4) * np.abs(expected).max()
        in_order = Tensor.from_numpy(np.ascontiguousarray(x[:, parts[0].order])).to(device)
        weight.order, order = None, weight.order
        apart = ops.linear(in_order, weight).to("cpu").array
        weight.order = order
        np.testing.assert_array_equal(ops.linear(on_gpu, weight).to("cpu").array, apart)


def test_columns_are_moved_as_they_are() -> None:
    """NaN, infinities and zeros of either sign included."""
    from numba_kernels.cuda import embedding
    from runtime.device.gpu import Gpu

    device = Device.parse("emulated:sm_90a")
    gpu, rng = Gpu.of(device), np.random.default_rng(3)
    for dtype, size in ((ml_dtypes.bfloat16, 264), (ml_dtypes.bfloat16, 37), (np.float32, 132), (np.float32, 7)):
        x = rng.standard_normal((3, size)).astype(dtype)
        x[0, 0], x[0, 1], x[1, 2], x[1, 3] = np.nan, -0.0, np.inf, -np.inf
        order = rng.permutation(size).astype(np.int32)
        given, places = Tensor.from_numpy(x).to(device), Tensor.from_numpy(order).to(device)
        result = Tensor.empty(x.shape, given.dtype, device)
        launch, accesses = embedding.plan_reordered(3, size, given.dtype.ptx)
        gpu.launch(launch, given.address, places.address, result.address, 3, size, accesses)
        bits = np.uint16 if x.itemsize == 2 else np.uint32
        np.testing.assert_array_equal(result.to("cpu").array.view(bits), x[:, order].view(bits))
