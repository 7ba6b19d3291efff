"""Granite 4: Granite's layers and multipliers, most with a Mamba-2 mixer in attention's place; the others' attention
mostly has no positions. A layer has an MLP for all tokens, and may have experts beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from models.base import Architecture
from models.configuration.json_fields import Fields
from models.decoder import Decoder, FeedForward
from models.experts import read_rule
from models.families.granite import GraniteMoeModel, read_granite_common
from models.makers.maker import Maker
from models.mamba import (
    ATTENTION,
    MAMBA,
    MambaConfig,
    MambaForm,
    MambaMixer,
    MambaModel,
    mamba_sizes,
    read_dt_limit,
    read_kinds,
)
from runtime.routing import RoutingRule

_SIZES = {
    "mamba_heads": "mamba_n_heads", "mamba_groups": "mamba_n_groups", "state_size": "mamba_d_state",
    "taps": "mamba_d_conv",
}  # fmt: skip
_DEFAULTS = {"mamba_heads": 128, "mamba_groups": 1, "state_size": 256, "taps": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteHybridConfig(MambaConfig):
    embedding_multiplier: float
    residual_multiplier: float
    logits_scaling: float


class GraniteHybridModel(MambaModel, GraniteMoeModel):
    config: GraniteHybridConfig  # type: ignore[assignment]  # it has the fields of the other

    def attention(self, index: int, maker: Maker, *, input_norm: str = "", **choices: Any) -> Any:
        if self.config.kinds[index] == MAMBA:
            return MambaMixer(self.config, index, maker.under("mamba"), self.input_norm(maker, input_norm))
        return Decoder.attention(self, index, maker, input_norm=input_norm, **choices)

    def feed_forward(self, index: int, maker: Maker, *, input_norm: str = "", **choices: Any) -> FeedForward:
        if self.config.expert_size:
            return GraniteMoeModel.feed_forward(self, index, maker, input_norm=input_norm, **choices)
        inner = self.config.shard("intermediate_size").whole
        maker.under("shared_mlp").note_row_stack(
            "input_linear", ("gate_proj", "up_proj"), (inner, inner), self.config.hidden_size
        )
        return self.mlp(maker, under="shared_mlp", down="output_linear", input_norm=input_norm)


def read_granite_hybrid(fields: Fields) -> GraniteHybridConfig:
    common = read_granite_common(fields)
    count, shared = common["num_layers"], fields.integer("shared_intermediate_size", 1024, most=1 << 24)
    kinds = read_kinds(fields, ("layer_types", "layers_block_type"), (MAMBA, ATTENTION)) or (MAMBA,) * count
    if len(kinds) != count:
        raise fields.error("layer_types", f"has {len(kinds)} names, must have one for each of {count} layers")
    positions = fields.string("position_embedding_type", None)
    if positions not in (None, "rope", "nope"):
        raise fields.error("position_embedding_type", f"{positions!r:.80} is not supported: it must be rope or nope")
    if positions != "rope":
        common["layer_ropes"] = (None,) * count
    has_experts = fields.integer("num_local_experts", 8, least=0) > 0
    if has_experts:
        expert_size, rule = common["intermediate_size"], read_rule(fields, count=8, top_k=2, normalises=True)
    else:
        fields.raw("num_experts_per_tok")
        common["intermediate_size"], expert_size, rule = shared, 0, RoutingRule(num_experts=1, top_k=1)
    fields.expect("normalization_function", "rmsnorm")
    fields.raw("mamba_chunk_size")  # how many tokens its own kernels take at once
    sizes, inner = mamba_sizes(fields, _SIZES, _DEFAULTS), fields.integer("mamba_expand", 2) * common["hidden_size"]
    heads = sizes["mamba_heads"]
    if inner % heads:
        raise fields.error("mamba_n_heads", f"= {heads} must divide mamba_expand x hidden_size = {inner}")
    fields.expect("mamba_d_head", inner // heads, "auto")
    return GraniteHybridConfig(
        **common, expert_size=expert_size, rule=rule, shared_size=shared if has_experts else 0,
        dense_layers=frozenset() if has_experts else frozenset(range(count)), kinds=kinds,
        mamba_heads=sizes.pop("mamba_heads"), mamba_groups=sizes.pop("mamba_groups"),
        mamba=MambaForm(
            **sizes, head_dim=inner // heads, has_conv_bias=fields.boolean("mamba_conv_bias", True),
            has_bias=fields.boolean("mamba_proj_bias", False), dt_limit=read_dt_limit(fields),
        ),
    )  # fmt: skip


ARCHITECTURES = (
    Architecture("GraniteMoeHybridForCausalLM", "granitemoehybrid", read_granite_hybrid, GraniteHybridModel),
)
