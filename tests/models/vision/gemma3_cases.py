"""Tiny Gemma 3s that read pictures, and what they are asked.

The tests and `tools/references/make_vision_goldens.py` share them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.models.golden_weights import golden_tensor
from tests.models.vision.cases import IMAGE, SEED, write_golden

NUM_PICTURES = 4


def _case(tokens: int, tower: dict[str, Any], text: dict[str, Any], is_tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "image_token_index": IMAGE,
        "boi_token_index": 92, "eoi_token_index": 93, "mm_tokens_per_image": tokens, "tie_word_embeddings": is_tied,
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 20, "num_attention_heads": 5, "num_hidden_layers": 2,
            "intermediate_size": 28, "patch_size": 4, "vision_use_head": False, **tower,
        },
        "text_config": {
            "model_type": "gemma3_text", "vocab_size": 96, "hidden_size": 40, "intermediate_size": 56,
            "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 20, "max_position_embeddings": 128,
            "rms_norm_eps": 1e-6, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, **text,
        },
    }  # fmt: skip


CASES: dict[str, dict[str, Any]] = {
    # 9 tokens, of which the last sees 7 in the layers with a window.
    "gemma3_window": _case(
        9, {"image_size": 24, "hidden_size": 36, "num_attention_heads": 3},
        {
            "num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 7, "query_pre_attn_scalar": 24,
        },
        is_tied=False,
    ),
    # 7 x 7 patches, of which 6 x 6 become 4 tokens.
    "gemma3_rest": _case(
        4, {"image_size": 30},
        {
            "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3,
            "num_attention_heads": 10, "num_key_value_heads": 5, "head_dim": 12, "query_pre_attn_scalar": 12,
        },
        is_tied=True,
    ),
}  # fmt: skip


def side_of(case: str) -> int:
    """Patches of a picture's side."""
    vision = CASES[case]["vision_config"]
    return int(vision["image_size"] // vision["patch_size"])


def prompt_of(case: str) -> tuple[list[int], list[int], int]:
    """Pictures first, after text, beside each other, and last; where each begins; tokens of a picture."""
    count = CASES[case]["mm_tokens_per_image"]
    image = [IMAGE] * count
    ids = [*image, 3, 17, *image, *image, 5, 81, 44, *image]
    return ids, [0, count + 2, 2 * count + 2, 3 * count + 5], count


def pixels_of(case: str) -> np.ndarray[Any, Any]:
    """The normalised pictures `[NUM_PICTURES, 3, size, size]`."""
    size = CASES[case]["vision_config"]["image_size"]
    flat = golden_tensor("pictures.weight", (NUM_PICTURES, 3 * size * size), SEED) * np.float32(size)
    return flat.reshape(NUM_PICTURES, 3, size, size)


def write_gemma3(folder: Path, case: str, names: dict[str, str] | None = None) -> Path:
    """A model folder with the case's weights, under other names where `names` says so."""
    return write_golden(folder, case, CASES[case], names)
