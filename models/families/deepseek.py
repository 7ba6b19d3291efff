"""DeepSeek-V2 (arXiv 2405.04434) and V3 (2412.19437), GLM-4.7-Flash and Mistral Small 4: latent attention; dense first
layers, then experts, some of them shared. V2 chooses by a softmax, V3 and GLM by sigmoids and a correction that is in
no weight, as GLM-4.5 does. Mistral Small 4 chooses by a softmax, and divides by the sum of what it chose; YaRN
stretches its context, and its queries grow with their position, as Ministral 3's do (`pictures/mistral3.py`, which also
has it with pictures).

Latent attention (MLA): one row is kept of each token, and all heads make their keys and values from it.

    row[j] = [rotated k | norm(c)]      by one map of x
    q[h]   = [rotated part | K_h^T q_h]      K_h: the map from c to the head's keys
    out[h] = V_h sum_j softmax_j(scale q[h] . row[j]) c[j]      V_h: the map from c to the head's values

So K_h and V_h are absorbed into the neighbouring maps (`Maker.latent_maps`), and attention is that of many query
heads with one key head, whose values are parts of its keys. Ranks share out the query heads; each has all latent rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from models.base import Architecture
from models.configuration.config import read_common
from models.configuration.json_fields import Fields
from models.configuration.rope_config import RopeConfig, parse_rope, rope_fields
from models.decoder import DecoderConfig, Layer, PreNormLayer
from models.experts import ExpertsForm, MoeConfig, MoeDecoder, check_groups
from models.families.glm import read_grouped_rule
from models.makers.maker import Maker
from models.makers.shards import whole_shard
from runtime import ops
from runtime.batch import Batch, LongChunks
from runtime.kv.cache import KVCache
from runtime.latent_ops import latent_layer
from runtime.linear.linear import Linear
from runtime.linear.norm import RmsNorm
from runtime.ops import RopeTable
from runtime.routing import RoutingRule
from runtime.tensor.tensor import Tensor

_INNER_EPS = 1e-6  # of the norms between maps, whatever `rms_norm_eps` is


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentForm:
    """Sizes of latent attention.

    Attributes:
        query_rank: columns between the two maps of queries; 0 if there is one map.
        latent_dim: the part of a row that keys and values are made from.
        rotary_dim: the rotated part of a row, and of each query.
        key_dim, value_dim: of a head, without the rotated part.
    """

    query_rank: int
    latent_dim: int
    rotary_dim: int
    key_dim: int
    value_dim: int

    @property
    def head_dim(self) -> int:
        """Numbers of a head's query and key."""
        return self.key_dim + self.rotary_dim

    @property
    def row_dim(self) -> int:
        """Numbers of a row in the pages."""
        return self.rotary_dim + self.latent_dim


class LatentAttention:
    """Causal latent attention between its projections, after a norm."""

    def __init__(
        self, config: DecoderConfig, form: LatentForm, index: int, maker: Maker, rope: RopeTable, input_norm: RmsNorm
    ) -> None:
        hidden, heads, has_bias = config.hidden_size, config.shard("num_heads"), config.attention_bias
        self.index, self.rope, self.form, self.num_heads = index, rope, form, heads.count
        self.scale, self.input_norm = config.attention_scales[index], input_norm
        query_size = heads.times(form.head_dim)
        name, width = ("q_a_proj", whole_shard(form.query_rank)) if form.query_rank else ("q_proj", query_size)
        names, outputs = (name, "kv_a_proj_with_mqa"), (width, whole_shard(form.row_dim))
        self.width, biases = width.count, (has_bias and form.query_rank > 0, has_bias)
        # One product has both parts as columns. The cpu's kernels take arrays; one map's outputs have biases or not.
        if maker.options.device.kind == "cpu" or len(set(biases)) > 1:
            self.projections = [
                maker.linear(each, outputs=size, inputs=hidden, has_bias=bias, split="outputs")
                for each, size, bias in zip(names, outputs, biases, strict=True)
            ]
        else:
            self.projections = [
                maker.linear(names, outputs=outputs, inputs=hidden, has_bias=has_bias, split="outputs", norm=input_norm)
            ]
        self.q_b_proj: Linear | None = None
        if form.query_rank:
            norm = maker.rms_norm("q_a_layernorm.weight", form.query_rank, _INNER_EPS)
            self.q_b_proj = maker.linear(
                "q_b_proj", outputs=query_size, inputs=form.query_rank, split="outputs", norm=norm
            )
        self.latent_norm = maker.rms_norm("kv_a_layernorm.weight", form.latent_dim, _INNER_EPS)
        self.maps = maker.latent_maps(
            "kv_b_proj", heads=heads, key_dim=form.key_dim, value_dim=form.value_dim, rotary_dim=form.rotary_dim,
            latent_dim=form.latent_dim,
        )  # fmt: skip
        self.o_proj = maker.linear(
            "o_proj", outputs=hidden, inputs=heads.times(form.value_dim), has_bias=has_bias, split="inputs"
        )

    def __call__(self, x: Tensor, batch: Batch, kv_cache: KVCache, *, residual: Tensor | None = None) -> Tensor:
        group = kv_cache.group_of(self.index)
        (pages,) = kv_cache.layer(self.index)
        if len(self.projections) == 1:
            both = self.projections[0](x, batch)
            q, latent = both[:, : self.width], both[:, self.width :]
        else:
            x = ops.rms_norm(x, self.input_norm.weight, self.input_norm.eps)
            q, latent = (each(x, batch) for each in self.projections)
        if self.q_b_proj is not None:
            q = self.q_b_proj(q.contiguous(), batch)  # [num_tokens, heads * (key + rotary)]
        values = latent_layer(
            q, latent, self.maps, pages=pages, batch=batch, group=group, rope=self.rope, norm=self.latent_norm,
            scale=self.scale,
        )  # fmt: skip
        return self.o_proj(values, batch, residual=residual)


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
        norm, rope = self.input_norm(maker, input_norm), self.rope_of(index)
        assert norm is not None
        assert rope is not None
        assert not choices
        made = LatentAttention(self.config, self.config.latent, index, maker.under("self_attn"), rope, norm)
        self.maps = made.maps
        return made

    def long_chunks(self, contexts: Sequence[int], counts: Sequence[int]) -> LongChunks:
        """See `runtime.engine.steps.executor.ExpandingModel`; the same for all layers."""
        return self.maps.long_chunks(contexts, counts)


class DeepseekV3Model(DeepseekV2Model):
    form = ExpertsForm(shared="shared_experts", has_shared_gate=False, correction="gate.e_score_correction_bias")


_DEEPSEEK = LatentForm(query_rank=1536, latent_dim=512, rotary_dim=64, key_dim=128, value_dim=128)
_GLM = LatentForm(query_rank=768, latent_dim=512, rotary_dim=64, key_dim=192, value_dim=256)
_MISTRAL4 = LatentForm(query_rank=1024, latent_dim=256, rotary_dim=64, key_dim=64, value_dim=128)
"""The sizes of transformers' classes."""


def _read_latent(
    fields: Fields, default: LatentForm = _DEEPSEEK, *, head_is_rotated: bool = True, **defaults: Any
) -> tuple[dict[str, Any], LatentForm]:
    """The fields of all models with latent attention; there are as many heads as query heads. `head_dim` is the rotated
    part, or the whole of a head; `defaults` are `read_common`'s."""
    form = LatentForm(
        query_rank=fields.integer("q_lora_rank", None if "q_lora_rank" in fields else default.query_rank) or 0,
        latent_dim=fields.integer("kv_lora_rank", default.latent_dim, most=1 << 16),
        rotary_dim=fields.integer("qk_rope_head_dim", default.rotary_dim, most=1 << 16),
        key_dim=fields.integer("qk_nope_head_dim", default.key_dim, most=1 << 16),
        value_dim=fields.integer("v_head_dim", default.value_dim, most=1 << 16),
    )
    common = read_common(fields, head_dim_name="qk_rope_head_dim", default_head_dim=form.rotary_dim, **defaults)
    fields.expect("head_dim", form.rotary_dim if head_is_rotated else form.head_dim)
    fields.expect("qk_head_dim", form.head_dim)
    if common["num_kv_heads"] != common["num_heads"]:
        raise fields.error(
            "num_key_value_heads",
            f"= {common['num_kv_heads']} must be num_attention_heads = {common['num_heads']}: heads share latent rows",
        )
    return common, form


def _finish(
    fields: Fields, common: dict[str, Any], form: LatentForm, rope: RopeConfig, num_dense: int
) -> dict[str, Any]:
    """Adds the rotation, the dense first layers, and the pages' sizes instead of a head's."""
    num_layers, inner, scale = common["num_layers"], rope_fields(fields), form.head_dim**-0.5
    if rope.kind != "default" and (of_all := inner.number("mscale_all_dim", 0.0, least=0.0, most=1e6)):
        factor = inner.number("factor", 1.0)
        scale *= (0.1 * of_all * math.log(factor) + 1.0) ** 2 if factor > 1.0 else 1.0
    return {
        **common, "num_kv_heads": 1, "head_dim": form.row_dim, "latent_values": form.latent_dim, "latent": form,
        "attention_scales": (scale,) * num_layers, "layer_ropes": (rope,) * num_layers,
        "attention_bias": fields.boolean("attention_bias", False),
        "dense_layers": frozenset(range(min(num_dense, num_layers))),
    }  # fmt: skip


def _read_rope(fields: Fields, common: dict[str, Any], form: LatentForm, *, interleaved: bool) -> RopeConfig:
    return parse_rope(fields, form.rotary_dim, common["max_position_embeddings"], interleaved=interleaved)


def _read_num_dense(fields: Fields, default: int) -> int:
    return int(fields.integer("first_k_dense_replace", default, least=0))


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
        **_finish(fields, common, form, _read_rope(fields, common, form, interleaved=True), _read_num_dense(fields, 0)),
        mlp_bias=fields.boolean("mlp_bias", False),
        expert_size=expert_size,
        shared_size=expert_size * fields.integer("n_shared_experts", 2, least=0, most=1 << 8),
        rule=RoutingRule(num_experts=count, top_k=top_k, scale=scale, num_groups=groups, top_groups=best),
    )


def read_deepseek_v3(fields: Fields) -> DeepseekConfig:
    common, form = _read_latent(fields, default_max_positions=4096)
    rope = _read_rope(fields, common, form, interleaved=fields.boolean("rope_interleave", True))
    return DeepseekConfig(
        **_finish(fields, common, form, rope, _read_num_dense(fields, 3)),
        **_read_experts(fields, "sigmoid", size=2048),
        rule=read_grouped_rule(fields, count=256, top_k=8, groups=8, best=4, scale=2.5),
        num_prediction_layers=fields.integer("num_nextn_predict_layers", 1, least=0, most=1 << 8),
    )


def _read_experts(fields: Fields, scores: str, *, size: int) -> dict[str, Any]:
    """The experts' sizes; refuses another choice of them."""
    fields.expect("scoring_func", scores)
    fields.expect("topk_method", "noaux_tc")
    fields.expect("moe_layer_freq", 1)
    size = fields.integer("moe_intermediate_size", size, most=1 << 24)
    return {"expert_size": size, "shared_size": size * fields.integer("n_shared_experts", 1, least=0, most=1 << 8)}


def read_glm4_moe_lite(fields: Fields) -> DeepseekConfig:
    """GLM-4.7-Flash: DeepSeek-V3 with values of other sizes than keys. transformers writes a list of the dense layers,
    the published file their number."""
    common, form = _read_latent(fields, _GLM, default_max_positions=202_752, default_norm_eps=1e-5)
    rope = _read_rope(fields, common, form, interleaved=fields.boolean("rope_interleave", True))
    num_layers, num_dense = common["num_layers"], _read_num_dense(fields, 1)
    values = _finish(fields, common, form, rope, num_dense)
    kinds = fields.strings("mlp_layer_types")
    if kinds is not None:
        if len(kinds) != num_layers or not set(kinds) <= {"dense", "sparse"}:
            problem = f"= {kinds!r:.80} must have dense or sparse for each of num_hidden_layers = {num_layers}"
            raise fields.error("mlp_layer_types", problem)
        dense = frozenset(index for index, kind in enumerate(kinds) if kind == "dense")
        if fields.has("first_k_dense_replace") and dense != values["dense_layers"]:
            raise fields.error("mlp_layer_types", f"has dense {sorted(dense)}, but first_k_dense_replace = {num_dense}")
        values["dense_layers"] = dense
    return DeepseekConfig(
        **values,
        **_read_experts(fields, "sigmoid", size=1536),
        rule=read_grouped_rule(fields, count=64, top_k=4, scale=1.8),
        num_prediction_layers=fields.integer("num_nextn_predict_layers", 1, least=0, most=1 << 8),
    )


def read_mistral4(fields: Fields) -> DeepseekConfig:
    common, form = _read_latent(fields, _MISTRAL4, head_is_rotated=False, default_max_positions=1 << 20)
    share = form.rotary_dim / form.head_dim
    rope = parse_rope(
        fields, form.head_dim, common["max_position_embeddings"], default_partial_rotary_factor=share, kinds=("yarn",),
        interleaved=fields.boolean("rope_interleave", True),
    )  # fmt: skip
    inner = rope_fields(fields)
    if rope.rotary_dim != form.rotary_dim:
        problem = f"rotates {rope.rotary_dim} of a head's {form.head_dim}, must be qk_rope_head_dim = {form.rotary_dim}"
        raise inner.error("partial_rotary_factor", problem)
    rope = replace(rope, q_scaling_beta=inner.number("llama_4_scaling_beta", least=0.0, most=1e6))
    return DeepseekConfig(
        **_finish(fields, common, form, rope, _read_num_dense(fields, 0)),
        **_read_experts(fields, "softmax", size=2048),
        rule=read_grouped_rule(fields, scores="softmax", count=128, top_k=4),
    )


ARCHITECTURES = (
    Architecture("DeepseekV2ForCausalLM", "deepseek_v2", read_deepseek_v2, DeepseekV2Model),
    Architecture("DeepseekV3ForCausalLM", "deepseek_v3", read_deepseek_v3, DeepseekV3Model),
    Architecture("Glm4MoeLiteForCausalLM", "glm4_moe_lite", read_glm4_moe_lite, DeepseekV3Model),
    Architecture("Mistral4ForCausalLM", "mistral4", read_mistral4, DeepseekV2Model),
)
