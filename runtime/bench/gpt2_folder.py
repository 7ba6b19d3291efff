"""Writes a model folder of GPT-2's shape with seeded random weights, in the form that any engine reads.

The weights are drawn once and both sides of `bench peers` load the same file. Initialised as GPT-2 is
(normal, 0.02; residual projections scaled by 1/sqrt(2 * layers)), but with biases and norms drawn too, so
that a side that leaves one out is caught by the verification.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True, slots=True)
class Gpt2Shape:
    """The numbers that make a GPT-2; the defaults are those of the 124M model."""

    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    vocab_size: int = 50257
    max_positions: int = 1024


def write_gpt2_folder(folder: Path, shape: Gpt2Shape, seed: int = 0) -> None:
    """Writes config.json, generation_config.json and model.safetensors (float32, Conv1D as [in, out])."""
    from safetensors.numpy import save_file

    hidden = shape.hidden_size
    generator = np.random.default_rng(seed)

    def normal(*dims: int, scale: float = 0.02, mean: float = 0.0) -> np.ndarray:
        values = generator.standard_normal(dims, dtype=np.float32)
        values *= np.float32(scale)
        if mean:
            values += np.float32(mean)
        return values

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
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
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
        "bos_token_id": shape.vocab_size - 1,
        "eos_token_id": shape.vocab_size - 1,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    generation = {"bos_token_id": shape.vocab_size - 1, "eos_token_id": shape.vocab_size - 1}
    (folder / "generation_config.json").write_text(json.dumps(generation) + "\n")
