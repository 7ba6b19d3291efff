"""Tiny EAGLE-3 drafters: what `speculators` is asked for, by case (`tools/references/make_eagle3_goldens.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "eagle3"
NUM_TOKENS, NUM_STEPS = 11, 3
TARGET_LAYERS = (1, 3, 4)

_SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64, "rope_theta": 100.0,
}  # fmt: skip
_OWN: dict[str, Any] = {
    "draft_vocab_size": 23, "eagle_aux_hidden_state_layer_ids": list(TARGET_LAYERS), "target_hidden_size": 16,
}  # fmt: skip

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({"model_type": "llama", **_SIZES}, _OWN),
    "llama_two_layers": (
        {"model_type": "llama", **_SIZES, "num_hidden_layers": 2},
        {**_OWN, "draft_vocab_size": 40, "norm_before_fc": True, "norm_before_residual": True},
    ),
    "qwen3": ({"model_type": "qwen3", **_SIZES}, {**_OWN, "fc_norm": True, "norm_output": True}),
}
