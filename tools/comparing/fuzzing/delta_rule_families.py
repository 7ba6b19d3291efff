"""Random configurations of families with gated delta rules."""

from __future__ import annotations

from collections.abc import Callable

from tools.comparing.fuzzing.draw import Draw, Fields
from tools.comparing.fuzzing.picture_families import wrapped


def _delta_rule(draw: Draw) -> Fields:
    fields, keys = draw.decoder(has_head_dim=True, step=8), draw.choice((1, 2, 3, 4))
    key_dim, value_dim = (draw.choice((8, 16)) if draw.is_emulated else draw.integer(3, 40) for _ in range(2))
    pairs, num_layers = fields["head_dim"] // 2, fields["num_hidden_layers"]
    partial = draw.choice((1.0, 0.5, 0.25)) if fields["head_dim"] % 8 == 0 else 1.0
    return {
        **fields,
        "linear_num_key_heads": keys, "linear_num_value_heads": keys * draw.choice((1, 2, 3)),
        "linear_key_head_dim": key_dim, "linear_value_head_dim": value_dim, "attention_bias": draw.flip(0.2),
        "linear_conv_kernel_dim": draw.integer(2, 5),
        "layer_types": [draw.choice(("linear_attention", "full_attention")) for _ in range(num_layers - 1)]
        + ["linear_attention"],
        "rope_parameters": {**draw.rope(has_scaling=False), "partial_rotary_factor": partial if pairs > 4 else 1.0},
    }  # fmt: skip


def _with_experts(draw: Draw, fields: Fields) -> Fields:
    count = draw.integer(1, 12)
    return {
        **fields, "num_experts": count, "num_experts_per_tok": draw.integer(1, count),
        "moe_intermediate_size": draw.integer(1, 50), "shared_expert_intermediate_size": draw.integer(1, 60),
    }  # fmt: skip


def _moe(draw: Draw) -> Fields:
    fields = _with_experts(draw, _delta_rule(draw))
    del fields["intermediate_size"]
    return fields


def _next(draw: Draw) -> Fields:
    fields = _with_experts(draw, _delta_rule(draw))
    dense = [index for index in range(fields["num_hidden_layers"]) if draw.flip(0.2)]
    step, normalises = draw.choice((1, 1, 2)), draw.flip(0.8)
    return {**fields, "mlp_only_layers": dense, "decoder_sparse_step": step, "norm_topk_prob": normalises}


def _pictures(draw: Draw, model_type: str, text: Fields) -> Fields:
    rope, heads = text["rope_parameters"], draw.integer(1, 3)
    pairs = int(text["head_dim"] * rope["partial_rotary_factor"]) // 2
    sections = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    text = {**text, "rope_parameters": {**rope, "mrope_section": sections, "mrope_interleaved": True}}
    tower = {
        "depth": 2, "num_heads": heads, "hidden_size": 8 * heads, "out_hidden_size": text["hidden_size"],
        "intermediate_size": draw.integer(8, 40), "patch_size": 4, "num_position_embeddings": 16,
    }  # fmt: skip
    return wrapped(draw, model_type, text, tower, "image_token_id")


def _dense_pictures(draw: Draw) -> Fields:
    return _pictures(draw, "qwen3_5_text", _delta_rule(draw))


def _moe_pictures(draw: Draw) -> Fields:
    return _pictures(draw, "qwen3_5_moe_text", _moe(draw))


DELTA_RULES: dict[str, tuple[str, str, Callable[[Draw], Fields]]] = {
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _delta_rule),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", _moe),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", _next),
    "qwen3_5_vl": ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration", _dense_pictures),
    "qwen3_5_moe_vl": ("Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration", _moe_pictures),
}
