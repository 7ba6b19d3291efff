"""Phi-3 and Phi-4 (arXiv 2404.14219, 2412.08905): Llama with one matrix for query, key and value, and one for gate and
up; part of each head rotated (Phi-4 mini), by longrope where the context is long.

transformers rotates a sequence by the short factors until it outgrows the original context, and then computes all its
keys again by the long ones. Here one table serves all sequences, since they share cached keys: the long factors if
sequences may outgrow the original context (`max_model_len`), else the short ones.
"""

from __future__ import annotations

from models.architecture import Architecture
from models.config import read_common
from models.decoder import Decoder, DecoderConfig, Layer, PreNormLayer
from models.json_fields import Fields
from models.maker import Maker
from models.rope_config import parse_rope


class Phi3Model(Decoder):
    def make_layer(self, index: int, maker: Maker) -> Layer:
        attention = self.attention(index, maker, qkv="qkv_proj")
        return PreNormLayer(self.config, maker, attention, self.mlp(maker, gate_up="gate_up_proj"))


def read_phi3(fields: Fields) -> DecoderConfig:
    common = read_common(fields, default_max_positions=4096, default_norm_eps=1e-5)
    fields.expect("attention_bias", False)
    fields.expect("mlp_bias", False)
    fields.raw("original_max_position_embeddings")  # a note but for longrope, which reads it
    rope = parse_rope(
        fields,
        common["head_dim"],
        common["max_position_embeddings"],
        default_partial_rotary_factor=1.0,
        default_original_context=4096,
        kinds=("default", "longrope"),
        aliases={"su": "longrope", "yarn": "longrope"},  # older files' names
    )
    num_layers = common["num_layers"]
    common["layer_windows"] = (fields.integer("sliding_window", None),) * num_layers
    return DecoderConfig(**common, layer_ropes=(rope,) * num_layers)


ARCHITECTURES = (Architecture("Phi3ForCausalLM", "phi3", read_phi3, Phi3Model),)
