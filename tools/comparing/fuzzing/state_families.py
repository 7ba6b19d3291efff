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
    return {
        **fields, "norm_eps": eps, "conv_bias": draw.flip(0.3), "conv_L_cache": draw.integer(2, 5),
        "layer_types": _kinds(draw, fields["num_hidden_layers"], "conv", "full_attention"),
        "block_auto_adjust_ff_dim": draw.flip(), "block_multiple_of": draw.choice((1, 8, 37)),
        "block_ffn_dim_multiplier": draw.choice((1.0, 1.3, None)), "rope_parameters": draw.rope(has_scaling=False),
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


STATES: dict[str, tuple[str, str, Callable[[Draw], Fields]]] = {
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM", _lfm2),
    **DELTA_RULES,
    "lfm2_moe": ("Lfm2MoeConfig", "Lfm2MoeForCausalLM", _lfm2_moe),
}
