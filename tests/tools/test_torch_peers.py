"""What torch is given to multiply, by a stand-in of its three kernels on numpy arrays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from runtime.device.gpu import Gpu
from tools.kernel_cases import torch_peers
from tools.kernel_cases.experts import _expected
from tools.kernel_cases.quantised_layers import dynamic_quantisation, float_layer, packed_layer

BF16 = np.dtype(ml_dtypes.bfloat16)


class FakeTensor(np.ndarray):
    def t(self) -> Any:
        return self.T

    def float(self) -> Any:
        return self.astype(np.float32)

    def chunk(self, count: int, axis: int) -> Any:
        return np.split(self, count, axis)

    def transpose(self, *axes: Any) -> Any:  # torch's takes two
        return self.swapaxes(*axes)

    def view(self, *given: Any) -> Any:
        return super().view(*given) if isinstance(given[0], (np.dtype, type)) else self.reshape(given)


def tensor(array: np.ndarray) -> Any:
    return np.ascontiguousarray(array).view(FakeTensor)


def scaled_mm(rows: Any, weight: Any, *, scale_a: Any, scale_b: Any, out_dtype: Any, use_fast_accum: bool) -> Any:
    return (rows.float() @ weight.float() * scale_a * scale_b).astype(out_dtype)


def int4_mm(rows: Any, weight: Any, group: int, factors: Any) -> Any:
    """As tinygemm unpacks: the first of two numbers has the upper bits; (number - 8) scale + the middle's value."""
    numbers = np.stack([weight >> 4, weight & 15], 2).reshape(len(weight), -1).astype(np.float32) - 8
    scales, middles = (factors[..., i].astype(np.float32).T.repeat(group, 1) for i in range(2))
    return rows.float() @ (numbers * scales + middles).T


def grouped_mm(rows: Any, weights: Any, *, offs: Any) -> Any:
    parts = np.split(rows, offs[:-1])
    return (
        np.concatenate([a.float() @ b.float() for a, b in zip(parts, weights, strict=True)])
        .astype(BF16)
        .view(FakeTensor)
    )


TORCH = SimpleNamespace(
    float8_e4m3fn=np.dtype(ml_dtypes.float8_e4m3fn), bfloat16=BF16, einsum=np.einsum,
    stack=lambda each: np.stack(each).view(FakeTensor),
    _scaled_mm=scaled_mm, _grouped_mm=grouped_mm,
    ops=SimpleNamespace(aten=SimpleNamespace(
        _convert_weight_to_int4pack=lambda weight, inner: weight, _weight_int4pack_mm=int4_mm
    )),
    nn=SimpleNamespace(functional=SimpleNamespace(silu=lambda x: x / (1 + np.exp(-x)))),
)  # fmt: skip


def error(found: Any, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found.astype(np.float32) - expected) / np.linalg.norm(expected))


@pytest.mark.emulator
def test_products() -> None:
    gpu, x = Gpu.of("emulated:sm_90a"), np.random.default_rng(1).standard_normal((70, 256)).astype(BF16)
    fp8, int4 = (packed_layer(gpu, name, 608, 256) for name in ("fp8", "int4 g128"))
    theirs = torch_peers.of_product("fp8", x, fp8, is_rounded=True)
    assert theirs is not None
    assert error(theirs(TORCH, tensor)(), fp8.expected(dynamic_quantisation(x, fp8.weight))) < 5e-3
    theirs = torch_peers.of_product("int4 g128", x, int4, is_rounded=False)
    assert theirs is not None
    assert error(theirs(TORCH, tensor)(), int4.expected(x)) < 5e-3
    assert torch_peers.of_product("fp8", x, fp8, is_rounded=False) is None, "few rows are not rounded"
    assert torch_peers.of_product("mxfp4", x, packed_layer(gpu, "mxfp4", 608, 256), is_rounded=False) is None


@pytest.mark.emulator
def test_experts() -> None:
    gpu, rng = Gpu.of("emulated:sm_90a"), np.random.default_rng(2)
    layers = [[float_layer(gpu, n, k, seed) for seed in range(5)] for n, k in ((64, 64), (64, 32))]
    x, ids = rng.standard_normal((6, 64)).astype(BF16), np.argsort(rng.random((6, 5)), 1)[:, :2].astype(np.int32)
    shares = rng.uniform(size=ids.shape).astype(np.float32)
    found = torch_peers.of_experts(x, ids, shares, layers)(TORCH, tensor)()
    assert error(found, _expected(x, ids, shares, layers, "silu")) < 1e-2
