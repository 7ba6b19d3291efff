"""Phi-3 and Phi-4 (arXiv 2404.14219, 2412.08905): Llama with one matrix for query, key and value, and one for gate and
up; part of each head rotated (Phi-4 mini), by longrope where the context is long.

Longrope has short factors for sequences within the original context, and long ones for longer sequences. As in
transformers' `generate`, a sequence starts with the factors for its prompt's length. If its answer outgrows the
original context, all of its keys are computed again by the long factors, once. So its tokens depend on its own length
alone, and equal transformers'. Prefixes are shared by sequences that have the same factors.

vLLM uses the long factors for all sequences if `max_model_len` exceeds the original context. That computes nothing
twice, but changes short sequences, which are most.
"""

from __future__ import annotations

from models.architecture import Architecture
from models.configuration.config import read_common
from models.configuration.json_fields import Fields
from models.configuration.rope_config import parse_rope
from models.decoder import Decoder, DecoderConfig, Layer, PreNormLayer
from models.makers.maker import Maker


class Phi3Model(Decoder):
    def make_layer(self, index: int, maker: Maker) -> Layer:
        return PreNormLayer(self, index, maker, attention={"qkv": "qkv_proj"}, mlp={"gate_up": "gate_up_proj"})


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
