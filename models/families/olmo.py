"""OLMo, the first (arXiv 2402.00838): Llama with LayerNorms that have no weights. Queries, keys and values may be kept
within bounds."""

from __future__ import annotations

from dataclasses import dataclass

from models.architecture import Architecture
from models.configuration.json_fields import Fields
from models.decoder import DecoderConfig, Layer
from models.families.llama import read_decoder
from models.layer_norm import LayerNormDecoder, LayerNormLayer
from models.makers.maker import Maker

_EPS = 1e-5  # no file says another one


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
    common = read_decoder(fields, default_max_positions=2048, default_norm_eps=_EPS)
    fields.expect("rms_norm_eps", _EPS)
    has_bias = fields.boolean("attention_bias", False)
    return OlmoConfig(
        **common,
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        clip_qkv=fields.number("clip_qkv", None, above=0.0),
    )


ARCHITECTURES = (Architecture("OlmoForCausalLM", "olmo", read_olmo, OlmoModel),)
