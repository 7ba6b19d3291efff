"""Writes a model folder of Qwen3's shape with seeded random weights in bfloat16, in the form that any engine reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from runtime.bench.peers.gpt2_folder import draw_normal, write_folder
from runtime.bench.scheduling.engines import QWEN3_0_6B


def write_qwen3_folder(folder: Path, config: Mapping[str, Any] = QWEN3_0_6B, seed: int = 0) -> None:
    """Writes config.json, generation_config.json and model.safetensors; norms are drawn around one."""
    generator = np.random.default_rng(seed)
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = (config[name] * head_dim for name in ("num_attention_heads", "num_key_value_heads"))
    residual = 0.02 / float(np.sqrt(2 * config["num_hidden_layers"]))

    def normal(*dims: int, scale: float = 0.02, mean: float = 0.0) -> np.ndarray:
        return draw_normal(generator, dims, scale, mean, "bfloat16")

    tensors = {
        "model.embed_tokens.weight": normal(config["vocab_size"], hidden),
        "model.norm.weight": normal(hidden, mean=1.0),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, size in (
            ("input_layernorm", hidden),
            ("post_attention_layernorm", hidden),
            ("self_attn.q_norm", head_dim),
            ("self_attn.k_norm", head_dim),
        ):
            tensors[f"{prefix}{name}.weight"] = normal(size, mean=1.0)
        for name, num_outputs, num_inputs, scale in (
            ("self_attn.q_proj", queries, hidden, 0.02),
            ("self_attn.k_proj", keys, hidden, 0.02),
            ("self_attn.v_proj", keys, hidden, 0.02),
            ("self_attn.o_proj", hidden, queries, residual),
            ("mlp.gate_proj", inner, hidden, 0.02),
            ("mlp.up_proj", inner, hidden, 0.02),
            ("mlp.down_proj", hidden, inner, residual),
        ):
            tensors[f"{prefix}{name}.weight"] = normal(num_outputs, num_inputs, scale=scale)
    write_folder(folder, config, tensors)
