"""Granite 3: Llama with four multipliers, of embeddings, of what each half of a layer adds, of scores and of logits."""

from __future__ import annotations

from dataclasses import dataclass

from models.architecture import Architecture
from models.configuration.config import read_common
from models.configuration.json_fields import Fields
from models.configuration.rope_config import parse_rope
from models.decoder import Decoder, DecoderConfig, Layer, PreNormLayer
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


class GraniteModel(Decoder):
    config: GraniteConfig

    def __init__(self, config: GraniteConfig, maker: Maker) -> None:
        super().__init__(config, maker)
        self.embedding_scale = config.embedding_multiplier
        self.logits_scale = 1.0 / config.logits_scaling

    def make_layer(self, index: int, maker: Maker) -> Layer:
        if self.config.residual_multiplier == 1.0:
            return PreNormLayer(self, index, maker)
        return GraniteLayer(self, index, maker)


class GraniteLayer(PreNormLayer):
    """`x = x + m attention(norm(x));  x = x + m mlp(norm(x))`."""

    def __init__(self, model: GraniteModel, index: int, maker: Maker) -> None:
        super().__init__(model, index, maker)
        self.multiplier = model.config.residual_multiplier

    def __call__(self, x: Tensor, batch: Batch, kv_cache: KVCache) -> Tensor:
        x = ops.add_scaled(x, self.attention(x, batch, kv_cache), self.multiplier)
        return ops.add_scaled(x, self.mlp(x), self.multiplier)


def read_granite(fields: Fields) -> GraniteConfig:
    common = read_common(fields, default_max_positions=2048)
    num_layers = common["num_layers"]
    rope = parse_rope(fields, common["head_dim"], common["max_position_embeddings"])
    common["attention_scales"] = (fields.number("attention_multiplier", 1.0, least=1e-6, most=1e6),) * num_layers
    has_bias = fields.boolean("attention_bias", False)
    return GraniteConfig(
        **common,
        layer_ropes=(rope,) * num_layers,
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        mlp_bias=fields.boolean("mlp_bias", False),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0, least=1e-6, most=1e6),
        residual_multiplier=fields.number("residual_multiplier", 1.0, least=1e-6, most=1e6),
        logits_scaling=fields.number("logits_scaling", 1.0, least=1e-6, most=1e6),
    )


ARCHITECTURES = (Architecture("GraniteForCausalLM", "granite", read_granite, GraniteModel),)
