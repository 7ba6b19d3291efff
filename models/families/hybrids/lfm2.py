"""LFM2, LFM2.5 and LFM2-MoE (arXiv 2511.23404): most layers have a gated short convolution in attention's place.

    B, C, u = in(norm(x));   x = x + out(C * conv(B * u));   x = x + mlp(norm(x))

`conv` sees a few tokens of each channel, so that a sequence keeps the last ones alone. Other layers have attention with
normalised heads; LFM2-MoE has experts after its first layers, chosen by sigmoids and a correction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from models.base import Architecture
from models.configuration.json_fields import Fields
from models.decoder import Decoder, Layer, PreNormLayer, read_rotated
from models.experts import ExpertsForm, MoeConfig, MoeDecoder, read_rule
from models.makers.maker import Maker
from runtime import ops
from runtime.batch import Batch
from runtime.kv.cache import KVCache
from runtime.kv.forms import Recurrent
from runtime.linear.norm import RmsNorm
from runtime.linear.recurrent import ShortConv
from runtime.routing import RoutingRule
from runtime.tensor.tensor import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2Config(MoeConfig):
    """LFM2's config; without experts, all layers are dense.

    Attributes:
        conv_layers: numbers of the layers with a convolution.
        conv_size: its channels, as many as the hidden size; of a rank, its share.
        conv_taps: the tokens that it sees, its own included.
        conv_bias: whether it and the maps around it have biases.
        corrects_choice: whether experts are chosen with a correction.
    """

    recurrence = "short_conv"
    conv_layers: frozenset[int]
    conv_size: int
    conv_taps: int
    conv_bias: bool
    corrects_choice: bool = False

    @property
    def split_widths(self) -> tuple[str, ...]:
        """See `ModelConfig`."""
        own = ("conv_size",) if self.conv_layers else ()
        return *MoeConfig.split_widths.fget(self), *own  # type: ignore[attr-defined]


class ShortConvolution:
    """A gated short convolution between its maps, after a norm."""

    def __init__(self, config: Lfm2Config, index: int, maker: Maker, norm: RmsNorm | None) -> None:
        hidden, size, has_bias = config.hidden_size, config.shard("conv_size"), config.conv_bias
        self.index = index
        self.in_proj = maker.linear(
            "in_proj", outputs=(size, size, size), inputs=hidden, has_bias=has_bias, split="outputs", norm=norm
        )
        bias = maker.vector("conv.bias", size) if has_bias else None
        self.weights = ShortConv(conv=maker.taps("conv", size, config.conv_taps), bias=bias)
        self.out_proj = maker.linear("out_proj", outputs=hidden, inputs=size, has_bias=has_bias, split="inputs")

    def __call__(self, x: Tensor, batch: Batch, kv_cache: KVCache, *, residual: Tensor | None = None) -> Tensor:
        pages, group = kv_cache.layer(self.index), kv_cache.group_of(self.index)
        y = ops.short_conv(self.in_proj(x, batch), self.weights, pages=pages, batch=batch, group=group)
        return self.out_proj(y, batch, residual=residual)


class Lfm2Model(MoeDecoder):
    norm_name = "embedding_norm"
    config: Lfm2Config

    def __init__(self, config: Lfm2Config, maker: Maker) -> None:
        correction = "expert_bias" if config.corrects_choice else ""
        self.form = ExpertsForm(under="feed_forward", gate_up=("w1", "w3"), down="w2", correction=correction)
        super().__init__(config, maker)

    def make_layer(self, index: int, maker: Maker) -> Layer:
        return PreNormLayer(self, index, maker, norms=("operator_norm", "ffn_norm"))

    def attention(self, index: int, maker: Maker, *, input_norm: str = "", **choices: Any) -> Any:
        if index in self.config.conv_layers:
            return ShortConvolution(self.config, index, maker.under("conv"), self.input_norm(maker, input_norm))
        norms = "q_layernorm", "k_layernorm"
        return Decoder.attention(
            self, index, maker, input_norm=input_norm, output="out_proj", norm="head", norms=norms, **choices
        )

    def mlp(self, maker: Maker, *, under: str = "", input_norm: str = "", **choices: Any) -> Any:
        names = {"gate_up": self.form.gate_up, "down": self.form.down}
        return Decoder.mlp(self, maker, under=self.form.under, input_norm=input_norm, **names, **choices)

    def state_form(self, index: int) -> Recurrent | None:
        if index not in self.config.conv_layers:
            return None
        return Recurrent(channels=self.config.conv_size, taps=self.config.conv_taps, activations=self.activations)


def _read_common(fields: Fields) -> dict[str, Any]:
    """The fields of both classes."""
    tied = fields.boolean("tie_embedding", fields.boolean("tie_word_embeddings", True))
    rope = {"default_theta": 1e6}
    common = read_rotated(fields, rope, default_max_positions=128_000, norm_eps_name="norm_eps", default_norm_eps=1e-5)
    hidden, heads = common["hidden_size"], common["num_heads"]
    for name, value in (
        ("block_dim", hidden), ("conv_dim", hidden), ("conv_dim_out", hidden), ("num_heads", heads),
        ("block_norm_eps", common["norm_eps"]), ("block_use_swiglu", True), ("use_pos_enc", True),
    ):  # fmt: skip
        fields.expect(name, value)
    return common | {
        "tie_word_embeddings": tied, "conv_size": hidden, "conv_bias": fields.boolean("conv_bias", False),
        "conv_taps": fields.integer("conv_L_cache", 3, least=2, most=1 << 8),
    }  # fmt: skip


def _conv_layers(fields: Fields, kinds: Sequence[str] | None, num_layers: int) -> frozenset[int]:
    """The layers that `layer_types` names, "conv" among "full_attention"."""
    if kinds is None or len(kinds) != num_layers or not {*kinds} <= {"conv", "full_attention"}:
        known = f"conv or full_attention for each of {num_layers} layers"
        raise fields.error("layer_types", f"must be {known}, not {kinds!r:.80}")
    return frozenset(index for index, kind in enumerate(kinds) if kind == "conv")


def read_lfm2(fields: Fields) -> Lfm2Config:
    common = _read_common(fields)
    count = common["num_layers"]
    attention = fields.integers("full_attn_idxs") if fields.has("full_attn_idxs") else range(count)
    written = ["full_attention" if index in attention else "conv" for index in range(count)]
    return Lfm2Config(
        **common | {"intermediate_size": _inner_size(fields, common["intermediate_size"])},
        conv_layers=_conv_layers(fields, fields.strings("layer_types") or written, count),
        dense_layers=frozenset(range(count)), expert_size=0, rule=RoutingRule(num_experts=1, top_k=1),
    )  # fmt: skip


def _inner_size(fields: Fields, size: int) -> int:
    """The MLP's columns: by default two thirds of those named, times a factor, rounded up."""
    size = fields.integer("block_ff_dim", size, most=1 << 24)
    multiple = fields.integer("block_multiple_of", 256, most=1 << 24)
    factor = fields.number("block_ffn_dim_multiplier", None if "block_ffn_dim_multiplier" in fields else 1.0, above=0.0)
    if not fields.boolean("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    size = size if factor is None else -(-int(factor * size) // multiple) * multiple
    if size < 1:
        raise fields.error("intermediate_size", f"gives an MLP of {size} columns, must give 1 or more: use 2 or more")
    return size


def read_lfm2_moe(fields: Fields) -> Lfm2Config:
    common = _read_common(fields)
    count, has_correction = common["num_layers"], fields.boolean("use_expert_bias", True)
    normalises, num_dense = fields.boolean("norm_topk_prob", True), fields.integer("num_dense_layers", 2, least=0)
    rule = read_rule(fields, count=32, top_k=4, normalises=normalises)
    scale = fields.number("routed_scaling_factor", 1.0)
    return Lfm2Config(
        **common,
        conv_layers=_conv_layers(fields, fields.strings("layer_types"), count),
        dense_layers=frozenset(range(min(num_dense, count))),
        expert_size=fields.integer("moe_intermediate_size", 1792, most=1 << 24),
        rule=replace(rule, scores="sigmoid", sum_eps=1e-6, scale=scale),
        corrects_choice=has_correction,
    )


ARCHITECTURES = (
    Architecture("Lfm2ForCausalLM", "lfm2", read_lfm2, Lfm2Model),
    Architecture("Lfm2MoeForCausalLM", "lfm2_moe", read_lfm2_moe, Lfm2Model),
)
