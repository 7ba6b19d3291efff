"""Tiny Gemma 4s with pictures of several shapes, and what they are asked.

The tests and `tools/references/make_vision_goldens.py` share them.
"""

from __future__ import annotations

from typing import Any

from tests.models.golden_weights import Array
from tests.models.vision.cases import IMAGE, SEED
from tests.models.vision.gemma4_pixels import drawn_pictures, our_patches

BEGIN, END = 92, 93
GRIDS = ((2, 3), (1, 4), (3, 3))
"""Lines and columns of tokens of each picture."""
SEEDS = tuple(SEED + 1000 * index for index in range(12))
"""Of weights with which errors of bfloat16 are compared: scores without a scale let rounding choose what a token sees,
so that one seed's error says little."""


def _gemma4(text: dict[str, Any], vision: dict[str, Any], kind: str = "gemma4", **own: Any) -> dict[str, Any]:
    name = "Gemma4" if kind == "gemma4" else "Gemma4Unified"
    return {
        "architectures": [f"{name}ForConditionalGeneration"], "model_type": kind, "image_token_id": IMAGE,
        "boi_token_id": BEGIN, "eoi_token_id": END, "video_token_id": 8, "audio_token_id": 6, "boa_token_id": 89,
        "eoa_token_index": 88, "tie_word_embeddings": True, "audio_config": None, **own,
        "vision_config": {"model_type": f"{kind}_vision", "patch_size": 4, "pooling_kernel_size": 2, **vision},
        "text_config": {
            "model_type": f"{kind}_text", "vocab_size": 96, "hidden_size": 40, "intermediate_size": 56,
            "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 128,
            "num_hidden_layers": 4, "sliding_window": 7, "final_logit_softcapping": 20.0, "pad_token_id": 0,
            "global_head_dim": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"], **text,
        },
    }  # fmt: skip


_TOWER = {
    "hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 12, "num_hidden_layers": 2,
    "intermediate_size": 28, "position_embedding_size": 2240,
}  # fmt: skip
_LARGE = {
    "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
    "use_bidirectional_attention": "vision",
}  # fmt: skip

CASES: dict[str, dict[str, Any]] = {
    "gemma4_whole": _gemma4(_LARGE, {**_TOWER, "standardize": True}),
    "gemma4_causal": _gemma4(
        {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96, "num_kv_shared_layers": 2,
         "use_double_wide_mlp": True},
        {**_TOWER, "use_clipped_linears": True},
    ),
    "gemma4_unified": _gemma4(
        {name: value for name, value in _LARGE.items() if name != "hidden_size_per_layer_input"},
        {"mm_embed_dim": 28, "output_proj_dims": 28, "mm_posemb_size": 1120}, "gemma4_unified",
        tie_word_embeddings=False,
    ),
}  # fmt: skip


def num_tokens(index: int) -> int:
    """Tokens of a picture."""
    return GRIDS[index][0] * GRIDS[index][1]


def prompt_of(case: str) -> tuple[list[int], list[int]]:
    """A picture after text, one after another, and one last; where each begins."""
    ids, firsts = [3, 17, 5], []
    for index, words in enumerate(([], [81, 44, 9, 30, 61, 2, 7, 33], [])):
        firsts.append(len(ids) + 1)
        ids += [BEGIN, *[IMAGE] * num_tokens(index), END, *words]
    return ids, firsts


def pictures_of(case: str) -> list[Array]:
    """Each picture's pixels."""
    return drawn_pictures(CASES[case]["vision_config"], GRIDS, SEED)


def patches_of(case: str) -> list[tuple[Array, tuple[int, int]]]:
    """Each picture's patches as the tower gets them."""
    return our_patches(CASES[case]["vision_config"], pictures_of(case))
