"""gpt-oss (arXiv 2508.10925): experts with a clamped SwiGLU with factors plus 1, a sink beside the keys of each head,
windows in every other layer, biases in all maps.

Experts are chosen by their logits, and a softmax runs over the chosen ones: the same as a renormalised softmax over
all. Checkpoints hold a layer's experts as one tensor, in floats or in MXFP4.
"""

from __future__ import annotations

from models.base import Architecture
from models.configuration.config import read_attention_bias, read_layer_types, read_window
from models.configuration.json_fields import Fields
from models.decoder import Layer, PreNormLayer, read_rotated
from models.experts import ExpertsForm, MoeConfig, MoeDecoder, read_rule
from models.makers.maker import Maker


class GptOssModel(MoeDecoder):
    form = ExpertsForm(router="router", has_bias=True, activation="clamped_silu", stack_order="by_turns")

    def make_layer(self, index: int, maker: Maker) -> Layer:
        return PreNormLayer(self, index, maker, attention={"has_sinks": True})


def read_gpt_oss(fields: Fields) -> MoeConfig:
    """Rotary positions must be given; transformers' config has defaults for them."""
    if not fields.has("rope_parameters") and not fields.has("rope_scaling"):
        raise fields.error("rope_parameters", "is missing")
    common = read_rotated(
        fields, {"default_theta": 150_000.0}, default_head_dim=64, default_max_positions=131_072, default_norm_eps=1e-5
    )
    fields.raw("initial_context_length")  # a note: the rope's original context counts
    fields.expect("swiglu_alpha", 1.702)
    fields.expect("swiglu_limit", 7, 7.0)
    rule = read_rule(fields, count=128, top_k=4, normalises=True)
    fields.expect("experts_per_token", rule.top_k)
    num_layers, window = common["num_layers"], read_window(fields, 128)
    kinds = read_layer_types(fields, num_layers)
    is_windowed = [index % 2 == 0 for index in range(num_layers)]
    if kinds is not None:
        is_windowed = [kind == "sliding_attention" for kind in kinds]
    common["layer_windows"] = tuple(window if each else None for each in is_windowed)
    return MoeConfig(
        **common,
        **read_attention_bias(fields, default=True),
        expert_size=common["intermediate_size"],
        rule=rule,
    )


ARCHITECTURES = (Architecture("GptOssForCausalLM", "gpt_oss", read_gpt_oss, GptOssModel),)
