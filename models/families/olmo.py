"""OLMo, OLMo 2 and 3, OLMoE.

OLMo, the first (arXiv 2402.00838), is Llama with LayerNorms that have no weights. Queries, keys and values may be kept
within bounds. OLMo 2 and OLMo 3 (arXiv 2501.00656) have norms after attention and MLP instead of before them, and over
all heads of queries and of keys. OLMo 3 has a sliding window in three of four layers, whose rotary positions are not
scaled. OLMoE (arXiv 2409.02060) has experts without renormalised weights, and such norms of queries and keys.

    x = x + norm(attention(x));  x = x + norm(mlp(x))        OLMo 2 and 3
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from models.base import Architecture
from models.configuration.config import read_attention_bias, read_common, read_windows
from models.configuration.json_fields import Fields
from models.configuration.rope_config import RopeConfig, parse_rope
from models.decoder import Attention, Decoder, DecoderConfig, GatedMlp, Layer, read_rotated
from models.experts import MoeConfig, MoeDecoder, read_rule
from models.families.llama import read_decoder
from models.layer_norm import LayerNormDecoder, LayerNormLayer
from models.makers.maker import Maker
from runtime import ops
from runtime.batch import Batch
from runtime.kv.cache import KVCache
from runtime.tensor.tensor import Tensor

_EPS = 1e-5  # no file says another one
_DEFAULTS: dict[str, Any] = {"default_max_positions": 2048, "default_norm_eps": _EPS}


@dataclass(frozen=True, slots=True, kw_only=True)
class OlmoConfig(DecoderConfig):
    clip_qkv: float | None


class OlmoModel(LayerNormDecoder):
    config: OlmoConfig
    norms_have_weights = norms_have_biases = False

    def make_layer(self, index: int, maker: Maker) -> Layer:
        attention = self.attention(index, maker, clip=self.config.clip_qkv)
        norms = (self.make_norm(name, maker) for name in ("input_layernorm", "post_attention_layernorm"))
        return LayerNormLayer(attention, self.mlp(maker), *norms)


def read_olmo(fields: Fields) -> OlmoConfig:
    common = read_decoder(fields, **_DEFAULTS)
    fields.expect("rms_norm_eps", _EPS)
    return OlmoConfig(**common, **read_attention_bias(fields), clip_qkv=fields.number("clip_qkv", None, above=0.0))


class Olmo2Model(Decoder):
    def make_layer(self, index: int, maker: Maker) -> Layer:
        return PostNormLayer(self.config, maker, self.attention(index, maker, norm="row"), self.mlp(maker))


class PostNormLayer:
    def __init__(self, config: DecoderConfig, maker: Maker, attention: Attention, mlp: GatedMlp) -> None:
        self.attention, self.mlp, self.eps = attention, mlp, config.norm_eps
        self.attention_norm = maker.vector("post_attention_layernorm.weight", config.hidden_size)
        self.mlp_norm = maker.vector("post_feedforward_layernorm.weight", config.hidden_size)

    def __call__(self, x: Tensor, batch: Batch, kv_cache: KVCache) -> Tensor:
        x = ops.rms_norm(self.attention(x, batch, kv_cache), self.attention_norm, self.eps, residual=x)
        return ops.rms_norm(self.mlp(x, batch), self.mlp_norm, self.eps, residual=x)


def read_olmo2(fields: Fields) -> DecoderConfig:
    return DecoderConfig(**read_rotated(fields, **_DEFAULTS), **_read_biases(fields))


def read_olmo3(fields: Fields) -> DecoderConfig:
    common = {**read_common(fields, **_DEFAULTS), **_read_biases(fields)}
    num_layers, head_dim = common["num_layers"], common["head_dim"]
    common["layer_windows"] = windows = read_windows(fields, num_layers, 4)
    positions, theta = common["max_position_embeddings"], 500_000.0
    full = parse_rope(fields, head_dim, positions, layer_type="full_attention", default_theta=theta)
    sliding = RopeConfig(full.theta, head_dim)  # of files with one entry, whose scaling is meant for the other layers
    if fields.object("rope_parameters").names():
        sliding = parse_rope(fields, head_dim, positions, layer_type="sliding_attention", default_theta=theta)
    return DecoderConfig(**common, layer_ropes=tuple(full if window is None else sliding for window in windows))


def _read_biases(fields: Fields) -> dict[str, Any]:
    fields.expect("clip_qkv")
    fields.expect("mlp_bias", False)
    return read_attention_bias(fields)


def read_olmoe(fields: Fields) -> MoeConfig:
    fields.expect("clip_qkv")
    common = read_decoder(fields, default_max_positions=4096, default_norm_eps=1e-5)
    is_normalised = fields.boolean("norm_topk_prob", False)
    return MoeConfig(
        **common,
        **read_attention_bias(fields),
        expert_size=common["intermediate_size"],
        rule=read_rule(fields, count=64, top_k=8, normalises=is_normalised),
        qk_norm="row",
    )


ARCHITECTURES = (
    Architecture("OlmoForCausalLM", "olmo", read_olmo, OlmoModel),
    Architecture("Olmo2ForCausalLM", "olmo2", read_olmo2, Olmo2Model),
    Architecture("Olmo3ForCausalLM", "olmo3", read_olmo3, Olmo2Model),
    Architecture("OlmoeForCausalLM", "olmoe", read_olmoe, MoeDecoder),
)
