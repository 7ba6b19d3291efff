"""Gemma (arXiv 2403.08295), Gemma 2 (2408.00118) and Gemma 3's text model (2503.19786).

The weights of norms are stored less 1, and the MLP's gate is a GELU. Embeddings are multiplied by sqrt(hidden_size),
rounded to the weights' type as in training. Gemma is Llama otherwise. Later ones have norms after attention and MLP,
too. Gemma 2 caps scores and logits, and every other layer has a sliding window. Gemma 3 normalises each head of queries
and keys instead, five of six layers have a window, and those rotate by another base.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from models.architecture import Architecture
from models.configuration.config import GELU_NAMES, read_common, read_layer_types
from models.configuration.json_fields import Fields
from models.configuration.rope_config import RopeConfig, parse_rope
from models.decoder import Decoder, DecoderConfig, Layer, PreNormLayer, SandwichLayer
from models.makers.maker import Maker

_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaConfig(DecoderConfig):
    has_head_norms: bool
    attention_softcap: float | None
    logits_softcap: float | None


class FirstGemmaModel(Decoder):
    norm_offset = 1.0

    def __init__(self, config: DecoderConfig, maker: Maker) -> None:
        super().__init__(config, maker)
        self.embedding_scale = float(np.array(math.sqrt(config.hidden_size), self.dtype.numpy))

    def make_layer(self, index: int, maker: Maker) -> Layer:
        return PreNormLayer(self, index, maker, mlp={"activation": "gelu_tanh"})


class GemmaModel(FirstGemmaModel):
    config: GemmaConfig

    def __init__(self, config: GemmaConfig, maker: Maker) -> None:
        super().__init__(config, maker)
        self.logits_softcap = config.logits_softcap

    def make_layer(self, index: int, maker: Maker) -> Layer:
        config = self.config
        attention = self.attention(
            index,
            maker,
            norm="head" if config.has_head_norms else "none",
            norm_offset=1.0,
            softcap=config.attention_softcap,
        )
        mlp = self.mlp(maker, activation="gelu_tanh")
        return SandwichLayer(config, maker, attention, mlp, norms=_NORMS, norm_offset=1.0)


def read_gemma(fields: Fields) -> DecoderConfig:
    """`hidden_act` "gelu" means the tanh approximation: the official files say so, and `hidden_activation` beside it
    in newer ones."""
    tanh = {"gelu": "tanh"} | {name: kind for name, kind in GELU_NAMES.items() if kind == "tanh"}
    common = read_common(
        fields, default_head_dim=256, default_max_positions=8192, activations=tanh,
        default_activation="gelu_pytorch_tanh", default_tie_word_embeddings=True,
    )  # fmt: skip
    fields.expect("hidden_activation", *tanh)
    fields.expect("use_bidirectional_attention", False)
    has_bias = fields.boolean("attention_bias", False)
    rope = parse_rope(fields, common["head_dim"], common["max_position_embeddings"])
    return DecoderConfig(
        **common, layer_ropes=(rope,) * common["num_layers"], attention_bias=has_bias, attention_output_bias=has_bias
    )


def read_gemma2(fields: Fields) -> GemmaConfig:
    common = _read_common(fields, default_max_positions=8192, pattern=2)
    rope = parse_rope(fields, common["head_dim"], common["max_position_embeddings"])
    return GemmaConfig(
        **common,
        layer_ropes=(rope,) * common["num_layers"],
        has_head_norms=False,
        attention_softcap=_softcap(fields, "attn_logit_softcapping", 50.0),
        logits_softcap=_softcap(fields, "final_logit_softcapping", 30.0),
    )


def read_gemma3(fields: Fields) -> GemmaConfig:
    names = ("sliding_window_pattern", "_sliding_window_pattern")
    pattern = next((value for name in names if (value := fields.integer(name, None)) is not None), 6)
    fields.raw(names[1])  # files have both, beside `layer_types`, which count
    common = _read_common(fields, default_max_positions=131_072, pattern=pattern)
    head_dim, positions = common["head_dim"], common["max_position_embeddings"]
    full = parse_rope(fields, head_dim, positions, layer_type="full_attention", default_theta=1e6)
    if isinstance(fields.object("rope_parameters").raw("sliding_attention"), dict):
        sliding = parse_rope(
            fields, head_dim, positions, layer_type="sliding_attention", theta_name="rope_local_base_freq"
        )
    else:  # a lone entry's scaling is meant for the other layers
        sliding = RopeConfig(fields.number("rope_local_base_freq", 1e4, least=1.0, most=1e12), head_dim)
    fields.expect("attn_logit_softcapping")  # transformers reads it, but leaves scores as they are
    return GemmaConfig(
        **common,
        layer_ropes=tuple(full if window is None else sliding for window in common["layer_windows"]),
        has_head_norms=True,
        attention_softcap=None,
        logits_softcap=_softcap(fields, "final_logit_softcapping", None),
    )


def _softcap(fields: Fields, name: str, default: float | None) -> float | None:
    # A null says that there is none.
    cap: float | None = fields.number(name, None if name in fields else default, least=1e-3, most=1e6)
    return cap


def _read_common(fields: Fields, *, default_max_positions: int, pattern: int) -> dict[str, Any]:
    """The fields that Gemma 2 and 3 share; every `pattern`th layer has no window, unless `layer_types` overrides it."""
    common = read_common(
        fields,
        default_head_dim=256,
        default_max_positions=default_max_positions,
        activation_name="hidden_activation",
        activations={"gelu_pytorch_tanh": "tanh"},
        default_activation="gelu_pytorch_tanh",
        default_tie_word_embeddings=True,
    )
    fields.raw("hidden_act")  # older files have it, too; `hidden_activation` is what counts
    fields.expect("use_bidirectional_attention", False)
    num_layers, has_bias = common["num_layers"], fields.boolean("attention_bias", False)
    common["attention_bias"] = common["attention_output_bias"] = has_bias
    scalar = fields.number("query_pre_attn_scalar", 256.0, least=1e-3, most=1e6)
    common["attention_scales"] = (scalar**-0.5,) * num_layers
    kinds = read_layer_types(fields, num_layers) or [
        "sliding_attention" if (index + 1) % pattern else "full_attention" for index in range(num_layers)
    ]
    window = fields.integer("sliding_window", None if "sliding_window" in fields else 4096)
    if window is None and "sliding_attention" in kinds:
        raise fields.error("sliding_window", "is null, but layers have sliding_attention")
    fields.expect("sliding_window_size", window)  # Gemma 2 says it twice
    common["layer_windows"] = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return common


ARCHITECTURES = (
    Architecture("GemmaForCausalLM", "gemma", read_gemma, FirstGemmaModel),
    Architecture("Gemma2ForCausalLM", "gemma2", read_gemma2, GemmaModel),
    Architecture("Gemma3ForCausalLM", "gemma3_text", read_gemma3, GemmaModel),
)
