"""DeepSeek-V2 (arXiv 2405.04434) and V3 (2412.19437): latent attention; dense first layers, then experts, some of them
shared. V2 chooses by a softmax, V3 by sigmoids and a correction that is in no weight, as GLM-4.5 does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from models.architecture import Architecture
from models.configuration.config import read_common
from models.configuration.json_fields import Fields
from models.configuration.rope_config import parse_rope, rope_fields
from models.decoder import Layer, PreNormLayer
from models.experts import ExpertsForm, MoeConfig, MoeDecoder, check_groups
from models.families.glm import read_sigmoid_rule
from models.latent import LatentAttention, LatentForm
from models.makers.maker import Maker
from runtime.routing import RoutingRule


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekConfig(MoeConfig):
    """DeepSeek's config, with the sizes of its latent attention."""

    latent: LatentForm


class DeepseekV2Model(MoeDecoder):
    form = ExpertsForm(shared="shared_experts", has_shared_gate=False)
    config: DeepseekConfig

    def make_layer(self, index: int, maker: Maker) -> Layer:
        return PreNormLayer(self, index, maker)

    def attention(self, index: int, maker: Maker, *, input_norm: str = "", **choices: Any) -> LatentAttention:  # type: ignore[override]
        norm, rope = self._input_norm(maker, input_norm), self.rope_of(index)
        assert norm is not None
        assert rope is not None
        assert not choices
        return LatentAttention(self.config, self.config.latent, index, maker.under("self_attn"), rope, norm)


class DeepseekV3Model(DeepseekV2Model):
    form = ExpertsForm(shared="shared_experts", has_shared_gate=False, correction="gate.e_score_correction_bias")


def _read_latent(fields: Fields, *, default_max_positions: int) -> tuple[dict[str, Any], LatentForm]:
    """The fields of all models with latent attention; there are as many heads as query heads."""
    form = LatentForm(
        query_rank=fields.integer("q_lora_rank", None if "q_lora_rank" in fields else 1536) or 0,
        latent_dim=fields.integer("kv_lora_rank", 512, most=1 << 16),
        rotary_dim=fields.integer("qk_rope_head_dim", 64, most=1 << 16),
        key_dim=fields.integer("qk_nope_head_dim", 128, most=1 << 16),
        value_dim=fields.integer("v_head_dim", 128, most=1 << 16),
    )
    if form.rotary_dim % 2:
        raise fields.error("qk_rope_head_dim", f"= {form.rotary_dim} must be even")
    fields.expect("head_dim", form.rotary_dim)
    fields.expect("qk_head_dim", form.key_dim + form.rotary_dim)
    common = read_common(fields, default_head_dim=form.rotary_dim, default_max_positions=default_max_positions)
    if common["num_kv_heads"] != common["num_heads"]:
        raise fields.error(
            "num_key_value_heads",
            f"= {common['num_kv_heads']} must be num_attention_heads = {common['num_heads']}: heads share latent rows",
        )
    return common, form


def _finish(
    fields: Fields, common: dict[str, Any], form: LatentForm, *, interleaved: bool, default_num_dense: int = 0
) -> dict[str, Any]:
    """Adds the rotation, and the pages' sizes instead of a head's."""
    num_layers = common["num_layers"]
    rope = parse_rope(fields, form.rotary_dim, common["max_position_embeddings"], interleaved=interleaved)
    scale = (form.key_dim + form.rotary_dim) ** -0.5
    inner = rope_fields(fields)
    if rope.kind != "default" and (of_all := inner.number("mscale_all_dim", 0.0, least=0.0, most=1e6)):
        factor = inner.number("factor", 1.0)
        scale *= (0.1 * of_all * math.log(factor) + 1.0) ** 2 if factor > 1.0 else 1.0
    num_dense = fields.integer("first_k_dense_replace", default_num_dense, least=0)
    return {
        **common, "num_kv_heads": 1, "head_dim": form.row_dim, "latent_values": form.latent_dim, "latent": form,
        "attention_scales": (scale,) * num_layers, "layer_ropes": (rope,) * num_layers,
        "attention_bias": fields.boolean("attention_bias", False),
        "dense_layers": frozenset(range(min(num_dense, num_layers))),
    }  # fmt: skip


def read_deepseek_v2(fields: Fields) -> DeepseekConfig:
    common, form = _read_latent(fields, default_max_positions=2048)
    fields.expect("norm_topk_prob", False)  # transformers does not read it
    fields.expect("scoring_func", "softmax")
    fields.expect("moe_layer_freq", 1)
    count = fields.integer("n_routed_experts", 64, most=1 << 16)
    top_k = fields.integer("num_experts_per_tok")
    groups, best = 1, 1
    method = fields.string("topk_method", "greedy")
    if method == "group_limited_greedy":
        groups, best = fields.integer("n_group"), fields.integer("topk_group")
    elif method == "greedy":
        for name in ("n_group", "topk_group"):
            fields.raw(name)
    else:
        known = "greedy, group_limited_greedy"
        raise fields.error("topk_method", f"{method!r:.80} is not supported; supported are {known}")
    check_groups(fields, count=count, top_k=top_k, groups=groups, best=best)
    scale = fields.number("routed_scaling_factor", 1.0)
    expert_size = fields.integer("moe_intermediate_size", 1407, most=1 << 24)
    return DeepseekConfig(
        **_finish(fields, common, form, interleaved=True),
        mlp_bias=fields.boolean("mlp_bias", False),
        expert_size=expert_size,
        shared_size=expert_size * fields.integer("n_shared_experts", 2, least=0, most=1 << 8),
        rule=RoutingRule(num_experts=count, top_k=top_k, scale=scale, num_groups=groups, top_groups=best),
    )


def read_deepseek_v3(fields: Fields) -> DeepseekConfig:
    common, form = _read_latent(fields, default_max_positions=4096)
    fields.expect("scoring_func", "sigmoid")
    fields.expect("topk_method", "noaux_tc")
    fields.expect("moe_layer_freq", 1)
    expert_size = fields.integer("moe_intermediate_size", 2048, most=1 << 24)
    interleaved = fields.boolean("rope_interleave", True)
    return DeepseekConfig(
        **_finish(fields, common, form, interleaved=interleaved, default_num_dense=3),
        expert_size=expert_size,
        shared_size=expert_size * fields.integer("n_shared_experts", 1, least=0, most=1 << 8),
        rule=read_sigmoid_rule(fields, count=256, top_k=8, groups=8, best=4, scale=2.5),
        num_prediction_layers=fields.integer("num_nextn_predict_layers", 1, least=0, most=1 << 8),
    )


ARCHITECTURES = (
    Architecture("DeepseekV2ForCausalLM", "deepseek_v2", read_deepseek_v2, DeepseekV2Model),
    Architecture("DeepseekV3ForCausalLM", "deepseek_v3", read_deepseek_v3, DeepseekV3Model),
)
