"""Matrices as quantisers write them, and the floats that these mean; and the configs that announce them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]
Stored = tuple[dict[str, Array], Array]
"""A matrix's tensors by the ends of their names, and its floats."""
GROUP, BLOCK = 32, 128


def grouped(weight: Array) -> tuple[Array, Array]:
    """Groups `[N, K / 32, 32]` of a matrix, and what a step of 4 bits has to be, `[N, K / 32]` float16."""
    groups = weight.reshape(len(weight), -1, GROUP)
    return groups, (np.abs(groups).max(-1) / 7).astype(np.float16)


def words_of(codes: Array, axis: int) -> Array:
    """Eight numbers of 4 bits to a word of int32, the first lowest, along an axis."""
    rows = np.moveaxis(codes.astype(np.uint32), axis, -1).reshape(*np.moveaxis(codes, axis, -1).shape[:-1], -1, 8)
    words = (rows << (4 * np.arange(8, dtype=np.uint32))).sum(-1, dtype=np.uint32)
    return np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32)


def gptq(weight: Array) -> Stored:
    groups, steps = grouped(weight)
    codes = np.clip(np.rint(groups / steps[..., None]) + 8, 0, 15)
    floats = (codes - 8).astype(np.float32) * steps[..., None].astype(np.float32)
    zeros = np.full((steps.shape[1], len(weight)), 7)  # less 1
    depth = weight.shape[1]
    return {
        "qweight": words_of(codes.reshape(weight.shape).T, 0), "qzeros": words_of(zeros, 1),
        "scales": np.ascontiguousarray(steps.T), "g_idx": (np.arange(depth) // GROUP).astype(np.int32),
    }, floats.reshape(weight.shape)  # fmt: skip


def awq(weight: Array) -> Stored:
    groups, steps = grouped(weight)
    zeros = 7 + np.arange(steps.size).reshape(steps.shape) % 3  # [N, groups]
    codes = np.clip(np.rint(groups / steps[..., None]) + zeros[..., None], 0, 15)
    floats = (codes - zeros[..., None]).astype(np.float32) * steps[..., None].astype(np.float32)

    def packed(numbers: Array) -> Array:  # [rows, N]
        order = np.arange(numbers.shape[1]).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(-1)
        return words_of(numbers[:, order], 1)

    return {
        "qweight": packed(codes.reshape(weight.shape).T), "qzeros": packed(zeros.T),
        "scales": np.ascontiguousarray(steps.T),
    }, floats.reshape(weight.shape)  # fmt: skip


def packed_int4(weight: Array) -> Stored:
    groups, steps = grouped(weight)
    codes = np.clip(np.rint(groups / steps[..., None]) + 8, 0, 15)
    floats = (codes - 8).astype(np.float32) * steps[..., None].astype(np.float32)
    return {
        "weight_packed": words_of(codes.reshape(weight.shape), 1), "weight_scale": steps,
        "weight_shape": np.array(weight.shape, np.int64),
    }, floats.reshape(weight.shape)  # fmt: skip


def fp8(weight: Array, steps: Array, spread: Array, name: str) -> Stored:
    codes = (weight / spread).astype(ml_dtypes.float8_e4m3fn)
    return {"weight": codes, name: steps}, codes.astype(np.float32) * spread


def fp8_rows(weight: Array) -> Stored:
    steps = (np.abs(weight).max(-1, keepdims=True) / 448).astype(ml_dtypes.bfloat16)
    return fp8(weight, steps, steps.astype(np.float32), "weight_scale")


def fp8_blocks(weight: Array) -> Stored:
    high, wide = (-(-size // BLOCK) for size in weight.shape)
    steps = (np.arange(1, 1 + high * wide, dtype=np.float32) / 256).reshape(high, wide)
    spread = np.repeat(np.repeat(steps, BLOCK, 0), BLOCK, 1)[: weight.shape[0], : weight.shape[1]]
    return fp8(weight, steps, spread, "weight_scale_inv")


def fp8_whole(weight: Array) -> Stored:
    steps = np.array(np.abs(weight).max() / 448, np.float32)
    parts, floats = fp8(weight, steps, steps, "weight_scale")
    return {**parts, "input_scale": np.array(0.02, np.float32)}, floats


def fp8_static(weight: Array) -> Stored:
    parts, floats = fp8_whole(weight)
    return {
        "weight": parts["weight"],
        "weight_scale_inv": parts["weight_scale"],
        "activation_scale": parts["input_scale"],
    }, floats


def compressed(ignored: list[str], weights: dict[str, Any], activations: Any, form: str) -> dict[str, Any]:
    group: dict[str, Any] = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}}
    group |= {"input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed", "ignore": ignored,
        "config_groups": {"group_0": group}, "kv_cache_scheme": None, "global_compression_ratio": None,
    }  # fmt: skip


def int4_config(ignored: list[str]) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "actorder": None}
    return compressed(ignored, weights, None, "pack-quantized")


def rows_config(ignored: list[str]) -> dict[str, Any]:
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    return compressed(ignored, weights, activations, "float-quantized")


def gptq_config(ignored: list[str]) -> dict[str, Any]:
    dynamic: dict[str, Any] = {f"-:.*{name.replace('.', chr(92) + '.')}.*": {} for name in ignored}
    return {
        "quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False, "lm_head": False,
        "checkpoint_format": "gptq", "pack_dtype": "int32", "dynamic": dynamic, "meta": {"quantizer": ["gptqmodel:7"]},
    }  # fmt: skip


FORMATS: dict[str, tuple[Callable[[Array], Stored], Callable[[list[str]], dict[str, Any]]]] = {
    "gptq": (gptq, gptq_config),
    "awq": (awq, lambda ignored: {
        "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": ignored,
    }),
    "packed": (packed_int4, int4_config),
    "rows": (fp8_rows, rows_config),
    "blocks": (fp8_blocks, lambda ignored: {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": ignored,
    }),
    "stacks": (fp8_blocks, lambda ignored: {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": ignored,
    }),
    "static_stacks": (fp8_static, lambda ignored: {
        "quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None,
        "modules_to_not_convert": ignored,
    }),
    "modelopt": (fp8_whole, lambda ignored: {
        "quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8, "type": "float",
        "dynamic": False}, "producer": {"name": "modelopt"}, "ignore": ignored,
    }),
}  # fmt: skip
