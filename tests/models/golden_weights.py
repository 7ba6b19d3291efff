"""The weights of the golden models, made again from a seed wherever they are needed.

`tools/references/generate_reference.py` gives them to transformers, the tests write them into model folders. They come
from the raw 64-bit stream of PCG64, which numpy promises never to change, and from exact float32
arithmetic, so every machine makes the same bits. Needs numpy alone.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def golden_tensor(name: str, shape: tuple[int, ...], seed: int) -> Array:
    """One tensor, float32: norms around one, biases of a few tenths, matrices that keep activations near
    one."""
    raw = np.random.PCG64([seed, zlib.crc32(name.encode())]).random_raw(math.prod(shape))
    uniform = (raw >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)  # [-1, 1)
    uniform = uniform.reshape(shape)
    if not shape:  # xIELU's beta, and its eps, which is small and negative
        middle = np.float32(-0.01 if name.endswith(".eps") else 0.5)
        middle *= np.float32({"_min": -3.0, "_max": 3.0}.get(name[-4:], 1.0))  # bounds, on both sides of zero
        return np.array(middle + middle * np.float32(0.5) * uniform, np.float32)
    if name.endswith((".bias", "_bias")):
        return uniform * np.float32(0.25)
    if name.endswith("linear_attn.A_log"):  # a state that lasts some tokens
        return uniform - np.float32(1.0)
    if len(shape) == 1:
        return np.float32(1.0) + uniform * np.float32(0.5)
    if "wte" in name or "embed_tokens" in name or "wpe" in name:
        return uniform
    if len(shape) == 5 or shape[1:2] == (1,):  # a convolution
        return uniform * np.float32(math.sqrt(3.0 / math.prod(shape[1:])))
    fan_in = shape[0] if name.split(".")[-2].startswith("c_") else shape[1]  # GPT-2 stores [inputs, outputs]
    gain = 3.0 if name.endswith("experts.gate_up_proj") else 1.0  # gpt-oss's, so that its clamps are met
    return uniform * np.float32(gain * math.sqrt(3.0 / max(1, fan_in)))


def named_tensors(model: Any) -> list[tuple[str, Any]]:
    """The parameters of a model of transformers, and the buffers that a checkpoint has."""
    stored = model.state_dict().keys()
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in stored]
    return [*model.named_parameters(), *buffers]


def stored_tensors(name: str, parameter: Any, model_type: str) -> list[tuple[str, Any]]:
    """The tensors of a checkpoint that a parameter of transformers' model is made of, and their places in it: it keeps
    all experts' matrices in one, `experts.gate_up_proj [E, 2 I, H]` and `experts.down_proj [E, H, I]`."""
    if model_type == "gpt_neox":
        name = name.replace("lm_head.", "embed_out.")
    under, _, kind = name.rpartition(".")
    names: dict[str, tuple[str, ...]] = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    if model_type == "mixtral":
        under = under.replace(".mlp", ".block_sparse_moe")
        names = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
    if model_type in ("granitemoe", "granitemoeshared", "granitemoehybrid"):
        name = name.replace("experts.gate_up_proj", "input_linear.weight").replace(".router.", ".router.layer.")
        return [(name.replace("experts.down_proj", "output_linear.weight"), parameter)]
    if model_type == "lfm2_moe":
        names = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
    if model_type == "nemotron_h":
        under, names = under.replace("model.", "backbone.", 1), {"up_proj": ("up_proj",), "down_proj": ("down_proj",)}
    if model_type == "phimoe":
        under = under.replace(".mlp", ".block_sparse_moe").replace(".router", ".gate")
        names = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
    if model_type == "ernie4_5_moe":
        under = under.replace(".gate.moe_statics", ".moe_statics")
    if not under.endswith(".experts") or model_type in ("gpt_oss", "gemma4_text"):  # which store them so, too
        return [(f"{under}.{kind}" if under else kind, parameter)]
    parts, size = names[kind], parameter.shape[1] // len(names[kind])
    return [
        (f"{under}.{number}.{part}.weight", parameter[number, place * size : (place + 1) * size])
        for number in range(parameter.shape[0])
        for place, part in enumerate(parts)
    ]


def rounded_to_bfloat16(array: Array) -> Array:
    """float32 values rounded to the nearest bfloat16, ties to even; finite values only."""
    bits = array.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return np.asarray(rounded & np.uint32(0xFFFF0000)).view(np.float32)
