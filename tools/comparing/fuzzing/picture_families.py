"""Random configurations of models with Pixtral's or Qwen's tower, whose text models have fields of their own."""

from __future__ import annotations

from collections.abc import Callable

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
