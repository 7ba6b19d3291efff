"""torch's own kernels beside ours for quantised weights and for experts: `_scaled_mm` (cuBLASLt), `_weight_int4pack_mm`
(tinygemm) and `_grouped_mm` (CUTLASS). Each gets the arrays that ours was made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from runtime.bench.kernels.case import Array
from tools.kernel_cases.quantised_layers import FORMATS, MOST_ROWS, Layer, random_matrix

Peer = Callable[[Any, Callable[[Array], Any]], Callable[[], Any]]
"""As `Prepared.torch`."""
_E4M3 = ml_dtypes.float8_e4m3fn


def of_product(format: str, x: Array, layer: Layer, *, is_rounded: bool) -> Peer | None:
    """torch's call for rows x and a layer of `packed_layer` with seed 0, which rounds x if `is_rounded`; None without
    one. x is rounded before it, which ours is timed with."""
    height = min(len(layer.rows), MOST_ROWS)
    scales = random_matrix(FORMATS[format], height, x.shape[1], 0).scales.astype(np.float32)
    if format == "fp8" and is_rounded:
        return _scaled_mm(x, layer, scales)
    return _int4(x, layer, scales) if format == "int4 g128" else None


def _scaled_mm(x: Array, layer: Layer, scales: Array) -> Peer:
    wide = x.astype(np.float32)
    x_scales = np.abs(wide).max(1, keepdims=True) / np.float32(448)
    codes = [np.ascontiguousarray(each.astype(_E4M3)).view(np.uint8) for each in (
        wide / x_scales, (layer.matrix / scales)[layer.rows]
    )]  # fmt: skip
    row_scales = np.ascontiguousarray(scales[layer.rows].T)

    def torch(module: Any, tensor: Callable[[Array], Any]) -> Callable[[], Any]:
        rows, weight = (tensor(each).view(module.float8_e4m3fn) for each in codes)
        given = {"scale_a": tensor(x_scales), "scale_b": tensor(row_scales), "out_dtype": module.bfloat16}
        return lambda: module._scaled_mm(rows, weight.t(), **given, use_fast_accum=True)

    return torch


def _int4(x: Array, layer: Layer, scales: Array) -> Peer:
    group = x.shape[1] // scales.shape[1]
    numbers = (np.rint(layer.matrix / scales.repeat(group, 1)) + 8).astype(np.uint8)
    packed = np.ascontiguousarray((numbers[:, ::2] << 4 | numbers[:, 1::2])[layer.rows])
    pairs = np.stack([scales, np.zeros_like(scales)], 2)[layer.rows].transpose(1, 0, 2)  # and the middle's value
    both = np.ascontiguousarray(pairs.astype(ml_dtypes.bfloat16))

    def torch(module: Any, tensor: Callable[[Array], Any]) -> Callable[[], Any]:
        weight = module.ops.aten._convert_weight_to_int4pack(tensor(packed), 8)
        rows, factors = tensor(x), tensor(both)
        return lambda: module.ops.aten._weight_int4pack_mm(rows, weight, group, factors)

    return torch


def of_experts(x: Array, ids: Array, shares: Array, layers: Sequence[Sequence[Layer]]) -> Peer:
    """SwiGLU experts of bfloat16 with `_grouped_mm`: rows in the order of their experts, which is known before."""
    num_experts, order = int(ids.max()) + 1, np.argsort(ids.reshape(-1), kind="stable")
    ends = np.cumsum(np.bincount(ids.reshape(-1), minlength=num_experts)).astype(np.int32)
    places = np.argsort(order).reshape(ids.shape)

    def torch(module: Any, tensor: Callable[[Array], Any]) -> Callable[[], Any]:
        gate_up, down = (
            module.stack([
                tensor(kinds[expert % len(kinds)].matrix.astype(ml_dtypes.bfloat16))[
                    tensor(kinds[expert % len(kinds)].rows)
                ]
                for expert in range(num_experts)
            ]).transpose(1, 2)
            for kinds in layers
        )  # fmt: skip
        rows, tokens, offsets = tensor(x), tensor(order // ids.shape[1]), tensor(ends)
        back, weights = tensor(places.reshape(-1)), tensor(shares)

        def run() -> Any:
            gate, up = module._grouped_mm(rows[tokens], gate_up, offs=offsets).chunk(2, 1)
            found = module._grouped_mm(module.nn.functional.silu(gate) * up, down, offs=offsets)[back]
            return module.einsum("tk,tkh->th", weights, found.view(*ids.shape, -1).float())

        return run

    return torch
