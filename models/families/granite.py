"""Granite 3: Llama with four multipliers, of embeddings, of what each half of a layer adds, of scores and of logits."""

from __future__ import annotations

from dataclasses import dataclass

from models.architecture import Architecture
from models.config import read_common
from models.decoder import Decoder, DecoderConfig, Layer, PreNormLayer
from models.json_fields import Fields
from models.maker import Maker
from models.rope_config import parse_rope
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
        attention, mlp = self.attention(index, maker), self.mlp(maker)
        if self.config.residual_multiplier == 1.0:
            return PreNormLayer(self.config, maker, attention, mlp)
        return GraniteLayer(self.config, maker, attention, mlp)


class GraniteLayer(PreNormLayer):
    """`x = x + m attention(norm(x));  x = x + m mlp(norm(x))`."""

    def __init__(self, config: GraniteConfig, *parts: object) -> None:
        super().__init__(config, *parts)  # type: ignore[arg-type]
        self.multiplier = config.residual_multiplier

    def __call__(self, x: Tensor, batch: Batch, kv_cache: KVCache) -> Tensor:
        attended = self.attention(ops.rms_norm(x, self.attention_norm, self.eps), batch, kv_cache)
        x = ops.add_scaled(x, attended, self.multiplier)
        return ops.add_scaled(x, self.mlp(ops.rms_norm(x, self.mlp_norm, self.eps)), self.multiplier)


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
