"""Random configurations of models with Pixtral's or Qwen's tower, whose text models have fields of their own."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tools.comparing.fuzzing.draw import Draw, Fields
from tools.comparing.fuzzing.latent_families import mistral4


def wrapped(draw: Draw, model_type: str, text: Fields, tower: Fields, token: str) -> Fields:
    """The fields of a model of this text and tower; `token` names the placeholder of a picture's tokens."""
    is_tied = text.pop("tie_word_embeddings")
    text = {"model_type": model_type, **text}
    text = {name: value for name, value in text.items() if not name.endswith("_token_id") or value is not None}
    return {
        "text_config": text, "vision_config": tower, token: text["vocab_size"] - 1, "tie_word_embeddings": is_tied,
    }  # fmt: skip


def _pixtral_tower(draw: Draw) -> Fields:
    heads = draw.integer(1, 3)
    return {
        "model_type": "pixtral", "hidden_size": 8 * heads, "num_attention_heads": heads, "num_hidden_layers": 2,
        "intermediate_size": draw.integer(8, 40), "image_size": 56, "patch_size": 14,
        "hidden_act": draw.choice(("silu", "gelu")),
    }  # fmt: skip


def _pixtral(draw: Draw) -> Fields:
    text = {**draw.decoder(has_head_dim=True), "rope_parameters": draw.rope(), "sliding_window": None}
    own = {"vision_feature_select_strategy": "full", "vision_feature_layer": draw.choice((-1, -2))}
    return {**wrapped(draw, "mistral", text, _pixtral_tower(draw), "image_token_index"), **own}


def _mistral3(draw: Draw) -> Fields:
    kind = draw.choice(("mistral", "ministral3", "mistral4"))
    text = {**draw.decoder(has_head_dim=True), "sliding_window": draw.choice((None, draw.window()))}
    if kind == "mistral4":
        text = mistral4(draw)
    elif kind == "mistral":
        text["rope_parameters"] = draw.rope()
    else:
        text["rope_parameters"] = {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": draw.choice((2.0, 16.0)), "beta_fast": 32.0,
            "beta_slow": 1.0, "original_max_position_embeddings": draw.integer(8, 100), "mscale": 1.0,
            "mscale_all_dim": 1.0, "llama_4_scaling_beta": draw.choice((0.1, 0.5)),
        }  # fmt: skip
    own = {"spatial_merge_size": draw.integer(1, 3), "multimodal_projector_bias": draw.flip()}
    return {**wrapped(draw, kind, text, _pixtral_tower(draw), "image_token_index"), **own}


def _qwen_text(draw: Draw, *, has_head_dim: bool, **rope: bool) -> Fields:
    text = draw.decoder(has_head_dim=has_head_dim, step=4)
    head_dim = text.get("head_dim", text["hidden_size"] // text["num_attention_heads"])
    pairs = head_dim // 2
    sections = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    own = {"rope_type": "default", "rope_theta": draw.choice((1e4, 1e6)), "mrope_section": sections, **rope}
    return {**text, "rope_parameters": own}


def _qwen_tower(draw: Draw, text: Fields, **own: object) -> Fields:
    heads = draw.integer(1, 3)
    return {
        "depth": 2, "num_heads": heads, "hidden_size": 8 * heads, "out_hidden_size": text["hidden_size"],
        "intermediate_size": draw.integer(8, 40), "patch_size": 4, **own,
    }  # fmt: skip


def _qwen2_vl(draw: Draw) -> Fields:
    text = _qwen_text(draw, has_head_dim=False)
    heads, width = draw.integer(1, 3), text["hidden_size"]
    tower = {"depth": 2, "num_heads": heads, "embed_dim": 8 * heads, "hidden_size": width, "patch_size": 4}
    return wrapped(draw, "qwen2_vl_text", text, tower, "image_token_id")


def _qwen2_5_vl(draw: Draw) -> Fields:
    text = _qwen_text(draw, has_head_dim=False)
    tower = _qwen_tower(draw, text, window_size=16, fullatt_block_indexes=[1])
    return wrapped(draw, "qwen2_5_vl_text", text, tower, "image_token_id")


def _qwen3_vl(draw: Draw) -> Fields:
    text = {**_qwen_text(draw, has_head_dim=True, mrope_interleaved=True), "attention_bias": draw.flip(0.3)}
    layers = [0] if draw.flip() else []
    tower = _qwen_tower(draw, text, num_position_embeddings=16, deepstack_visual_indexes=layers)
    return wrapped(draw, "qwen3_vl_text", text, tower, "image_token_id")


def _qwen3_vl_moe(draw: Draw) -> Fields:
    fields = _qwen3_vl(draw)
    count = draw.integer(2, 8)
    fields["text_config"] |= {
        "model_type": "qwen3_vl_moe_text", "num_experts": count, "num_experts_per_tok": draw.integer(1, count),
        "moe_intermediate_size": 4 * draw.integer(1, 12), "decoder_sparse_step": draw.choice((1, 2)),
    }  # fmt: skip
    return fields


PICTURES: dict[str, tuple[str, str, Callable[[Draw], Fields]]] = {
    "pixtral": ("LlavaConfig", "LlavaForConditionalGeneration", _pixtral),
    "mistral3": ("Mistral3Config", "Mistral3ForConditionalGeneration", _mistral3),
    "qwen2_vl": ("Qwen2VLConfig", "Qwen2VLForConditionalGeneration", _qwen2_vl),
    "qwen2_5_vl": ("Qwen2_5_VLConfig", "Qwen2_5_VLForConditionalGeneration", _qwen2_5_vl),
    "qwen3_vl": ("Qwen3VLConfig", "Qwen3VLForConditionalGeneration", _qwen3_vl),
    "qwen3_vl_moe": ("Qwen3VLMoeConfig", "Qwen3VLMoeForConditionalGeneration", _qwen3_vl_moe),
}


# Gemma 4

PICTURE_TOKENS = 280
"""A picture's, at most."""
_NOT_UNIFIED = (
    "hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block", "num_experts", "top_k_experts",
    "moe_intermediate_size",
)  # fmt: skip
"""Fields that the class of the model without a tower lacks."""


def gemma4(draw: Draw) -> Fields:
    """The last layer sees all tokens whatever the file says, so that files say it; layers that use others' pages have
    one of each kind before them, and inputs of their own, without which transformers fails."""
    fields = draw.decoder(has_head_dim=True)
    fields["num_hidden_layers"] = count = draw.integer(1, 3 if draw.is_emulated else 6)
    kinds = [*draw.layer_types(count)[:-1], "full_attention"]
    shared = [n for n in range(count) if {*kinds[count - n :]} <= {*kinds[: count - n]} == {*kinds}]
    is_equal, num_experts = draw.flip(), draw.integer(1, 9)
    has_experts = draw.flip(0.4)
    kv_heads = draw.choice([n for n in range(1, 8) if fields["num_attention_heads"] % n == 0])
    head_dim = draw.choice((32, 64) if draw.is_emulated else (16, 32, 40, 64, 96, 128))
    factor, input_size = draw.choice((0.25, 0.5, 1.0)), draw.choice((0, 8, draw.integer(1, 20)))
    return {
        **fields, "layer_types": kinds, "sliding_window": draw.window(), "global_head_dim": head_dim,
        "num_global_key_value_heads": kv_heads if is_equal else None, "attention_k_eq_v": is_equal,
        "num_kv_shared_layers": draw.choice(shared or [0]) if input_size else 0, "use_double_wide_mlp": draw.flip(),
        "final_logit_softcapping": draw.choice((30.0, 10.0, None)), "attention_bias": draw.flip(0.2),
        "hidden_size_per_layer_input": input_size,
        "vocab_size_per_layer_input": fields["vocab_size"], "enable_moe_block": has_experts,
        "num_experts": num_experts if has_experts else None,
        "top_k_experts": draw.integer(1, num_experts) if has_experts else None,
        "moe_intermediate_size": draw.integer(1, 60) if has_experts else None,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": factor},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }  # fmt: skip


def _pictures(draw: Draw, model_type: str, text: Fields, tower: Fields) -> Fields:
    """A picture's tokens see each other in some, in which a step has to fit a whole one. A token of a picture that is
    not there is the padding, as transformers has it embedded."""
    text = {**text, "use_bidirectional_attention": draw.choice((None, "vision"))}
    tokens = {"image_token_id": 0, "boi_token_id": text["vocab_size"] - 1, "eoi_token_id": text["vocab_size"] - 2}
    return {**wrapped(draw, model_type, text, {"patch_size": 4, **tower}, "image_token_id"), **tokens}


def _with_tower(draw: Draw) -> Fields:
    """With tokens of one patch transformers' pooling keeps the padding instead of the tokens."""
    heads, head_dim, side = draw.integer(1, 3), draw.choice((4, 8, 12)), draw.integer(2, 3)
    tower = {
        "num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": head_dim,
        "hidden_size": heads * head_dim, "intermediate_size": draw.integer(8, 40), "pooling_kernel_size": side,
        "position_embedding_size": 1120 * side, "use_clipped_linears": draw.flip(), "standardize": draw.flip(),
    }  # fmt: skip
    return _pictures(draw, "gemma4_text", gemma4(draw), tower)


def _unified(draw: Draw) -> Fields:
    text = {name: value for name, value in gemma4(draw).items() if name not in _NOT_UNIFIED}
    width = draw.integer(8, 40)
    tower = {"mm_embed_dim": width, "output_proj_dims": width, "pooling_kernel_size": draw.integer(1, 3)}
    return _pictures(draw, "gemma4_unified_text", {**text, "num_kv_shared_layers": 0}, tower)


def with_pictures(rng: random.Random, case: dict[str, Any]) -> dict[str, Any]:
    """A Gemma 4's case with small pictures in the first prompt, and a token of pictures that no text has."""
    fields = case["fields"]
    begin, end, image = (fields["text_config"]["vocab_size"] - place for place in (1, 2, 3))
    ids, grids, firsts = [rng.randrange(image) for _ in range(rng.randint(0, 15))], [], []
    for _ in range(rng.randint(1, 2)):
        grids.append((rng.randint(1, 3), rng.randint(1, 3)))
        firsts.append(len(ids) + 1)
        words = [rng.randrange(image) for _ in range(rng.randint(0, 15))]
        ids += [begin, *[image] * (grids[-1][0] * grids[-1][1]), end, *words]
    others = [[token % image for token in prompt] for prompt in case["prompts"][1:]]
    pictures = {"grids": grids, "firsts": firsts}
    return {**case, "fields": fields | {"image_token_id": image}, "prompts": [ids, *others], "pictures": pictures}


GEMMA4: dict[str, tuple[str, str, Callable[[Draw], Fields]]] = {
    "gemma4": ("Gemma4TextConfig", "Gemma4ForCausalLM", gemma4),
    "gemma4_vision": ("Gemma4Config", "Gemma4ForConditionalGeneration", _with_tower),
    "gemma4_unified": ("Gemma4UnifiedConfig", "Gemma4UnifiedForConditionalGeneration", _unified),
}
