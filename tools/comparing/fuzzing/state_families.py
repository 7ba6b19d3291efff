"""Random configurations of families with recurrent states, gated delta rules among them."""

from __future__ import annotations

from collections.abc import Callable

from tools.comparing.fuzzing.draw import Draw, Fields
from tools.comparing.fuzzing.picture_families import wrapped


def _kinds(draw: Draw, num_layers: int, *names: str) -> list[str]:
    """A kind for each layer; some models lack one."""
    some = draw.rng.sample(names, draw.integer(1, len(names)))
    return [draw.choice(some) for _ in range(num_layers)]


def _lfm2(draw: Draw) -> Fields:
    fields = draw.decoder(has_head_dim=False)
    eps = fields.pop("rms_norm_eps")
    fields["intermediate_size"] = max(2, fields["intermediate_size"])  # of which two thirds may be taken
    return {
        **fields, "norm_eps": eps, "conv_bias": draw.flip(0.3), "conv_L_cache": draw.integer(2, 5),
        "layer_types": _kinds(draw, fields["num_hidden_layers"], "conv", "full_attention"),
        "block_auto_adjust_ff_dim": draw.flip(), "block_multiple_of": draw.choice((1, 8, 37)),
        "block_ffn_dim_multiplier": draw.choice((1.0, 1.3)), "rope_parameters": draw.rope(has_scaling=False),
    }  # fmt: skip


def _lfm2_moe(draw: Draw) -> Fields:
    fields, count = draw.decoder(has_head_dim=False), draw.integer(1, 12)
    eps = fields.pop("rms_norm_eps")
    return {
        **fields, "norm_eps": eps, "conv_bias": draw.flip(0.3), "conv_L_cache": draw.integer(2, 5),
        "layer_types": _kinds(draw, fields["num_hidden_layers"], "conv", "full_attention"),
        "num_dense_layers": draw.integer(0, 2), "num_experts": count, "num_experts_per_tok": draw.integer(1, count),
        "moe_intermediate_size": draw.integer(1, 60), "use_expert_bias": draw.flip(), "norm_topk_prob": draw.flip(),
        "routed_scaling_factor": draw.choice((1.0, 2.5)), "rope_parameters": draw.rope(has_scaling=False),
    }  # fmt: skip


def _granite_hybrid(draw: Draw) -> Fields:
    fields, groups = draw.decoder(has_head_dim=False), draw.choice((1, 1, 2, 3))
    heads, expand, head_dim = groups * draw.integer(1, 3), draw.integer(1, 3), fields["num_attention_heads"]
    width = (18 if heads % 3 == 0 else 16) // heads if draw.is_emulated else draw.choice((2, 4, 6))
    fields["hidden_size"] = heads * head_dim * width
    count = draw.choice((0, draw.integer(1, 9)))
    return {
        **fields, "rope_parameters": draw.rope(), "embedding_multiplier": draw.choice((1.0, 12.0)),
        "residual_multiplier": draw.choice((1.0, 0.22)), "attention_multiplier": draw.choice((1.0, 0.125)),
        "logits_scaling": draw.choice((1.0, 8.0)), "attention_bias": draw.flip(0.3),
        "num_local_experts": count, "num_experts_per_tok": draw.integer(1, count) if count else 0,
        "shared_intermediate_size": draw.integer(1, 90), "position_embedding_type": draw.choice((None, "rope", "nope")),
        "layer_types": _kinds(draw, fields["num_hidden_layers"], "linear_attention", "full_attention"),
        "mamba_n_heads": heads, "mamba_n_groups": groups, "mamba_d_state": draw.kernel_size(1, 40),
        "mamba_d_conv": draw.integer(2, 5), "mamba_expand": expand, "mamba_chunk_size": draw.choice((16, 256)),
        "mamba_d_head": draw.choice(("auto", expand * fields["hidden_size"] // heads)),
        "mamba_conv_bias": draw.flip(0.8), "mamba_proj_bias": draw.flip(0.3),
    }  # fmt: skip


def _nemotron_h(draw: Draw) -> Fields:
    """The least step is so small that transformers' limit, which holds for prompts alone, changes nothing."""
    fields, groups = draw.decoder(has_head_dim=True), draw.choice((1, 2, 3, 4))
    names, num_layers = ("linear_attention", "full_attention", "moe", "mlp"), fields.pop("num_hidden_layers")
    kinds = [draw.choice(names[:2]), *_kinds(draw, num_layers, *names)]
    draw.rng.shuffle(kinds)
    expert_groups = draw.choice((1, 1, 2, 3))
    count = expert_groups * draw.integer(2, 5)
    best = draw.integer(1, expert_groups)
    return {
        **fields, "layer_norm_epsilon": fields.pop("rms_norm_eps"), "layers_block_type": kinds,
        "mamba_num_heads": groups * draw.integer(1, 3), "n_groups": groups, "mamba_head_dim": draw.integer(1, 24),
        "ssm_state_size": draw.kernel_size(1, 40), "conv_kernel": draw.integer(2, 5),
        "chunk_size": draw.choice((16, 128)),
        "use_conv_bias": draw.flip(0.8), "use_bias": draw.flip(0.3), "mlp_bias": draw.flip(0.3), "time_step_min": 1e-9,
        "n_routed_experts": count, "n_group": expert_groups, "topk_group": best,
        "num_experts_per_tok": draw.integer(1, best * count // expert_groups), "norm_topk_prob": draw.flip(0.7),
        "routed_scaling_factor": draw.choice((1.0, 2.5)), "moe_intermediate_size": draw.integer(1, 60),
        "moe_shared_expert_intermediate_size": draw.integer(1, 90),
        "moe_latent_size": draw.choice((None, draw.integer(1, 40))), "tie_word_embeddings": False,
    }  # fmt: skip


# Gated delta rules


def _delta_rule(draw: Draw) -> Fields:
    fields, keys = draw.decoder(has_head_dim=True, step=8), draw.choice((1, 2, 3, 4))
    key_dim, value_dim = draw.kernel_size(3, 40), draw.integer(3, 40)
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


STATES: dict[str, tuple[str, str, Callable[[Draw], Fields]]] = {
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM", _lfm2),
    **DELTA_RULES,
    "lfm2_moe": ("Lfm2MoeConfig", "Lfm2MoeForCausalLM", _lfm2_moe),
    "granite_hybrid": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", _granite_hybrid),
    "nemotron_h": ("NemotronHConfig", "NemotronHForCausalLM", _nemotron_h),
}
