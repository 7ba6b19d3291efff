"""GLM-4 dense and GLM-4.5.

GLM-4 (arXiv 2406.12793): half of each head rotated, in neighbouring pairs, biases of query, key and value, one matrix
for gate and up. Glm4 has norms after attention and MLP, too. GLM-4.5 (arXiv 2508.06471): dense first layers, then
experts, of which one (or several in one) is shared. The others are chosen as in DeepSeek-V3 (2412.19437): by sigmoids
and a correction that is in no weight, within the best groups.
"""

from __future__ import annotations

from typing import Literal

from models.base import Architecture
from models.configuration.json_fields import Fields
from models.decoder import Decoder, DecoderConfig, Layer, PreNormLayer, SandwichLayer, read_rotated
from models.experts import ExpertsForm, MoeConfig, MoeDecoder, check_groups
from models.makers.maker import Maker
from runtime.routing import RoutingRule

_GLM4_NORMS = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


class GlmModel(Decoder):
    def make_layer(self, index: int, maker: Maker) -> Layer:
        return PreNormLayer(self, index, maker, mlp={"gate_up": "gate_up_proj"})


class Glm4Model(Decoder):
    def make_layer(self, index: int, maker: Maker) -> Layer:
        mlp = self.mlp(maker, gate_up="gate_up_proj")
        return SandwichLayer(self.config, maker, self.attention(index, maker), mlp, norms=_GLM4_NORMS)


def read_glm(fields: Fields) -> DecoderConfig:
    rope = {"default_partial_rotary_factor": 0.5, "interleaved": True}
    common = read_rotated(fields, rope, default_head_dim=128, default_max_positions=131_072, default_norm_eps=1.5625e-7)
    fields.expect("mlp_bias", False)
    return DecoderConfig(**common, attention_bias=fields.boolean("attention_bias", True))


class Glm4MoeModel(MoeDecoder):
    form = ExpertsForm(shared="shared_experts", has_shared_gate=False, correction="gate.e_score_correction_bias")


def read_glm4_moe(fields: Fields) -> MoeConfig:
    rope = {"default_partial_rotary_factor": 0.5}
    common = read_rotated(fields, rope, default_max_positions=131_072, default_norm_eps=1e-5)
    num_dense = fields.integer("first_k_dense_replace", 1, least=0)
    expert_size = fields.integer("moe_intermediate_size", 1408, most=1 << 24)
    return MoeConfig(
        **common,
        attention_bias=fields.boolean("attention_bias", False),
        expert_size=expert_size,
        rule=read_grouped_rule(fields),
        dense_layers=frozenset(range(min(num_dense, common["num_layers"]))),
        shared_size=expert_size * fields.integer("n_shared_experts", 1, least=0, most=1 << 8),
        qk_norm="head" if fields.boolean("use_qk_norm", False) else "none",
        num_prediction_layers=fields.integer("num_nextn_predict_layers", 1, least=0, most=1 << 8),
    )


def read_grouped_rule(
    fields: Fields, *, scores: Literal["sigmoid", "softmax"] = "sigmoid", count: int = 128, top_k: int = 8,
    groups: int = 1, best: int = 1, scale: float = 1.0,
) -> RoutingRule:  # fmt: skip
    """DeepSeek-V3's choice within the best groups, by sigmoids or a softmax; the numbers are transformers' defaults."""
    count = fields.integer("n_routed_experts", count, most=1 << 16)
    top_k, groups = fields.integer("num_experts_per_tok", top_k), fields.integer("n_group", groups)
    best = fields.integer("topk_group", best)
    check_groups(fields, count=count, top_k=top_k, groups=groups, best=best)
    if count == groups:
        raise fields.error(
            "n_group", f"= {groups} leaves 1 expert in a group, but a group is as good as its best two: limit"
            f" {count // 2} for n_routed_experts = {count}"
        )  # fmt: skip
    return RoutingRule(
        num_experts=count, top_k=top_k, scores=scores, normalises=fields.boolean("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", scale), sum_eps=1e-20, num_groups=groups, top_groups=best,
        group_score="two",
    )  # fmt: skip


ARCHITECTURES = (
    Architecture("GlmForCausalLM", "glm", read_glm, GlmModel),
    Architecture("Glm4ForCausalLM", "glm4", read_glm, Glm4Model),
    Architecture("Glm4MoeForCausalLM", "glm4_moe", read_glm4_moe, Glm4MoeModel),
)
