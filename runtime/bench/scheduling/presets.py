"""Shapes of published models, for rooflines without their files: the fields of ``config.json`` that say them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models.configuration.config import ModelConfig
from models.registry import load_config, parse_config
from runtime.errors import InvalidArgumentError


def _shape(architecture: str, model_type: str, sizes: tuple[int, ...], **fields: Any) -> dict[str, Any]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    common = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16", "tie_word_embeddings": False}
    return {
        "architectures": [architecture], "model_type": model_type, **dict(zip(names, sizes, strict=True)), **common,
        **fields,
    }  # fmt: skip


def _qwen3(*sizes: int, **fields: Any) -> dict[str, Any]:
    known = {"head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960, "rope_theta": 1e6}
    return _shape("Qwen3ForCausalLM", "qwen3", sizes, **{**known, **fields})


def _llama3(*sizes: int, factor: float = 8.0, **fields: Any) -> dict[str, Any]:
    rope = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    known = {"vocab_size": 128_256, "max_position_embeddings": 131_072, "rope_theta": 5e5, "rope_scaling": rope}
    return _shape("LlamaForCausalLM", "llama", sizes, **{**known, **fields})


PRESETS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, 8, tie_word_embeddings=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, 8, tie_word_embeddings=True),
    "qwen3-8b": _qwen3(4096, 12_288, 36, 32, 8),
    "qwen3-14b": _qwen3(5120, 17_408, 40, 40, 8),
    "qwen3-32b": _qwen3(5120, 25_600, 64, 64, 8),
    "llama-3.2-1b": _llama3(2048, 8192, 16, 32, 8, factor=32.0, head_dim=64, tie_word_embeddings=True),
    "llama-3.1-8b": _llama3(4096, 14_336, 32, 32, 8),
    "llama-3.1-70b": _llama3(8192, 28_672, 80, 64, 8),
    "mistral-7b": _shape(
        "MistralForCausalLM", "mistral", (4096, 14_336, 32, 32, 8), vocab_size=32_768, max_position_embeddings=32_768,
        rope_theta=1e6, sliding_window=None,
    ),
}  # fmt: skip


def find_config(name: str) -> ModelConfig:
    """The configuration of a preset, in any case of letters, or of a folder. Raises ``InvalidArgumentError`` with the
    names of the presets for what is neither, and what ``load_config`` raises."""
    if name.lower() in PRESETS and not Path(name).is_dir():
        return parse_config(PRESETS[name.lower()], name)
    if not Path(name).exists():
        raise InvalidArgumentError(f"{name}: no such folder, and none of {', '.join(PRESETS)}", param="config")
    return load_config(name)
