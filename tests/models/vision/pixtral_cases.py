"""Tiny models with Pixtral's tower, and what they are asked: shared by the tests and
`tools/references/make_vision_goldens.py`."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.models.golden_weights import golden_tensor
from tests.models.vision.cases import IMAGE, SEED

LINE_END, END = 12, 13
PATCH = 4

_TOWER = {
    "model_type": "pixtral", "hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 3,
    "intermediate_size": 28, "patch_size": PATCH, "image_size": 40, "hidden_act": "silu",
}  # fmt: skip
_TEXT = {
    "model_type": "mistral", "vocab_size": 96, "hidden_size": 20, "intermediate_size": 56, "num_hidden_layers": 2,
    "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "sliding_window": None,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def _case(
    architecture: str, model_type: str, tower: dict[str, Any], text: dict[str, Any], **own: Any
) -> dict[str, Any]:
    return {
        "architectures": [architecture], "model_type": model_type, "image_token_index": IMAGE,
        "tie_word_embeddings": False, "vision_config": {**_TOWER, **tower}, "text_config": {**_TEXT, **text}, **own,
    }  # fmt: skip


CASES: dict[str, dict[str, Any]] = {
    "pixtral": _case(
        "LlavaForConditionalGeneration", "llava", {}, {},
        vision_feature_layer=-1, vision_feature_select_strategy="full",
    ),
    "pixtral_layers": _case(
        "LlavaForConditionalGeneration", "llava", {"hidden_act": "gelu"}, {},
        vision_feature_layer=[0, -2], vision_feature_select_strategy="full",
    ),
    "mistral3": _case(
        "Mistral3ForConditionalGeneration", "mistral3", {}, {}, vision_feature_layer=-1, spatial_merge_size=2,
    ),
    "mistral3_yarn": _case(
        "Mistral3ForConditionalGeneration", "mistral3", {"hidden_act": "gelu"},
        {"model_type": "ministral3", "rope_parameters": _YARN},
        vision_feature_layer=-2, spatial_merge_size=3, multimodal_projector_bias=True, tie_word_embeddings=True,
    ),
    "mistral4": _case(
        "Mistral3ForConditionalGeneration", "mistral3", {},
        {
            "model_type": "mistral4", "num_key_value_heads": 5, "head_dim": 14, "q_lora_rank": 18, "kv_lora_rank": 26,
            "qk_nope_head_dim": 8, "qk_rope_head_dim": 6, "v_head_dim": 13, "n_routed_experts": 6,
            "num_experts_per_tok": 2, "moe_intermediate_size": 21,
            "rope_parameters": {**_YARN, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5},
        },
        vision_feature_layer=-1, spatial_merge_size=2,
    ),
}  # fmt: skip

_TOKENS = ((3, 2), (1, 1), (2, 5), (1, 4))
"""Lines and columns of tokens of each picture."""


def merge_size_of(case: str) -> int:
    return int(CASES[case].get("spatial_merge_size", 1))


def grids_of(case: str) -> list[tuple[int, int]]:
    """Of patches."""
    merge = merge_size_of(case)
    return [(lines * merge, across * merge) for lines, across in _TOKENS]


def prompt_of(case: str) -> tuple[list[int], list[int]]:
    """Pictures first, after text, beside each other, and last; where each begins."""
    pictures = []
    for lines, across in _TOKENS:
        pictures.append([*[IMAGE] * across, LINE_END] * lines)
        pictures[-1][-1] = END
    ids: list[int] = []
    firsts = []
    for text, picture in zip(([], [3, 17], [], [5, 81, 44]), pictures, strict=True):
        firsts.append(len(ids) + len(text))
        ids += [*text, *picture]
    return ids, firsts


def picture_of(case: str, index: int) -> np.ndarray[Any, Any]:
    """A normalised picture, `[3, height, width]`."""
    height, width = (side * PATCH for side in grids_of(case)[index])
    flat = golden_tensor(f"picture.{index}.weight", (1, 3 * height * width), SEED)
    return (flat * np.float32(np.sqrt(height * width))).reshape(3, height, width)


def patches_of(case: str, index: int) -> np.ndarray[Any, Any]:
    """The same as patches, those of a token together: `[rows * columns, 3 * PATCH**2]`."""
    merge, (rows, columns) = merge_size_of(case), grids_of(case)[index]
    cut = picture_of(case, index).reshape(3, rows // merge, merge, PATCH, columns // merge, merge, PATCH)
    return np.ascontiguousarray(cut.transpose(1, 4, 2, 5, 0, 3, 6)).reshape(rows * columns, -1)


def batch_of(case: str) -> tuple[np.ndarray[Any, Any], list[tuple[int, int]]]:
    """All pictures as transformers takes them, `[n, 3, most height, most width]`, zeros around the smaller ones; and
    the height and width of each."""
    pictures = [picture_of(case, index) for index in range(len(_TOKENS))]
    sizes = [picture.shape[1:] for picture in pictures]
    most = [max(side) for side in zip(*sizes, strict=True)]
    batch = np.zeros((len(pictures), 3, *most), np.float32)
    for place, picture in zip(batch, pictures, strict=True):
        place[:, : picture.shape[1], : picture.shape[2]] = picture
    return batch, [(int(height), int(width)) for height, width in sizes]
