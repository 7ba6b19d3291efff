"""Random configurations of families with latent attention."""

from __future__ import annotations

from collections.abc import Callable

from tools.comparing.fuzzing.draw import Draw, Fields

_SIZES = ((33, 8, 16, 24), (64, 16, 40, 12), (7, 2, 4, 5), (48, 32, 22, 40), (70, 10, 30, 17))
"""Sizes of a row, rotated, of keys, of values, on an emulated device."""


def _latent(draw: Draw) -> Fields:
    """The fields of both generations. transformers' rotation of V2 needs even strides of queries and rows."""
    fields = draw.decoder(has_head_dim=False)
    row, rotary, key, value = draw.integer(1, 70), 2 * draw.integer(1, 16), draw.integer(1, 40), draw.integer(1, 40)
    if draw.is_emulated:
        row, rotary, key, value = draw.choice(_SIZES)
    fields |= {
        "num_key_value_heads": fields["num_attention_heads"], "q_lora_rank": draw.choice((None, draw.integer(1, 48))),
        "kv_lora_rank": row, "qk_rope_head_dim": rotary, "qk_nope_head_dim": key + key % 2,
        "v_head_dim": value, "attention_bias": draw.flip(0.3),
        "moe_intermediate_size": draw.integer(1, 60), "n_shared_experts": draw.integer(1, 3),
        "first_k_dense_replace": draw.integer(0, 2), "routed_scaling_factor": draw.choice((1.0, 2.5)),
    }  # fmt: skip
    return {**fields, "rope_parameters": draw.rope()}


def _deepseek_v2(draw: Draw) -> Fields:
    fields = _latent(draw)
    fields["kv_lora_rank"] *= 2
    groups, size = draw.choice((1, draw.integer(2, 4))), draw.integer(1, 6)
    best = draw.integer(1, groups)
    return {
        **fields, "n_routed_experts": groups * size, "n_group": groups, "topk_group": best,
        "topk_method": "greedy" if groups == 1 else "group_limited_greedy",
        "num_experts_per_tok": draw.integer(1, best * size), "mlp_bias": draw.flip(0.3),
    }  # fmt: skip


def _deepseek_v3(draw: Draw) -> Fields:
    fields = _latent(draw)
    groups, size = draw.choice((1, draw.integer(2, 4))), draw.integer(2, 6)
    best = draw.integer(1, groups)
    return {
        **fields, "n_routed_experts": groups * size, "n_group": groups, "topk_group": best,
        "num_experts_per_tok": draw.integer(1, best * size), "norm_topk_prob": draw.flip(0.7),
        "rope_interleave": draw.flip(),
    }  # fmt: skip


def _of_newer(draw: Draw) -> Fields:
    """Experts in groups, and the layout of rotated pairs, of families after DeepSeek's."""
    fields = _deepseek_v3(draw)
    return {**fields, "n_shared_experts": draw.integer(0, 3)}


def _glm4_moe_lite(draw: Draw) -> Fields:
    """Any layers may be dense."""
    fields = _of_newer(draw)
    del fields["first_k_dense_replace"]
    kinds = [draw.choice(("dense", "sparse", "sparse")) for _ in range(fields["num_hidden_layers"])]
    return {**fields, "mlp_layer_types": kinds} if draw.flip(0.7) else fields


def mistral4(draw: Draw) -> Fields:
    """A share of a head that is rotated whose product with the head has no rounding. YaRN, without which transformers
    rotates nothing or fails."""
    fields = _of_newer(draw)
    rotary = fields["qk_rope_head_dim"]
    keys = [each for each in range(1, 41) if int((each + rotary) * (rotary / (each + rotary))) == rotary]
    keys = [max(each for each in keys if each <= fields["qk_nope_head_dim"])] if draw.is_emulated else keys
    return {
        **fields, "qk_nope_head_dim": draw.choice(keys), "rope_parameters": {
            "type": "yarn", "rope_type": "yarn", "rope_theta": draw.choice((1e4, 1e6)),
            "factor": draw.choice((2.0, 16.0, 128.0)), "original_max_position_embeddings": draw.integer(8, 40),
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": draw.choice((0.0, 0.7, 1.0)),
            "llama_4_scaling_beta": draw.choice((0.0, 0.1, 0.5)),
        },
    }  # fmt: skip


LATENT: dict[str, tuple[str, str, Callable[[Draw], Fields]]] = {
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM", _deepseek_v2),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", _deepseek_v3),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", _glm4_moe_lite),
    "mistral4": ("Mistral4Config", "Mistral4ForCausalLM", mistral4),
}
