"""Model folders of GPT-2's and Qwen3's shapes with seeded random weights, in the form that any engine reads.

All sides of `bench peers` load the same file. Weights are initialised like GPT-2's (normal, 0.02; residual projections
scaled by 1/sqrt(2 * layers)), but with random biases and norms, so that verification catches a side that leaves one
out.
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

from models.checkpoints.dummy import DummyCheckpoint
from models.registry import declare
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
    """A GPT-2 (Conv1D as [in, out]); `dtype`, float32 or bfloat16, is that of all tensors."""
    config = {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new",
        "n_embd": shape.hidden_size, "n_layer": shape.num_layers, "n_head": shape.num_heads,
        "n_positions": shape.max_positions, "n_ctx": shape.max_positions, "vocab_size": shape.vocab_size,
        "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "dtype": dtype,
    }  # fmt: skip
    write_random_folder(folder, config, seed)


def write_qwen3_folder(folder: Path, config: Mapping[str, Any] = PRESETS["qwen3-0.6b"], seed: int = 0) -> None:
    """A Qwen3, in bfloat16."""
    write_random_folder(folder, {**config, "dtype": "bfloat16"}, seed)


def write_random_folder(folder: Path, config: Mapping[str, Any], seed: int) -> None:
    """Writes config.json and generation_config.json, with the last id as the end of sequence, and model.safetensors
    with the tensors that the model declares."""
    folder.mkdir(parents=True, exist_ok=True)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), config["vocab_size"] - 1)
    for name, content in (("config.json", {**ends, **config}), ("generation_config.json", ends)):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    declared = declare(folder, load_format="dummy", device="cpu")
    assert isinstance(declared.source, DummyCheckpoint)
    generator = np.random.default_rng(seed)
    residual = float((2 * declared.config.num_layers) ** -0.5)
    element = np.dtype(ml_dtypes.bfloat16 if config["dtype"] == "bfloat16" else np.float32)
    tensors = {}
    for name, shape in declared.source.shapes.items():
        values = generator.standard_normal(shape, dtype=np.float32)
        is_residual = name.endswith(("c_proj.weight", "o_proj.weight", "down_proj.weight"))
        values *= np.float32(0.02 * (residual if is_residual else 1.0))
        if len(shape) == 1 and name.endswith(".weight"):  # a norm
            values += np.float32(1.0)
        tensors[name] = values.astype(element)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
