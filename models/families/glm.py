"""GLM-4 dense (arXiv 2406.12793): half of each head rotated, in neighbouring pairs, biases of query, key and value, one
matrix for gate and up. Glm4 has norms after attention and MLP, too."""

from __future__ import annotations

from models.architecture import Architecture
from models.configuration.config import read_common
from models.configuration.json_fields import Fields
from models.configuration.rope_config import parse_rope
from models.decoder import Decoder, DecoderConfig, Layer, PreNormLayer, SandwichLayer
from models.makers.maker import Maker

_GLM4_NORMS = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


class GlmModel(Decoder):
    def make_layer(self, index: int, maker: Maker) -> Layer:
        return PreNormLayer(self, index, maker, mlp={"gate_up": "gate_up_proj"})


class Glm4Model(Decoder):
    def make_layer(self, index: int, maker: Maker) -> Layer:
        mlp = self.mlp(maker, gate_up="gate_up_proj")
        return SandwichLayer(self.config, maker, self.attention(index, maker), mlp, norms=_GLM4_NORMS)


def read_glm(fields: Fields) -> DecoderConfig:
    common = read_common(fields, default_head_dim=128, default_max_positions=131_072, default_norm_eps=1.5625e-7)
    fields.expect("mlp_bias", False)
    rope = parse_rope(
        fields,
        common["head_dim"],
        common["max_position_embeddings"],
        default_partial_rotary_factor=0.5,
        interleaved=True,
    )
    return DecoderConfig(
        **common,
        layer_ropes=(rope,) * common["num_layers"],
        attention_bias=fields.boolean("attention_bias", True),
    )


ARCHITECTURES = (
    Architecture("GlmForCausalLM", "glm", read_glm, GlmModel),
    Architecture("Glm4ForCausalLM", "glm4", read_glm, Glm4Model),
)
