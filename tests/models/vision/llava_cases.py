"""Tiny LLaVAs, and what they are asked: shared by the tests and `tools/references/make_vision_goldens.py`."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.models.golden_weights import golden_tensor
from tests.models.vision.cases import IMAGE, SEED

NUM_PICTURES = 4


def _case(tower: dict[str, Any], text: dict[str, Any], **own: Any) -> dict[str, Any]:
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

CASES: dict[str, dict[str, Any]] = {
    "llava_clip_llama": _case(
        _CLIP, {"model_type": "llama", "hidden_size": 20, "num_attention_heads": 5},
        vision_feature_layer=-2, vision_feature_select_strategy="default",
    ),
    "llava_clip_mistral": _case(
        _CLIP, {"model_type": "mistral", "hidden_size": 40, "num_attention_heads": 5, "sliding_window": None},
        vision_feature_layer=[0, -2], vision_feature_select_strategy="full", multimodal_projector_bias=False,
    ),
    "llava_siglip_qwen2": _case(
        _SIGLIP, {"model_type": "qwen2", "hidden_size": 20, "num_attention_heads": 5},
        vision_feature_layer=-1, vision_feature_select_strategy="full",
    ),
}  # fmt: skip


def side_of(case: str) -> int:
    """Patches of a picture's side."""
    vision = CASES[case]["vision_config"]
    return int(vision["image_size"] // vision["patch_size"])


def prompt_of(case: str) -> tuple[list[int], list[int], int]:
    """Pictures first, after text, beside each other, and last; where each begins; tokens of a picture."""
    config = CASES[case]
    count = side_of(case) ** 2 + (config["vision_config"]["model_type"] == "clip_vision_model")
    count -= config["vision_feature_select_strategy"] == "default"
    image = [IMAGE] * count
    ids = [*image, 3, 17, *image, *image, 5, 81, 44, *image]
    return ids, [0, count + 2, 2 * count + 2, 3 * count + 5], count


def pixels_of(case: str) -> np.ndarray[Any, Any]:
    """The normalised pictures `[NUM_PICTURES, 3, size, size]`."""
    size = CASES[case]["vision_config"]["image_size"]
    flat = golden_tensor("pictures.weight", (NUM_PICTURES, 3 * size * size), SEED) * np.float32(size)
    return flat.reshape(NUM_PICTURES, 3, size, size)
