"""A folder of a model that reads pictures, in Qwen3-VL-2B's widths and fewer layers, for seeded random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_IMAGE_TOKEN = 1000
_VOCAB_SIZE = 4096


def write_qwen3_vl(folder: Path, *, tower_layers: int, text_layers: int) -> Path:
    """Its `config.json`, with every matrix of a layer and of the mergers as in Qwen3-VL-2B, a small vocabulary, and one
    merger of a middle layer for every eight layers of the tower."""
    deepstack = [index for index in (5, 11, 17) if index < tower_layers]
    config: dict[str, Any] = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": _IMAGE_TOKEN,
        "video_token_id": _IMAGE_TOKEN + 1,
        "vision_start_token_id": _IMAGE_TOKEN + 2,
        "vision_end_token_id": _IMAGE_TOKEN + 3,
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "qwen3_vl_text", "vocab_size": _VOCAB_SIZE, "hidden_size": 2048, "intermediate_size": 6144,
            "num_hidden_layers": text_layers, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
            "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False,
            "dtype": "bfloat16",
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True,
            },
        },
        "vision_config": {
            "model_type": "qwen3_vl", "depth": tower_layers, "hidden_size": 1024, "num_heads": 16,
            "intermediate_size": 4096, "out_hidden_size": 2048, "patch_size": 16, "temporal_patch_size": 2,
            "spatial_merge_size": 2, "num_position_embeddings": 2304, "deepstack_visual_indexes": deepstack,
            "hidden_act": "gelu_pytorch_tanh", "in_channels": 3,
        },
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
