"""Granite 3: Llama with four multipliers, of embeddings, of what each half of a layer adds, of scores and of logits.
Its mixtures of experts may have a shared one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from models.base import Architecture
from models.configuration.config import read_attention_bias
from models.configuration.json_fields import Fields
from models.decoder import Decoder, DecoderConfig, Layer, PreNormLayer, read_rotated
from models.experts import ExpertsForm, MoeConfig, MoeDecoder, read_rule
from models.makers.maker import Maker
from runtime import ops
from runtime.batch import Batch
from runtime.kv.cache import KVCache
from runtime.tensor.tensor import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteConfig(DecoderConfig):
    embedding_multiplier: float
    residual_multiplier: float
    logits_scaling: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteMoeConfig(MoeConfig):
    embedding_multiplier: float
    residual_multiplier: float
    logits_scaling: float


class GraniteModel(Decoder):
    config: GraniteConfig | GraniteMoeConfig

    def __init__(self, config: GraniteConfig | GraniteMoeConfig, maker: Maker) -> None:
        super().__init__(config, maker)
        self.embedding_scale = config.embedding_multiplier
        self.logits_scale = 1.0 / config.logits_scaling

    def make_layer(self, index: int, maker: Maker) -> Layer:
        multiplier = self.config.residual_multiplier
        if multiplier == 1.0:
            return PreNormLayer(self, index, maker)
        return GraniteLayer(self, index, maker, multiplier)


class GraniteMoeModel(GraniteModel, MoeDecoder):
    config: GraniteMoeConfig
    form = ExpertsForm(
        under="block_sparse_moe", router="router.layer", stack_order="outputs_first",
        stacks=("input_linear.weight", "output_linear.weight"), shared="shared_mlp", shared_stack="input_linear",
        shared_down="output_linear", shared_is_beside=True, has_shared_gate=False,
    )  # fmt: skip

    renames = MappingProxyType({  # names of transformers 5
        ".block_sparse_moe.experts.gate_up_proj": ".block_sparse_moe.input_linear.weight",
        ".block_sparse_moe.experts.down_proj": ".block_sparse_moe.output_linear.weight",
        ".block_sparse_moe.router.weight": ".block_sparse_moe.router.layer.weight",
    })  # fmt: skip


class GraniteLayer(PreNormLayer):
    """`x = x + m attention(norm(x));  x = x + m mlp(norm(x))`."""

    def __init__(self, model: Decoder, index: int, maker: Maker, multiplier: float) -> None:
        super().__init__(model, index, maker)
        self.multiplier = multiplier

    def __call__(self, x: Tensor, batch: Batch, kv_cache: KVCache) -> Tensor:
        x, batch = self.wanted(ops.add_scaled(x, self.attention(x, batch, kv_cache), self.multiplier), batch)
        return ops.add_scaled(x, self.mlp(x, batch), self.multiplier)


def read_granite(fields: Fields) -> GraniteConfig:
    return GraniteConfig(**read_granite_common(fields), mlp_bias=fields.boolean("mlp_bias", False))


def read_granite_moe(fields: Fields) -> GraniteMoeConfig:
    common, rule = read_granite_common(fields), read_rule(fields, count=8, top_k=2, normalises=True)
    return GraniteMoeConfig(**common, expert_size=common["intermediate_size"], rule=rule)


def read_granite_moe_shared(fields: Fields) -> GraniteMoeConfig:
    shared_size = fields.integer("shared_intermediate_size", 0, least=0, most=1 << 24)
    return replace(read_granite_moe(fields), shared_size=shared_size)


def read_granite_common(fields: Fields) -> dict[str, Any]:
    """The fields of all its classes, as keyword arguments."""
    common = read_rotated(fields, default_max_positions=2048)
    scale = fields.number("attention_multiplier", 1.0, least=1e-6, most=1e6)
    factors = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
    return {
        **common, **read_attention_bias(fields), "attention_scales": (scale,) * common["num_layers"],
        **{name: fields.number(name, 1.0, least=1e-6, most=1e6) for name in factors},
    }  # fmt: skip


ARCHITECTURES = (
    Architecture("GraniteForCausalLM", "granite", read_granite, GraniteModel),
    Architecture("GraniteMoeForCausalLM", "granitemoe", read_granite_moe, GraniteMoeModel),
    Architecture("GraniteMoeSharedForCausalLM", "granitemoeshared", read_granite_moe_shared, GraniteMoeModel),
)
