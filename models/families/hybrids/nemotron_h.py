"""Nemotron-H (arXiv 2504.03624) and Nemotron 3: each layer is a norm and one part.

    x = x + part(norm(x)),   part: a Mamba-2 mixer, attention without positions, an MLP, or experts

Nemotron 3 Super predicts further tokens by two more layers, of attention and of experts (`models.drafters.mtp`).

MLP and experts are `down(max(up(x), 0)^2)`, without a gate. Experts are chosen as in DeepSeek-V3, one more takes all
tokens; in the larger models the chosen ones see a shorter row (`moe_latent_size`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from types import MappingProxyType

from models.base import Architecture
from models.configuration.config import read_common
from models.configuration.json_fields import Fields
from models.decoder import Attention, DecoderConfig, FeedForward, Layer
from models.experts import Experts, ExpertsForm, MoeConfig, MoeDecoder, PredictionNames
from models.families.glm import read_grouped_rule
from models.makers.maker import Maker
from models.mamba import (
    ATTENTION,
    EXPERTS,
    MAMBA,
    MLP,
    MambaConfig,
    MambaForm,
    MambaMixer,
    MambaModel,
    mamba_sizes,
    read_dt_limit,
    read_kinds,
)
from runtime import ops
from runtime.batch import Batch
from runtime.kv.cache import KVCache
from runtime.linear.norm import RmsNorm
from runtime.routing import RoutingRule
from runtime.tensor.tensor import Tensor

_LETTERS = {"M": MAMBA, "*": ATTENTION, "E": EXPERTS, "-": MLP}
_SIZES = {
    "mamba_heads": "mamba_num_heads", "mamba_groups": "n_groups", "head_dim": "mamba_head_dim",
    "state_size": "ssm_state_size", "taps": "conv_kernel",
}  # fmt: skip
_DEFAULTS = {"mamba_heads": 128, "mamba_groups": 8, "head_dim": 64, "state_size": 128, "taps": 4}
_UNREAD = (
    "chunk_size", "expand", "moe_shared_expert_overlap", "num_logits_to_keep", "partial_rotary_factor",
    "rescale_prenorm_residual", "rope_parameters", "rope_theta", "time_step_floor", "time_step_max", "time_step_min",
    "time_step_rank", "use_mamba_kernels",
)  # fmt: skip
"""Fields about training, its own kernels, and rotations, which it has not."""
_PREDICTS = (ATTENTION, EXPERTS)
"""The kinds of the layers that predict further tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NemotronHConfig(MambaConfig):
    @property
    def split_widths(self) -> tuple[str, ...]:
        """See `ModelConfig`: those of the kinds of layers that there are."""
        experts = ("expert_size", "shared_size") if EXPERTS in self.kinds else ()
        return *experts, *(("intermediate_size",) if MLP in self.kinds else ())


class NemotronHModel(MambaModel, MoeDecoder):
    table_name, norm_name = "embeddings", "norm_f"
    renames = MappingProxyType({"backbone.": "model."})
    harmless = re.compile(r"mtp\..*")  # layers that predict further tokens
    predicts_apart = PredictionNames(
        "mtp", "layers.0.enorm", "layers.0.hnorm", "layers.0.eh_proj", ("layers.0", "layers.1"),
        "layers.1.final_layernorm",
    )  # fmt: skip
    form = ExpertsForm(
        gate_up=("up_proj",), activation="squared_relu", shared="shared_experts", has_shared_gate=False,
        correction="gate.e_score_correction_bias", latent=("fc1_latent_proj", "fc2_latent_proj"),
        stacks=("experts.up_proj", "experts.down_proj"),
    )  # fmt: skip
    config: NemotronHConfig

    def prediction_config(self) -> MoeConfig:
        """See `MoeDecoder`. Two layers, of which the first has attention."""
        return replace(
            self.config, num_layers=2, kinds=_PREDICTS, dense_layers=frozenset({0}), layer_windows=(None,) * 2,
            layer_ropes=(None,) * 2, attention_scales=self.config.attention_scales[-1:] * 2,
        )  # fmt: skip

    def make_layer(self, index: int, maker: Maker) -> Layer:
        kind, norm, inner = self.config.kinds[index], self.input_norm(maker, "norm"), maker.under("mixer")
        if kind == MAMBA:
            return OnePart(MambaMixer(self.config, index, inner, norm))
        if kind == ATTENTION:
            return OnePart(self.attention(index, maker, under="mixer", input_norm="norm"))
        if kind == MLP:
            return OnePart(None, SquaredReluMlp(self.config, inner, norm))
        return OnePart(None, Experts(self.config, inner, self.form, norm))

    def has_pages(self, index: int) -> bool:
        return self.config.kinds[index] in (MAMBA, ATTENTION)


class OnePart:
    """`x = x + part(norm(x))`, where the part holds its norm: one that sees other tokens, or one that does not."""

    def __init__(self, mixer: MambaMixer | Attention | None, mlp: FeedForward | None = None) -> None:
        self.mixer, self.mlp = mixer, mlp

    def __call__(self, x: Tensor, batch: Batch, kv_cache: KVCache) -> Tensor:
        if self.mixer is not None:
            return self.mixer(x, batch, kv_cache, residual=x)
        assert self.mlp is not None, "a layer has one part"
        return self.mlp(x, batch, residual=x)


class SquaredReluMlp:
    """`down(max(up(x), 0)^2)`, after a norm."""

    def __init__(self, config: DecoderConfig, maker: Maker, norm: RmsNorm | None) -> None:
        hidden, inner, has_bias = config.hidden_size, config.shard("intermediate_size"), config.mlp_bias
        self.up = maker.linear("up_proj", outputs=inner, inputs=hidden, has_bias=has_bias, split="outputs", norm=norm)
        self.down = maker.linear("down_proj", outputs=hidden, inputs=inner, has_bias=has_bias, split="inputs")

    def __call__(self, x: Tensor, batch: Batch, *, residual: Tensor | None = None) -> Tensor:
        inner = self.up(x, batch)
        return self.down(ops.squared_relu(inner, out=inner), batch, residual=residual)


def read_nemotron_h(fields: Fields) -> NemotronHConfig:
    kinds = _read_kinds(fields)
    common = read_common(
        fields, default_head_dim=128, default_max_positions=4096, norm_eps_name="layer_norm_epsilon",
        default_norm_eps=1e-5, activation_name="mlp_hidden_act", activations={"relu2": "relu2"},
        default_activation="relu2",
    )  # fmt: skip
    for name, value in (
        ("attention_bias", False), ("mamba_proj_bias", False), ("sliding_window", None), ("n_shared_experts", 1),
        ("mamba_hidden_act", "silu"), ("norm_eps", common["norm_eps"]), ("rms_norm_eps", common["norm_eps"]),
        ("attention_head_dim", common["head_dim"]),
    ):  # fmt: skip
        fields.expect(name, value)
    for name in _UNREAD:
        fields.raw(name)
    for older in ("mamba_n_groups", "mamba_d_conv", "mamba_dt_limit", "mamba_conv_bias"):
        if fields.has(older):
            raise fields.error(older, "is an older name: give n_groups, conv_kernel, time_step_limit, use_conv_bias")
    sizes = mamba_sizes(fields, _SIZES, _DEFAULTS)
    expert_size, shared_size = (
        fields.integer(name, 7688, most=1 << 24)
        for name in ("moe_intermediate_size", "moe_shared_expert_intermediate_size")
    )
    if fields.has("num_local_experts"):
        fields.expect("num_local_experts", fields.integer("n_routed_experts"))
    latent_size, has_experts = fields.integer("moe_latent_size", 0, most=1 << 20), EXPERTS in kinds
    rule = read_grouped_rule(fields, count=8, top_k=2) if has_experts else RoutingRule(num_experts=1, top_k=1)
    if not has_experts:
        for name in ("n_routed_experts", "num_experts_per_tok", "n_group", "topk_group", "routed_scaling_factor"):
            fields.raw(name)
        fields.raw("norm_topk_prob")
    return NemotronHConfig(
        **common, kinds=kinds, layer_ropes=(None,) * len(kinds), mlp_bias=fields.boolean("mlp_bias", False),
        dense_layers=frozenset(index for index, kind in enumerate(kinds) if kind != EXPERTS),
        expert_size=expert_size, shared_size=shared_size, latent_size=latent_size, rule=rule,
        num_prediction_layers=_read_prediction(fields),
        mamba_heads=sizes.pop("mamba_heads"), mamba_groups=sizes.pop("mamba_groups"),
        mamba=MambaForm(
            **sizes, has_conv_bias=fields.boolean("use_conv_bias", True), has_bias=fields.boolean("use_bias", False),
            dt_limit=read_dt_limit(fields),
        ),
    )  # fmt: skip


def _read_prediction(fields: Fields) -> int:
    """How many times further tokens are predicted; 0 by other layers than are known."""
    kinds = _kinds_of(fields, "mtp_hybrid_override_pattern", ("mtp_layers_block_type",))
    count = fields.integer("num_nextn_predict_layers", 0, least=0, most=1 << 8)
    return count if kinds in ((), _PREDICTS) else 0


def _kinds_of(fields: Fields, pattern_name: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """The kinds of layers that a field has as letters, or others by their names; () if none is given."""
    pattern, kinds = fields.string(pattern_name, None), read_kinds(fields, names, tuple(_LETTERS.values()))
    if pattern is None:
        return kinds
    if unknown := {*pattern} - {*_LETTERS}:
        known = ", ".join(_LETTERS)
        raise fields.error(pattern_name, f"has {min(unknown)!r:.80}, which must be one of {known}")
    by_letter = tuple(_LETTERS[letter] for letter in pattern)
    if kinds and kinds != by_letter:
        raise fields.error(pattern_name, f"contradicts {names[0]}")
    return by_letter


def _read_kinds(fields: Fields) -> tuple[str, ...]:
    """The kind of each layer, whose number is also `num_hidden_layers`."""
    kinds = _kinds_of(fields, "hybrid_override_pattern", ("layers_block_type", "layer_types"))
    kinds = kinds or (MAMBA, EXPERTS, ATTENTION, MLP)
    if not {MAMBA, ATTENTION} & {*kinds}:
        raise fields.error("layers_block_type", "has no linear_attention and no full_attention: one layer must be that")
    fields.expect("num_hidden_layers", len(kinds))
    fields.default({"num_hidden_layers": len(kinds)})
    return kinds


ARCHITECTURES = (Architecture("NemotronHForCausalLM", "nemotron_h", read_nemotron_h, NemotronHModel),)
