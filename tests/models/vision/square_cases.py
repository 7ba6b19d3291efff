"""Tiny LLaVAs and Gemma 3s, whose pictures are squares of one size, and what they are asked.

The tests and `tools/references/make_vision_goldens.py` share them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.models.golden_weights import golden_tensor
from tests.models.vision.cases import IMAGE, SEED

NUM_PICTURES = 4


def _llava(tower: dict[str, Any], text: dict[str, Any], **own: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "image_token_index": IMAGE,
        "projector_hidden_act": "gelu", "tie_word_embeddings": False, **own,
        "vision_config": {"num_hidden_layers": 3, "intermediate_size": 28, **tower},
        "text_config": {
            "vocab_size": 96, "intermediate_size": 56, "num_hidden_layers": 2, "num_key_value_heads": 1,
            "max_position_embeddings": 128, "rms_norm_eps": 1e-6, **text,
        },
    }  # fmt: skip


_CLIP = {"model_type": "clip_vision_model", "hidden_size": 12, "num_attention_heads": 3, "image_size": 13,
         "patch_size": 4}  # fmt: skip
_SIGLIP = {"model_type": "siglip_vision_model", "hidden_size": 20, "num_attention_heads": 5, "image_size": 8,
           "patch_size": 4}  # fmt: skip

LLAVA: dict[str, dict[str, Any]] = {
    "llava_clip_llama": _llava(
        _CLIP, {"model_type": "llama", "hidden_size": 20, "num_attention_heads": 5},
        vision_feature_layer=-2, vision_feature_select_strategy="default",
    ),
    "llava_clip_mistral": _llava(
        _CLIP, {"model_type": "mistral", "hidden_size": 40, "num_attention_heads": 5, "sliding_window": None},
        vision_feature_layer=[0, -2], vision_feature_select_strategy="full", multimodal_projector_bias=False,
    ),
    "llava_siglip_qwen2": _llava(
        _SIGLIP, {"model_type": "qwen2", "hidden_size": 20, "num_attention_heads": 5},
        vision_feature_layer=-1, vision_feature_select_strategy="full",
    ),
}  # fmt: skip


def _gemma3(tokens: int, tower: dict[str, Any], text: dict[str, Any], is_tied: bool) -> dict[str, Any]:
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


GEMMA3: dict[str, dict[str, Any]] = {
    # 9 tokens, of which the last sees 7 in the layers with a window.
    "gemma3_window": _gemma3(
        9, {"image_size": 24, "hidden_size": 36, "num_attention_heads": 3},
        {
            "num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 7, "query_pre_attn_scalar": 24,
        },
        is_tied=False,
    ),
    # 7 x 7 patches, of which 6 x 6 become 4 tokens.
    "gemma3_rest": _gemma3(
        4, {"image_size": 30},
        {
            "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3,
            "num_attention_heads": 10, "num_key_value_heads": 5, "head_dim": 12, "query_pre_attn_scalar": 12,
        },
        is_tied=True,
    ),
}  # fmt: skip


CASES = LLAVA | GEMMA3


def side_of(case: str) -> int:
    """Patches of a picture's side."""
    vision = CASES[case]["vision_config"]
    return int(vision["image_size"] // vision["patch_size"])


def num_tokens_of(case: str) -> int:
    """Tokens of a picture."""
    config = CASES[case]
    if case in GEMMA3:
        return int(config["mm_tokens_per_image"])
    count = side_of(case) ** 2 + (config["vision_config"]["model_type"] == "clip_vision_model")
    return count - (config["vision_feature_select_strategy"] == "default")


def prompt_of(case: str) -> tuple[list[int], list[int]]:
    """Pictures first, after text, beside each other, and last; where each begins."""
    count = num_tokens_of(case)
    image = [IMAGE] * count
    ids = [*image, 3, 17, *image, *image, 5, 81, 44, *image]
    return ids, [0, count + 2, 2 * count + 2, 3 * count + 5]


def pixels_of(case: str) -> np.ndarray[Any, Any]:
    """The normalised pictures `[NUM_PICTURES, 3, size, size]`."""
    size = CASES[case]["vision_config"]["image_size"]
    flat = golden_tensor("pictures.weight", (NUM_PICTURES, 3 * size * size), SEED) * np.float32(size)
    return flat.reshape(NUM_PICTURES, 3, size, size)


def patches_of(case: str) -> list[np.ndarray[Any, Any]]:
    """The same as patches of each picture, `[side**2, 3 * patch_size**2]`."""
    side, patch = side_of(case), CASES[case]["vision_config"]["patch_size"]
    cut = pixels_of(case)[:, :, : side * patch, : side * patch].reshape(-1, 3, side, patch, side, patch)
    return list(cut.transpose(0, 2, 4, 1, 3, 5).reshape(len(cut), side * side, -1))
