"""Random configurations of families with recurrent states."""

from __future__ import annotations

from collections.abc import Callable

from tools.comparing.fuzzing.delta_rule_families import DELTA_RULES
from tools.comparing.fuzzing.draw import Draw, Fields


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
    fields["hidden_size"] = heads * head_dim * draw.choice((2, 4, 6))
    count = draw.choice((0, draw.integer(1, 9)))
    return {
        **fields, "rope_parameters": draw.rope(), "embedding_multiplier": draw.choice((1.0, 12.0)),
        "residual_multiplier": draw.choice((1.0, 0.22)), "attention_multiplier": draw.choice((1.0, 0.125)),
        "logits_scaling": draw.choice((1.0, 8.0)), "attention_bias": draw.flip(0.3),
        "num_local_experts": count, "num_experts_per_tok": draw.integer(1, count) if count else 0,
        "shared_intermediate_size": draw.integer(1, 90), "position_embedding_type": draw.choice((None, "rope", "nope")),
        "layer_types": _kinds(draw, fields["num_hidden_layers"], "linear_attention", "full_attention"),
        "mamba_n_heads": heads, "mamba_n_groups": groups, "mamba_d_state": draw.integer(1, 40),
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
        "ssm_state_size": draw.integer(1, 40), "conv_kernel": draw.integer(2, 5), "chunk_size": draw.choice((16, 128)),
        "use_conv_bias": draw.flip(0.8), "use_bias": draw.flip(0.3), "mlp_bias": draw.flip(0.3), "time_step_min": 1e-9,
        "n_routed_experts": count, "n_group": expert_groups, "topk_group": best,
        "num_experts_per_tok": draw.integer(1, best * count // expert_groups), "norm_topk_prob": draw.flip(0.7),
        "routed_scaling_factor": draw.choice((1.0, 2.5)), "moe_intermediate_size": draw.integer(1, 60),
        "moe_shared_expert_intermediate_size": draw.integer(1, 90),
        "moe_latent_size": draw.choice((None, draw.integer(1, 40))), "tie_word_embeddings": False,
    }  # fmt: skip


STATES: dict[str, tuple[str, str, Callable[[Draw], Fields]]] = {
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM", _lfm2),
    **DELTA_RULES,
    "lfm2_moe": ("Lfm2MoeConfig", "Lfm2MoeForCausalLM", _lfm2_moe),
    "granite_hybrid": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", _granite_hybrid),
    "nemotron_h": ("NemotronHConfig", "NemotronHForCausalLM", _nemotron_h),
}
