"""Ministral 3: Mistral whose context YaRN stretches, and whose queries grow with their position, as Llama 4's do:
q is multiplied by `1 + beta log(1 + floor(position / original context))`."""

from __future__ import annotations

from dataclasses import replace

from models.architecture import Architecture
from models.configuration.config import read_common
from models.configuration.json_fields import Fields
from models.configuration.rope_config import parse_rope, rope_fields
from models.decoder import Decoder, DecoderConfig, Layer, PreNormLayer
from models.makers.maker import Maker


class Ministral3Model(Decoder):
    def make_layer(self, index: int, maker: Maker) -> Layer:
        return PreNormLayer(self, index, maker)


def read_ministral3(fields: Fields) -> DecoderConfig:
    common = read_common(fields, default_head_dim=128, default_max_positions=262_144, default_norm_eps=1e-5)
    fields.expect("attention_bias", False)
    fields.expect("mlp_bias", False)
    own = rope_fields(fields)
    rope = parse_rope(fields, common["head_dim"], common["max_position_embeddings"], kinds=("yarn",))
    rope = replace(rope, q_scaling_beta=own.number("llama_4_scaling_beta", least=0.0, most=1e6))
    num_layers = common["num_layers"]
    common["layer_windows"] = (fields.integer("sliding_window", None),) * num_layers
    return DecoderConfig(**common, layer_ropes=(rope,) * num_layers)


ARCHITECTURES = (Architecture("Ministral3ForCausalLM", "ministral3", read_ministral3, Ministral3Model),)
