"""Writes model folders of GPT-2's and Qwen3's shapes with seeded random weights, in the form that any engine reads.

The weights are drawn once and all sides of `bench peers` load the same file. Initialised like GPT-2 (normal, 0.02;
residual projections scaled by 1/sqrt(2 * layers)), but with random biases and norms, so that verification catches a
side that leaves one out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from runtime.bench.scheduling.roofline import PRESETS


@dataclass(frozen=True, slots=True)
class Gpt2Shape:
    """A GPT-2's dimensions; the defaults are those of the 124M model."""

    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    vocab_size: int = 50257
    max_positions: int = 1024


def write_gpt2_folder(folder: Path, shape: Gpt2Shape, seed: int = 0, dtype: str = "float32") -> None:
    """Writes config.json, generation_config.json and model.safetensors (Conv1D as [in, out]); `dtype`, float32 or
    bfloat16, is that of all tensors."""

    hidden = shape.hidden_size
    generator = np.random.default_rng(seed)

    def normal(*dims: int, scale: float = 0.02, mean: float = 0.0) -> np.ndarray:
        return draw_normal(generator, dims, scale, mean, dtype)

    residual = 0.02 / float(np.sqrt(2 * shape.num_layers))
    tensors = {
        "transformer.wte.weight": normal(shape.vocab_size, hidden),
        "transformer.wpe.weight": normal(shape.max_positions, hidden),
        "transformer.ln_f.weight": normal(hidden, mean=1.0),
        "transformer.ln_f.bias": normal(hidden),
    }
    for layer in range(shape.num_layers):
        prefix = f"transformer.h.{layer}."
        for norm in ("ln_1", "ln_2"):
            tensors[f"{prefix}{norm}.weight"] = normal(hidden, mean=1.0)
            tensors[f"{prefix}{norm}.bias"] = normal(hidden)
        for name, num_inputs, num_outputs, scale in (
            ("attn.c_attn", hidden, 3 * hidden, 0.02),
            ("attn.c_proj", hidden, hidden, residual),
            ("mlp.c_fc", hidden, 4 * hidden, 0.02),
            ("mlp.c_proj", 4 * hidden, hidden, residual),
        ):
            tensors[f"{prefix}{name}.weight"] = normal(num_inputs, num_outputs, scale=scale)
            tensors[f"{prefix}{name}.bias"] = normal(num_outputs)
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "n_embd": hidden,
        "n_layer": shape.num_layers,
        "n_head": shape.num_heads,
        "n_positions": shape.max_positions,
        "n_ctx": shape.max_positions,
        "vocab_size": shape.vocab_size,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "dtype": dtype,
    }
    write_folder(folder, config, tensors)


def write_qwen3_folder(folder: Path, config: Mapping[str, Any] = PRESETS["qwen3-0.6b"], seed: int = 0) -> None:
    """The same for Qwen3, in bfloat16; norms are drawn around one."""
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


def draw_normal(
    generator: np.random.Generator, dims: tuple[int, ...], scale: float, mean: float, dtype: str
) -> np.ndarray:
    """Normal values of `dtype`, float32 or bfloat16, rounded from float32."""
    values = generator.standard_normal(dims, dtype=np.float32)
    values *= np.float32(scale)
    if mean:
        values += np.float32(mean)
    return values.astype(ml_dtypes.bfloat16) if dtype == "bfloat16" else values


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    """Writes a model folder: the configuration, one file of weights, and the last id as the end of sequence."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    last_id = config["vocab_size"] - 1
    (folder / "config.json").write_text(
        json.dumps({"bos_token_id": last_id, "eos_token_id": last_id, **config}, indent=1) + "\n", encoding="utf-8"
    )
    generation = {"bos_token_id": last_id, "eos_token_id": last_id}
    (folder / "generation_config.json").write_text(json.dumps(generation) + "\n", encoding="utf-8")
